"""Variables of a chat template from a request: its tools, and variables that a client sets. Also the schema that makes
a model call a tool."""

import inspect
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.parser import Parser

from paceline.errors import PacelineError, shortened
from paceline.formats.tokenizer import Tokenizer
from paceline.serve.fields import AllowedTools, Conversation, Tool, ToolChoice
from paceline.serve.said import once
from paceline.serve.settings import Refused

_FIXED = {"messages", "tools", "raise_exception", "strftime_now", *jinja2.Environment().globals}
"""Names in a template that are the server's or jinja's."""


def chosen(request: Conversation) -> list[Tool]:
    """The tools that the answer may call. Raises PacelineError if tool_choice names another."""
    tools, choice = request.tools or [], request.tool_choice
    if choice == "none":
        return []
    if isinstance(choice, (ToolChoice, AllowedTools)):
        wanted = choice.allowed_tools.tools if isinstance(choice, AllowedTools) else [choice]
        named = [one.function.name for one in wanted]
        known = [tool.function.name for tool in tools]
        if missing := [name for name in named if name not in known]:
            has = ", ".join(known) or "none"
            raise PacelineError(f"tool_choice names the function {shortened(repr(missing[0]))}; tools has: {has}")
        return [tool for tool in tools if tool.function.name in named]
    if choice == "required" and not tools:
        raise PacelineError("tool_choice is required, and tools is empty")
    return tools


def schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """JSON schema of a call of one of `tools`."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                # An $id of its own: references such as #/$defs/X are to the function's schema, not to this one.
                "arguments": {"$id": f"tool:{i}", **parameters(tool)},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for i, tool in enumerate(tools)
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def parameters(tool: Tool) -> dict[str, Any]:
    """JSON schema of a function's arguments. Raises Refused if its type is not object."""
    given = tool.function.parameters or {}
    kinds = given.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        what = f"the parameters of {shortened(tool.function.name)} are of type {shortened(str(kinds))}"
        raise Refused(f"{what}; arguments are an object, so let type be object", "tools")
    return {**given, "type": "object"}


def thinking(request: Conversation, template: str, may_think: bool, *, refuse: bool = True) -> dict[str, Any]:
    """Variables of a template for a request's thinking and length: enable_thinking, reasoning_effort, verbosity. An
    effort of "none" turns thinking off if the template knows no effort.

    may_think  whether the model's answers have reasoning.
    refuse     whether a field that the template does not read raises Refused; else it is ignored, and named once."""
    (says, effort), (tells, thinks) = request.effort, request.thinks
    if effort == "none" and "reasoning_effort" not in template and thinks is None:
        tells, thinks, effort = says, False, None
    asked = {
        "reasoning_effort": (says, effort, "medium"),
        "enable_thinking": (tells, thinks, None if tells == "enable_thinking" else may_think),
        "verbosity": ("verbosity", request.verbosity, "medium"),
    }
    given = {}
    for name, (field, value, as_it_is) in asked.items():
        if value is not None and name in template:
            given[name] = value
        elif value is not None and value != as_it_is:
            unread(f"{field} is not read by this model's chat template", field, refuse)
    return given


def unread(what: str, field: str, refuse: bool) -> None:
    """Refuse a field that would be ignored, or name it once."""
    if refuse:
        raise Refused(f"{what}; leave it out", field)
    once(f"{what}, and is ignored")


class _Generation(jinja2.ext.Extension):
    """Parses transformers' own tag, {% generation %}."""

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
    """Variables of the model's chat template that a client may set. tools: of the template for requests with tools.

    Parameters of `apply_chat_template`, such as chat_template and tokenize, and special tokens are not among them."""
    inner = tokenizer.inner
    if not tokenizer.has_chat_template:
        return frozenset()
    own = set(inspect.signature(inner.apply_chat_template).parameters) - {"documents"}
    template = inner.get_chat_template(None, tools=[{}] if tools else None)
    return _variables(template) - own - _FIXED - set(inner.special_tokens_map)


def unread_variables(
    tokenizer: Tokenizer, given: dict[str, Any], *, tools: bool = False, refuse: bool = True
) -> list[str]:
    """Names in `given` that are no variables of the model's chat template.
    refuse: whether to raise Refused for the first."""
    allowed = variables(tokenizer, tools=tools) if given else frozenset()
    wrong, where = sorted(set(given) - allowed), "chat_template_kwargs"
    if wrong and refuse:
        names = ", ".join(sorted(allowed)) or "no variable that a request may set"
        raise Refused(f"{where} has {wrong[0][:80]!r}; this model's chat template reads: {names}", where)
    for name in wrong:
        unread(f"{shortened(repr(name))} in {where} is not read by this model's chat template", where, refuse)
    return wrong
