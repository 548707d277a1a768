"""Measure a drafter on held-out text, with the same figures for every recipe.

Drafts are measured below texts that the target wrote: at every position of an answer, and at every depth as far as the
text goes on. `Fit` has the figures of one depth.

Drafters that fill a tree of fixed shape get slots.json: how often the candidate of each depth and rank is the target's
best token. `draft/shapes.py` builds trees from it. `paceline train tools tree` writes it for heads without one:"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from paceline.core.segment import Segment
from paceline.draft.models.fixed_tree import HeadsDrafter, HeadsModel
from paceline.draft.registry import create
from paceline.draft.shapes import SLOTS_FILE, best_paths
from paceline.errors import PacelineError
from paceline.outputs import check_folder, write_json
from paceline.target.base import Target
from paceline.target.load import load, load_tokenizer
from paceline.train.data import Example, Rows, batches, read_examples
from paceline.train.student import Student, known_depths

RANKS = 10  # Candidates to count at each depth.
SHOWN = (8, 16, 32, 63)  # Sizes in nodes of the example trees in slots.json.


class Fit:
    """Figures of one depth, where all tokens up to it are the target's; p: its distribution, q: the draft's, at 1.

    positions  their number; reached: of those whose draft is the text up to this depth.
    ranks      how often candidate r of the draft is the target's best token.
    soft_ce    mean of -sum p log q over the tokens that q has, in nats; entropy: of p, its least possible value where q
               has all tokens.
    loss       mean of -log q of the text's token, in nats; 0 for a token that q does not have.
    accepted   share of the reached positions where both have the same best token: greedy acceptance.
    overlap    mean of sum min(p, q) over the reached positions: the most that any rule of acceptance reaches.
    sampled    probability that a draft drawn from q is accepted up to this depth and at it by the ratio test (Leviathan
               et al. 2023); shared noise accepts a little less. The texts are taken as drawn from p. Then the draft
               agrees with a token x of the text with probability min(1, q(x) / p(x))."""

    def __init__(self) -> None:
        self.right = torch.zeros(RANKS, dtype=torch.float64)
        names = ("positions", "reached", "soft_ce", "entropy", "loss", "accepted", "overlap", "sampled")
        self.sums = dict.fromkeys(names, 0.0)

    def add(
        self, p: Tensor, q: Tensor, text: Tensor, reached: Tensor | None = None, weights: Tensor | float = 1.0
    ) -> None:
        """Add N positions: p, q [N, V]; text [N], the tokens; reached bool [N], None: all; weights [N] of the texts."""
        if reached is None:
            reached = torch.ones_like(text, dtype=torch.bool)
        log_q = torch.where(q > 0, q.log(), 0.0)
        best, overlap = p.argmax(-1), torch.minimum(p, q).sum(-1)
        self.rank(q.topk(min(RANKS, q.shape[-1])).indices, best)
        more = {
            "reached": reached.sum(),
            "soft_ce": -(p * log_q).sum(),
            "entropy": -torch.xlogy(p, p).sum(),
            "loss": -log_q.gather(-1, text[:, None]).sum(),
            "accepted": (q.argmax(-1) == best)[reached].sum(),
            "overlap": overlap[reached].sum(),
            "sampled": (overlap * weights).sum(),
        }
        for name, value in more.items():
            self.sums[name] += float(value)

    def rank(self, candidates: Tensor, best: Tensor) -> None:
        """Count the candidates [N, ranks], best first, that are the target's best tokens, best [N]."""
        self.right[: candidates.shape[1]] += (candidates == best[:, None]).sum(0).double().cpu()
        self.sums["positions"] += len(best)

    @property
    def ranks(self) -> list[float]:
        """Share of the positions, by rank."""
        shares: list[float] = (self.right / max(self.sums["positions"], 1)).tolist()
        return [round(share, 4) for share in shares]

    @property
    def row(self) -> dict[str, float]:
        """The figures by name; top1 and top5 are of `ranks`."""
        positions, reached = (max(self.sums[name], 1) for name in ("positions", "reached"))
        return {
            "positions": int(self.sums["positions"]),
            "top1": self.ranks[0],
            "top5": round(sum(self.ranks[:5]), 4),
            **{name: round(self.sums[name] / positions, 4) for name in ("soft_ce", "entropy", "loss", "sampled")},
            "reached": int(self.sums["reached"]),
            **{name: round(self.sums[name] / reached, 4) for name in ("accepted", "overlap")},
        }

    def __add__(self, other: Fit) -> Fit:
        both = Fit()
        both.right = self.right + other.right
        both.sums = {name: value + other.sums[name] for name, value in self.sums.items()}
        return both


Fits = dict[str, list[Fit]]  # By source, and "all" for all sources: a fit for every depth, exit or stream.


def with_all(fits: Fits) -> Fits:
    """The fits by source, and their sums as "all"; empty without a source."""
    return fits | {"all": [sum(of_depth, Fit()) for of_depth in zip(*fits.values(), strict=True)]} if fits else {}


def rows_of(fits: Fits) -> dict[str, list[dict[str, float]]]:
    """The figures as entries of config.json."""
    return {name: [fit.row for fit in of_source] for name, of_source in fits.items()}


