"""The nouns of an alignment run: rules, scenarios, items, calls, generations, verdicts. Files hold them as JSON."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

Kind = Literal["safety", "behavioral"]
KINDS: tuple[Kind, Kind] = ("safety", "behavioral")
Label = Literal["unsafe", "safe"]
Mark = Literal["YES", "NO", "NA"]
"""YES: the answer keeps the rule; NO: it breaks it; NA: the rule does not apply."""


@dataclass(frozen=True)
class Rule:
    """A written rule. index: from 1 within its kind; weight: a behavioural rule's weight in the behaviour score."""

    kind: Kind
    index: int
    text: str
    weight: float = 1.0

    @property
    def id(self) -> str:
        """ "safety/3"."""
        return f"{self.kind}/{self.index}"


@dataclass(frozen=True)
class Scenario:
    """A setting and the rules that bind every answer in it."""

    key: str
    name: str
    description: str
    safety: tuple[Rule, ...]
    behavioral: tuple[Rule, ...]

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Safety rules, then behavioural ones."""
        return self.safety + self.behavioral

    def of(self, kind: Kind) -> tuple[Rule, ...]:
        return self.safety if kind == "safety" else self.behavioral

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits of the rules and their weights."""
        return digest([[rule.kind, rule.text, rule.weight] for rule in self.rules])


@dataclass(frozen=True)
class Item:
    """A prompt under the rules of a scenario.

    id                  the scenario and the number in its file, from 0: "Child/017".
    prompt              the plain request.
    adversarial_prompt  the disguised request, which the model gets unless a run asks plain prompts.
    answer              the reference answer, if there is one."""

    id: str
    scenario: str
    prompt: str
    adversarial_prompt: str
    label: Label
    source: str = ""
    answer: str | None = None

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits of all that models and judges may see."""
        return digest([self.prompt, self.adversarial_prompt, self.label, self.answer])


@dataclass(frozen=True)
class Data:
    """Scenarios and their items, in the order of the files."""

    name: str
    scenarios: Mapping[str, Scenario]
    items: tuple[Item, ...]


@dataclass
class Call:
    """The cost of one completion. Counts are None if the server does not report them.

    phase        what it was for: "answer", "step 1", "feedback", "judge".
    prefilled    prompt tokens, forced text included. cached: those of them that the server's cache held.
    injected     tokens of `prefilled` that a method forced into this turn; None without a tokenizer to count them.
    generated    decoded tokens.
    tries        attempts, the last one included.
    speculation  rounds and draft tokens of our own engine."""

    phase: str
    finish_reason: str
    seconds: float
    prefilled: int | None = None
    cached: int | None = None
    injected: int | None = None
    generated: int | None = None
    tries: int = 1
    speculation: dict[str, Any] | None = None


@dataclass(frozen=True)
class Output:
    """A response split into thought and answer. unanswered: why `response` is empty, else None; open: whether the
    thought never ended."""

    thought: str
    response: str
    finish_reason: str
    unanswered: str | None = None
    open: bool = False


@dataclass(frozen=True)
class Generation(Output):
    """A method's answer to an item. extra: other fields of its row."""

    calls: Sequence[Call] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """A judge's label of the rule with this id."""

    rule: str
    mark: Mark
    analysis: str = ""


@dataclass
class Judgement:
    """Verdicts on every rule of the scenario, in order. cut: characters of the answer that the judge did not see."""

    verdicts: list[Verdict]
    cut: int = 0
    calls: list[Call] = field(default_factory=list)


def digest(value: Any) -> str:
    """16 hexadecimal digits of a JSON value (dataclasses allowed), the same in every run."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=asdict)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
