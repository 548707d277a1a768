"""What a client may set in the model's chat template: variables that the template reads, and nothing else."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.parser import Parser

from paceline.serve.refusal import Refused
from paceline.target.tokenizer import Tokenizer

_FIXED = {"messages", "tools", "raise_exception", "strftime_now", *jinja2.Environment().globals}
"""Names in a template that are the server's or jinja's."""


class _Generation(jinja2.ext.Extension):
    """transformers' own tag, {% generation %}."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


@lru_cache(8)
def _variables(template: str) -> frozenset[str]:
    environment = jinja2.Environment(extensions=[_Generation, "jinja2.ext.loopcontrols"])
    try:
        return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(template)))
    except jinja2.TemplateError:
        return frozenset()


def variables(tokenizer: Tokenizer, *, tools: bool = False) -> frozenset[str]:
    """Variables of the model's chat template that a client may set. tools: of the one for requests with tools.

    The parameters of `apply_chat_template`, such as chat_template and tokenize, and the special tokens are none."""
    inner = tokenizer.inner
    if not tokenizer.has_chat_template:
        return frozenset()
    own = set(inspect.signature(inner.apply_chat_template).parameters) - {"documents"}
    template = inner.get_chat_template(None, tools=[{}] if tools else None)
    return _variables(template) - own - _FIXED - set(inner.special_tokens_map)


def check_variables(tokenizer: Tokenizer, given: dict[str, Any], *, tools: bool = False) -> None:
    """Refused for a name that is no variable of the model's chat template."""
    allowed = variables(tokenizer, tools=tools) if given else frozenset()
    if wrong := sorted(set(given) - allowed):
        names = ", ".join(sorted(allowed)) or "no variable that a request may set"
        raise Refused(
            f"chat_template_kwargs has {wrong[0][:80]!r}; this model's chat template reads: {names}",
            "chat_template_kwargs",
        )
