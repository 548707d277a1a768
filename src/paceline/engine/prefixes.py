"""Prefixes: keys and values of requests that ended, for later requests that begin alike."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from paceline.core.tree import IntArray
from paceline.target.recurrent import State

SHORTEST = 16
"""Smallest number of tokens that are copied instead of run."""
MOST_STATES, RECENT = 16, 4
"""Largest number of a prefix's recurrent states, each as large as the keys and values of a long text; and how many of
them, the last used, are kept wherever they are."""


class Share(NamedTuple):
    """The conditions for sharing keys and values: the other request has the same salt, and it has kept the target's
    states of `layers`, which this request's drafter reads for all tokens."""

    salt: str = ""
    layers: frozenset[int] = frozenset()


@dataclass(eq=False)
class Prefix:
    """Tokens int64 [n], and their keys and values [layers, 2, kv_heads, n, head_dim]. begins: their `beginning`.

    hidden  by layer: states [n, H] of all tokens, for drafters that read them.
    states  by number of tokens: recurrent states, least recently used first. With states, the text can only be reused
            up to one of them; without, up to any token."""

    tokens: IntArray
    kv: torch.Tensor
    begins: tuple[str, bytes]
    states: dict[int, State] = field(default_factory=dict)
    hidden: Mapping[int, torch.Tensor] = field(default_factory=dict)

    def reusable(self, most: int) -> int:
        """How many of the first `most` tokens can be reused."""
        return max((n for n in self.states if n <= most), default=0) if self.states else most

    def take(self, length: int) -> tuple[torch.Tensor, State | None]:
        """Return keys and values of the first `length` tokens, and the state after them."""
        state = self.states.pop(length, None)
        if state is not None:
            self.states[length] = state
        return self.kv[:, :, :, :length], state


class Prefixes:
    """Keys and values of requests that ended, for later requests that begin alike.

    most         largest number of prefixes, each of SHORTEST tokens or more; the least recently used is forgotten.
    most_states  largest number of states of a prefix.

    Each is a copy outside the batch's cache, so that attention does not read it. Only texts with the same first
    SHORTEST tokens are compared: for a hundred rows, comparing all takes longer than the forwards of a small model."""

    def __init__(self, most: int, most_states: int = MOST_STATES):
        self.most, self.most_states = most, most_states
        self._prefixes: list[Prefix] = []  # Least recently used first.

    def __len__(self) -> int:
        return len(self._prefixes)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and states. Prefixes may share states."""
        states = {id(state): state.nbytes for prefix in self._prefixes for state in prefix.states.values()}
        others = (one for prefix in self._prefixes for one in (prefix.kv, *prefix.hidden.values()))
        return sum(states.values()) + sum(one.nbytes for one in others)

    def _shared(self, tokens: IntArray, share: Share) -> list[tuple[int, Prefix]]:
        """Pairs (length of the common beginning, prefix) for the prefixes with the same `beginning` as `tokens`."""
        begins, layers = beginning(tokens, share.salt), share.layers
        alike = (one for one in self._prefixes if one.begins == begins and layers <= one.hidden.keys())
        return [(common(one.tokens, tokens), one) for one in alike]

    def best(self, tokens: IntArray, share: Share = Share()) -> tuple[int, Prefix | None]:
        """Find the longest reusable beginning of `tokens`: (length, prefix), or (0, None) if it is too short."""
        every = ((prefix.reusable(shared), prefix) for shared, prefix in self._shared(tokens, share))
        shared, prefix = max(every, key=lambda pair: pair[0], default=(0, None))
        if prefix is None or shared < SHORTEST:
            return 0, None
        self._prefixes.remove(prefix)
        self._prefixes.append(prefix)
        return shared, prefix

    def common(self, tokens: IntArray, share: Share = Share()) -> int:
        """Length of the longest beginning that `tokens` share with a prefix, reusable or not."""
        return max((shared for shared, _ in self._shared(tokens, share)), default=0)

    def add(
        self, tokens: IntArray, kv: torch.Tensor, states: Mapping[int, State] = {}, salt: str = "",
        hidden: Mapping[int, torch.Tensor] = {},
    ) -> None:  # fmt: skip
        """Add a prefix. It replaces prefixes with which it begins, and takes over states of all that begin alike."""
        states = {**states}
        for shared, prefix in self._shared(tokens, Share(salt)):
            states = {n: state for n, state in prefix.states.items() if n <= shared} | states
            if shared == len(prefix.tokens) and prefix.hidden.keys() <= hidden.keys():
                self._prefixes.remove(prefix)
        while self._prefixes and len(self._prefixes) >= self.most:
            self.forget()
        kept = spread(states, self.most_states)
        self._prefixes.append(Prefix(tokens, kv, beginning(tokens, salt), kept, hidden))

    def forget(self) -> None:
        """Remove the prefix that was used longest ago."""
        del self._prefixes[0]


def spread(states: Mapping[int, State], most: int) -> dict[int, State]:
    """Choose `most` states: the last RECENT ones of the mapping, and others far apart. The next prompt probably goes on
    from one of the last; any other prompt loses least if no gap between two states is large."""
    kept = {**states}
    while len(kept) > most:
        old = sorted([*kept][: max(len(kept) - RECENT, 1)])
        lengths = [0, *sorted(kept)]
        del kept[min(old, key=lambda n: n - lengths[lengths.index(n) - 1])]
    return kept


def beginning(tokens: IntArray, salt: str) -> tuple[str, bytes]:
    """The key of a text: its salt and its first SHORTEST tokens. Texts with different keys must not share, or have too
    little in common."""
    return salt, tokens[:SHORTEST].tobytes()


def common(a: IntArray, b: IntArray) -> int:
    """Length of the longest common beginning of two int64 arrays."""
    short = min(len(a), len(b))
    different = np.flatnonzero(a[:short] != b[:short])
    return int(different[0]) if len(different) else short
