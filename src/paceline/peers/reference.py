"""Reference: the model alone, run by transformers' own code over whole texts, without drafts.

A model with weights of eight and four bits transformers does not have: its reference is `PlainDecoding`, ours.
`Reference` shares nothing with the engines under test but the weights, and, with ours, the definition of temperature
and filters (`paceline.core.sampling.warp`), which has tests of its own against transformers' processors."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.noise import Noise
from paceline.core.sampling import SamplingParams, probabilities
from paceline.core.segment import Segment
from paceline.formats.precision import DTYPES
from paceline.moved import aliases
from paceline.peers.setup import folder_of
from paceline.peers.transformers import load_model
from paceline.target.base import Target

TOKENS = 4096  # Most tokens in one forward.
PIECE = 8  # Tokens of a piece, as wide as a draft.
CHUNK = 512  # Tokens of a text's beginning in one forward of our decoder.
ROUNDING = 1e-5  # float32's, as a share of the largest logit: other kernels add in another order.
SHAKEN = 2.0**-8  # bfloat16 rounds a number by at most this share of it.
SHAKES = 4  # Rounding is imitated so many times.
SCALES = (1.5, -1.5)
"""Multiples of what rounding was seen to change that it may change elsewhere: no two kernels round alike."""


class Reference:
    """A transformers model, in evaluation mode.

    ways    in which it can read a text; rounding is all that differs between them. The first one is the default.
    shakes  others, in which bfloat16's rounding is imitated."""

    ways: Sequence[str] = ("together", "in pieces")
    shakes: Sequence[str] = tuple(f"shaken {seed}" for seed in range(SHAKES))

    def __init__(self, model: Any):
        self.model = model

    @classmethod
    def load(cls, model: str, *, dtype: str, device: str | torch.device = "cpu") -> Self:
        """Load the model in a folder or on the hub. Raises ModelError if transformers cannot load it."""
        return cls(load_model(str(folder_of(model)), DTYPES[dtype]).to(device))

    @torch.inference_mode()
    def after(self, texts: Sequence[Sequence[int]], way: str = "") -> torch.Tensor:
        """Logits of the token after each text, [N, V]; the texts are equally long."""
        at_once = max(1, TOKENS // max(len(texts[0]), 1))
        parts = [texts[i : i + at_once] for i in range(0, len(texts), at_once)]
        return torch.cat([self._run(part, 1, way)[:, -1].float().cpu() for part in parts])

    @torch.inference_mode()
    def along(self, text: Sequence[int], start: int, way: str = "") -> torch.Tensor:
        """Logits of the tokens `start`.. of a text, [len(text) - start, V]."""
        if start >= len(text):
            return torch.empty(0, 1)
        return self._run([text[:-1]], len(text) - start, way)[0].float().cpu()

    def _run(self, texts: Sequence[Sequence[int]], keep: int, way: str) -> torch.Tensor:
        """Logits after the last `keep` tokens, [N, keep, V]."""
        ids = torch.tensor([list(text) for text in texts], device=self.model.device)
        if way != "in pieces":
            with self._shaken(way) if way in self.shakes else nullcontext():
                whole: torch.Tensor = self.model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits
            return whole
        begin, cache, parts = max(1, ids.shape[1] - max(keep, 2)), None, []
        for piece in (ids[:, :begin], *ids[:, begin:].split(PIECE, 1)):
            out = self.model(input_ids=piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits)
        return torch.cat(parts, 1)[:, -keep:]

    @contextmanager
    def _shaken(self, way: str) -> Iterator[None]:
        """Imitate rounding: the outputs of all layers, and of all that they are made of, are off by up to SHAKEN."""
        noise = torch.Generator(self.model.device).manual_seed(self.shakes.index(way))

        def shake(module: Any, args: Any, out: Any) -> Any:
            if not isinstance(out, torch.Tensor):
                return out
            return out * (1 + SHAKEN * (2 * torch.rand(out.shape, generator=noise, device=out.device) - 1))

        modules = [m for name, m in self.model.named_modules() if name[-1:].isdigit() or not list(m.children())]
        with ExitStack() as hooks:
            for module in modules:
                hooks.enter_context(module.register_forward_hook(shake))
            yield


class PlainDecoding:
    """Our own decoder, without drafts: a text's beginning in one forward, and then one token a forward, alone. What it
    has is as in `Reference`.

    pieces  read the end of a text's beginning in two ways, its last token alone and as wide as a draft: what they
            differ by counts as rounding."""

    shakes: Sequence[str] = ()

    def __init__(self, target: Target, pieces: bool = False):
        self.target = target
        self._ends = {"alone": 1, "in pieces": 2 * PIECE} if pieces else {"alone": CHUNK}
        self.ways: Sequence[str] = tuple(self._ends)

    def after(self, texts: Sequence[Sequence[int]], way: str = "") -> torch.Tensor:
        return torch.stack([self._read(text, len(text) - 1, way)[-1] for text in texts])

    def along(self, text: Sequence[int], start: int, way: str = "") -> torch.Tensor:
        return self._read(text[:-1], start, way) if start < len(text) else torch.empty(0, 1)

    def _read(self, text: Sequence[int], start: int, way: str) -> torch.Tensor:
        """Logits after `text[:start]` and after every token from there on, float32."""
        slot, start = self.target.add_row(len(text)), max(start, 1)
        whole = max(start - self._ends[way or "alone"], 0)
        for begin in range(0, whole, CHUNK):
            self._forward(slot, text[begin : min(begin + CHUNK, whole)], last=False)
        pieces = (text[whole:start], *([token] for token in text[start:]))
        out = [self._forward(slot, piece, last=True)[-1:].float().cpu() for piece in pieces]
        self.target.drop_row(slot)
        return torch.cat(out)

    def _forward(self, slot: int, piece: Sequence[int], last: bool) -> torch.Tensor:
        verdict = self.target.verify([Segment.chunk(slot, np.array(piece), last=last)])
        self.target.commit(slot, range(len(piece)))
        return verdict.logits


Model = Reference | PlainDecoding
Read = Callable[[Model, str], torch.Tensor]


class Rounding:
    """The model's logits as rounding may have them: W worlds, the first one float32's.

    Measured: the same positions read in every way by the model in the engine's dtype (in float32 where that is the
    engine's). Kernels of one library round much alike, and another library rounds in places of its own; so float32's
    forward is shaken, too, for other directions, and what that changes is made as large as what was measured. Each
    change is scaled by SCALES and gives a world: a whole set of logits, which goes through penalties, top-k and top-p.
    So a token at their border is inside in one world and outside in another.

    exact: the model in float32; own: the same in the engine's dtype, None where that is float32."""

    def __init__(self, exact: Model, own: Model | None = None):
        self.exact, self.own = exact, own

    def after(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits of the token after each text, [W, N, V]."""
        return self._worlds(lambda model, way: model.after(texts, way))

    def along(self, text: Sequence[int], start: int) -> torch.Tensor:
        """Logits of the tokens `start`.. of a text, [W, len(text) - start, V]."""
        return self._worlds(lambda model, way: model.along(text, start, way))

    def measured(self, text: Sequence[int], start: int) -> list[torch.Tensor]:
        """Logits of the tokens `start`.. of a text as they are read, float32's first, [len(text) - start, V] each."""
        return self._read(lambda model, way: model.along(text, start, way))

    def _read(self, read: Read) -> list[torch.Tensor]:
        if self.own is None:
            return [read(self.exact, way) for way in self.exact.ways]
        return [read(self.exact, ""), *(read(self.own, way) for way in self.own.ways)]

    def _worlds(self, read: Read) -> torch.Tensor:
        exact, *others = self._read(read)
        moved = [other - exact for other in others]
        if self.own is not None:
            size = max(float(by.square().mean()) for by in moved)
            shaken = [read(self.exact, way) - exact for way in self.exact.shakes]
            moved += [by * (size / float(by.square().mean())) ** 0.5 for by in shaken]
        return torch.stack([exact, *(exact + scale * by for by in moved for scale in SCALES)])


def finite(logits: torch.Tensor) -> torch.Tensor:
    """`logits`, with 0 for what is not a finite number: banned tokens, and their differences."""
    return logits.nan_to_num(0.0, 0.0, 0.0)


def noise_of(exact: torch.Tensor, others: Iterable[torch.Tensor]) -> torch.Tensor:
    """How far rounding moves logits at each place, [n]: the largest difference of the other readings, [n, V] each, from
    the exact one, and at least float32's own rounding."""
    noise: torch.Tensor = ROUNDING * finite(exact).abs().amax(-1)
    for other in others:
        noise = noise.maximum(finite(other - exact).abs().amax(-1))
    return noise


class Sampled(NamedTuple):
    """How a token was sampled: the row's noise, the output position, and the temperature."""

    noise: Noise
    position: int
    temperature: float


def distance(
    rounding: Rounding, prefix: Sequence[int], tokens: Sequence[int], sampled: Sampled | None = None
) -> tuple[float, float]:
    """(gap, noise): how far the lowest of `tokens` lies below the best of all tokens after `prefix`, exactly computed,
    and by how much rounding moves a logit there. With `sampled`, of what decides there: the logits by the temperature,
    plus the place's noise."""
    exact, *others = rounding.measured([*prefix, tokens[0]], len(prefix))
    noise, of_all = float(noise_of(exact, others)[0]), exact[0]
    if sampled is None:
        return float(of_all.max() - of_all[list(tokens)].min()), noise
    logs = (of_all.double() / sampled.temperature).log_softmax(-1)
    compared = [sampled.noise.choose(logs.exp(), sampled.position), *tokens]
    scores = logs[compared].numpy(force=True) - np.log(sampled.noise.times(sampled.position, compared))
    return float(scores.max() - scores.min()), noise / sampled.temperature


def distributions(
    worlds: Iterable[torch.Tensor], params: SamplingParams, texts: Sequence[Sequence[int]], prompt: int
) -> NDArray[np.float64]:
    """The distributions that a request draws from in each world, float64 [W, n, V].

    worlds: logits [n, V] of each; texts: the tokens before each of n places; the first `prompt` are the prompt's."""
    of_row = params.of_row(prompt, frozenset())
    contexts = [np.array(text) for text in texts]
    return np.stack([probabilities(world, of_row, contexts).double().numpy() for world in worlds])


aliases(__name__)
