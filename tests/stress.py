"""Many requests of every kind through few slots and little memory, each held to its answer alone.

traffic = Traffic(200, seed=1)
traffic.run(decoder, drafter, slots=64, memory=...)     # AssertionError where anything is not as it should be
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from paceline.core.sampling import SamplingParams
from paceline.draft.base import Drafter
from paceline.engine.engine import Engine
from paceline.errors import RowError
from tests import models


@dataclass(frozen=True)
class Wish:
    """A request, and what befalls it: "", "abort" (in the round `when`), "drafter" (its drafter fails there once it
    has `when` tokens) or "logits" (they are not numbers then)."""

    prompt: list[int]
    params: SamplingParams
    fate: str
    when: int


class Careful(Drafter):
    """Another drafter that fails at rows it is told of, and knows which rows it holds."""

    def __init__(self, inner):
        self.inner, self.name = inner, inner.name
        self.fails = {}
        self.held = set()

    def bind(self, target):
        self.inner.bind(target)
        self.needs = self.inner.needs

    def start(self, row):
        self.held.add(row.id)
        self.inner.start(row)

    def propose(self, asks):
        rows = [row for row, _ in asks]
        trees = self.inner.propose(asks)  # which has drawn by the time another row fails
        for row in rows:
            if row.num_new >= self.fails.get(row.id, 1 << 30):
                raise RowError(row.id) from RuntimeError("no draft")
        return trees

    def observe(self, round):
        self.inner.observe(round)

    def restart(self, row):
        assert row.id in self.held
        self.inner.restart(row)

    def drop(self, row):
        self.held.remove(row.id)
        self.inner.drop(row)


class Traffic:
    """`count` requests of random prompts, some of which begin alike, lengths, temperatures and fates."""

    def __init__(self, count, seed):
        rng = self.rng = np.random.default_rng(seed)
        shared = [rng.integers(2, models.VOCAB_SIZE, n).tolist() for n in (40, 70)]
        self.wishes = [self._wish(i, shared) for i in range(count)]

    def _wish(self, i, shared):
        rng = self.rng
        own = rng.integers(2, models.VOCAB_SIZE, int(rng.choice([1, 5, 20, 60]))).tolist()
        prompt = [*(shared[i % 2] if rng.random() < 0.4 else []), *own]
        params = SamplingParams(
            max_tokens=int(min(1 + rng.geometric(1 / 20), 150)),
            temperature=float(rng.choice([0.0, 0.7, 1.2])),
            top_k=int(rng.choice([0, 20])),
            seed=i,
        )
        fate = str(rng.choice(["", "abort", "drafter", "logits"], p=[0.85, 0.05, 0.05, 0.05]))
        return Wish(prompt, params, fate, int(rng.integers(1, 8)))

    def alone(self, decoder, drafter):
        """Every answer by itself: one row, no memory of others, nothing fails."""
        engine = Engine(decoder, drafter, max_batch=1, reuse=False)
        return [engine.generate([wish.prompt], wish.params)[0].tokens for wish in self.wishes]

    def run(self, decoder, make, *, slots, memory, watch):
        """Answer all, in waves; watch is called after every round. Returns how often what happened."""
        wanted = self.alone(decoder, make())
        drafter = Careful(make())
        engine = Engine(decoder, drafter, max_batch=slots, prefill_chunk=128, cache_memory=memory)
        coming = list(enumerate(self.wishes))[::-1]
        rows = {}
        lost = set()
        with broken_logits(engine, lost):
            while coming or engine.has_work:
                for _ in range(min(len(coming), int(self.rng.poisson(slots / 8)))):
                    i, wish = coming.pop()
                    rows[i] = row = engine.add(wish.prompt, wish.params)
                    if wish.fate == "drafter":
                        drafter.fails[row.id] = wish.when
                    elif wish.fate == "logits":
                        lost.add(row.id)
                engine.step()
                for i, row in rows.items():
                    wish = self.wishes[i]
                    if wish.fate == "abort" and row.finish_reason is None and row.num_new >= wish.when:
                        engine.abort(row)
                assert decoder.cache.nbytes + engine.room.prefixes.nbytes <= memory
                assert sorted(row.slot for row in engine.rows) == decoder.cache.held
                watch()
        for i, row in rows.items():
            self._check(self.wishes[i], row, wanted[i])
        assert not engine.rows
        assert not engine.waiting
        assert not decoder.cache.held
        assert not drafter.held
        assert not any(seat.waits for seat in engine.seats._of.values())
        every = list(rows.values())
        return {
            "preempted": sum(row.preempted for row in every),
            "reused": sum(row.reused for row in every),
            "aborted": sum(row.finish_reason == "abort" for row in every),
            "failed": sum(row.finish_reason == "error" for row in every),
            "drafted": sum(sum(row.stats.accepted[1:]) for row in every),
        }

    def _check(self, wish, row, wanted):
        got = row.new_tokens.tolist()
        assert got == wanted[: len(got)], f"{wish}: {got} instead of {wanted}"
        if row.finish_reason in ("abort", "error"):
            assert wish.fate
        else:
            assert len(got) == len(wanted)


class broken_logits:
    """While it lasts the rows with ids in `lost` get logits that are not numbers, from their fourth token on."""

    def __init__(self, engine, lost):
        self.engine, self.lost = engine, lost

    def __enter__(self):
        target, verify = self.engine.target, self.engine.target.verify

        def broken(segments, *rest):
            verdict = verify(segments, *rest)
            of = {row.slot: row for row in self.engine.rows}
            lost = {slot for slot, row in of.items() if row.id in self.lost and row.num_new >= 3}
            bad = [i for i, segment in enumerate(segments) if segment.slot in lost and segment.num_logits]
            if bad:
                verdict = replace(verdict, logits=verdict.logits.clone())
            for i in bad:
                verdict.of(i).fill_(torch.nan)
            return verdict

        target.verify = broken

    def __exit__(self, *_):
        del self.engine.target.verify
