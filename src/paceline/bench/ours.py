"""Our engine as a contestant: one target for every drafter, an engine each. Knows nothing of suites or peers.

    Ours("sam", target, tokenizer, batch=1).answer([tokens], Ask(max_tokens=64))
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, is_dataclass
from time import perf_counter
from typing import Any

from paceline import __version__
from paceline.bench.contestant import Ask, Contestant
from paceline.bench.record import Reply
from paceline.draft.registry import create
from paceline.engine.engine import Engine
from paceline.engine.request import Delta, Row
from paceline.engine.sampling import SamplingParams
from paceline.errors import PacelineError
from paceline.target.base import Target
from paceline.target.tokenizer import Tokenizer


class Ours(Contestant):
    """A drafter, by its spec, on a target that is shared with the other drafters of a run.

    made  the spec of the drafter that is made, where it differs from the one in the record."""

    def __init__(self, spec: str, target: Target, tokenizer: Tokenizer, *, batch: int, made: str | None = None):
        super().__init__(spec, target_bytes=target.weight_bytes)
        self.target, self.tokenizer, self.batch, self.spec = target, tokenizer, batch, made or spec
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """The engine; made anew by `open` and `forget`."""
        assert self._engine is not None, "open it first"
        return self._engine

    def open(self) -> None:
        self.forget()
        parts = getattr(self.engine.drafter, "parts", (self.engine.drafter,))
        self.lossless = all(getattr(part, "lossless", "not stated") == "yes" for part in parts)
        self._weigh()
        self.settings = {"engine": f"paceline {__version__}", "drafter": {part.name: _options(part) for part in parts}}

    def forget(self) -> None:
        # Every prompt is run whole: repetitions and the other contestants compute the same.
        self._engine = Engine(
            self.target, create(self.spec), max_batch=self.batch, tokenizer=self.tokenizer, reuse=False
        )

    def close(self) -> None:
        self._engine = None

    def wake(self, seconds: float) -> None:
        plain = Engine(self.target, tokenizer=self.tokenizer, reuse=False)
        began = perf_counter()
        while perf_counter() - began < seconds:
            plain.generate([[1]], SamplingParams(max_tokens=2, ignore_eos=True))

    def answer(self, prompts: Sequence[Sequence[int]], ask: Ask) -> list[Reply]:
        rounds: list[list[tuple[float, Delta]]] = [[] for _ in prompts]
        began = perf_counter()
        with closing(self.engine.stream(prompts, _params(ask, len(prompts)))) as deltas:
            for delta in deltas:
                rounds[delta.index].append((perf_counter() - began, delta))
                if delta.row.error:
                    raise PacelineError(delta.row.error)
        seconds = perf_counter() - began
        self._weigh()
        return [self._turn(of_row[0][1].row, of_row, seconds) for of_row in rounds]

    def _weigh(self) -> None:
        """Note what a draft forward reads; for a draft of several depths that is a mean of what it did so far."""
        parts = getattr(self.engine.drafter, "parts", (self.engine.drafter,))
        self.draft_bytes = round(sum(part.weight_bytes for part in parts))

    def _turn(self, row: Row, rounds: Sequence[tuple[float, Delta]], seconds: float) -> Reply:
        return Reply(
            prompt_tokens=row.prompt_length,
            tokens=row.new_tokens.tolist(),
            text=self.tokenizer.decode(row.new_tokens.tolist()),
            seconds=seconds,
            lengths=[len(delta.tokens) for _, delta in rounds],
            times=[when for when, _ in rounds],
            nodes=[delta.nodes for _, delta in rounds],
            depths=[delta.depth for _, delta in rounds],
            calls=sum(delta.calls for _, delta in rounds),
            runs=_runs(row, self.tokenizer),
            parts=dict(row.stats.seconds),
            finish=row.finish_reason or "abort",
        )


def _params(ask: Ask, count: int) -> list[SamplingParams]:
    seeds = ask.seeds or (None,) * count
    return [
        SamplingParams(
            max_tokens=ask.max_tokens,
            temperature=ask.temperature,
            top_k=ask.top_k,
            top_p=ask.top_p,
            repetition_penalty=ask.repetition_penalty,
            seed=seed,
            stop_token_ids=ask.ends,
        )
        for seed in seeds
    ]


def _runs(row: Row, tokenizer: Tokenizer) -> list[tuple[str, str, int]]:
    """Text of every run; a character made of several tokens belongs to the run that completes it."""
    detokenizer, tokens, at = tokenizer.detokenizer(), row.new_tokens.tolist(), 0
    runs = []
    for who, count in row.runs:
        runs.append((who, "".join(map(detokenizer.push, tokens[at : at + count])), count))
        at += count
    if runs and (rest := detokenizer.flush()):
        who, text, count = runs[-1]
        runs[-1] = (who, text + rest, count)
    return runs


def _options(drafter: Any) -> dict[str, Any]:
    """A drafter's options, defaults included."""
    config = getattr(drafter, "config", None)
    return asdict(config) if is_dataclass(config) and not isinstance(config, type) else {}
