"""A draft model for any target: a small Llama with the target's tokenizer, distilled on the target's own answers.

The loss is `distil.py`'s (KL plus total variation at every token that is read); the text is what the target wrote
itself (`generated.py`), so no template and no data set is assumed. At the end the draft is measured on answers that it
has not seen: how often would its tokens be accepted?

Doesn't know: how drafts are verified.

    paceline train draft models/demo --data answers.jsonl --out build/draft
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from paceline import __version__
from paceline.errors import ModelError, PacelineError
from paceline.records import loads, write_whole
from paceline.target.fingerprint import fingerprint
from paceline.target.load import load_tokenizer
from paceline.target.tokenizer import Tokenizer
from paceline.train.distil import DRAFT, DistilLoss
from paceline.train.evaluate import agreement
from paceline.train.generated import split_rows, told
from paceline.train.lm import ModelConfig
from paceline.train.loop import Batch, LoopConfig, train
from paceline.train.rows import DataConfig, Mixture

PASSES = 20
"""Over the answers, where no budget is given: it begins with random weights."""


@dataclass(frozen=True)
class DraftConfig:
    """What a draft looks like and what a batch is made of."""

    model: ModelConfig = DRAFT
    length: int = 512  # tokens a row
    rows: int = 32  # rows a batch
    held_out: float = 0.05  # share of the prompts


def open_teacher(target: Path) -> Any:
    """The target as transformers runs it, in float32. ModelError if its states and its head cannot be told apart."""
    teacher: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    if not hasattr(teacher, "model") or not hasattr(teacher, "lm_head"):
        raise ModelError(f"{target}: a {teacher.config.model_type} keeps its layers in another place than a Llama does")
    return teacher


def new_draft(shape: ModelConfig, teacher: Any, seed: int) -> LlamaForCausalLM:
    """A Llama of that shape with random weights, and the target's vocabulary and end tokens."""
    torch.manual_seed(seed)
    config = teacher.config
    positions = min(shape.positions, config.max_position_embeddings)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            intermediate_size=shape.intermediate,
            tie_word_embeddings=True,
            max_position_embeddings=positions,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=None,
        )
    )


def pad_token(tokenizer: Tokenizer) -> int:
    """What fills rows up: a run of it is not learnt."""
    named = getattr(tokenizer.inner, "pad_token_id", None)
    found = tokenizer.eos_token_id if named is None else int(named)
    if found is None:
        raise PacelineError(f"{tokenizer.name} has neither a padding nor an end token, and rows need one of the two")
    return found


def train_draft(
    target: Path,
    answers: Path,
    out: Path,
    run: Path,
    loop: LoopConfig,
    config: DraftConfig = DraftConfig(),
    compiled: bool = True,
) -> bool:
    """Train a draft for the model in `target` on `answers` (a file of `generated_rows`); writes `out` in bfloat16, a
    model folder for `model:PATH`. False when interrupted; the same call goes on."""
    state = PartialState(cpu=not torch.cuda.is_available())
    console = Console(stderr=True, quiet=not state.is_main_process)
    tokenizer, teacher = load_tokenizer(target), open_teacher(target).to(state.device)
    training, held = split_rows(answers, config.length, pad_token(tokenizer), config.held_out)
    for name, (ids, _) in training.items():
        console.print(f"  {name:10} {len(ids):6} rows  {ids.size:>10,} tokens")
    weights: dict[str, float] = {name: len(ids) for name, (ids, _) in training.items()}
    data = DataConfig(config.length, config.rows, weights, weights, seed=loop.seed)
    network = new_draft(config.model, teacher, loop.seed)
    loss = DistilLoss(network, teacher, pad_token(tokenizer), compiled)
    validation = {name: [_batch(ids[:16], labels[:16])] for name, (ids, labels) in held.items()}
    if not train(loss, Mixture(training, data), loop, run, validation):
        return False
    if state.is_main_process:
        found = agreement(teacher.cpu(), network.cpu().eval(), held) if held else []
        facts = {
            "paceline": __version__,
            "target": {
                "name": target.resolve().name,
                "tokenizer_fingerprint": tokenizer.fingerprint,
                "weights_fingerprint": fingerprint(dict(teacher.named_parameters())),
            },
            "recipe": {"stage": "draft", "loop": asdict(loop), "config": asdict(config)},
            "data": [answers.name],
            "acceptance": [asdict(a) for a in found],
        }
        save_draft(network, tokenizer, out, facts)
        for line in told(found) if found else ["too few prompts to hold any out: acceptance was not measured"]:
            console.print(line, highlight=False)
        console.print(f"wrote {out}")
    return True


def _batch(ids: Any, labels: Any) -> Batch:
    return {"input_ids": torch.from_numpy(ids).long(), "labels": torch.from_numpy(labels).long()}


def save_draft(network: Any, tokenizer: Tokenizer, out: Path, facts: dict[str, Any]) -> None:
    """A model folder in bfloat16, with `facts` in its config.json; the model in memory keeps its precision."""
    weights: dict[str, Tensor] = {name: p.detach().to(torch.bfloat16) for name, p in network.named_parameters()}
    copy: Any = LlamaForCausalLM(network.config)
    copy.to(dtype=torch.bfloat16)
    copy.load_state_dict(weights, strict=False)  # tied weights stand in it once
    copy.tie_weights()
    out.mkdir(parents=True, exist_ok=True)
    copy.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # safetensors writes for the owner alone
    tokenizer.inner.save_pretrained(out)
    config = loads((out / "config.json").read_bytes())
    write_whole(out / "config.json", json.dumps(config | facts, indent=2) + "\n")
