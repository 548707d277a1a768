"""What is kept of a rollout, and what it is kept under. Plain NumPy; knows no engine and no file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.sampling import WARPING, SamplingParams
from paceline.tree import IntArray

OVERHEAD = 256
"""Bytes that an entry takes beside its arrays, about: the objects that hold them."""


class Key(NamedTuple):
    """A prompt, by a digest of its token ids, and which of its copies in a group this is, from 0."""

    digest: bytes
    copy: int


def digest(prompt: Sequence[int] | IntArray) -> bytes:
    """16 bytes that stand for a prompt's token ids."""
    return hashlib.blake2b(np.asarray(prompt, "<i8").tobytes(), digest_size=16).digest()


def numbered(digests: Sequence[bytes]) -> list[Key]:
    """A key for each prompt of a batch: the first of equal ones is copy 0, the next copy 1."""
    counts: dict[bytes, int] = {}
    keys = []
    for name in digests:
        copy = counts.get(name, 0)
        counts[name] = copy + 1
        keys.append(Key(name, copy))
    return keys


def law(params: SamplingParams) -> str:
    """The parameters that turn logits into the distribution that is drawn from, as a text; equal texts, equal laws."""
    values: dict[str, Any] = {name: getattr(params, name) for name in WARPING}
    values["logit_bias"] = sorted(dict(params.logit_bias).items())
    values["bad_words"] = sorted(tuple(word) for word in params.bad_words)
    return " ".join(f"{name}={value}" for name, value in values.items())


@dataclass(frozen=True, eq=False)
class Entry:
    """The last answer to one copy of a prompt.

    tokens     int32 [n], the end token included if there was one.
    probs      float [n]: the probability of each token under the policy that this answer counts as drawn from, after
               temperature and filters.
    top_ids    int32 [n, M]: that policy's M most probable tokens at each place; top_probs float [n, M]. M may be 0.
    version    of the policy, as the caller counts.
    visit      how many answers to this copy came before it.
    finished   it ended by itself; else it was cut at the most tokens there may be.
    law        see `law`.
    """

    tokens: NDArray[np.int32]
    probs: NDArray[Any]
    top_ids: NDArray[np.int32]
    top_probs: NDArray[Any]
    version: int
    visit: int
    finished: bool
    law: str

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def logprobs(self) -> NDArray[Any]:
        """Natural logarithms of `probs`."""
        return np.log(self.probs)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, about."""
        arrays = (self.tokens, self.probs, self.top_ids, self.top_probs)
        return OVERHEAD + sum(array.nbytes for array in arrays)
