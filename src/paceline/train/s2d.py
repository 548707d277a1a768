"""Sorted: the first layers of a model become a draft that tokens may leave at several depths.

SortedNet's fine-tuning for language models (SoFT; Kavehzadeh et al. 2024, arXiv 2309.08968, section 3) as S2D uses it
(Kavehzadeh et al. 2024, arXiv 2407.01955). The first layers, the embedding, the final norm and the head are copied. In
one forward the states behind every exit go through that one norm and that one head, and the loss is the mean over the
exits of the cross-entropy at what the assistant says. All of it is trained. Nothing of the target enters the loss, so
one draft serves every target with the tokenizer; `--teacher` adds the distance to the target's distribution (that of
`distil.py`) at every exit, for a draft that has one target to serve.

Where we differ: a sum over exits in SoFT is a mean here (and in S2D's code), which only rescales the learning rate.

Doesn't know: how drafts are verified, when a token leaves.

    paceline train sorted models/demo --data answers.jsonl --out build/sorted
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from accelerate import PartialState
from rich.console import Console
from torch import Tensor, nn
from transformers import AutoConfig

from paceline.draft.neural.checkpoint import TargetFacts, save_drafter
from paceline.errors import PacelineError
from paceline.target.load import load, load_tokenizer
from paceline.target.tokenizer import Tokenizer
from paceline.train import attention, options
from paceline.train.draft import open_teacher, pad_token
from paceline.train.generated import acceptance, split_rows
from paceline.train.loop import Batch, LoopConfig, train
from paceline.train.loss import IGNORE, chunked_cross_entropy, chunked_distillation
from paceline.train.rows import DataConfig, Mixture, Rows
from paceline.train.thresholds import Watched

PASSES = 3
"""Over the answers, where no budget is given: the layers know the language already."""


@dataclass(frozen=True)
class SortedRecipe:
    """What the draft is cut to, and what a batch is made of."""

    layers: int | None = None  # None: half of the target's
    exits: tuple[int, ...] | None = None  # layers; None: half, three quarters and all of the draft's
    teacher: bool = False  # add the distance to the target's distribution
    length: int = 512  # tokens a row
    rows: int = 16  # rows a batch
    held_out: float = 0.05  # share of the prompts


class SortedLoss(nn.Module):
    """A model with exits whose forward is its loss. input_ids, labels [B, T], labels shifted.

    exits: layers, ascending. teacher: a transformers model with the same tokens, or None."""

    def __init__(self, model: Any, exits: Sequence[int], teacher: Any = None, compiled: bool = False) -> None:
        super().__init__()
        self.model, self.exits = model, tuple(exits)
        if compiled and next(model.parameters()).device.type == "cpu":
            for one in (model, teacher):
                if one is not None:
                    one.set_attn_implementation(attention.register())
        self.compiled = compiled
        # In a list: the teacher must not appear among the parameters.
        self._teacher = [] if teacher is None else [teacher.eval().requires_grad_(False)]
        self._run = torch.compile(self.states) if compiled else self.states

    def states(self, input_ids: Tensor) -> list[Tensor]:
        """What the head reads at every exit, [B, T, H] each: the residual stream behind the final norm."""
        out = self.model.model(input_ids=input_ids, use_cache=False, output_hidden_states=True)
        # transformers' last entry has been through the norm already.
        inner = [self.model.model.norm(out.hidden_states[exit]) for exit in self.exits if exit < self._depth]
        return [*inner, out.last_hidden_state][: len(self.exits)]

    @property
    def _depth(self) -> int:
        return len(self.model.model.layers)

    def forward(self, input_ids: Tensor, labels: Tensor, exit: Tensor | None = None) -> Tensor:
        """The mean over all exits; with `exit` [B], a number from 0, the cross-entropy of that one."""
        states = (self._run if self.training else self.states)(input_ids)
        if torch.is_autocast_enabled(input_ids.device.type):
            states = [of_exit.to(torch.get_autocast_dtype(input_ids.device.type)) for of_exit in states]
        table, compiled = self.model.lm_head.weight, self.compiled and self.training
        if exit is not None:
            return chunked_cross_entropy(states[int(exit[0])], table, labels, compiled=compiled)
        losses = [chunked_cross_entropy(of_exit, table, labels, compiled=compiled) for of_exit in states]
        for teacher in self._teacher:
            with torch.no_grad():
                last = teacher.model(input_ids=input_ids, use_cache=False).last_hidden_state
            kept, target_table = labels != IGNORE, teacher.lm_head.weight
            losses += [
                chunked_distillation(of_exit, table, last, target_table, kept, compiled=compiled) for of_exit in states
            ]
        return torch.stack(losses).sum() / len(states)


def cut(target: Path, layers: int) -> Any:
    """The model in `target` with its first `layers` layers alone, in float32."""
    network = open_teacher(target)
    network.model.layers = network.model.layers[:layers]
    network.config.num_hidden_layers = layers
    if getattr(network.config, "layer_types", None):
        network.config.layer_types = network.config.layer_types[:layers]
    return network


def depths(recipe: SortedRecipe, num_layers: int) -> tuple[int, tuple[int, ...]]:
    """(layers, exits) of a draft for a target of `num_layers`. PacelineError if they cannot be."""
    layers = recipe.layers or max(num_layers // 2, 1)
    if not 1 <= layers <= num_layers:
        raise PacelineError(f"--layers is {layers}; the target has {num_layers}, so 1 to that")
    exits = recipe.exits or tuple(sorted({max(layers // 2, 1), max(3 * layers // 4, 1), layers}))
    if list(exits) != sorted(set(exits)) or exits[0] < 1 or exits[-1] != layers:
        raise PacelineError(
            f"--exits are {','.join(map(str, exits))}; they ascend from 1 or more to the draft's last layer, {layers}"
        )
    return layers, exits


def train_sorted(
    target: Path,
    answers: Path,
    out: Path,
    run: Path,
    loop: LoopConfig,
    recipe: SortedRecipe = SortedRecipe(),
    compiled: bool = True,
) -> bool:
    """Train a sorted draft from the model in `target` on `answers` (a file of `generated_rows`); writes `out`, a model
    folder for `s2d:PATH`. False when interrupted; the same call goes on."""
    state = PartialState(cpu=not torch.cuda.is_available())
    console = Console(stderr=True, quiet=not state.is_main_process)
    tokenizer, teacher = load_tokenizer(target), open_teacher(target).to(state.device)
    layers, exits = depths(recipe, teacher.config.num_hidden_layers)
    training, held = split_rows(answers, recipe.length, pad_token(tokenizer), recipe.held_out)
    for name, (ids, labels) in training.items():
        learnt = int((labels != IGNORE).sum())
        console.print(f"  {name:10} {len(ids):6} rows  {ids.size:>10,} tokens, {learnt:>10,} learnt")
    weights: dict[str, float] = {name: len(ids) for name, (ids, _) in training.items()}
    data = DataConfig(recipe.length, recipe.rows, weights, weights, seed=loop.seed)
    loss = SortedLoss(cut(target, layers), exits, teacher if recipe.teacher else None, compiled)
    if not train(loss, Mixture(training, data), loop, run, validation(held, exits)):
        return False
    if state.is_main_process:
        found = by_exit(loss.model.cpu(), exits, teacher.cpu(), held) if held else []
        thresholds, speed = watch(loss.model, exits, teacher, held).best() if held else (None, 0.0)
        facts = {
            "exits": list(exits),
            "thresholds": thresholds,
            "recipe": {"stage": "sorted", "loop": asdict(loop), "config": asdict(recipe)},
            "data": [answers.name],
            "acceptance": found,
        }
        save(loss.model, tokenizer, out, facts, target)
        for line in told(found) if found else ["too few prompts to hold any out: acceptance was not measured"]:
            console.print(line, highlight=False)
        if thresholds:
            listed = ",".join(f"{threshold:g}" for threshold in thresholds)
            console.print(f"thresholds {listed} should be fastest for {target.name}: {speed:.2f} times plain decoding "
                          "where reading weights takes the time")
        console.print(f"wrote {out}")
    return True


def validation(held: Mapping[str, Rows], exits: Sequence[int], most: int = 16) -> dict[str, list[Batch]]:
    """Held-out rows of every source once for every exit, as "source@layers"."""
    batches = {}
    for name, (ids, labels) in held.items():
        batch = {"input_ids": torch.from_numpy(ids[:most]).long(), "labels": torch.from_numpy(labels[:most]).long()}
        for number, exit in enumerate(exits):
            batches[f"{name}@{exit}"] = [batch | {"exit": torch.full((len(batch["labels"]),), number)}]
    return batches


@torch.no_grad()
def by_exit(
    model: Any, exits: Sequence[int], teacher: Any, held: Mapping[str, Rows], batch: int = 4
) -> list[dict[str, Any]]:
    """Of every exit: its cross-entropy on held-out answers in nats, and how far it agrees with the target, by source
    (`paceline.train.generated.acceptance`)."""
    loss = SortedLoss(model, exits).eval()  # anew: training wraps a module's forward in lower precision

    def logits(input_ids: Tensor, number: int) -> Tensor:
        found: Tensor = model.lm_head(loss.states(input_ids)[number])
        return found

    found = []
    for number, exit in enumerate(exits):
        total, count = 0.0, 0
        for ids, labels in held.values():
            for at in range(0, len(ids), batch):
                inputs, wanted = (torch.from_numpy(side[at : at + batch]).long() for side in (ids, labels))
                learnt = int((wanted != IGNORE).sum())
                total += learnt * float(loss(inputs, wanted, torch.full((len(inputs),), number)))
                count += learnt
        agreed = acceptance(lambda ids: teacher(input_ids=ids).logits, partial(logits, number=number), held)
        found.append({"layers": exit, "loss": total / max(count, 1), "agreement": [asdict(a) for a in agreed]})
    return found


@torch.no_grad()
def watch(model: Any, exits: Sequence[int], teacher: Any, held: Mapping[str, Rows], batch: int = 4) -> Watched:
    """What every exit says on held-out answers, every source weighing alike, and what of the target it reads."""
    loss = SortedLoss(model, exits).eval()
    sure, right, share = [], [], []
    for ids, labels in held.values():
        kept = labels != IGNORE
        share.append(np.full(kept.sum(), 1 / (kept.sum() * len(held))))
        for at in range(0, len(ids), batch):
            inputs, wanted = torch.from_numpy(ids[at : at + batch]).long(), torch.from_numpy(kept[at : at + batch])
            best = teacher(input_ids=inputs).logits[wanted].argmax(-1)
            said = [model.lm_head(states[wanted]).float().softmax(-1).max(-1) for states in loss.states(inputs)]
            sure.append(torch.stack([one.values for one in said], -1).numpy())
            right.append(torch.stack([one.indices == best for one in said], -1).numpy())
    layer, head = (sum(p.numel() for p in part.parameters()) for part in (model.model.layers[0], model.lm_head))
    reads = layer * teacher.config.num_hidden_layers + head
    return Watched(
        np.concatenate(sure), np.concatenate(right), [layer * exit / reads for exit in exits], head / reads,
        np.concatenate(share),
    )  # fmt: skip


def told(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """`by_exit` in lines for a reader."""
    every = [(row["layers"], row["loss"], row["agreement"][-1]) for row in found]
    return [
        f"behind {layers:2} layers  loss {loss:.3f}  accepted {a['overlap']:6.1%}  same best token {a['top1']:6.1%}"
        for layers, loss, a in every
    ]


def save(network: Any, tokenizer: Tokenizer, out: Path, facts: Mapping[str, Any], target: Path) -> None:
    """A model folder in the target's own dtype, with the exits and `facts` in its config.json."""
    own = AutoConfig.from_pretrained(target).dtype or torch.float32
    weights = {name: p.detach().to(own) for name, p in network.named_parameters()}  # tied weights once
    config = json.loads(network.config.to_json_string(use_diff=False)) | {"dtype": str(own).removeprefix("torch.")}
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.inner.save_pretrained(out)
    network.generation_config.save_pretrained(out)
    opened = load(target, device="cpu")
    opened.tokenizer = tokenizer
    save_drafter(out, "s2d", config={**config, **facts}, tensors=weights, target=TargetFacts.of(opened))


