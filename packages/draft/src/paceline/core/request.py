"""Row: a request in the engine, with its tokens, its end and statistics of its rounds. Delta and Completion: its
results.

A row ends exactly where plain decoding would: `extend` takes a round's tokens one by one, until the answer ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal, Protocol

import numpy as np

from paceline.core.noise import Noise
from paceline.core.params import SamplingParams, TokenLogprob
from paceline.core.tally import Tally
from paceline.core.tree import IntArray

FinishReason = Literal["stop", "length", "context", "abort", "error"]
"""length: max_tokens is reached; context: the context or the memory is full; abort: the caller gave up; error: see
`Row.error`."""

AHEAD = 256
"""Number of tokens reserved for an answer when its request joins. Few answers are longer."""


class Request(Protocol):
    """What drafters know of a request, in our engine or another. `Row` documents the attributes."""

    @property
    def id(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def params(self) -> SamplingParams: ...
    @property
    def noise(self) -> Noise: ...
    @property
    def tokens(self) -> IntArray: ...
    @property
    def last_token(self) -> int: ...
    @property
    def prompt_length(self) -> int: ...
    @property
    def num_new(self) -> int: ...
    @property
    def ends(self) -> frozenset[int]: ...
    @property
    def past(self) -> IntArray | None: ...
    @property
    def expected_length(self) -> int: ...
    @property
    def is_complete(self) -> bool: ...
    def __len__(self) -> int: ...


class Detokenizer(Protocol):
    """Turns a growing list of tokens into text, token by token."""

    def push(self, token: int) -> str:
        """Add a token. Returns the text that has become final; it may be empty inside a character of several bytes."""

    def flush(self) -> str:
        """End the answer. Returns the text that was held back."""


@dataclass
class RowStats(Tally):
    """Statistics of a row's rounds. Only forwards that yielded tokens for the row count as rounds.

    accepted  accepted[d] is the number of rounds that accepted exactly d drafted tokens.
    drafted   drafted[d] is the number of rounds with a draft of at least d levels.
    drafters  by drafter: number of drafted tokens, and of accepted tokens.
    seconds   by part of the round: this row's share of the time. A round's time is split evenly between its rows."""

    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    drafters: dict[str, tuple[int, int]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def record(self, depth: int, nodes: int, accepted: int, drafter: str = "") -> None:
        """Count a round. Its draft had `depth` levels and `nodes` nodes, of which `accepted` were accepted."""
        if nodes:
            before = self.drafters.get(drafter, (0, 0))
            self.drafters[drafter] = before[0] + nodes, before[1] + accepted
        self.rounds += 1
        self.draft_rounds += nodes > 0
        self.draft_tokens += nodes
        self.accepted_tokens += accepted
        for d in range(1, depth + 1):
            _bump(self.drafted, d)
        _bump(self.accepted, accepted)

    def acceptance_by_depth(self) -> list[float]:
        """Acceptance by depth: of the rounds with a draft of at least d levels, entry d - 1 is the share that accepted
        at least d tokens."""
        return [sum(self.accepted[d:]) / self.drafted[d] for d in range(1, len(self.drafted)) if self.drafted[d]]


def _bump(histogram: list[int], index: int) -> None:
    histogram.extend([0] * (index + 1 - len(histogram)))
    histogram[index] += 1


class Row:
    """A request: `tokens` (prompt, then answer), its parameters, its noise, its statistics.

    id               number of the row, unique in an engine's life.
    client           name of the client, set before the row joins. Clients whose requests wait join in turn.
    slot             its slot in the target's cache, -1 while it has none.
    cached           number of its tokens in the cache.
    reused           number of its tokens whose keys and values were copied from another request instead of being run.
    preempted        how often it lost its slot; its tokens are then run again.
    joined, ended    when it joined and left the batch, by time.perf_counter; 0 before.
    runs             (drafter, length) of each piece of the answer; for the target's own tokens the drafter is "".
    logprobs         an entry for each new token, if the request wants them.
    prompt_logprobs  an entry for each prompt token so far, if the request wants them. The first is None, because
                     nothing predicts the first token.
    past             int64 [n], an earlier answer to the same prompt, for drafters to propose; None: there is none.
    error            message of the error that ended the row, if finish_reason is "error".
    max_length       largest number of tokens of prompt and answer together."""

    def __init__(
        self, id: int, prompt: Sequence[int] | IntArray, params: SamplingParams, *, max_context: int,
        eos_token_ids: Sequence[int] = (), detokenizer: Detokenizer | None = None,
    ):  # fmt: skip
        self.id = id
        self.client = ""
        self._ends = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)))
        self.params = params.of_row(len(prompt), self._ends)
        self.noise = Noise(params.seed)
        self.prompt_length = len(prompt)
        self.slot = -1
        self.cached = 0
        self.reused = 0
        self.preempted = 0
        self.joined = 0.0
        self.ended = 0.0
        self.stats = RowStats()
        self.runs: list[tuple[str, int]] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] = [] if params.prompt_logprobs is None else [None]
        self.past: IntArray | None = None
        self.finish_reason: FinishReason | None = None
        self.error = ""
        self.text = ""
        self._sent = 0
        self._source = ""
        self._written: deque[tuple[str, int]] = deque()
        self._detokenizer = detokenizer
        self.max_length = min(self.prompt_length + params.max_tokens, max_context)
        self._context_first = self.prompt_length + params.max_tokens > max_context
        self._tokens = np.empty(min(self.max_length, self.prompt_length + AHEAD) + 1, np.int64)
        self._tokens[: self.prompt_length] = prompt
        self._length = self.prompt_length

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> IntArray:
        """Prompt and answer so far, int64 [n], as a view that must not be written to."""
        return self._tokens[: self._length]

    @property
    def new_tokens(self) -> IntArray:
        """The answer so far."""
        return self._tokens[self.prompt_length : self._length]

    @property
    def num_new(self) -> int:
        """Number of tokens of the answer so far, which is the output position of the next token."""
        return self._length - self.prompt_length

    @property
    def last_token(self) -> int:
        """The newest token: the root of the next draft."""
        return int(self._tokens[self._length - 1])

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end the answer. Nothing can be accepted after them."""
        return self._ends

    @property
    def pending(self) -> IntArray:
        """Tokens to run before the row can decode: the prompt; after a preemption also the answer so far, except its
        last token, which is the root of the next draft."""
        return self._tokens[self.cached : self._length - (self.num_new > 0)]

    @property
    def expected_length(self) -> int:
        """Number of tokens to reserve: the prompt and `AHEAD` tokens of the answer, or more if the answer is longer."""
        return min(self.max_length, max(self.prompt_length + AHEAD, self._length + AHEAD // 4))

    @property
    def max_draft(self) -> int:
        """Depth of the deepest useful draft: the tokens that are left, less the token that the target adds."""
        return self.max_length - self._length - 1

    @property
    def is_decoding(self) -> bool:
        """Whether the prompt is done: the answer has begun, and all tokens but the last are in the cache."""
        return self._length > self.prompt_length and self.cached == self._length - 1

    def count_unscored(self, chunk: int) -> int:
        """How many tokens at the end of the prompt's next `chunk` tokens need logits for `prompt_logprobs`.

        When a prompt is run again after a preemption, only tokens that have no score yet count."""
        if self.params.prompt_logprobs is None:
            return 0
        begin = max(self.cached, len(self.prompt_logprobs) - 1)
        return max(self.cached + chunk - begin, 0) if begin < self.prompt_length - 1 else 0

    @property
    def is_complete(self) -> bool:
        """Whether the answer has ended by itself, so that drafters may learn from it."""
        return self.finish_reason in ("stop", "length", "context")

    def extend(
        self, tokens: Sequence[int], source: str = "", logprobs: Sequence[TokenLogprob] | None = None
    ) -> int:
        """Append the tokens of a round, up to the end of the answer, and set `finish_reason` if it ends. Returns the
        number of tokens taken.

        tokens    drafted tokens of the drafter `source`, then the target's own token.
        logprobs  an entry for each of `tokens`, if the request wants them."""
        taken, drafted = 0, max(len(tokens) - 1, 0)
        if self._length + len(tokens) > len(self._tokens):
            self._tokens = np.concatenate([self.tokens, np.empty(self._length + len(tokens), np.int64)])
        for token in tokens:
            self._tokens[self._length] = token
            self._length += 1
            self._source = source if taken < drafted else ""
            taken += 1
            if self._ends_with(token):
                break
        self.logprobs += (logprobs or ())[:taken]
        self.stats.new_tokens += taken
        self.runs += [(source, min(taken, drafted))] * (drafted > 0) + [("", 1)] * (taken > drafted)
        return taken

    def end(self, reason: FinishReason, error: str = "") -> None:
        """End the answer where it is, unless it has ended.

        reason  "abort", or "error" with the message `error`."""
        if self.finish_reason is None:
            self.finish_reason, self.error = reason, error
            if reason == "error":
                self._detokenizer = None  # The detokenizer may be what failed.
            self.finish_text()

    def _ends_with(self, token: int) -> bool:
        """Add `token` to the text, unless it is an end token. Returns whether the answer ends here."""
        ends = token in self._ends
        stops = not ends and self._detokenizer is not None and self._write(self._detokenizer.push(token))
        if ends or stops:
            self.finish_reason = "stop"
        elif self._length >= self.max_length:
            self.finish_reason = "context" if self._context_first else "length"
        if self.finish_reason is not None:
            self.finish_text()
        return self.finish_reason is not None

    def finish_text(self) -> None:
        """Append the text that the detokenizer held back. No more text follows."""
        if self._detokenizer is not None:
            self._write(self._detokenizer.flush())
            self._detokenizer = None

    def _write(self, text: str) -> bool:
        """Append to the answer's text. If that completes a stop string, cut the text before it, and return True."""
        old = len(self.text)
        self.text += text
        # The old text has no stop string, so a stop string ends in the new text.
        matches = [self.text.find(stop, max(0, old - len(stop) + 1)) for stop in self.params.stop if text]
        cuts = [at for at in matches if at >= 0]
        if cuts:
            self.text = self.text[: min(cuts)]
            self._detokenizer = None
        elif text:
            self._written.append((self._source, len(self.text)))
        return bool(cuts)

    def take_pieces(self) -> list[tuple[str, str]]:
        """Return pieces (drafter, text) of the text that is new since the last call and can no longer change.

        The drafter is as in `runs`. A character of several tokens belongs to the last of them. Text that may begin a
        stop string is held back."""
        safe = len(self.text)
        if self.finish_reason is None:
            safe -= max((overlap(self.text, stop) for stop in self.params.stop), default=0)
        pieces: list[tuple[str, str]] = []
        while self._sent < safe:
            # Text that a stop string cut short has no entry.
            source, end = self._written[0] if self._written else (self._source, safe + 1)
            text = self.text[self._sent : min(end, safe)]
            if pieces and pieces[-1][0] == source:
                pieces[-1] = (source, pieces[-1][1] + text)
            else:
                pieces.append((source, text))
            self._sent += len(text)
            if self._sent == end:
                self._written.popleft()
        return pieces


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    tail = text[-len(stop) + 1 :] if len(stop) > 1 else ""
    at = tail.find(stop[0])
    while at >= 0 and not stop.startswith(tail[at:]):
        at = tail.find(stop[0], at + 1)
    return len(tail) - at if at >= 0 else 0


@dataclass
class Delta:
    """The tokens and the text that a round added to a request.

    index     the request's number among the prompts of this call.
    pieces    (source, text) pairs. The source is the drafter's name for accepted tokens, "" for the target's own. Text
              lags behind tokens inside a character and before a possible stop string.
    nodes     number of drafted tokens that were verified in this round.
    depth     number of levels of the draft. calls: number of forwards of a draft model for it.
    accepted  number of drafted tokens in `tokens`.
    logprobs  an entry for each of `tokens`, if the request wants them."""

    index: int
    row: Row
    tokens: list[int]
    pieces: list[tuple[str, str]]
    finished: bool
    nodes: int = 0
    depth: int = 0
    calls: int = 0
    accepted: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.pieces)

    @classmethod
    def end(cls, row: Row) -> Delta:
        """Make the last delta of a request that ended without a new token. It has the text that was held back."""
        return cls(row.id, row, [], row.take_pieces(), True)


@dataclass
class Completion:
    """A finished request.

    seconds  time from joining the batch to the last token.
    seed     seed with which the same request gives the same sampled answer again; None: the request was greedy.

    The other fields are as in `Row`."""

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
    seed: int | None = None

    @classmethod
    def of(cls, index: int, row: Row) -> Completion:
        """Make the completion of a row's answer so far. If it has not ended, finish_reason is "abort"."""
        return cls(
            index,
            text=row.text,
            tokens=row.new_tokens.tolist(),
            prompt_tokens=row.prompt_length,
            finish_reason=row.finish_reason or "abort",
            seconds=(row.ended or perf_counter()) - row.joined if row.joined else 0.0,
            stats=row.stats,
            runs=row.runs,
            logprobs=row.logprobs,
            error=row.error,
            reused=row.reused,
            seed=None if row.params.is_greedy else row.noise.seed,
        )

    @property
    def new_tokens(self) -> int:
        """Number of tokens of the answer, with an end-of-sequence token."""
        return len(self.tokens)

    @property
    def rounds(self) -> int:
        """Number of forwards of the target that yielded tokens, with the forward that finished the prompt."""
        return self.stats.rounds

    @property
    def mean_accepted_tokens(self) -> float:
        """Tokens per round, with the target's own; 1 for plain decoding."""
        return self.stats.mean_accepted_tokens

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the answer per second, with the time of the prompt."""
        return self.new_tokens / self.seconds if self.seconds else 0.0
