"""The language model recipe: pretrain a small Llama on packed text, tune it on conversations, distil a draft from it.

Three stages over the shared loop. `pretrain` trains on every token of documents laid end to end; `chat` trains on what
the assistant says (and on the token that ends its turn) in conversations, and on some of the text of `pretrain`;
`distil` trains the family's small draft model on the same rows, with the loss of `paceline.train.draft`. The rows come
from `text.py`."""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from paceline.errors import PacelineError
from paceline.train.data import Document, Rows, Source, first_batch, row_counts
from paceline.train.draft import DistilLoss
from paceline.train.llama import ModelConfig, new_llama
from paceline.train.loop import LoopConfig, Stream, read_log, train
from paceline.train.loss import LmLoss
from paceline.train.trainer import open_teacher
from zoo.text import Build, DataConfig, StageMixture, chat_rows, lay_end_to_end, load_documents, render
from zoo.tokenizer import DOCUMENT, END, save_tokenizer, token_id

SIZES = {
    "tiny": ModelConfig(hidden=64, layers=2, heads=1, kv_heads=1, intermediate=128),
    "demo": ModelConfig(),
    "large": ModelConfig(hidden=768, layers=12, heads=12, kv_heads=4, intermediate=2304),
}
"""By name: for trying the recipe out, the shipped target, and 90 million parameters for a GPU."""
DRAFT = ModelConfig(hidden=128, layers=3, heads=2, kv_heads=1, intermediate=384)
"""A draft model of 1.6 million parameters: an eighth of the demo target's, and three layers to its eight."""


@dataclass(frozen=True)
class Job:
    """What every stage has: its text, where it writes, how long it trains, and what a batch is made of."""

    sources: Sequence[Source]
    tokenizer: PreTrainedTokenizerFast
    out: Path
    run: Path
    loop: LoopConfig
    data: DataConfig
    compiled: bool = True


def pretrain(job: Job, model: ModelConfig = ModelConfig()) -> bool:
    """Train from random weights; writes `out` in float32 and its log and facts into it. False when interrupted."""
    network = new_model(model, job.tokenizer, job.loop.seed)

    def build(name: str, documents: list[Document]) -> dict[str, Rows]:
        return {name: lay_end_to_end(render(job.tokenizer, documents), job.data.length)}

    return run_stage("pretrain", job, network, LmLoss(network, job.compiled), build, torch.float32)


def new_model(model: ModelConfig, tokenizer: PreTrainedTokenizerFast, seed: int) -> Any:
    """A Llama of that shape with random weights and the tokenizer's vocabulary."""
    document, end = token_id(tokenizer, DOCUMENT), token_id(tokenizer, END)
    return new_llama(
        model, seed, vocab_size=len(tokenizer), bos_token_id=document, eos_token_id=end, pad_token_id=document
    )


def chat(job: Job, start: Path) -> bool:
    """Tune the model in `start` on conversations; writes `out` in bfloat16. False when interrupted."""
    network = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    build = chat_rows(job.tokenizer, job.data)
    return run_stage("chat", job, network, LmLoss(network, job.compiled), build, torch.bfloat16, start)


def distil(job: Job, target: Path, model: ModelConfig = DRAFT) -> bool:
    """Train a draft of shape `model` to say what the model in `target` would say; both must have one tokenizer. Writes
    `out` in bfloat16. False when interrupted."""
    teacher = open_teacher(target)
    if teacher.config.vocab_size != len(job.tokenizer):
        raise PacelineError(
            f"the model in {target} has {teacher.config.vocab_size} tokens and its tokenizer {len(job.tokenizer)}: "
            "a draft model needs its target's vocabulary"
        )
    network = new_model(model, job.tokenizer, job.loop.seed)
    loss = DistilLoss(network, teacher, token_id(job.tokenizer, DOCUMENT), job.compiled)
    return run_stage("distil", job, network, loss, chat_rows(job.tokenizer, job.data), torch.bfloat16)


def run_stage(
    stage: str, job: Job, network: Any, loss: nn.Module, build: Build, dtype: torch.dtype, start: Path | None = None,
    wrap: Callable[[StageMixture, dict[str, list[Document]]], Stream] | None = None,
) -> bool:  # fmt: skip
    """Text to rows, the loop, and the model with its log and facts in `job.out`. False when interrupted.

    loss   the module around `network` that is trained
    build  rows by group from the documents of one source
    dtype  of the weights as written
    start  the model that this stage continues, whose logs are kept
    wrap   another stream around the mixture of rows"""
    first = PartialState(cpu=not torch.cuda.is_available()).is_main_process
    console = Console(stderr=True, quiet=not first)
    began = time.monotonic()
    training, valid = load_documents(job.sources, job.data)
    rows: dict[str, Rows] = {}
    held: dict[str, Rows] = {}
    for name in training:
        rows |= build(name, training[name])
        held |= build(name, valid[name])
    console.print("\n".join(row_counts(rows)))
    console.print(f"text ready after {time.monotonic() - began:.0f} s")
    # Short rows if training has them: a model that has read only short rows cannot be judged on long ones.
    width, most = job.data.short or job.data.length, job.data.validation_rows
    validation = {
        name: [first_batch((ids[:most].reshape(-1, width), labels[:most].reshape(-1, width)), most=len(ids) * width)]
        for name, (ids, labels) in held.items()
        if len(ids)
    }
    mixture = StageMixture(rows, job.data)
    if not train(loss, wrap(mixture, training) if wrap else mixture, job.loop, job.run, validation):
        return False
    if first:
        save(network, job.tokenizer, job.out, dtype)
        if start is not None:
            for log in start.glob("training-*.json*"):
                shutil.copy(log, job.out / log.name)
        _write_facts(stage, job, network, mixture)
        console.print(f"wrote {job.out}")
    return True


def _write_facts(stage: str, job: Job, network: Any, mixture: StageMixture) -> None:
    """training-STAGE.json: what was trained on what, and how; and the log beside it."""
    facts = {
        "stage": stage,
        "model": {"parameters": sum(p.numel() for p in network.parameters())},
        "sources": {
            name: {"tokens_available": int(ids.size), "rows_seen": mixture.taken[name], "rows": len(ids)}
            for name, (ids, _) in mixture.rows.items()
        },
        "data": asdict(job.data),
        "loop": asdict(job.loop),
    }
    (job.out / f"training-{stage}.json").write_text(json.dumps(facts, indent=2) + "\n")
    log = "".join(json.dumps(row) + "\n" for row in read_log(job.run / "log.jsonl"))
    (job.out / f"training-{stage}.jsonl").write_text(log)


def save(network: Any, tokenizer: PreTrainedTokenizerFast, out: Path, dtype: torch.dtype) -> None:
    """A model folder for transformers, whose answers end at the end of a turn or of a document; the model in memory
    keeps its precision."""
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
