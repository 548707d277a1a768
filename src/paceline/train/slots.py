"""How often the candidates of each depth are right, measured on held-out text, for trees of fixed shape.

    slots = Slots(depth=4, ranks=10)
    slots.add(k, candidates, wanted)          # of head k, for any number of positions
    write_slots(out, slots.accuracies, slots.counts)

`draft/shapes.py` builds trees from the file. The counts of each depth are divided by its own number of positions: deep
ones have fewer.

`paceline train tree` measures heads that came without the file. Every answer is run through the target once; at each of
its positions the heads' candidates of every depth are compared with the target's best tokens. Heads that read drafted
tokens read the text's.

    paceline train tree models/demo medusa:downloads/heads --data answers.jsonl
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from torch import Tensor

from paceline.draft.neural.static_heads import StaticHeads
from paceline.draft.registry import create
from paceline.draft.shapes import SLOTS_FILE, best_paths
from paceline.engine.round import Segment
from paceline.errors import PacelineError
from paceline.jsonl import check_folder, write_whole
from paceline.target.base import Target
from paceline.target.load import load, load_tokenizer
from paceline.train.data import Example, read_examples
from paceline.train.options import Threads, use_threads

RANKS = 10
"""Candidates of each depth that are counted."""
SHOWN = (8, 16, 32, 63)
"""Sizes in nodes of the example trees in the file."""


class Slots:
    """Counts by depth and rank. right [depth, ranks]: correct candidates; counts [depth]: positions."""

    def __init__(self, depth: int, ranks: int = RANKS) -> None:
        self.right = torch.zeros(depth, ranks, dtype=torch.float64)
        self.counts = torch.zeros(depth, dtype=torch.float64)

    def add(self, k: int, candidates: Tensor, wanted: Tensor) -> None:
        """Count N positions: candidates [N, ranks] of depth k, best first, and the target's tokens, wanted [N]."""
        self.right[k, : candidates.shape[1]] += (candidates == wanted[:, None]).sum(0).double().cpu()
        self.counts[k] += len(wanted)

    @property
    def accuracies(self) -> list[list[float]]:
        """Entry [k][r]: how often candidate r of depth k is the target's token."""
        shares: list[list[float]] = (self.right / self.counts.clamp_min(1)[:, None]).tolist()
        return [[round(share, 4) for share in row] for row in shares]


def write_slots(out: Path, accuracies: Sequence[Sequence[float]], counts: Iterable[Any] = ()) -> None:
    """Write slots.json: the accuracies, the positions by depth, and for readers the trees that follow from them."""
    trees = {count: ["-".join(map(str, path)) for path in best_paths(accuracies, count)] for count in SHOWN}
    positions = [int(count) for count in counts]
    facts = {"accuracies": accuracies, **({"positions": positions} if positions else {}), "trees": trees}
    write_whole(out / SLOTS_FILE, json.dumps(facts, indent=1) + "\n")


def slot_lines(accuracies: Sequence[Sequence[float]]) -> list[str]:
    """The accuracies as lines of a report."""
    return [
        f"slot {slot}  right {shares[0]:6.1%}  among {len(shares)} candidates {sum(shares):6.1%}"
        for slot, shares in enumerate(accuracies, 1)
    ]


@torch.inference_mode()
def measure_heads(target: Target, drafter: StaticHeads, examples: Iterable[Example]) -> Slots:
    """How often the candidates of each depth are the target's best token, over the answers of `examples`, all of which
    have prompts. The drafter is bound to the target."""
    slots = Slots(drafter.depth)
    (layer,) = drafter.needs.hidden_layers
    for example in examples:
        tokens = np.array([*(example.prompt or ()), *example.tokens])[: target.max_context]
        slot = target.add_row(len(tokens))
        segment = Segment(slot, tokens, np.arange(-1, len(tokens) - 1), num_logits=len(tokens), is_prompt=True)
        verdict = target.verify([segment], drafter.needs)
        target.drop_row(slot)
        best_tokens = verdict.logits.argmax(-1).cpu()
        read = drafter.read_text(tokens, verdict.hidden[layer])
        first = len(example.prompt or ()) - 1  # the position before the answer's first token
        for k in range(drafter.depth):
            last = len(tokens) - 2 - k  # for larger t, token t + 2 + k is after the answer
            if first >= last:
                break
            best = torch.from_numpy(drafter.candidates(read[first:last, k], k))
            slots.add(k, best, best_tokens[first + k + 1 : last + k + 1])
    return slots


def command(
    target: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of the target.")],
    heads: Annotated[str, typer.Argument(help="The heads as --draft names them, such as medusa:PATH.")],
    data: Annotated[Path, typer.Option(help="JSON Lines of answers with their prompts.", exists=True, dir_okay=False)],
    answers: Annotated[int, typer.Option(help="Most answers to measure on.", min=1)] = 200,
    threads: Threads = 1,
) -> None:
    """Measure heads by depth and rank, and write slots.json next to them: `tree=N` builds its trees from that file.

    paceline train tree models/demo medusa:downloads/heads --data answers.jsonl

    For heads that came without the file, or for text of another kind. `paceline train medusa`, `hydra` and `amphista`
    do the same when they end.
    """
    use_threads(threads)
    drafter = create(heads)
    if not isinstance(drafter, StaticHeads):
        raise PacelineError(f"{heads} does not fill a tree of fixed shape: there is nothing to measure for it")
    check_folder(Path(drafter.folder))
    console = Console(stderr=True)
    model = load(target)
    model.tokenizer = load_tokenizer(target)
    drafter.bind(model)
    drafter.use_ranks()
    examples = list(islice(read_examples(data, model.tokenizer, need_prompts=True), answers))
    with console.status(f"{len(examples)} answers ..."):
        slots = measure_heads(model, drafter, examples)
    write_slots(drafter.folder, slots.accuracies, slots.counts)
    console.print("\n".join(slot_lines(slots.accuracies)), highlight=False)
    console.print(f"wrote {drafter.folder / SLOTS_FILE}")
