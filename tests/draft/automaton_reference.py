"""A suffix automaton as the textbook has it (Blumer et al. 1985): what the compiled one is compared with."""

from collections.abc import Sequence

from paceline.draft.text.automaton import Match


class DictAutomaton:
    """Plain Python, one dict of edges a state. `recent` is exact."""

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.first = [0]
        self.recent = [0]
        self.last = 0
        self._found = 0

    def __len__(self) -> int:
        return self.length[self.last]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append `tokens`."""
        for token in tokens:
            self._append(token)

    def match(self) -> Match:
        """The longest suffix that also ends earlier."""
        state = self.link[self.last] if len(self) else 0
        return Match(self.length[state], self.first[state], self._found)

    def transfer(self, state: int, length: int, tokens: Sequence[int]) -> tuple[int, int]:
        """Read another text, from (0, 0) on: the state of its longest suffix that occurs here, and that length.

        Commits nothing. What is appended here later may split the state of a place and outdate it."""
        for token in tokens:
            while state and token not in self.next[state]:
                state = self.link[state]
                length = self.length[state]
            state, length = (self.next[state][token], length + 1) if token in self.next[state] else (0, 0)
        return state, length

    def _append(self, token: int) -> None:
        end = len(self) + 1
        new = self._state({}, end, end, end)
        p = self.last
        while p >= 0 and token not in self.next[p]:
            self.next[p][token] = new
            p = self.link[p]
        if p < 0:
            self.link[new] = 0
        else:
            q = self.next[p][token]
            self.link[new] = q if self.length[p] + 1 == self.length[q] else self._split(p, token, q)
        self.last = new
        self._stamp(self.link[new], end)

    def _split(self, p: int, token: int, q: int) -> int:
        """Part the shorter strings of q, which now end in one place more, from the longer; their state."""
        copy = self._state(dict(self.next[q]), self.length[p] + 1, self.first[q], self.recent[q])
        self.link[copy] = self.link[q]
        self.link[q] = copy
        while p >= 0 and self.next[p].get(token) == q:
            self.next[p][token] = copy
            p = self.link[p]
        return copy

    def _stamp(self, state: int, end: int) -> None:
        """Remember where the match ended before now, then that all its suffixes end at `end`."""
        self._found = self.recent[state]
        while state > 0:
            self.recent[state] = end
            state = self.link[state]

    def _state(self, edges: dict[int, int], length: int, first: int, recent: int) -> int:
        self.next.append(edges)
        self.link.append(-1)
        self.length.append(length)
        self.first.append(first)
        self.recent.append(recent)
        return len(self.next) - 1
