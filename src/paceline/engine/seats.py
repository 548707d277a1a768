"""Seats: the rows in the cache, and from where they take over keys and values."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from paceline.core.request import Row
from paceline.core.round import Round
from paceline.core.tree import IntArray
from paceline.engine.prefix_cache import BLOCK, PrefixCache
from paceline.engine.prefixes import SHORTEST, Share, beginning, common
from paceline.engine.room import Room
from paceline.errors import PacelineError
from paceline.target.cache import RaggedCache

log = logging.getLogger("paceline.memory")

STRIDE, STRIDES = 2048, 8
"""Of a long prompt, recurrent states are kept after so many tokens each; and the largest number of them."""


@dataclass(eq=False)
class Seat:
    """A row in the cache.

    share        conditions for sharing its keys and values.
    waits        it has not taken over keys and values yet. Until then it does not run.
    lead, least  it waits until `lead`, an older row, has `least` tokens in the cache; None: it takes over a prefix.
    states       states [n, L * H] of its tokens in the cache, in pieces; None: none are kept."""

    row: Row
    share: Share
    waits: bool = False
    lead: Row | None = None
    least: int = 0
    states: list[torch.Tensor] | None = None

    @property
    def layers(self) -> list[int]:
        """The layers of `states`, in order."""
        return sorted(self.share.layers)

    @property
    def hidden(self) -> dict[int, torch.Tensor]:
        """The row's states [n, H] by layer; {} if none are kept."""
        if not self.layers or not self.states:
            return {}
        return dict(zip(self.layers, torch.cat(self.states).chunk(len(self.layers), -1), strict=True))


