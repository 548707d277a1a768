"""Judge answers token by token: each must be the model's own after the tokens before it, or tie with it. Also stop
strings and acceptance.

The model's own token is its best one in a greedy answer. In a sampled answer of our own engine it is the token chosen
by the noise of the request's seed (`paceline.core.noise`), whatever was drafted; other engines have noise of their own.

The model alone reads an answer, in float32 and in one forward. No second answer is written, so tokens after a tie are
still judged. Another token is a tie if it lies no further below than rounding moves logits there: twice the largest
change by the engine's dtype, or by float32 itself. Anything else is a bug. There must also be no more ties than the
rounded model has, because an engine that accepts nearly best tokens shows no other sign.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from paceline.certify.acceptance import Rounds
from paceline.certify.asking import request
from paceline.certify.verdict import CONTEXT, Divergence, Greedy
from paceline.core.noise import Noise
from paceline.core.params import SamplingParams
from paceline.core.sampling import warp
from paceline.draft.base import Drafter
from paceline.draft.recording import Chains, Recording
from paceline.errors import PacelineError
from paceline.logs.transcript import RecordedAnswer
from paceline.moved import aliases
from paceline.net.completion import Completion
from paceline.net.endpoint import Body, Endpoint
from paceline.peers.reference import Rounding, noise_of
from paceline.replay.walk import ReplayTally, replay, replayable

PLACES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # Stop strings are cut out at these shares of an answer's length.
BROKEN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Pass:
    """A way to ask for answers to all prompts: greedily, or with seeds whose noise is known.

    company  what the requests run together with, for the certificate; {batch} is the engine's.
    changes  fields of the requests.
    batch    least batch of an engine; with a smaller one the pass would repeat another pass.
    alone    one request after another; mixed: between requests that sample; seeded: sampled, with a seed for each."""

    company: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 1
    alone: bool = False
    mixed: bool = False
    seeded: bool = False

    def fits(self, engine: Endpoint) -> bool:
        """Whether the engine can be asked this way."""
        able = engine.can_take(self.changes) and engine.slots >= self.batch and (engine.mixes or not self.mixed)
        return able and (engine.has_our_noise or not self.seeded)

    def params(self, number: int, max_tokens: int) -> SamplingParams:
        """The sampling parameters of the answer to prompt `number`."""
        return SamplingParams(max_tokens=max_tokens, seed=number if self.seeded else None, **self.changes)

    def ask(
        self, engine: Endpoint, prompts: Sequence[Sequence[int]], max_tokens: int, first: int = 0
    ) -> list[Completion]:
        """Ask for the answers, in the order of the prompts. first: the number of the first prompt."""
        seeds = [{"seed": first + i} if self.seeded else {} for i in range(len(prompts))]
        pairs = zip(prompts, seeds, strict=True)
        bodies: list[Body] = [request(prompt, max_tokens=max_tokens, **self.changes, **seed) for prompt, seed in pairs]
        if not self.mixed:
            return engine.ask(bodies, 1 if self.alone else None)
        hot = (request(p, temperature=1.0, max_tokens=1 + i % 7, seed=i) for i, p in enumerate(prompts))
        return engine.ask([one for pair in zip(bodies, hot, strict=True) for one in pair])[::2]


PASSES = (
    Pass("alone", alone=True),
    Pass("in batches of {batch}", batch=2),
    Pass("between rows that sample", batch=2, mixed=True),
    Pass("in batches of {batch}, repetition penalty 1.2", {"repetition_penalty": 1.2}),
    Pass("sampled with seeds at temperature 1, alone", {"temperature": 1.0}, alone=True, seeded=True),
    Pass("sampled with seeds at temperature 0.7, in batches of {batch}", {"temperature": 0.7}, seeded=True),
)
"""How answers are asked for. The replies of the first pass are those that stop strings are cut out of."""


class Reader:
    """Reads answers, and notes where they diverge."""

    def __init__(self, rounding: Rounding, ends: Collection[int]):
        self.rounding, self.ends = rounding, frozenset(ends)
        self.found = Greedy()
        self._read: set[int] = set()  # Hashes of contexts, because passes write the same text again.

    def read(
        self, number: int, prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams, company: str
    ) -> None:
        """Judge the answer to prompt `number`. Stops at the first bug, since everything differs after it."""
        self.found.answers += 1
        self.found.tokens += len(tokens)
        self.found.seeded += not params.is_greedy
        start, text = len(prompt), [*prompt, *tokens]
        readings = self.rounding.measured(text, start)
        exact, *rounded = [self._warped(one, text, start, params) for one in readings]
        judge, noise = _Judge(params), noise_of(exact, rounded) / (params.temperature or 1.0)
        best = judge.best(exact)
        flipped = judge.unlike(exact, best, judge.best(rounded[0])) if rounded else torch.zeros(0)
        unlike = judge.unlike(exact, best, torch.tensor(tokens, dtype=torch.long))
        for at in range(len(tokens)):
            of = None
            if unlike[at]:
                gap = judge.gap(exact[at], at, (int(best[at]), tokens[at]))
                before = list(tokens[max(0, at - CONTEXT) : at])
                of = Divergence(number, at, company, tokens[at], int(best[at]), gap, float(noise[at]), before=before)
                self.found.divergences.append(of)
                if not of.is_tie:
                    return
            context = hash((params.shifts_logits, *text[: start + at]))
            if rounded and params.is_greedy and context not in self._read:
                self._read.add(context)
                self.found.places += 1
                self.found.tied += of is not None
                self.found.rounded += bool(flipped[at])
        if why := self._wrong_end(tokens, params):
            before = list(tokens[-CONTEXT:])
            self.found.divergences.append(Divergence(number, len(tokens), company, why=why, before=before))

    def _warped(self, logits: torch.Tensor, text: Sequence[int], start: int, params: SamplingParams) -> torch.Tensor:
        if not params.shifts_logits or not len(logits):
            return logits
        contexts = [np.array(text[:end]) for end in range(start, len(text))]
        return warp(logits, replace(params, temperature=0.0).of_row(start, self.ends), contexts)

    def _wrong_end(self, tokens: Sequence[int], params: SamplingParams) -> str:
        """Why an answer does not end at its first end token or at max_tokens; "" if it does."""
        ends = set() if params.ignore_eos else self.ends
        first = next((i for i, token in enumerate(tokens) if token in ends), None)
        if first is not None and first + 1 < len(tokens):
            return "it goes on after an end token"
        if first is None and len(tokens) < params.max_tokens:
            return f"it ends after {len(tokens)} of {params.max_tokens} tokens, without an end token"
        if len(tokens) > params.max_tokens:
            return f"it has {len(tokens)} tokens; {params.max_tokens} were asked for"
        return ""


class _Judge:
    """Finds the model's own tokens by the logits of an answer's places, [n, V]: the best ones, or the ones chosen by
    the noise of a request that samples without filters."""

    def __init__(self, params: SamplingParams):
        self.noise = None if params.is_greedy else Noise(params.seed)
        self.temperature = params.temperature

    def best(self, logits: torch.Tensor) -> torch.Tensor:
        """The model's own token at each place, int64 [n]."""
        if self.noise is None:
            return logits.argmax(-1)
        probs = (logits.double() / self.temperature).softmax(-1)
        return torch.tensor([self.noise.choose(p, at) for at, p in enumerate(probs)], dtype=torch.long)

    def unlike(self, logits: torch.Tensor, best: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Which of `tokens` [n] are not the model's own, bool [n].
        In a greedy answer every token with the best logit is."""
        if self.noise is not None or not len(tokens):
            return best != tokens
        return logits.gather(-1, tokens.unsqueeze(-1))[:, 0] < logits.amax(-1)

    def gap(self, logits: torch.Tensor, at: int, tokens: tuple[int, int]) -> float:
        """How far the second of `tokens` lies below the first at place `at`. logits: those of this place, [V]."""
        first, second = logits[list(tokens)].tolist()
        if self.noise is None:
            return first - second
        times = self.noise.times(at, tokens)
        return (first - second) / self.temperature + float(np.log(times[1] / times[0]))


def stop_strings(text: str) -> list[str]:
    """Distinct strings of two characters, or one, cut out of the text. None has part of a character."""
    cuts: dict[str, None] = {}
    for share in PLACES:
        begin = int(share * len(text))
        found = (text[begin : begin + n] for n in (2, 1) if BROKEN not in text[begin : begin + n])
        cuts |= dict.fromkeys([next(found, "")])
    return [cut for cut in cuts if cut]


def replayed(
    draft: str, recording: Recording, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], *,
    chains: bool,
) -> list[Rounds]:  # fmt: skip
    """Replay the drafter alone over `answers`. Returns an empty list if it needs more of the target than tokens.

    The first token of an answer belongs to the prompt, as in `measured`. chains: whether trees are cut to chains."""
    try:
        drafter: Drafter = replayable(draft, recording)
    except PacelineError:
        return []
    drafter, found = Chains(drafter) if chains else drafter, list[Rounds]()
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tally = ReplayTally()
        if len(answer) > 1:
            turn = RecordedAnswer(np.array([*prompt, answer[0]], np.int64), np.array(answer[1:], np.int64))
            replay(drafter, turn, i, tally)
        found.append((tally.new_tokens, tally.rounds))
    return found


aliases(__name__)
