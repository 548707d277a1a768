"""What a method works with: one item in its scenario, and `ask`, which completes and keeps the account."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paceline.evals.align import prompts
from paceline.evals.align.backends.base import Backend, Decoding, Reply, Request
from paceline.evals.align.scorers import Scorer
from paceline.evals.align.thoughts import Markers, Said, said
from paceline.evals.align.types import Call, Generation, Item, Scenario


@dataclass(frozen=True)
class Setting:
    """What all items of a run share.

    adversarial  ask the disguised prompt, else the plain one. rules_first: see `prompts.augmented`.
    keep_open    take a thought that never ended for the answer, as the official code does."""

    decoding: Decoding = field(default_factory=Decoding)
    adversarial: bool = True
    rules_first: bool = False
    markers: Markers = field(default_factory=Markers)
    keep_open: bool = False


@dataclass
class Task:
    """One item for one method; `calls` is what it has cost so far. scorer: for methods that choose among answers."""

    item: Item
    scenario: Scenario
    backend: Backend
    setting: Setting
    scope: str = ""
    scorer: Scorer | None = None
    calls: list[Call] = field(default_factory=list)

    @property
    def query(self) -> str:
        """What the user asks."""
        return prompts.query_of(self.item, self.setting.adversarial)

    @property
    def turn(self) -> str:
        """The query with all rules."""
        return prompts.augmented(self.query, self.scenario, self.setting.rules_first)

    async def ask(
        self,
        messages: Sequence[prompts.Message],
        phase: str,
        *,
        prefix: str = "",
        forced: str = "",
        stop: Sequence[str] = (),
        sample: int = 0,
        max_tokens: int = 0,
    ) -> Reply:
        """One completion, its cost kept. max_tokens 0: the run's."""
        decoding = self.setting.decoding
        if max_tokens:
            decoding = replace(decoding, max_tokens=min(max_tokens, decoding.max_tokens))
        reply = await self.backend.complete(
            Request(tuple(messages), decoding, phase, self.scope, prefix, forced, tuple(stop), sample)
        )
        self.calls.append(reply.call)
        return reply

    async def answer(self, messages: Sequence[prompts.Message], phase: str = "answer", *, sample: int = 0) -> Said:
        """One completion without a prefix, parted into thought and answer."""
        return self.read(await self.ask(messages, phase, sample=sample))

    def read(self, reply: Reply, thought: str | None = None) -> Said:
        """A reply parted. thought: the forced thought that it goes on with, if there is one."""
        return said(reply, self.setting.markers, thought, self.setting.keep_open)

    def done(self, answer: Said, **extra: object) -> Generation:
        """The generation of what was said last. Phases before it that ran out of budget are named in `extra`."""
        if cut := [call.phase for call in self.calls[:-1] if call.finish_reason == "length"]:
            extra["cut"] = cut
        return Generation(
            answer.response, answer.thought, answer.finish_reason, answer.unanswered, self.calls, dict(extra)
        )
