"""SamplingParams: what a request asks of its answer. Imports no torch, as drafters over a recording need them, too."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from paceline.core.rules import RULES, check
from paceline.errors import PacelineError, shortened

if TYPE_CHECKING:
    import torch

WARPING = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "min_tokens", "logit_bias", "bad_words", "grammar", "beginning", "ends",
)  # fmt: skip
"""Fields of SamplingParams that change the distribution."""
HIDDEN = ("prompt_logprobs", "grammar", "prediction", "draft", "cache_salt", "branches", "corpus", "beginning", "ends")
"""Fields that command lines and prompt files lack."""


class Grammar(Protocol):
    """Constrains an answer's text. It must be a pure function of the answer so far, because drafts are checked, too."""

    def allowed(self, answer: Sequence[int], size: int) -> torch.Tensor:
        """The mask, bool [size], of the tokens that may follow `answer`; all False if none may."""


def token_id(text: Any) -> int:
    """Read a token id from a JSON key of digits. ValueError for anything else, such as "1_0"."""
    if not isinstance(text, str) or not re.fullmatch("[0-9]{1,10}", text):
        raise ValueError(f"{shortened(repr(text))} is no token id")
    return int(text)


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request. The distribution of its answers does not depend on drafter or batch.

    temperature         0 is greedy.
    top_k               keep the k most probable tokens; 0 keeps all.
    top_p               keep the smallest set of tokens with at least this probability; 1 keeps all.
    min_p               drop tokens less probable than min_p times the most probable token; 0 drops none.
    repetition_penalty  divisor of positive and factor of negative logits of tokens in prompt and answer; 1 is off.
    presence_penalty    number to subtract from the logits of tokens that the answer has; 0 is off.
    frequency_penalty   number to subtract once for each time that the answer has the token; 0 is off.
    min_tokens          smallest number of tokens of the answer.
    logit_bias          numbers to add to logits, by token id.
    bad_words           token sequences that must not occur.
    max_tokens          largest number of new tokens.
    seed                number that makes the row reproducible; None draws a fresh one.
    stop                strings that end the answer; the text ends before them.
    stop_token_ids      tokens that end the answer, in addition to the model's end-of-sequence tokens.
    ignore_eos          go on past the model's end-of-sequence tokens.
    grammar             `Grammar` of the answer; None: any text.
    prediction          token ids of a text that the answer should resemble; only drafters read them.
    draft               the drafter of this request, if the engine has several (`draft/fallback.py`).
    logprobs            report the log-probability of each new token, and of this many best tokens at its place; None
                        reports nothing.
    prompt_logprobs     the same for the prompt's tokens; the whole prompt is then run, even if others share it.
    cache_salt          requests share keys and values, and what drafters learn, only with requests of the same salt, so
                        that nobody can find out another's prompt by what is reused or drafted.
    branches            lengths of beginnings of the prompt with which later prompts may begin, such as the prompt
                        without the words that invite an answer. Recurrent models keep their states there.
    corpus              a `SuffixArray` of texts that the answer may copy from; only `suffix` and `sam` read it.
    beginning, ends     the arguments of `of_row`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[Sequence[int]] = ()
    max_tokens: int = 256
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    grammar: Grammar | None = field(default=None, compare=False)
    prediction: Sequence[int] = ()
    draft: str | None = None
    cache_salt: str = ""
    branches: Sequence[int] = ()
    corpus: Any = field(default=None, repr=False, compare=False)
    beginning: int = field(default=0, repr=False)
    ends: frozenset[int] = field(default=frozenset(), repr=False)

    def __post_init__(self) -> None:
        for name in RULES:
            check(name, getattr(self, name))

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken: temperature 0."""
        return self.temperature == 0

    @property
    def shifts_logits(self) -> bool:
        """Whether warping can change the most probable token, so that even greedy decoding needs it."""
        is_biased = self.repetition_penalty != 1 or bool(self.logit_bias) or bool(self.bad_words)
        return is_biased or self.looks_back or self.grammar is not None

    @property
    def looks_back(self) -> bool:
        """Whether the distribution of the next token depends on the answer so far, by penalties or min_tokens."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.min_tokens > 0

    def without_shifts(self) -> SamplingParams:
        """The same parameters with only temperature and filters."""
        if not self.shifts_logits:
            return self
        return SamplingParams(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)

    def of_row(self, beginning: int, ends: frozenset[int]) -> SamplingParams:
        """The parameters of a row whose answer begins after `beginning` tokens and ends with a token of `ends`."""
        if not self.looks_back and self.grammar is None:
            return self
        return replace(self, beginning=beginning, ends=ends)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise PacelineError if a parameter names a token from `vocab_size` on, or if all tokens are banned."""
        for name, ids in ("logit_bias", [*self.logit_bias]), ("bad_words", [word[-1] for word in self.bad_words]):
            if wrong := [i for i in ids if i >= vocab_size]:
                raise PacelineError(f"{name} names token {wrong[0]}; this model's tokens are 0 to {vocab_size - 1}.")
        banned = {i for i, bias in self.logit_bias.items() if bias == -math.inf}
        banned |= {word[0] for word in self.bad_words if len(word) == 1}
        if len(banned) == vocab_size:
            raise PacelineError("logit_bias and bad_words ban every token; allow at least one.")

    def warps_like(self, other: SamplingParams) -> bool:
        """Whether both turn the same logits into the same distribution."""
        return self is other or all(getattr(self, f) == getattr(other, f) for f in WARPING)

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """The fields that command lines and prompt files have."""
        return tuple(f.name for f in fields(cls) if f.name not in HIDDEN)


class TokenLogprob(NamedTuple):
    """The natural logarithm of a token's probability at temperature 1, before penalties, biases and filters.

    top  (token id, logarithm) of the most probable tokens at this place, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
