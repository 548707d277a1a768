"""Streams: several drafted tokens from one forward of a draft model (Speculative Streaming).

Bhendawade et al. 2024 (arXiv 2402.11131), on the draft as in Mirror-SD (arXiv 2510.13161, section 3). A draft model
with streams (`paceline train streams`) predicts the next token after every token that it runs, and its streams predict
those after that one. They are guesses: the next forward runs them, and a guess is kept if the model itself predicts it.

    forward      runs        predicts
    1            ... t       a, and guesses b' c'
    2            a b' c'     b, not b'; and guesses c'' d''
    3            b c'' d''   c = c'', d = d'', e; and guesses f' g'

Every token has the distribution that is recorded with it. One that was run again has the model's own: drawn, a guess is
kept with probability min(1, q / q'), else replaced out of what is left of q. Guesses at the end of a full window have
that of their stream. No decision depends on a guess before it is run, because that would change its distribution.

A token's streams are nodes below it in the last layers alone, which see its ancestors, itself, and the streams before
them; no token sees a stream. Their keys and values are overwritten by the next forward."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from paceline.core.accept import residual
from paceline.core.segment import Segment
from paceline.draft.models.draft_model import Draft
from paceline.draft.models.proposers import Chain
from paceline.errors import MethodError, PacelineError
from paceline.jsonl import loads
from paceline.target.base import Needs
from paceline.target.decoder import Decoder
from paceline.target.load import SMALL_FILES, find

FILE, KEY = "streams.safetensors", "streams"
"""Of a draft model's folder: the weights of its streams, and where its config.json describes them."""


class Streams:
    """A draft model with `count` streams, run as one.

    layers: the model's last ones, that run them. down [r, H], up [H, r]: the low-rank projection; embedding [g, H]."""

    def __init__(self, model: Decoder, layers: int, tensors: dict[str, torch.Tensor], count: int):
        self.model, self.layers, self.count = model, layers, count
        weights = {name: tensor.to(model.device, model.dtype) for name, tensor in tensors.items()}
        self._down, self._up = weights["down"], weights["up"]
        self._embedding = weights["embedding"][:count]
        self.nbytes = sum(part.nbytes for part in (self._down, self._up, self._embedding))

    def run(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Logits [M, 1 + count, K] after each node whose logits are wanted: the model's own, and its streams'."""
        if not any(segment.num_logits for segment in segments):
            return self.model.verify(segments).logits
        longer = [self._longer(segment) for segment in segments]
        ends = np.cumsum([segment.num_run for segment in longer])
        wanted = [segment.num_logits for segment in segments]
        last = [np.arange(end - n * (1 + self.count), end) for end, n in zip(ends, wanted, strict=True)]
        tokens = torch.from_numpy(np.concatenate([at[:n] for at, n in zip(last, wanted, strict=True)]))
        streams = torch.from_numpy(np.concatenate([at[n:] for at, n in zip(last, wanted, strict=True)]))

        def begin(layer: int, hidden: torch.Tensor) -> None:
            states = hidden[tokens]
            states = states + states @ self._down.T @ self._up.T
            hidden[streams] = (states[:, None] + self._embedding).flatten(0, 1)

        logits = self.model.verify(longer, Needs(callback_layer=self.model.num_layers - self.layers), begin).logits
        parts = logits.split([n * (1 + self.count) for n in wanted])
        return torch.cat(
            [
                torch.cat([part[:n, None], part[n:].unflatten(0, (n, self.count))], 1)
                for part, n in zip(parts, wanted, strict=True)
            ]
        )

    def _longer(self, segment: Segment) -> Segment:
        """The segment with streams below each of its wanted nodes, after all others."""
        n, count = len(segment.tokens), self.count
        above = np.arange(n - segment.num_logits, n)
        streams = n + np.arange(segment.num_logits * count).reshape(-1, count)
        parent = np.concatenate([above[:, None], streams[:, :-1]], 1).ravel()
        return Segment(
            segment.slot,
            np.concatenate([segment.tokens, segment.tokens[above].repeat(count)]),
            np.concatenate([segment.parent, parent]),
            segment.start,
            segment.num_logits * (1 + count),
        )


def open_streams(path: str, model: Any, count: int) -> Streams:
    """`count` streams of the draft model in folder `path`; MethodError if it has none, or fewer."""
    if not isinstance(model, Decoder):
        raise MethodError(f"streams: {path} does not run in the native decoder, and no other model can run streams")
    folder = find(path, [*SMALL_FILES, FILE])
    described = loads((folder / "config.json").read_bytes()).get(KEY)
    if described is None or not (folder / FILE).exists():
        raise MethodError(f"{path} has no streams: train some (`paceline train streams`), or leave out streams={count}")
    try:
        tensors = load_file(folder / FILE)
        layers, most = int(described["layers"]), len(tensors["embedding"])
        fits = tensors["down"].shape[1] == tensors["up"].shape[0] == model.hidden_size and layers <= model.num_layers
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise MethodError(f"{folder / FILE} is cut off or damaged ({error}): copy or train it again") from None
    if not fits:
        raise MethodError(f"{folder / FILE} belongs to a model of another shape: copy or train it again")
    if count > most:
        raise MethodError(f"streams is {count}; {path} has {most}")
    return Streams(model, layers, tensors, count)


class StreamedChain(Chain):
    """A chain whose model has streams: `DraftModel.extend` gives logits [M, 1 + count, K]."""

    def grow(self, drafts: Sequence[Draft], logits: torch.Tensor) -> list[Draft]:
        """Add tokens to every chain by the logits of its last nodes, one more than its guesses. Returns the chains
        that go on."""
        parts = logits.split([1 + draft.num_guesses for draft in drafts])
        return [draft for draft, part in zip(drafts, parts, strict=True) if self._grow(draft, part)]

    def _grow(self, draft: Draft, logits: torch.Tensor) -> bool:
        """`grow` one chain by logits [1 + num_guesses, 1 + count, K]. Returns whether it goes on."""
        guesses = draft.take_guesses()
        signals = self.rule.signals(logits[:, 0])
        for i, signal in enumerate(signals):
            draft.num_run, own = len(draft.tokens), logits[i, :1]
            guess, given = guesses[i] if i < len(guesses) else (-1, None)
            drew = self.sampler.draw([draft], own)[0] if given is None else self._replace(draft, own, guess, given)
            if not drew or draft.tokens[-1] in draft.ends or self.is_enough(draft, draft.length, signal):
                return False
            if draft.tokens[-1] != guess:
                break
        for stream in logits[i, 1:]:
            if draft.length == draft.most or not self.sampler.draw([draft], stream[None])[0]:
                break
            draft.num_guesses += 1
        return draft.length < draft.most

    def _replace(self, draft: Draft, logits: torch.Tensor, guess: int, given: torch.Tensor) -> bool:
        """Add a token with the distribution of logits [1, K]. The guess, which was drawn from `given` [V], is kept as
        often as that allows. Returns False for logits that are no distribution."""
        random = draft.row.random
        try:
            q = self.sampler.distribution(draft, logits)
            stands = random.keep(min(1.0, float(q[guess] / given[guess])))
            token = guess if stands else random.draft(residual(q, given, guess, True)[0])
        except PacelineError:
            return False
        draft.probs.append(q)
        draft.add(token)
        return True
