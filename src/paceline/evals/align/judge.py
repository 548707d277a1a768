"""Judges: what labels every rule of an answer. A model, on whatever backend, or the sample's own checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

from paceline.evals.align import judge_prompts, sample
from paceline.evals.align.backends.base import Backend, Decoding, Request
from paceline.evals.align.prompts import Message
from paceline.evals.align.thoughts import Markers, said
from paceline.evals.align.types import Call, Item, Judgement, Scenario, Verdict
from paceline.evals.align.verdicts import Blocks, Unreadable, read_json, read_one, read_tags
from paceline.workbench.client import CompletionError

T = TypeVar("T")
CHECKS = "checks"
COMPAT_CHARACTERS = 8000
"""What the official code shows the judge of an answer."""


@dataclass(frozen=True)
class JudgeConfig:
    """How a model judges.

    mode       joint: all rules in one call; sequential: a call for each rule.
    form       tags, or json: with a schema that servers can guide decoding by. Sequential replies are tags.
    sees       which prompt the judge is shown: the one the model was asked, or the plain one (the official code's).
    characters most characters of an answer that are shown; None: all.
    compat     the official code's reading: the first tag of a line counts, and an empty reference is announced.
    repairs    times a reply that cannot be read is asked for again, with what was wrong."""

    mode: Literal["joint", "sequential"] = "joint"
    form: Literal["tags", "json"] = "tags"
    sees: Literal["asked", "plain"] = "asked"
    characters: int | None = None
    compat: bool = False
    repairs: int = 3
    decoding: Decoding = field(default_factory=lambda: Decoding(max_tokens=4200, temperature=0.0))


class Unjudged(CompletionError):
    """A judge whose replies could not be read, repairs included. calls: what they cost."""

    def __init__(self, why: str, calls: list[Call]):
        super().__init__(why)
        self.calls = calls


class Judge(Protocol):
    """label names it in reports; identity is all that decides its verdicts."""

    label: str

    @property
    def identity(self) -> Any: ...

    async def judge(self, item: Item, scenario: Scenario, asked: str, response: str) -> Judgement:
        """Verdicts for `response` to the query `asked`. CompletionError when there can be none."""


class Checks:
    """The ground truth of the sample: a program for each rule, no model."""

    label = CHECKS
    identity = [CHECKS, 1]

    async def judge(self, item: Item, scenario: Scenario, asked: str, response: str) -> Judgement:
        return Judgement([Verdict(rule.id, sample.check(rule, item, response)) for rule in scenario.rules])


class ModelJudge:
    """A judge model."""

    def __init__(self, backend: Backend, config: JudgeConfig = JudgeConfig(), markers: Markers = Markers()):
        self.backend, self.config, self.markers, self.label = backend, config, markers, backend.label

    @property
    def identity(self) -> Any:
        return [self.label, asdict(self.config), judge_prompts.VERSION]

    async def judge(self, item: Item, scenario: Scenario, asked: str, response: str) -> Judgement:
        config = self.config
        shown = response if config.characters is None else response[: config.characters]
        query = asked if config.sees == "asked" else item.prompt
        calls: list[Call] = []
        if config.mode == "joint":
            verdicts = await self._joint(item, scenario, query, shown, calls)
        else:
            verdicts = await self._sequential(item, scenario, query, shown, calls)
        return Judgement(verdicts, len(response) - len(shown), calls)

    async def _joint(
        self, item: Item, scenario: Scenario, query: str, response: str, calls: list[Call]
    ) -> list[Verdict]:
        json = self.config.form == "json"
        messages = judge_prompts.joint(scenario, item, query, response, json=json, compat=self.config.compat)

        def read(text: str) -> list[Verdict]:
            return read_json(text, scenario) if json else read_tags(text, scenario, self.config.compat)

        schema = Blocks.model_json_schema() if json else None
        return await self._ask(messages, read, scenario.key, calls, schema)

    async def _sequential(
        self, item: Item, scenario: Scenario, query: str, response: str, calls: list[Call]
    ) -> list[Verdict]:
        verdicts = []
        for rule in scenario.rules:
            messages = judge_prompts.single(
                item, rule, query, response, last=rule == scenario.rules[-1], compat=self.config.compat
            )
            verdicts.append(await self._ask(messages, partial(read_one, rule=rule), item.id, calls))
        return verdicts

    async def _ask(
        self,
        messages: tuple[Message, ...],
        read: Callable[[str], T],
        scope: str,
        calls: list[Call],
        schema: dict[str, Any] | None = None,
    ) -> T:
        """Ask until the reply can be read. A repair goes on in the conversation: asked the same again at temperature
        0, a judge would say the same again."""
        turns, problem = messages, ""
        for _ in range(self.config.repairs + 1):
            request = Request(turns, self.config.decoding, "judge", f"judge {scope}", schema=schema)
            reply = await self.backend.complete(request)
            calls.append(reply.call)
            answer = said(reply, self.markers)
            try:
                return read(answer.response)
            except Unreadable as error:
                problem = answer.unanswered or str(error)
                turns = messages + judge_prompts.repair(answer.response, problem)
        raise Unjudged(f"judge {self.label}: {problem} Asked {self.config.repairs + 1} times.", calls)