def sorted_command(
    target: options.Target,
    out: options.Out,
    run: options.DrafterRun = None,
    data: options.Data = None,
    prompts: options.Prompts = None,
    generate: options.Generate = 0,
    max_tokens: options.AnswerTokens = 128,
    temperature: options.AnswerHeat = None,
    minutes: options.Minutes = None,
    tokens: options.Tokens = None,
    lr: options.Rate = 3e-4,
    layers: Annotated[
        int | None, typer.Option(help="Layers of the draft; half of the target's if left out.", min=1)
    ] = None,
    exits: Annotated[
        str | None, typer.Option(help="Layers with an exit, as in 2,3,4; half, three quarters and all if left out.")
    ] = None,
    teacher: Annotated[
        bool, typer.Option("--teacher", help="Learn the target's distribution as well: for one target alone.")
    ] = False,
    length: Annotated[int, typer.Option(help="Tokens of a training row.", min=8)] = 512,
    rows: Annotated[int, typer.Option(help="Rows of a batch.", min=1)] = 16,
    seed: int = 0,
    save_every: options.SaveEvery = 5.0,
    compiled: options.Compiled = True,
    threads: options.Threads = 1,
) -> None:
    """Cut a draft with several exits from a model's first layers, for `--draft s2d:OUT`.

    paceline train sorted models/demo --data answers.jsonl --out build/sorted

    What is learnt is what assistants say in --data (conversations of any kind) or what the model answers itself. Ctrl-C
    saves; the same command goes on from there. At the end every exit is measured on held-out answers, and the
    thresholds that should be fastest for this target are written beside the draft.
    """
    options.use_threads(threads)
    wanted = None if exits is None else _exits(exits)
    run = options.run_folder(out, run, minutes, tokens)
    recipe = SortedRecipe(layers, wanted, teacher, length, rows)
    answers = options.own_answers(target, data, prompts, generate, run / "answers.jsonl", max_tokens, temperature, seed)
    tokens = options.budget(answers, minutes, tokens, PASSES)
    loop = LoopConfig(minutes=minutes, tokens=tokens, peak_lr=lr, seed=seed, save_every=save_every)
    if not train_sorted(target, answers, out, run, loop, recipe, compiled):
        raise typer.Exit(130)


def _exits(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise PacelineError(f"--exits is {text!r}; it must be layers with commas between, as in 2,3,4") from None
