"""Contestant: whatever answers questions in a benchmark, our engine with a drafter or another engine altogether.

All contestants of a run get the same token ids and the same limits, one after another. Knows nothing of suites.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from paceline.bench.record import Reply
from paceline.errors import PacelineError


class NotInstalled(PacelineError):
    """A peer cannot take part because something it needs is not installed; the message says what and how."""


@dataclass(frozen=True)
class Ask:
    """How to answer. seeds: one a prompt, for sampling; ends: token ids that end an answer; the others as in
    `SamplingParams`."""

    max_tokens: int
    temperature: float = 0.0
    seeds: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0


@dataclass
class Contestant(ABC):
    """Opened once, asked many times, closed at the end.

    name      as in the record: "none", "sam", "peer:vllm-ngram".
    settings  everything that decides how fast it is, for the record: options, versions, threads, dtype.
    draft_bytes, target_bytes  weights a forward of the draft model (0: there is none) and of the target reads.
    max_batch the most prompts it can answer together.
    in_process  whether it runs in this process, so that this process's memory is its memory.
    lossless  False for one that may change what the target says.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    draft_bytes: int = 0
    target_bytes: int = 0
    max_batch: int = 1 << 30
    lossless: bool = True
    in_process: bool = True

    def open(self) -> None:  # noqa: B027
        """Load whatever it takes. Raises NotInstalled, or another PacelineError; called before anything is timed."""

    def forget(self) -> None:  # noqa: B027
        """Forget what earlier questions taught it: called after the warm-up and between repetitions, so that no
        question is answered by one that has seen its answer."""

    def wake(self, seconds: float) -> None:
        """Work for so long, or a little longer, unrecorded and without teaching a drafter anything, so that what is
        asked next finds the processor as fast and the caches as full as under load. Here: this process's threads."""
        square = torch.ones(256, 256)
        began = perf_counter()
        while perf_counter() - began < seconds:
            torch.mm(square, square)

    @abstractmethod
    def answer(self, prompts: Sequence[Sequence[int]], ask: Ask) -> list[Reply]:
        """Answer `prompts` (token ids) together, timed: one Reply each. `plain_tokens` is for the caller to fill in.

        Every Reply's `seconds` is the time of the whole call."""

    def close(self) -> None:  # noqa: B027
        """Give memory and processes back; called once, after a failed `open`, or none, too."""
