"""The nouns of an alignment run: rules, scenarios, items, generations, verdicts. Plain data, no behaviour to speak of.

Rows on disk are these as JSON (`to_json`); what is read back is plain dictionaries.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
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
    """One written rule; index counts from 1 within its kind. weight: of behavioural rules, in the share kept."""

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

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits of the rules and their weights: another text, another digest."""
        return digest([[rule.kind, rule.text, rule.weight] for rule in self.rules])


@dataclass(frozen=True)
class Item:
    """One prompt. adversarial_prompt: what the model is given; prompt: the same wish before it was disguised.

    answer is the reference, None if there is none. id: "Child/017", its number in the file, from 0."""

    id: str
    scenario: str
    prompt: str
    adversarial_prompt: str
    label: Label
    source: str = ""
    answer: str | None = None

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits of what a model or a judge may get to see."""
        return digest([self.prompt, self.adversarial_prompt, self.label, self.answer])


@dataclass(frozen=True)
class Data:
    """Scenarios and their items, in the order of the files."""

    name: str
    scenarios: Mapping[str, Scenario]
    items: tuple[Item, ...]


@dataclass
class Call:
    """One completion that was asked for, and what it cost.

    prefilled   prompt tokens, forced text included, and cached how many of them the server had from before.
    injected    tokens of the text that a method forced into this turn of the model, counted within `prefilled`; None
                if there was no tokenizer to count them with.
    generated   tokens that were decoded. All three are None if the server did not say.
    tries       attempts, the last one included. speculation: rounds and drafts, of our own engine."""

    phase: str
    finish_reason: str
    seconds: float
    prefilled: int | None = None
    cached: int | None = None
    injected: int | None = None
    generated: int | None = None
    tries: int = 1
    speculation: dict[str, Any] | None = None


@dataclass
class Generation:
    """What a method made of an item. unanswered: why `response` is empty, if it is."""

    response: str
    thought: str = ""
    finish_reason: str = "stop"
    unanswered: str | None = None
    calls: list[Call] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """A judge's label of one rule."""

    rule: str
    mark: Mark
    analysis: str = ""


@dataclass
class Judgement:
    """Verdicts for every rule of the scenario, in order. cut: characters of the answer that the judge did not see."""

    verdicts: list[Verdict]
    cut: int = 0
    calls: list[Call] = field(default_factory=list)


def digest(value: Any) -> str:
    """16 hexadecimal digits of a JSON value (dataclasses allowed), the same in every run."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=asdict)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