class Seats:
    """The rows in the cache. Without `reuse`, or for a target without a `RaggedCache`, they share nothing.

    disk  folder for prompts' keys and values, and its largest number of bytes; None: nothing is stored."""

    def __init__(self, room: Room, *, reuse: bool, disk: tuple[str | Path, int] | None = None):
        self.room, self.prefixes, self.target = room, room.prefixes, room.target
        self.reuse = reuse and room.cache is not None
        self.disk = None if disk is None else self._disk(*disk)
        self._of: dict[int, Seat] = {}
        self._recalled: list[tuple[Row, Mapping[int, torch.Tensor]]] = []

    def _disk(self, folder: str | Path, most: int) -> PrefixCache:
        if not self.reuse:
            raise PacelineError(
                "prefix_cache stores what prompts share, and here they share nothing: it needs reuse, a cache of "
                "rows of any length, and a drafter that is not called inside the target's forward"
            )
        layers, two, _, heads, _, dim = self._cache.kv.shape
        return PrefixCache(folder, self.target, (layers, two, heads, BLOCK, dim), most, self._cache.empty_state())

    @property
    def _cache(self) -> RaggedCache:
        assert self.room.cache is not None
        return self.room.cache

    def start(self, row: Row, running: Sequence[Row], layers: Collection[int] | None = ()) -> None:
        """Give a row its slot. `ready` holds it back while an older row computes keys and values that both need.

        layers  layers whose states its drafter reads for all tokens. None: the row can reuse nothing."""
        self.room.enter(row)
        seat = self._of[row.id] = Seat(row, Share(row.params.cache_salt, frozenset(layers or ())))
        if not self.reuse:
            return
        if seat.layers:
            seat.states = []
        if layers is None or len(row) <= SHORTEST or row.params.prompt_logprobs is not None:
            return
        tokens = row.tokens[:-1]
        self._load(tokens, seat.share)
        seat.waits, seat.least = True, self.prefixes.best(tokens, seat.share)[0] + SHORTEST
        for other in self._alike(seat, running):
            shared = common(other.tokens, tokens)
            if other.cached >= shared:  # Otherwise the other row will have them all.
                shared = self._cache.reusable(other.slot, shared)
            if other.id < row.id and shared > seat.least:
                seat.least, seat.lead = shared, other
        if self.target.recurrent:
            self._mark(seat, tokens)

    def _mark(self, seat: Seat, tokens: IntArray) -> None:
        """Mark where states are kept: where later prompts may branch off, and where the row itself branches off."""
        row, stride = seat.row, max(STRIDE, len(tokens) // STRIDES + 1)
        known = [n for n in row.params.branches if SHORTEST <= n <= len(tokens)]
        ends = len(tokens), self.prefixes.common(tokens, seat.share)
        for length in (*range(stride, len(tokens), stride), *known, *ends):
            self._cache.mark(row.slot, length)
        if seat.lead is not None:
            self._cache.mark(seat.lead.slot, seat.least)

    def _load(self, tokens: IntArray, share: Share) -> None:
        """Load the stored prefix of `tokens` if no prefix in memory is as long."""
        if self.disk is not None:
            kv, state, hidden = self.disk.load(tokens, self.prefixes.best(tokens, share)[0], share.salt, share.layers)
            length = kv.shape[3]
            if length and self.room.make_room(length, 0 if state is None else state.nbytes):
                states = {} if state is None else {length: state}
                self.prefixes.add(tokens[:length].copy(), kv, states, share.salt, hidden)

    def reusable(self, row: Row, layers: Collection[int]) -> int:
        """How many tokens of a row's prompt a prefix in memory has. layers: as in `start`."""
        return self.prefixes.best(row.tokens[:-1], Share(row.params.cache_salt, frozenset(layers)))[0]

    def keep_states(self, round: Round) -> None:
        """Keep the states of the tokens that a round committed, for rows whose drafters read states."""
        for i, row in enumerate(round.rows):
            seat = self._of[row.id]
            if seat.states is not None:
                seat.states.append(torch.cat([round.committed(i, layer) for layer in seat.layers], -1))

    def recalled(self) -> list[tuple[Row, Mapping[int, torch.Tensor]]]:
        """The rows that took over tokens since the last call, with these tokens' states [n, H] by layer."""
        recalled, self._recalled = self._recalled, []
        return recalled

    def ready(self, running: Sequence[Row]) -> Sequence[Row]:
        """The rows that may run in this round."""
        ready = list(running)
        for seat in [seat for row in running if (seat := self._of[row.id]).waits]:
            if seat.lead is not None and seat.lead in running and seat.lead.cached < seat.least:
                ready.remove(seat.row)
                continue
            seat.waits = False
            try:
                self._take_over(seat, running)
            except (MemoryError, RuntimeError):  # The row runs its tokens instead.
                log.exception("request %d could not reuse the keys and values of its prompt", seat.row.id)
        return ready

    def _take_over(self, seat: Seat, running: Sequence[Row]) -> None:
        """Copy the keys and values of the row or prefix with the longest common beginning. The last token is run."""
        row, cache = seat.row, self._cache
        tokens = row.tokens[:-1]
        shared, prefix = self.prefixes.best(tokens, seat.share)
        alike = self._alike(seat, running)
        reach = {r: cache.reusable(r.slot, min(r.cached, common(r.tokens, tokens))) for r in alike}
        lead = max(reach, key=reach.__getitem__, default=row)
        live = reach.get(lead, 0)
        if max(shared, live) < SHORTEST:
            return
        if prefix is not None and shared >= live:
            (kv, state), hidden = prefix.take(shared), prefix.hidden
        else:
            kv, state = cache.copy(lead.slot, live), cache.states(lead.slot).get(live)
            hidden = self._of[lead.id].hidden if seat.states is not None else {}
        cache.paste(row.slot, kv, state)
        row.cached = kv.shape[3]
        row.reused += row.cached
        if seat.states is not None:
            reused = {layer: hidden[layer][: row.cached] for layer in seat.layers}
            seat.states = [torch.cat(list(reused.values()), -1)]
            self._recalled.append((row, reused))

    def _alike(self, seat: Seat, running: Sequence[Row]) -> list[Row]:
        """The running rows from which the seat's row may take over: same `beginning`, and all states that it needs."""
        seats, begins = [self._of[row.id] for row in running], beginning(seat.row.tokens, seat.share.salt)
        able = [one for one in seats if seat.share.layers <= one.share.layers]
        return [one.row for one in able if beginning(one.row.tokens, one.share.salt) == begins]

    def release(self, row: Row) -> None:
        """Forget a row that has lost its slot and will be run again."""
        del self._of[row.id]

    def end(self, row: Row) -> None:
        """Free a row's slot. Its keys and values are kept for later requests if they fit into the budget."""
        seat = self._of.pop(row.id, None)
        try:
            if seat is not None and self.reuse and row.finish_reason != "error" and row.cached >= SHORTEST:
                self._store(seat)
                if self.disk is not None:
                    prompt, states = row.tokens[: min(row.cached, row.prompt_length)], self._cache.states(row.slot)
                    copy = partial(self._cache.copy, row.slot)
                    self.disk.store(prompt, copy, row.params.cache_salt, states, seat.hidden)
        except Exception:  # The row's answer stands, and other rows must not suffer.
            log.exception("request %d is not kept for reuse", row.id)
        finally:
            self.target.drop_row(row.slot)

    def _store(self, seat: Seat) -> None:
        row = seat.row
        tokens, states = row.tokens[: row.cached].copy(), self._cache.states(row.slot)
        size = sum(state.nbytes for state in states.values())
        if self.prefixes.common(tokens, seat.share) < len(tokens) and self.room.make_room(row.cached, size):
            kv = self._cache.copy(row.slot, row.cached)
            self.prefixes.add(tokens, kv, states, seat.share.salt, seat.hidden)
