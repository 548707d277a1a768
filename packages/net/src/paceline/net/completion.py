"""Completion: the answer of any endpoint. It can be read without an HTTP client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from paceline.errors import PacelineError, printable

WRITTEN = ("content", "reasoning_content", "reasoning", "tool_calls")
"""Keys of a message that hold what the model wrote."""
MOST_PARTS = 1024  # Most answers or calls of a completion.


class CompletionError(PacelineError):
    """There is no completion: the server refused, or kept failing."""


class Passing(Exception):
    """A failure that may pass. after: seconds the server asked to wait."""

    def __init__(self, why: str, after: float = 0.0):
        super().__init__(why)
        self.after = after


SPECULATION_FIELDS = {
    "num_spec_steps": ("spec_verify_ct",),
    "num_draft_tokens": (
        "total_draft_tokens", "spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num", "draft_n",
    ),
    "num_accepted_draft_tokens": (
        "total_accepted_draft_tokens", "spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num",
        "draft_n_accepted",
    ),
    "acceptance_histogram": ("spec_correct_drafts_histogram", "spec_accept_histogram"),
}  # fmt: skip
"""What an answer says of its drafts, by vLLM's names, which are ours; after each, the names of others: TensorRT-LLM's,
in a choice's speculative_decoding; SGLang's of its versions, in a choice's meta_info (`"return_meta_info": true`); and
llama.cpp's, in timings."""


def speculation_of(said: object) -> dict[str, Any]:
    """Counts of drafts in a part of an answer, in vLLM's names; empty without a count of drafted tokens."""
    if not isinstance(said, dict):
        return {}
    spelt = ((name, key) for name, keys in SPECULATION_FIELDS.items() for key in (*keys, name))
    found = {name: said[key] for name, key in spelt if _counts(said.get(key))}
    own: dict[str, Any] = {"num_rounds": said["num_rounds"]} if _counts(said.get("num_rounds")) else {}
    if isinstance(drafters := said.get("by_drafter"), dict):
        both = {printable(name): (counts["drafted"], counts["accepted"]) for name, counts in drafters.items()}
        own["by_drafter"] = {name: counts for name, counts in both.items() if _counts([*counts])}
    return found | own if "num_draft_tokens" in found else {}


def _counts(value: object) -> bool:
    """Whether the value is a whole number, or a list of whole numbers."""
    return all(type(one) is int for one in value) if isinstance(value, list) else type(value) is int


