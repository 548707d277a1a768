"""SamplingParams, and the warping of logits.

Logits are warped here and nowhere else. The target's logits and a drafter's go through the same function, so that both
take the same token from the same noise if they agree."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from paceline.core.rules import RULES, check
from paceline.core.tree import IntArray
from paceline.errors import PacelineError, shortened
from paceline.kernels.rows import best_or_none, keep_best, log_total, softmax, top_tokens

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


@torch.inference_mode()
def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Log-probabilities of tokens [n] by logits [n, V], with the `count` best tokens at each place."""
    if is_compiled(logits):
        whole = log_total(logits).unsqueeze(-1)
    else:
        logits, whole = logits.log_softmax(-1), torch.zeros((), device=logits.device)
    own = (logits.gather(-1, torch.tensor(tokens, device=logits.device).unsqueeze(-1)) - whole)[:, 0].tolist()
    values, ids = top_tokens(logits, min(count, logits.shape[-1])) if count else (logits[:, :0],) * 2
    values = values - whole
    tops = [tuple(zip(*best, strict=True)) for best in zip(ids.tolist(), values.tolist(), strict=True)]
    return [TokenLogprob(*entry) for entry in zip(tokens, own, tops, strict=True)]


def on_accelerator(tensor: torch.Tensor) -> bool:
    """Whether reading `tensor` waits for a device."""
    return tensor.device.type != "cpu"


def best_of_rows(logits: torch.Tensor) -> list[int | None]:
    """The best token of each row of logits [R, V], of equals the lowest id; None for a row with NaN or infinity, or
    only minus infinity. On an accelerator it waits once."""
    if not on_accelerator(logits):
        return [best_or_none(logits, r) for r in range(len(logits))]
    values, indices = logits.max(-1)
    # Together, both wait only once. float64 holds all token ids exactly.
    finite, best = torch.stack([torch.isfinite(values).double(), indices.double()]).tolist()
    return [int(token) if good else None for good, token in zip(finite, best, strict=True)]


def warp(logits: torch.Tensor, params: SamplingParams, contexts: Sequence[IntArray]) -> torch.Tensor:
    """Apply a request's parameters to logits [R, V]. Returns float32 or float64 [R, V], with -inf for dropped tokens.

    contexts[r] has all tokens before the position that row r of `logits` predicts, drafted or not; it is read only if
    `params.shifts_logits`. The order is that of transformers' processors: logit bias, repetition penalty, bad words,
    temperature, top-k, top-p, min-p. `logits` are not changed.

    Raises PacelineError if logit_bias or bad_words name a token that the model lacks, or leave no token."""
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if params.shifts_logits:
        scores = _shift(scores.clone(), params, contexts)
    if params.is_greedy:
        return scores
    if params.temperature != 1:
        scores = scores / params.temperature
    if 0 < params.top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(params.top_k).values[:, -1:], -torch.inf)
    if params.top_p < 1:
        scores = nucleus(scores, params.top_p)
    if params.min_p > 0:
        probs = scores.softmax(-1)
        scores = scores.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return scores


def _shift(scores: torch.Tensor, params: SamplingParams, contexts: Sequence[IntArray]) -> torch.Tensor:
    """Apply logit bias, repetition penalty and bad words in place."""
    vocab_size = scores.shape[-1]
    params.check_vocabulary(vocab_size)
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=scores.device)
        scores[:, ids] += torch.tensor(list(params.logit_bias.values())).to(scores)
    for row, context in zip(scores, contexts, strict=True):
        if params.repetition_penalty != 1:
            # A prompt may have ids that the model can read but not write, such as those of images.
            seen = torch.from_numpy(np.unique(context[context < vocab_size])).to(scores.device)
            past, penalty = row[seen], params.repetition_penalty
            row[seen] = torch.where(past > 0, past / penalty, past * penalty)
        if params.looks_back:
            _look_back(row, params, context[params.beginning :])
        if params.grammar is not None:
            allowed = params.grammar.allowed(context[params.beginning :].tolist(), vocab_size)
            row[~allowed.to(scores.device)] = -torch.inf
        for word in params.bad_words:
            begun = len(word) - 1
            if begun <= len(context) and list(context[len(context) - begun :]) == list(word[:-1]):
                row[word[-1]] = -torch.inf
    if bool((scores.amax(-1) == -torch.inf).any()):
        raise PacelineError("logit_bias, bad_words and grammar leave no token that may come next; ban fewer.")
    return scores


def _look_back(row: torch.Tensor, params: SamplingParams, answer: IntArray) -> None:
    """Apply OpenAI's penalties on the answer's tokens to row [V], and forbid its end before min_tokens; in place."""
    tokens, counts = np.unique(answer[answer < len(row)], return_counts=True)
    seen = torch.from_numpy(tokens).to(row.device)
    times = torch.from_numpy(counts).to(row)
    row[seen] -= params.presence_penalty + params.frequency_penalty * times
    ends = sorted(end for end in params.ends if end < len(row))  # Requests may name other ids, which never come.
    if len(answer) < params.min_tokens and ends:
        row[torch.tensor(ends, device=row.device)] = -torch.inf


def nucleus(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Set `scores` [R, V] to -inf outside the smallest set of tokens with probability `top_p` (Holtzman et al. 2020,
    section 3.1). Of equal scores at the border, lower ids are dropped first, in any batch."""
    ranked, order = scores.sort(stable=True)
    drop = ranked.softmax(-1).cumsum(-1) <= 1 - top_p
    drop[:, -1] = False
    return scores.masked_fill(drop.scatter(-1, order, drop), -torch.inf)


def probabilities(logits: torch.Tensor, params: SamplingParams, contexts: Sequence[IntArray]) -> torch.Tensor:
    """The distribution from which a request draws, [R, V]: softmax of `warp`, or one-hot for a greedy request."""
    if params.is_greedy:
        scores = warp(logits, params, contexts)
        return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores.dtype)
    if is_compiled(logits):
        if params.shifts_logits:
            logits = _shift(logits.to(torch.float32, copy=True), params, contexts)
        return distributions(logits, params)
    return warp(logits, params, contexts).softmax(-1)


def is_compiled(logits: torch.Tensor) -> bool:
    """Whether the compiled functions of `paceline.kernels.rows` take these logits."""
    return logits.dtype in (torch.float32, torch.bfloat16) and not on_accelerator(logits)


def distributions(logits: torch.Tensor, params: SamplingParams, row: int | None = None) -> torch.Tensor:
    """Fast path of `probabilities` for logits [n, V] for which `is_compiled`. Returns float32 [n, V], or [V] for `row`
    alone.

    It does not shift logits, is equal up to float32's rounding, and several times as fast."""
    probs = softmax(logits, params.temperature, row)
    if params.top_k or params.top_p < 1 or params.min_p:
        for of_row in probs if row is None else [probs]:
            keep_best(of_row, params.top_k, params.top_p, params.min_p)
    return probs
