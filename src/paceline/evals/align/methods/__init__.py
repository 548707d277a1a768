"""The methods by name, and reading `--method vanilla,align3,steps=132`. Each is a file with one async function."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

from paceline.draft.spec import parse, values
from paceline.errors import MethodError, meant
from paceline.evals.align.methods.align3 import Align3Config, align3
from paceline.evals.align.methods.base import Task
from paceline.evals.align.methods.best_of_n import BestOfNConfig, best_of_n
from paceline.evals.align.methods.more_think import MoreThinkConfig, more_think
from paceline.evals.align.methods.self_refine import SelfRefineConfig, self_refine
from paceline.evals.align.methods.single import raw, vanilla, zero_think
from paceline.evals.align.methods.tpo import TpoConfig, tpo
from paceline.evals.align.types import Generation

Run = Callable[[Task, Any], Awaitable[Generation]]

METHODS: dict[str, tuple[Run, type | None]] = {
    "raw": (raw, None),
    "vanilla": (vanilla, None),
    "zero-think": (zero_think, None),
    "more-think": (more_think, MoreThinkConfig),
    "align3": (align3, Align3Config),
    "self-refine": (self_refine, SelfRefineConfig),
    "best-of-n": (best_of_n, BestOfNConfig),
    "tpo": (tpo, TpoConfig),
}


@dataclass(frozen=True)
class Method:
    """A method with its options. label: its name and the options that are not its defaults, "align3,steps=13"."""

    name: str
    label: str
    config: Any

    async def __call__(self, task: Task) -> Generation:
        return await METHODS[self.name][0](task, self.config)

    @property
    def identity(self) -> list[Any]:
        """What of it decides the outcome: the name and every option, defaults included."""
        return [self.name, None if self.config is None else asdict(self.config)]

    @property
    def chooses(self) -> bool:
        """Whether it needs a scorer."""
        return self.name == "tpo" or (self.name == "best-of-n" and self.config.n > 1)


def read_methods(spec: str) -> list[Method]:
    """Methods of "name[,option=value...],name..."; MethodError for unknown ones, bad options and repetitions."""
    methods = [_one(part.strip()) for part in re.split(r",(?!\s*[A-Za-z_][\w-]*\s*=)", spec) if part.strip()]
    if not methods:
        raise MethodError(f"name a method: {', '.join(METHODS)}.")
    seen = [method.identity for method in methods]
    for method in methods:
        if seen.count(method.identity) > 1:
            raise MethodError(f"{method.label} is named twice.")
    return methods


def _one(text: str) -> Method:
    part = parse(text)
    name = part.name.replace("_", "-")
    if name not in METHODS:
        raise MethodError(f"there is no method {part.name!r}; there are {', '.join(METHODS)}.{meant(name, METHODS)}")
    config_class = METHODS[name][1]
    if config_class is None and (part.options or part.checkpoint):
        raise MethodError(f"{name} has no options.")
    config = None if config_class is None else config_class(**values(part, config_class))
    _positive(name, config)
    return Method(name, _label(name, config), config)


def _label(name: str, config: Any) -> str:
    changed = [f for f in fields(config) if getattr(config, f.name) != f.default] if config is not None else []
    return ",".join([name, *(f"{f.name}={str(getattr(config, f.name)).lower()}" for f in changed)])


MAY_BE_ZERO = ("iterations", "rounds", "step_tokens")


def _positive(name: str, config: Any) -> None:
    """Counts are 1 or more, but for those of MAY_BE_ZERO."""
    for key, value in (asdict(config) if config is not None else {}).items():
        least = 0 if key in MAY_BE_ZERO else 1
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            raise MethodError(f"{name}: {key} is {value}; it must be {least} or more.")
