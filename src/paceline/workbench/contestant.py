"""Contestant: whatever answers prompts to be measured or certified, our engine with a drafter or another engine.

All contestants of a run get the same token ids and the same limits, one after another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from paceline.errors import PacelineError

PEER = "peer:"
"""What the names of other engines begin with."""


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
class Reply:
    """One turn of an answer.

    tokens    the new tokens, an end-of-sequence token included.
    text      as a reader sees it: no special tokens, no white space around it.
    seconds   from handing the prompt over to the last token, prompt included, the device waited for. With several
              questions answered together it is the time of all of them: every one of the group has the same.
    lengths   tokens each round brought, the target's own included; the round that ended the prompt counts with its
              one token, as in Spec-Bench. Sums to len(tokens). None: the engine does not tell.
    times     seconds from the start to each round's tokens, as long as `lengths`; None: the engine does not tell.
    nodes     tokens drafted and verified in each round (nodes of the tree but for its root); depths the longest path
              among them. None: the engine does not tell.
    calls     forwards of a draft model, one after another; 0 for a drafter without a model.
    runs      (who, text, tokens) of each piece of the answer in order: the drafter it came from, "" for the target.
    parts     seconds by part of a round ("draft", "forward", "accept", "bookkeeping", and "align" where rows are
              realigned), prompt included.
    plain_tokens  what Spec-Bench counts for its baseline: the text encoded again, less one.
    batch         counts of all questions answered together, on the first one's reply, where schedules are compared:
              rounds; rows that ran in them, and slots, those that could have; drafting rounds, and those in which a
              whole batch was equally long; moved_bytes read and written to realign rows.
    peak_bytes    most memory of the process while answering, everything that was loaded included; None: unknown.
    finish    stop, length, context or abort.
    """

    prompt_tokens: int
    tokens: list[int]
    text: str
    seconds: float
    lengths: list[int] | None = None
    times: list[float] | None = None
    nodes: list[int] | None = None
    depths: list[int] | None = None
    calls: int = 0
    runs: list[tuple[str, str, int]] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    plain_tokens: int = 0
    peak_bytes: int | None = None
    batch: dict[str, int] = field(default_factory=dict)
    finish: str = "stop"

    def __post_init__(self) -> None:
        self.runs = [(str(who), str(text), int(count)) for who, text, count in self.runs]


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
