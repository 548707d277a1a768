"""What the engine gives back: a Delta a round and request, a Completion a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

from paceline.row import FinishReason, Row, RowStats
from paceline.sampling import TokenLogprob


@dataclass
class Delta:
    """What one round added to one request.

    index   the request's number among the prompts of this call.
    pieces  (source, text), source "" for the target's own tokens and the drafter's name for accepted ones. Text may
            lag after tokens inside a character or before what may become a stop string.
    nodes   drafted tokens that were verified in this round, depth the longest path among them, calls the forwards of
            a draft model that they took.
    logprobs  one entry for each of `tokens`, if the request wants them.
    """

    index: int
    row: Row
    tokens: list[int]
    pieces: list[tuple[str, str]]
    finished: bool
    nodes: int = 0
    depth: int = 0
    calls: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The new text."""
        return "".join(text for _, text in self.pieces)

    @classmethod
    def end(cls, row: Row) -> Delta:
        """The last of a request that ended without a new token: text that was held back, if there is any."""
        return cls(row.id, row, [], row.take_pieces(), True)


@dataclass
class Completion:
    """A finished request.

    seconds   from the moment it joined the batch to its last token, prompt included.
    logprobs  one entry a token, if the request wanted them. error: what went wrong, with finish_reason "error".
    reused    tokens whose keys and values an earlier request had computed.
    """

    index: int
    text: str
    tokens: list[int]
    prompt_tokens: int
    finish_reason: FinishReason
    seconds: float
    stats: RowStats = field(repr=False)
    runs: list[tuple[str, int]] = field(repr=False)
    logprobs: list[TokenLogprob] = field(default_factory=list, repr=False)
    error: str = ""
    reused: int = 0

    @classmethod
    def of(cls, index: int, row: Row) -> Completion:
        """A row's answer as it stands; one that is not finished counts as given up."""
        return cls(
            index,
            row.text,
            row.new_tokens.tolist(),
            row.prompt_length,
            row.finish_reason or "abort",
            (row.ended or perf_counter()) - row.joined if row.joined else 0.0,
            row.stats,
            row.runs,
            row.logprobs,
            row.error,
            row.reused,
        )

    @property
    def new_tokens(self) -> int:
        """Tokens of the answer, an end-of-sequence token included."""
        return len(self.tokens)

    @property
    def rounds(self) -> int:
        """Forwards of the target that yielded tokens, the one that finished the prompt included."""
        return self.stats.rounds

    @property
    def mean_accepted_tokens(self) -> float:
        """Tokens per round, the target's own included; plain decoding is 1."""
        return self.new_tokens / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens over `seconds`."""
        return self.new_tokens / self.seconds if self.seconds else 0.0