@dataclass
class Completion:
    """An endpoint's answer, as sent, so any field may be unknown. The engine's own completion
    (`paceline.core.request.Completion`) is made of a row and knows all.

    reasoning      reasoning that the server took out of the text.
    finish_reason  "stop", "length" or another word of the server.
    usage          the server's counts of tokens, empty if it reports none.
    logprobs       log-probabilities of each token in the form of chats, if they were asked for.
    prompt_logprobs  log-probabilities at each token of the prompt, by token id,
                     of the best and of the own token (vLLM).
    tool_calls     name and arguments of each call, as texts.
    tokens         ids of the new tokens, from servers that return them.
    speculation    rounds and drafted tokens in vLLM's names, from servers that report them (`SPECULATION_FIELDS`), and
                   our by_drafter as (drafted, accepted) of each; empty otherwise.
    others         the answers after the first, if `n` asked for several.
    streamed       whether it came as events.
    times          seconds from the request to each event with a part of the answer; a single time if it came whole.
    counts         number of token ids in each of these events; 0 from servers that return none.
    tries          attempts needed.

    A measurement adds, in token ids and in rounds of the engine:

    seconds        from the request to the last token, prompt included; requests asked together share one time.
    lengths        tokens of each round, the target's own included; `times` are then of the rounds. The prompt is a
                   round of one token, as in Spec-Bench. nodes: tokens drafted and verified in each round; depths: the
                   longest path of each draft. Any of the three is None if unknown.
    calls          sequential forwards of a draft model; 0 for a drafter without a model.
    runs           (drafter, text, tokens) of each piece of the answer in order; drafter "": the target.
    parts          seconds by part of a round ("draft", "forward", "accept", "bookkeeping", "align"), prompt included.
    plain_tokens   tokens that Spec-Bench counts for its baseline: the text encoded again, less one.
    batch          counts for all requests asked together, kept with the first: of schedules, or of a server's drafts.
    peak_bytes     peak memory of the process while answering, with all that it had loaded; None: unknown.
    seed           seed of a sampled answer."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float]] = field(default_factory=list)
    tool_calls: list[dict[str, str]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    speculation: dict[str, Any] = field(default_factory=dict)
    others: list[Completion] = field(default_factory=list)
    streamed: bool = False
    times: list[float] = field(default_factory=list, compare=False)
    counts: list[int] = field(default_factory=list, compare=False)
    tries: int = 1
    seconds: float = field(default=0.0, compare=False)
    lengths: list[int] | None = None
    nodes: list[int] | None = None
    depths: list[int] | None = None
    calls: int = 0
    runs: list[tuple[str, str, int]] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    plain_tokens: int = 0
    batch: dict[str, int] = field(default_factory=dict)
    peak_bytes: int | None = None
    seed: int | None = None
    began: float = field(default_factory=perf_counter, repr=False, compare=False)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt; 0 if unknown."""
        return self.usage.get("prompt_tokens") or 0

    @property
    def num_new(self) -> int:
        """New tokens, an end token included, by their ids, else by the usage, else by the number of events."""
        return len(self.tokens) or self.usage.get("completion_tokens") or len(self.times)

    def beside(self, other: Completion) -> tuple[Sequence[int] | str, Sequence[int] | str]:
        """The parts of two answers to compare: their tokens, or their texts if either has no tokens."""
        return (self.tokens, other.tokens) if self.tokens and other.tokens else (self.text, other.text)

    @property
    def rounds(self) -> int | None:
        """Forwards that the answer took; None if neither rounds nor drafts are reported."""
        if self.lengths is not None:
            return len(self.lengths)
        counts, new = self.speculation, len(self.tokens) or self.usage.get("completion_tokens") or 0
        own = counts.get("num_rounds")
        accepted = counts.get("num_accepted_draft_tokens")
        return own if own is not None or accepted is None else max(new - accepted, 1)

    def take(self, part: dict[str, Any]) -> None:
        """Add an event of a stream, or a whole response: both have `choices` and perhaps `usage`."""
        if part.get("error"):
            raise Passing(f"the server broke off: {printable(part['error'])[:300]}")
        self.usage = part.get("usage") or self.usage
        if any(type(self.usage.get(name) or 0) is not int for name in ("prompt_tokens", "completion_tokens")):
            raise TypeError("usage counts tokens in whole numbers")
        of_all = (part.get("metrics") or {}).get("speculative_decoding"), part.get("timings")
        self.speculation = next(filter(None, map(speculation_of, of_all)), self.speculation)
        if _counts(reused := (part.get("timings") or {}).get("cache_n")):  # llama.cpp's word for reused tokens.
            self.usage = {"prompt_tokens_details": {"cached_tokens": reused}} | self.usage
        for choice in part.get("choices") or ():
            self._answer(choice.get("index") or 0)._add(choice)

    def _answer(self, index: int) -> Completion:
        if not 0 <= index < MOST_PARTS:
            raise TypeError(f"index {index}")
        while len(self.others) < index:
            self.others.append(Completion())
        return self.others[index - 1] if index else self

    def _add(self, choice: dict[str, Any]) -> None:
        of_one = choice.get("speculative_decoding"), choice.get("meta_info")
        self.speculation = next(filter(None, map(speculation_of, of_one)), self.speculation)
        message = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        self.text += _writable(message.get("content") or message.get("refusal") or "")
        self.reasoning += _writable(message.get("reasoning_content") or message.get("reasoning") or "")
        self.logprobs += (choice.get("logprobs") or {}).get("content") or ()
        for place in choice.get("prompt_logprobs") or ():  # The first token has none.
            self.prompt_logprobs.append({int(token): float(one["logprob"]) for token, one in (place or {}).items()})
        self.tokens += choice.get("token_ids") or ()
        for at, call in enumerate(message.get("tool_calls") or ()):
            if not 0 <= (at := call.get("index", at)) < MOST_PARTS:
                raise TypeError(f"index {at}")
            self.tool_calls += [{"name": "", "arguments": ""} for _ in range(at + 1 - len(self.tool_calls))]
            for key in ("name", "arguments"):
                self.tool_calls[at][key] += (call.get("function") or {}).get(key) or ""
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if choice.get("token_ids") or any(message.get(part) for part in WRITTEN):
            self.times.append(perf_counter() - self.began)
            self.counts.append(len(choice.get("token_ids") or ()))


def _writable(text: str) -> str:
    """`text` with lone surrogates, which JSON may hold but files cannot, as question marks."""
    return text.encode("utf-8", "replace").decode()


def in_common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Length of the longest common beginning of two sequences."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:  # This is the usual case, and fast for long answers.
        return shorter
    return next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), shorter)
