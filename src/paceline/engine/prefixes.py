"""Prefixes: keys and values of requests that ended, for later ones that begin alike."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from paceline.core.tree import IntArray
from paceline.target.recurrent import State

SHORTEST = 16  # fewest tokens that are copied instead of run
MOST_STATES = 4  # recurrent states of a prefix, which are as large as a long text's keys and values


class Share(NamedTuple):
    """The conditions for sharing keys and values: the other request has the same salt, and the target's states of
    `layers`, which this one's drafter reads of every token."""

    salt: str = ""
    layers: frozenset[int] = frozenset()


@dataclass(eq=False)
class Prefix:
    """Tokens int64 [n], and their keys and values [layers, 2, kv_heads, n, head_dim]. begins: their `beginning`.

    hidden  states [n, H] by layer, for drafters that read them of every token.
    states  recurrent states by number of tokens, the least recently used first. The text can be reused up to one of
            them alone; without any, it can be reused up to every token."""

    tokens: IntArray
    kv: torch.Tensor
    begins: tuple[str, bytes]
    states: dict[int, State] = field(default_factory=dict)
    hidden: Mapping[int, torch.Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and states."""
        states, hidden = self.states.values(), self.hidden.values()
        return self.kv.nbytes + sum(one.nbytes for one in states) + sum(one.nbytes for one in hidden)

    def reusable(self, most: int) -> int:
        """The number of the first `most` tokens that can be reused."""
        return max((n for n in self.states if n <= most), default=0) if self.states else most

    def take(self, length: int) -> tuple[torch.Tensor, State | None]:
        """Keys and values of the first `length` tokens, and the state after them."""
        state = self.states.pop(length, None)
        if state is not None:
            self.states[length] = state
        return self.kv[:, :, :, :length], state


class Prefixes:
    """Keys and values of requests that ended, for later ones that begin alike.

    most    largest number of prefixes, each of SHORTEST tokens or more; the least recently used is forgotten.
    nbytes  bytes of all prefixes.

    Each is a copy outside the batch's cache, so that attention does not read it. Texts whose first SHORTEST tokens
    differ are not compared further: with a hundred rows, that takes longer than the forwards of a small model."""

    def __init__(self, most: int):
        self.most = most
        self.nbytes = 0
        self._prefixes: list[Prefix] = []  # the least recently used first

    def __len__(self) -> int:
        return len(self._prefixes)

    def _shared(self, tokens: IntArray, share: Share) -> list[tuple[int, Prefix]]:
        """The prefixes with the `beginning` of `tokens`, each after the length of the common beginning."""
        begins, layers = beginning(tokens, share.salt), share.layers
        alike = (one for one in self._prefixes if one.begins == begins and layers <= one.hidden.keys())
        return [(common(one.tokens, tokens), one) for one in alike]

    def best(self, tokens: IntArray, share: Share = Share()) -> tuple[int, Prefix | None]:
        """The longest beginning of `tokens` that can be reused: (length, prefix), or (0, None) if it is too short."""
        every = ((prefix.reusable(shared), prefix) for shared, prefix in self._shared(tokens, share))
        shared, prefix = max(every, key=lambda pair: pair[0], default=(0, None))
        if prefix is None or shared < SHORTEST:
            return 0, None
        self._prefixes.remove(prefix)
        self._prefixes.append(prefix)
        return shared, prefix

    def common(self, tokens: IntArray, share: Share = Share()) -> int:
        """Length of the longest common beginning with `tokens`, reusable or not."""
        return max((shared for shared, _ in self._shared(tokens, share)), default=0)

    def add(
        self, tokens: IntArray, kv: torch.Tensor, states: Mapping[int, State] = {}, salt: str = "",
        hidden: Mapping[int, torch.Tensor] = {},
    ) -> None:  # fmt: skip
        """Add a prefix. It replaces those that are its own beginnings, and takes over their states."""
        states = {**states}
        for shared, prefix in self._shared(tokens, Share(salt)):
            if shared == len(prefix.tokens) and prefix.hidden.keys() <= hidden.keys():
                self._remove(prefix)
                states = prefix.states | states
        while self._prefixes and len(self._prefixes) >= self.most:
            self.forget()
        states = dict([*states.items()][-MOST_STATES:])
        self._prefixes.append(Prefix(tokens, kv, beginning(tokens, salt), states, hidden))
        self.nbytes += self._prefixes[-1].nbytes

    def forget(self) -> None:
        self._remove(self._prefixes[0])

    def _remove(self, prefix: Prefix) -> None:
        self._prefixes.remove(prefix)
        self.nbytes -= prefix.nbytes


def beginning(tokens: IntArray, salt: str) -> tuple[str, bytes]:
    """The key of a text: its salt and its first SHORTEST tokens. Texts with different keys share too little to be
    reused, or must not share."""
    return salt, tokens[:SHORTEST].tobytes()


def common(a: IntArray, b: IntArray) -> int:
    """Length of the longest common beginning of two int64 arrays."""
    short = min(len(a), len(b))
    different = np.flatnonzero(a[:short] != b[:short])
    return int(different[0]) if len(different) else short
