"""The tree of heads that came without one: how often their candidates are right, measured and written beside them.

Every answer is run through the target once; at each of its positions the heads say their candidates of every depth, and
those are compared with what the target says there. Heads that read drafted tokens are given the right ones.

Doesn't know: how heads work, how they were trained.

    paceline train tree models/demo medusa:downloads/heads --data answers.jsonl
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console

from paceline.draft.neural.static_heads import StaticHeads
from paceline.draft.registry import create
from paceline.draft.shapes import SLOTS_FILE
from paceline.engine.round import Segment
from paceline.errors import PacelineError
from paceline.jsonl import check_folder
from paceline.target.base import Target
from paceline.target.load import load, load_tokenizer
from paceline.train import options
from paceline.train.data import Example, read_examples
from paceline.train.slots import Slots, slot_lines, write_slots


@torch.inference_mode()
def measure_heads(target: Target, drafter: StaticHeads, examples: Iterable[Example]) -> Slots:
    """How often the candidates of each depth are what the target says there, over the answers of `examples`, all of
    which have prompts. The drafter is bound to the target."""
    slots = Slots(drafter.depth)
    (layer,) = drafter.needs.hidden_layers
    for example in examples:
        tokens = np.array([*(example.prompt or ()), *example.tokens])[: target.max_context]
        slot = target.add_row(len(tokens))
        segment = Segment(slot, tokens, np.arange(-1, len(tokens) - 1), num_logits=len(tokens), is_prompt=True)
        verdict = target.verify([segment], drafter.needs)
        target.drop_row(slot)
        said = verdict.logits.argmax(-1).cpu()
        read = drafter.read_text(tokens, verdict.hidden[layer])
        first = len(example.prompt or ()) - 1  # its next token is the first of the answer
        for k in range(drafter.depth):
            last = len(tokens) - 2 - k  # token t + 2 + k is the answer's last
            if first >= last:
                break
            best = torch.from_numpy(drafter.candidates(read[first:last, k], k))
            slots.add(k, best, said[first + k + 1 : last + k + 1])
    return slots


@options.with_options
def command(
    target: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of the target.")],
    heads: Annotated[str, typer.Argument(help="The heads as --draft names them, such as medusa:PATH.")],
    data: Annotated[Path, typer.Option(help="JSON Lines of answers with their prompts.", exists=True, dir_okay=False)],
    answers: Annotated[int, typer.Option(help="Most answers to measure on.", min=1)] = 200,
    threads: options.Threads = 1,
) -> None:
    """Measure heads by depth and rank, and write slots.json beside them: `tree=N` builds its trees from that.

    paceline train tree models/demo medusa:downloads/heads --data answers.jsonl

    For heads that came without it, or for text of another kind than they were measured on. `paceline train medusa`,
    `hydra` and `amphista` do the same at their end.
    """
    options.use_threads(threads)
    drafter = create(heads)
    if not isinstance(drafter, StaticHeads):
        raise PacelineError(f"{heads} does not fill a tree of fixed shape: there is nothing to measure for it")
    check_folder(Path(drafter.folder))
    console = Console(stderr=True)
    model = load(target)
    model.tokenizer = load_tokenizer(target)
    drafter.bind(model)
    drafter.use_ranks()
    examples = []
    for example in read_examples(data, model.tokenizer, need_prompts=True):
        examples.append(example)
        if len(examples) == answers:
            break
    with console.status(f"{len(examples)} answers ..."):
        slots = measure_heads(model, drafter, examples)
    write_slots(drafter.folder, slots.accuracies, [int(count) for count in slots.counts])
    console.print("\n".join(slot_lines(slots.accuracies)), highlight=False)
    console.print(f"wrote {drafter.folder / SLOTS_FILE}")
