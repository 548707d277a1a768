"""The language model recipe: pretrain a small Llama on packed text, then tune it on conversations.

Two stages over the shared loop. `pretrain` trains on every token of documents laid end to end; `chat` trains on what
the assistant says (and on the token that ends its turn) in conversations, and on some of the text of `pretrain`.
`rows.py` makes the rows of both.

Doesn't know: drafters, benchmarks.

    python -m paceline.train pretrain --help
"""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from rich.console import Console
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from paceline.train import attention
from paceline.train.loop import Batch, LoopConfig, Stream, read_log, train
from paceline.train.loss import IGNORE, chunked_cross_entropy
from paceline.train.rows import (
    CHAT,
    PRETRAIN,
    Build,
    DataConfig,
    Mixture,
    Rows,
    chat_rows,
    lay_end_to_end,
    load_documents,
    render,
)
from paceline.train.sources import Document, Source
from paceline.train.tokenizer import DOCUMENT, END, save_tokenizer, token_id


@dataclass(frozen=True)
class ModelConfig:
    """A Llama shape; the default is the demo target, 13 million parameters, 27 MB in bfloat16.

    Heads are 64 wide: vLLM's CPU attention takes 32, 64, 80, 96, 112 and 128, and half as many heads are half the
    softmax.
    """

    hidden: int = 384
    layers: int = 8
    heads: int = 6
    kv_heads: int = 2
    intermediate: int = 768
    positions: int = 2048
    rope_theta: float = 10000.0


SIZES = {
    "tiny": ModelConfig(hidden=64, layers=2, heads=1, kv_heads=1, intermediate=128),
    "demo": ModelConfig(),
    "large": ModelConfig(hidden=768, layers=12, heads=12, kv_heads=4, intermediate=2304),
}
"""By name: for trying the recipe out, the shipped target, and 90 million parameters for a GPU."""


class LmLoss(nn.Module):
    """A causal language model whose forward is its training loss. input_ids, labels [B, T], labels shifted; `unwanted`
    [B, T] names tokens that ought not to follow, for the unlikelihood term."""

    def __init__(self, model: Any, compiled: bool = False) -> None:
        super().__init__()
        self.model = model
        if compiled and next(model.parameters()).device.type == "cpu":
            model.set_attn_implementation(attention.register())
        self.compiled = compiled
        # A function, not a module: the compiled copy must not appear among the parameters.
        self._compiled = torch.compile(self._hidden) if compiled else self._hidden

    def _hidden(self, input_ids: Tensor) -> Tensor:
        hidden: Tensor = self.model.model(input_ids=input_ids, use_cache=False).last_hidden_state
        return hidden

    def forward(self, input_ids: Tensor, labels: Tensor, unwanted: Tensor | None = None) -> Tensor:
        hidden = (self._compiled if self.training else self._hidden)(input_ids)
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        compiled = self.compiled and self.training
        return chunked_cross_entropy(hidden, self.model.lm_head.weight, labels, unwanted, compiled=compiled)


def pretrain(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerFast,
    out: Path,
    run: Path,
    loop: LoopConfig,
    data: DataConfig = PRETRAIN,
    model: ModelConfig = ModelConfig(),
    compiled: bool = True,
) -> bool:
    """Train from random weights; writes `out` in float32 and its log and facts into it. False when interrupted."""
    network = new_model(model, tokenizer, loop.seed)

    def build(name: str, documents: list[Document]) -> dict[str, Rows]:
        return {name: lay_end_to_end(render(tokenizer, documents), data.length)}

    job = Job(sources, tokenizer, out, run, loop, data)
    return run_stage("pretrain", job, network, LmLoss(network, compiled), build, torch.float32)


def new_model(model: ModelConfig, tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A Llama of that shape with random weights and the tokenizer's vocabulary."""
    document, end = token_id(tokenizer, DOCUMENT), token_id(tokenizer, END)
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=model.hidden,
            num_hidden_layers=model.layers,
            num_attention_heads=model.heads,
            num_key_value_heads=model.kv_heads,
            intermediate_size=model.intermediate,
            tie_word_embeddings=True,
            max_position_embeddings=model.positions,
            rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
            bos_token_id=document,
            eos_token_id=end,
            pad_token_id=document,
        )
    )