@torch.no_grad()
def measure(student: Student, held: Mapping[str, Rows]) -> Fits:
    """The figures of a student by source and depth, over held-out rows."""
    student.eval()
    fits: Fits = {}
    for source, rows in held.items():
        of_source = fits[source] = [Fit() for _ in range(student.depths)]
        for batch in batches(rows):
            ids, labels = (side.to(student.teacher.device) for side in batch)
            known = known_depths(labels, student.depths)
            last, drafted = student.drafts(ids, student.depths)
            reached, weights = known[:, :, 0], torch.ones_like(labels, dtype=torch.float32)
            for depth, (fit, hidden) in enumerate(zip(of_source, drafted, strict=True)):
                length = hidden.shape[1]
                here = known[:, :length, depth]
                p = student.target_probs(last[:, 1 + depth :][here])
                q = student.probs(hidden[here], depth)
                text = labels[:, 1 + depth :][here]
                fit.add(p, q, text, reached[:, :length][here], weights[:, :length][here])
                # The next depth counts only where the text continues with this draft.
                reached, weights = reached[:, :length].clone(), weights[:, :length].clone()
                of_p, of_q = (probs.gather(-1, text[:, None])[:, 0] for probs in (p, q))
                reached[here] &= q.argmax(-1) == text
                weights[here] *= (of_q / of_p.clamp_min(torch.finfo(of_p.dtype).tiny)).clamp_max(1)
    return with_all(fits)


def fit_lines(fits: Fits, name: str = "depth", numbers: Iterable[int] | None = None) -> list[str]:
    """A table of the fits of all sources, and what a draft of so many tokens brings.

    name, numbers  of the rows: depths counted from 1, or for example exits."""
    columns = ("positions", "top1", "top5", "loss", "soft_ce", "sampled", "reached", "accepted", "overlap")
    lines = ["held out " + "".join(f"{column:>10}" for column in columns)]
    rows = [fit.row for fit in fits["all"]]
    for number, row in zip(numbers or range(1, len(rows) + 1), rows, strict=True):
        figures = (f"{row[c]:10,}" if c in ("positions", "reached") else f"{row[c]:10.3f}" for c in columns)
        lines.append(f"{name} {number:<{8 - len(name)}}" + "".join(figures))
    return lines


def accepted_length(fits: Sequence[Fit]) -> float:
    """Mean tokens a round with a chain of `len(fits)` tokens, by `sampled`, the target's own token included."""
    return 1 + sum(fit.row["sampled"] for fit in fits)


def write_slots(out: Path, fits: Sequence[Fit]) -> None:
    """Write slots.json: the accuracies by depth and rank, the positions by depth, and for readers the trees that these
    give. The counts of each depth are divided by its own number of positions: deep ones have fewer."""
    accuracies = [fit.ranks for fit in fits]
    trees = {count: ["-".join(map(str, path)) for path in best_paths(accuracies, count)] for count in SHOWN}
    facts = {"accuracies": accuracies, "positions": [fit.row["positions"] for fit in fits], "trees": trees}
    write_json(out / SLOTS_FILE, facts)


def slot_lines(fits: Sequence[Fit]) -> list[str]:
    """The accuracies as lines of a report."""
    return [
        f"slot {slot}  right {fit.ranks[0]:6.1%}  among {RANKS} candidates {sum(fit.ranks):6.1%}"
        for slot, fit in enumerate(fits, 1)
    ]


@torch.inference_mode()
def measure_heads(target: Target, model: HeadsModel, examples: Iterable[Example]) -> list[Fit]:
    """How often the candidates of each depth are the target's best token, over the answers of `examples`, all of which
    have prompts. The heads are bound to the target; heads that read drafted tokens read the text's."""
    fits = [Fit() for _ in range(model.heads.depth)]
    for example in examples:
        tokens = np.array([*(example.prompt or ()), *example.tokens])[: target.max_context]
        slot = target.add_row(len(tokens))
        segment = Segment(slot, tokens, np.arange(-1, len(tokens) - 1), num_logits=len(tokens), is_prompt=True)
        verdict = target.verify([segment], model.needs)
        target.drop_row(slot)
        best_tokens = verdict.logits.argmax(-1).cpu()
        read = model.read_text(tokens, verdict.hidden[model.heads.layer])
        first = len(example.prompt or ()) - 1  # the position before the answer's first token
        for k, fit in enumerate(fits):
            last = len(tokens) - 2 - k  # for larger t, token t + 2 + k is after the answer
            if first >= last:
                break
            best = torch.from_numpy(model.candidates(read[first:last, k], k))
            fit.rank(best, best_tokens[first + k + 1 : last + k + 1])
    return fits


def measure_folder(heads: str, target: str, data: Path, most: int) -> None:
    """Measure the heads that a spec names on at most so many answers in `data`, and write slots.json next to them.
    PacelineError for a drafter without a tree of fixed shape."""
    drafter = create(heads)
    if not isinstance(drafter, HeadsDrafter):
        raise PacelineError(f"{heads} does not fill a tree of fixed shape: there is nothing to measure for it")
    check_folder(drafter.folder)
    console = Console(stderr=True)
    tokenizer = load_tokenizer(target)
    model = load(target, tokenizer=tokenizer)
    drafter.bind(model)
    drafter.model.use_ranks()
    examples = list(islice(read_examples(data, tokenizer, need_prompts=True), most))
    with console.status(f"{len(examples)} answers ..."):
        fits = measure_heads(model, drafter.model, examples)
    write_slots(drafter.folder, fits)
    console.print("\n".join(slot_lines(fits)), highlight=False)
    console.print(f"wrote {drafter.folder / SLOTS_FILE}")
