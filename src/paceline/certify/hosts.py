"""Other libraries as engines under test: the contestants of the benchmark, asked as ours is.

Host(create_peer("vllm-ngram", ...)).answer(...)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paceline.bench.contestant import Ask, Contestant
from paceline.certify.engines import Said, UnderTest
from paceline.sampling import SamplingParams


class Host(UnderTest):
    """A contestant; opened here, closed by `close`. A batch holds requests that are asked for alike."""

    takes = frozenset({"top_k", "top_p", "repetition_penalty"})

    def __init__(self, contestant: Contestant, ends: Sequence[int]):
        self.contestant, self.ends = contestant, tuple(ends)
        if hasattr(contestant, "guarded"):
            contestant.guarded = False  # what is known to go wrong is to be found here
        try:
            contestant.open()
        except BaseException:
            contestant.close()
            raise
        self.name, self.batch = contestant.name, contestant.max_batch
        self.facts: dict[str, Any] = contestant.settings

    def close(self) -> None:
        self.contestant.close()

    def answer(self, prompts: Sequence[Sequence[int]], wishes: Sequence[SamplingParams]) -> list[Said]:
        alike: dict[Ask, list[int]] = {}
        for i, wish in enumerate(wishes):
            alike.setdefault(self._ask(wish), []).append(i)
        said: dict[int, Said] = {}
        for ask, members in alike.items():
            for begin in range(0, len(members), self.batch):
                together = members[begin : begin + self.batch]
                seeds = tuple(wishes[i].seed or 0 for i in together)
                replies = self.contestant.answer([prompts[i] for i in together], replace(ask, seeds=seeds))
                said |= {i: Said(one.tokens, None, one.lengths or []) for i, one in zip(together, replies, strict=True)}
        return [said[i] for i in range(len(prompts))]

    def _ask(self, wish: SamplingParams) -> Ask:
        return Ask(
            max_tokens=wish.max_tokens,
            temperature=wish.temperature,
            ends=() if wish.ignore_eos else self.ends,
            top_k=wish.top_k,
            top_p=wish.top_p,
            repetition_penalty=wish.repetition_penalty,
        )
