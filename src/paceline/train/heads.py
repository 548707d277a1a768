"""What the training of draft heads shares: a frozen target, its states and its distributions at several depths.

Heads that read the state after token t propose tokens t + 2, t + 3, ...: the token after t is known when they draft,
for the target has just said it. Depth k, counted from 0, is about token t + 2 + k, and it counts if that token and all
from t + 1 on are the target's own. Its soft label is the target's distribution at t + 1 + k, read off the same forward
that gives the states, so nothing is written to disk. The logits are most of the work: in training they are computed at
a share of the positions, chosen anew for each batch.

A recipe fills in `HeadsLoss`: which states its heads read, and what they say.

Doesn't know: what the heads are made of, how drafts are made or verified.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.draft.neural.checkpoint import save_drafter
from paceline.errors import PacelineError
from paceline.target.base import BEFORE_NORM
from paceline.target.load import read_config
from paceline.target.shape import unsupported
from paceline.train.attention import use_blocks
from paceline.train.data import Rows, batches
from paceline.train.drafter import Lesson, LessonConfig
from paceline.train.loss import IGNORE, chunked_cross_entropy, chunked_distillation, soft_cross_entropy
from paceline.train.options import DrafterOptions, HeadOptions
from paceline.train.plan import LoopConfig
from paceline.train.slots import RANKS, Slots, slot_lines, write_slots
from paceline.train.states import StateCache, States

PASSES = 4
"""Over the answers, where no budget is given."""
MOST_ROWS = 48
"""Held-out rows of a source that are measured."""


@dataclass(frozen=True, kw_only=True)
class HeadsConfig(LessonConfig):
    """What a batch is made of, and what of it is learnt."""

    depth: int = 4  # heads
    share: float = 0.25  # of the positions of a batch whose logits are computed
    soft: float = 1.0  # share of the target's distribution in the loss; the rest is its tokens
    decay: float = 0.8  # weight of a depth beside the one above it
    begin: str | None = None  # folder of heads to go on from


class Teacher:
    """A frozen target: its states, its final norm, its output head and its embeddings."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval().requires_grad_(False)
        use_blocks(self.model)
        self.config = model.config
        self.norm, self.table = model.model.norm, model.lm_head.weight
        self.embedding = model.get_input_embeddings()

    @torch.no_grad()
    def last(self, input_ids: Tensor) -> Tensor:
        """States [B, T, H] before the final norm."""
        return self.states(input_ids, BEFORE_NORM)[0]

    @torch.no_grad()
    def states(self, input_ids: Tensor, *layers: int) -> list[Tensor]:
        """States [B, T, H] before each of `layers` (num_layers: after the final norm; BEFORE_NORM: before it)."""
        before: list[Tensor] = []
        hook = self.norm.register_forward_pre_hook(lambda module, given: before.append(given[0]))
        try:
            out = self.model.model(input_ids=input_ids, use_cache=False, output_hidden_states=True)
        finally:
            hook.remove()
        return [before[0] if layer == BEFORE_NORM else out.hidden_states[layer] for layer in layers]

    def turns(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [1, T, head_dim] of the positions of states [B, T, H]."""
        positions = torch.arange(states.shape[1], device=states.device)[None]
        turns: tuple[Tensor, Tensor] = self.model.model.rotary_emb(states, positions)
        return turns


class HeadsLoss(nn.Module):
    """Heads whose forward is their loss, mean over depths, weighted. input_ids, labels [B, T], labels shifted: IGNORE
    where the next token is not the target's own.

    A recipe's subclass fills in `drafted`, and sets `normed` if its heads read the states after the final norm. Where
    each depth has an output head of its own, those are in `lm_heads`, and they learn too."""

    normed = True

    def __init__(self, teacher: Teacher, config: HeadsConfig) -> None:
        super().__init__()
        self.config = config
        self.lm_heads: nn.ModuleList | None = None
        self._teacher = [teacher]  # in a list: the target must not appear among the parameters
        self.states: States = teacher.last

    @property
    def teacher(self) -> Teacher:
        """The frozen target."""
        return self._teacher[0]

    def drafted(self, input_ids: Tensor, states: Tensor, at: Tensor) -> Tensor:
        """What the output head reads, [N, depth, H], at N positions `at` of the flattened batch; states [B, T, H]."""
        raise NotImplementedError

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        states, last = self.read(input_ids)
        kept = known_depths(labels, self.config.depth).flatten(0, 1)
        at = self._chosen(kept[:, 0])
        drafted = self.drafted(input_ids, states, at)
        last, flat = last.flatten(0, 1), labels.flatten()
        total, weights = torch.zeros((), device=last.device), 0.0
        for k in range(self.config.depth):
            weight = self.config.decay**k
            there = (at + k + 1).clamp_max(len(flat) - 1)
            total = total + weight * self._of_depth(k, drafted[:, k], last[there], flat[there], kept[at, k])
            weights += weight
        return total / weights

    @torch.no_grad()
    def read(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The states that the heads read, and those after the final norm, [B, T, H] each."""
        before = self.states(input_ids)
        last = self.teacher.norm(before.float())
        return (last if self.normed else before), last

    def _chosen(self, able: Tensor) -> Tensor:
        """Numbers of the positions that are learnt from: a share of those that can be, random in training."""
        at = able.nonzero().flatten()
        if self.training:
            at = at[torch.rand(len(at)).to(at.device) < self.config.share]
            return at if len(at) else able.nonzero().flatten()[:1]
        return at[:: max(round(1 / self.config.share), 1)]

    def _of_depth(self, k: int, drafted: Tensor, last: Tensor, labels: Tensor, kept: Tensor) -> Tensor:
        soft, table = self.config.soft, self.teacher.table
        loss = torch.zeros((), device=drafted.device)
        own = self._own_table(k)
        if soft > 0 and own is not None:
            loss = loss + soft * chunked_distillation(drafted, own, last, table, kept)
        elif soft > 0:
            loss = loss + soft * soft_cross_entropy(drafted, last, table, kept)
        if soft < 1:
            wanted = torch.where(kept, labels, IGNORE)
            loss = loss + (1 - soft) * chunked_cross_entropy(drafted, table if own is None else own, wanted)
        return loss

    def logits(self, k: int, drafted: Tensor) -> Tensor:
        """Logits [N, V] of depth k from what its output head reads."""
        own = self._own_table(k)
        return drafted @ (self.teacher.table if own is None else own).T

    def _own_table(self, k: int) -> Tensor | None:
        """The weights of depth k's own output head."""
        head = None if self.lm_heads is None else self.lm_heads[k]
        return head.weight if isinstance(head, nn.Linear) else None

    def saved(self) -> dict[str, Tensor]:
        """The parameters by the names they are saved under."""
        return {name.removeprefix("network."): weight for name, weight in self.named_parameters()}


@torch.no_grad()
def go_on(module: HeadsLoss, folder: Path) -> None:
    """Give `module` the weights of the heads in `folder`; PacelineError if they are of another make."""
    file = folder / "model.safetensors"
    if not file.exists():
        raise PacelineError(f"--begin: {folder} has no model.safetensors; name a folder that this command wrote")
    weights, own = load_file(file), module.saved()
    wrong = sorted(set(weights) ^ set(own)) or [name for name in own if own[name].shape != weights[name].shape]
    if wrong:
        raise PacelineError(f"--begin: {folder} has heads of another make: {', '.join(wrong[:3])}")
    for name, parameter in own.items():
        parameter.copy_(weights[name])


def known_depths(labels: Tensor, depth: int) -> Tensor:
    """bool [B, T, depth]: whether the tokens t + 1 to t + 2 + k after position t are all the target's own."""
    kept = labels != IGNORE
    ahead = [torch.cat([kept[:, k:], torch.zeros_like(kept[:, :k])], 1) for k in range(depth + 1)]
    return torch.stack(ahead, -1).cumprod(-1)[..., 1:].bool()


@torch.no_grad()
def measure(module: HeadsLoss, held: Mapping[str, Rows]) -> Slots:
    """How often the candidates of each depth are what the target says there, over the labelled positions of `held`."""
    module.eval()
    depth, table = module.config.depth, module.teacher.table
    slots = Slots(depth)
    ranks = min(RANKS, len(table))
    few: list[Rows] = [(ids[:MOST_ROWS], labels[:MOST_ROWS]) for ids, labels in held.values()]
    for batch in (pair for rows in few for pair in batches(rows)):
        ids, labels = (side.to(table.device) for side in batch)
        states, last = module.read(ids)
        kept = known_depths(labels, depth).flatten(0, 1)
        at = kept[:, 0].nonzero().flatten()
        if not len(at):
            continue
        said = (last @ table.T).argmax(-1).flatten()
        drafted = module.drafted(ids, states, at)
        for k in range(depth):
            here = kept[at, k]
            best = module.logits(k, drafted[here, k]).topk(ranks).indices
            slots.add(k, best, said[at[here] + k + 1])
    return slots


def head_facts(slots: Slots) -> dict[str, Any]:
    """What config.json says about the heads on held-out answers, by depth."""
    shares = slots.accuracies
    return {
        "positions": [int(count) for count in slots.counts],
        "top1": [row[0] for row in shares],
        "top5": [round(sum(row[:5]), 4) for row in shares],
    }


def prepare(setup: DrafterOptions, heads: HeadOptions) -> tuple[Path, Path, Path, Path, LoopConfig, HeadsConfig]:
    """The first arguments of every recipe of heads, from the options of its command: target, answers, which are
    written now if they are not there yet, folder to write, folder of the run, loop, batches."""
    check_depth(setup.target, heads.heads)
    run, answers = setup.prepare()
    config = HeadsConfig(
        length=setup.length,
        rows=heads.rows,
        depth=heads.heads,
        share=heads.share,
        soft=heads.soft,
        decay=heads.decay,
        begin=None if heads.begin is None else str(heads.begin),
    )
    return setup.target, answers, setup.out, run, setup.loop(answers, PASSES, **heads.settings()), config


def check_depth(target: Path, depth: int) -> None:
    """PacelineError unless heads can be trained for the model in `target`."""
    config = read_config(target)
    if reason := unsupported(config):
        raise PacelineError(f"{target}: the native decoder cannot run it, {reason}; heads would be of no use")
    if depth < 1:
        raise PacelineError(f"--heads is {depth}; it must be 1 or more")


def train_heads(
    kind: str,
    target: Path,
    answers: Path,
    out: Path,
    run: Path,
    loop: LoopConfig,
    config: HeadsConfig,
    make: Callable[[Teacher], HeadsLoss],
    facts: Mapping[str, Any],
    states: Path | None = None,
) -> bool:
    """Train what `make` makes on `answers` (a file of `generated_rows`); writes `out` in bfloat16, for `kind:PATH`.
    False when interrupted; the same call goes on.

    facts   what config.json says about the heads.
    states  folder in which the target's states are kept, for other trainings on the same answers."""
    check_depth(target, config.depth)
    lesson = Lesson.open(target, answers, config)
    if not lesson.training or not lesson.held:
        raise PacelineError(f"{answers} has too few answers to learn from some and to measure on others: generate more")
    torch.manual_seed(loop.seed)
    teacher = Teacher(lesson.teacher)
    module = make(teacher)
    if config.begin is not None:
        go_on(module, Path(config.begin))
    if states is not None:
        facts_of = lesson.target_facts()
        width, weights = facts_of.hidden_size, facts_of.weights_fingerprint
        module.states = StateCache.open(states, weights, teacher.last, lesson.training, width).of
    if not lesson.train(module, loop, run):
        return False
    if lesson.first:
        slots = measure(module, lesson.held)
        said = lesson.facts(kind, loop, **facts, held_out=head_facts(slots))
        tensors = {name: weight.to(torch.bfloat16) for name, weight in module.saved().items()}
        save_drafter(out, kind, config=said, tensors=tensors, target=lesson.target_facts())
        write_slots(out, slots.accuracies, [int(count) for count in slots.counts])
        shutil.copy(run / "log.jsonl", out / "training.jsonl")
        lesson.report(slot_lines(slots.accuracies), out)
    return True
