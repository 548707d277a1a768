"""Contestant: an engine that is measured or certified. All of a run get the same token ids and the same limits."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from paceline.errors import PacelineError

PEER = "peer:"  # prefix of the names of other engines
SAMPLING = ("temperature", "top_k", "top_p", "repetition_penalty")
"""Fields of `Ask` and of `SamplingParams` that say how tokens are drawn."""


class NotInstalled(PacelineError):
    """Something that a peer needs is not installed; the message says what, and how to install it."""


@dataclass(frozen=True)
class Ask:
    """How to answer, as in `SamplingParams`. seeds: one a prompt; ends: token ids; predictions: only ours read them."""

    max_tokens: int
    temperature: float = 0.0
    seeds: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    predictions: tuple[tuple[int, ...], ...] = ()

    def sampling(self) -> dict[str, Any]:
        """How tokens are drawn."""
        return {name: getattr(self, name) for name in SAMPLING}


def cut(tokens: Sequence[int], ends: Collection[int], limit: int | None = None) -> list[int]:
    """At most `limit` tokens, up to and including the first end."""
    tokens = tokens[:limit]
    return list(tokens[: next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))])


def in_common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many items two sequences have in common at their beginnings."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:  # often, and fast for a long answer
        return shorter
    return next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), shorter)


@dataclass
class Reply:
    """One turn of an answer.

    tokens    the new tokens, an end-of-sequence token included.
    text      without special tokens and surrounding white space.
    seconds   from the request to the last token, prefill included; of questions answered together, that of all.
    lengths   tokens of each round, the target's own included. The prefill is a round of one token, as in Spec-Bench.
    times     seconds from the request to each round's tokens, as many as `lengths`.
    nodes     tokens drafted and verified in each round; depths: the longest path of each. None of the four: unknown.
    calls     sequential forwards of a draft model; 0 for a drafter without a model.
    runs      (drafter, text, tokens) of each piece of the answer in order; drafter "": the target.
    parts     seconds by part of a round ("draft", "forward", "accept", "bookkeeping", "align"), prefill included.
    plain_tokens  the tokens that Spec-Bench counts for its baseline: the text encoded again, less one.
    batch     counts of the whole group, on its first reply, where schedules are compared (`bench.ours.Scheduled`).
    peak_bytes  peak memory of the process while answering, everything that was loaded included; None: unknown.
    finish    stop, length, context, abort, or error for a request that failed.
    count     new tokens, where an engine tells their number and not which they are.
    seed      of a sampled answer."""

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
    count: int = 0
    seed: int | None = None

    @property
    def num_new(self) -> int:
        """New tokens."""
        return len(self.tokens) or self.count

    def beside(self, other: "Reply") -> tuple[Sequence[int] | str, Sequence[int] | str]:
        """What is compared of two answers: their tokens, or their texts where either has no tokens."""
        return (self.tokens, other.tokens) if self.tokens and other.tokens else (self.text, other.text)

    def __post_init__(self) -> None:
        self.runs = [(str(who), str(text), int(count)) for who, text, count in self.runs]


@dataclass
class Contestant(ABC):
    """Opened once, asked many times, closed at the end.

    name      as in the record: "none", "sam", "peer:vllm-ngram".
    settings  everything that decides its speed, for the record: options, versions, threads, dtype.
    draft_bytes, target_bytes  weights that a forward of the draft model (0: there is none) and of the target reads.
    max_batch most prompts that it can answer together.
    in_process  it runs in this process, so that this process's memory is its memory.
    lossless  False for one that may change the target's output."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    draft_bytes: int = 0
    target_bytes: int = 0
    max_batch: int = 1 << 30
    lossless: bool = True
    in_process: bool = True

    def open(self) -> None:  # noqa: B027
        """Load the model; called before anything is timed. Raises NotInstalled, or another PacelineError."""

    def forget(self) -> None:  # noqa: B027
        """Forget earlier answers, which a drafter drafts easily. Called after the warm-up and between repetitions."""

    def wake(self, seconds: float) -> None:
        """Keep the processor busy for at least `seconds`, without teaching a drafter anything, as it is under load."""
        import torch  # slow, and reports of runs need none

        square = torch.ones(256, 256)
        began = perf_counter()
        while perf_counter() - began < seconds:
            torch.mm(square, square)

    @abstractmethod
    def answer(self, prompts: Sequence[Sequence[int]], ask: Ask) -> list[Reply]:
        """Answer `prompts` (token ids), `max_batch` at most, together: one Reply each, whose `seconds` is the time of
        the whole call.

        The caller fills in `plain_tokens`."""

    def close(self) -> None:  # noqa: B027
        """Release memory and processes. Called once, even without `open` or after one that failed."""