def chat(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerFast,
    start: Path,
    out: Path,
    run: Path,
    loop: LoopConfig,
    data: DataConfig = CHAT,
    compiled: bool = True,
) -> bool:
    """Tune the model in `start` on conversations; writes `out` in bfloat16. False when interrupted."""
    network = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    job = Job(sources, tokenizer, out, run, loop, data)
    build = chat_rows(tokenizer, data)
    return run_stage("chat", job, network, LmLoss(network, compiled), build, torch.bfloat16, start)


@dataclass(frozen=True)
class Job:
    """What every stage is told: its text, where it writes, how long it trains, what a batch is made of."""

    sources: Sequence[Source]
    tokenizer: PreTrainedTokenizerFast
    out: Path
    run: Path
    loop: LoopConfig
    data: DataConfig


def run_stage(
    stage: str,
    job: Job,
    network: Any,
    loss: nn.Module,
    build: Build,
    dtype: torch.dtype,
    start: Path | None = None,
    wrap: Callable[[Mixture, dict[str, list[Document]]], Stream] | None = None,
) -> bool:
    """Text to rows, the loop, and the model with its log and facts in `job.out`. False when interrupted.

    loss: the module around `network` that is trained. build: rows by group from the documents of one source. dtype: of
    the weights as written. start: the model that this stage went on from, whose logs are kept. wrap: another stream
    around the mixture of rows."""
    data, out = job.data, job.out
    first = PartialState(cpu=not torch.cuda.is_available()).is_main_process
    console = Console(stderr=True, quiet=not first)
    began = time.monotonic()
    training, valid = load_documents(job.sources, data)
    rows: dict[str, Rows] = {}
    held: dict[str, Rows] = {}
    for name in training:
        rows |= build(name, training[name])
        held |= build(name, valid[name])
    for name, (ids, labels) in rows.items():
        learnt = int((labels != IGNORE).sum())
        console.print(f"  {name:10} {len(ids):6} rows  {ids.size:>10,} tokens, {learnt:>10,} learnt")
    console.print(f"text ready after {time.monotonic() - began:.0f} s")
    # Short rows where training has them: a model that has read nothing longer cannot say how good it is on long ones.
    width = data.short or data.length
    validation = {
        name: [_batch(*(side[: data.validation_rows].reshape(-1, width) for side in sides))]
        for name, sides in held.items()
        if len(sides[0])
    }
    mixture = Mixture(rows, data)
    stream = wrap(mixture, training) if wrap else mixture
    if not train(loss, stream, job.loop, job.run, validation):
        return False
    if not first:
        return True
    facts = {
        "stage": stage,
        "model": {"parameters": sum(p.numel() for p in network.parameters())},
        "sources": {
            name: {"tokens_available": int(ids.size), "rows_seen": mixture.taken[name], "rows": len(ids)}
            for name, (ids, _) in mixture.rows.items()
        },
        "data": asdict(data),
        "loop": asdict(job.loop),
    }
    save(network, job.tokenizer, out, dtype)
    if start is not None:
        for log in start.glob("training-*.json*"):
            shutil.copy(log, out / log.name)
    (out / f"training-{stage}.json").write_text(json.dumps(facts, indent=2) + "\n")
    (out / f"training-{stage}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in read_log(job.run / "log.jsonl")))
    console.print(f"wrote {out}")
    return True


def _batch(ids: np.ndarray, labels: np.ndarray) -> Batch:
    return {"input_ids": torch.from_numpy(ids).long(), "labels": torch.from_numpy(labels).long()}


def save(network: Any, tokenizer: PreTrainedTokenizerFast, out: Path, dtype: torch.dtype) -> None:
    """Hugging Face layout; the model in memory keeps its precision."""
    document, end = token_id(tokenizer, DOCUMENT), token_id(tokenizer, END)
    weights = {name: p.detach().to(dtype) for name, p in network.named_parameters()}  # tied weights once
    config = network.config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")}
    copy: Any = LlamaForCausalLM(LlamaConfig.from_dict(config))
    copy.to(dtype=dtype)
    copy.load_state_dict(weights, strict=False)
    copy.tie_weights()
    copy.generation_config = GenerationConfig(
        bos_token_id=document, eos_token_id=[end, document], pad_token_id=document
    )
    out.mkdir(parents=True, exist_ok=True)
    copy.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # safetensors writes for the owner alone
    save_tokenizer(tokenizer, out)
