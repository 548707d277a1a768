"""What a drafted token costs, beside the bare forward of the model that drafts it.

    python benchmarks/drafting.py models/demo
    python benchmarks/drafting.py build/draft --rows 8 --dtype bfloat16
    python benchmarks/drafting.py models/demo-draft --rule fixed --vocab 4096 2048

A step of drafting is a forward, a look at its distribution by the stop rule, and a token; the bare forward is the same
nodes through `verify` and nothing else. Both draft the same chain behind the same context, one after the other, again
and again; medians, and the ratio of the medians. The rules are held to one length: what they cost is asked here, not
what they gain.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from paceline.core.request import Row
from paceline.core.sampling import SamplingParams
from paceline.core.segment import Segment
from paceline.draft.methods.model import Model, StreamedConfig
from paceline.draft.models.stop import RULES
from paceline.draft.models.text_model import TextModel
from paceline.target.base import Target
from paceline.target.load import load

CONTEXT, LENGTH = 256, 8


def drafter(path: str, target: Target, rule: str, length: int, vocab: str | None) -> Model:
    """A drafter whose rule never stops before `length`, so that all draft alike."""
    made = Model(StreamedConfig(checkpoint=path, stop=rule, draft=length, vocab=vocab))  # type: ignore[arg-type]
    made.bind(target)
    ask = made.rule.stop

    def go_on(row: int, drafted: int, signal: float) -> bool:
        ask(row, drafted, signal)
        return False

    made.rule.stop = go_on  # type: ignore[method-assign]
    made.rule.most = lambda row: length  # type: ignore[method-assign]
    return made


def rows_of(count: int, vocab_size: int, temperature: float) -> list[Row]:
    """Rows of random text, `CONTEXT` long."""
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=temperature, max_tokens=100, ignore_eos=True, seed=0)
    texts = [rng.integers(5, vocab_size, CONTEXT) for _ in range(count)]
    return [Row(i, text, params, max_context=2048) for i, text in enumerate(texts)]


def bare(model: Target, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> list[list[Segment]]:
    """The segments of each forward that drafts these tokens, one for every row."""
    return [
        [
            Segment(slot, np.array(of_row[: n + 1]), np.arange(-1, n), start=n, num_logits=1)
            for slot, of_row in zip(slots, tokens, strict=True)
        ]
        for n in range(len(tokens[0]) - 1)
    ]


def measure(
    path: str, target: Target, rule: str, vocab: str | None, temperature: float, rows: int, rounds: int
) -> tuple[float, float]:
    """Microseconds of a drafted token (for all rows), and of a bare forward."""
    made = drafter(path, target, rule, LENGTH, vocab)
    assert isinstance(made.model, TextModel)
    network, slot_of = made.model.network, made.model.slot
    texts = rows_of(rows, network.vocab_size, temperature)
    for row in texts:
        made.start(row)
        network.verify([Segment.chunk(slot_of(row), row.tokens[:-1], last=False)])
        network.commit(slot_of(row), range(CONTEXT - 1))
    drafted, forwards = [], []
    for turn in range(rounds + 2):
        begin = time.perf_counter()
        trees = made.propose(texts)
        middle = time.perf_counter()
        segments = bare(network, [slot_of(row) for row in texts], [tree.tokens.tolist() for tree in trees])
        start = time.perf_counter()
        for of_step in segments:
            network.verify(of_step)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        end = time.perf_counter()
        if turn >= 2:
            drafted.append((middle - begin) / LENGTH)
            forwards.append((end - start) / LENGTH)
    return 1e6 * statistics.median(drafted), 1e6 * statistics.median(forwards)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the draft model")
    parser.add_argument("--rows", type=int, default=1, help="rows drafted for together (default 1)")
    parser.add_argument("--rounds", type=int, default=60, help="drafts of 8 tokens of each kind (default 60)")
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16, float16 or auto")
    parser.add_argument("--rule", nargs="*", default=[*RULES], help="stop rules (default all)")
    parser.add_argument("--vocab", nargs="*", default=[], help="trimmed vocabularies, beside the whole one")
    wish = parser.parse_args()
    target = load(wish.model, dtype=wish.dtype)
    table = Table("vocabulary", "rule", "temperature", "a drafted token, µs", "bare forward, µs", "ratio")
    for vocab, rule, temperature in itertools.product([None, *wish.vocab], wish.rule, (0.0, 1.0)):
        step, forward = measure(wish.model, target, rule, vocab, temperature, wish.rows, wish.rounds)
        row = vocab or "whole", rule, f"{temperature:g}", f"{step:,.0f}", f"{forward:,.0f}", f"{step / forward:.2f}"
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
