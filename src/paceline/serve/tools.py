"""What a chat template is given of a request: its tools, and variables that a client sets; and the schema that makes a
model call a tool."""

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
from paceline.serve.fields import AllowedTools, Conversation, Tool, ToolChoice
from paceline.serve.settings import Refused
from paceline.target.tokenizer import Tokenizer

_FIXED = {"messages", "tools", "raise_exception", "strftime_now", *jinja2.Environment().globals}
"""Names in a template that are the server's or jinja's."""


def chosen(request: Conversation) -> list[Tool]:
    """The tools that the answer may call; PacelineError for a choice that names none of them."""
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
    """JSON schema of a function's arguments, which are an object; Refused for one that is of another type."""
    given = tool.function.parameters or {}
    kinds = given.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        what = f"the parameters of {shortened(tool.function.name)} are of type {shortened(str(kinds))}"
        raise Refused(f"{what}; arguments are an object, so let type be object", "tools")
    return {**given, "type": "object"}


def thinking(request: Conversation, template: str) -> dict[str, Any]:
    """reasoning_effort and enable_thinking for a template; PacelineError where it does not read them. An effort of
    "none" turns thinking off where that is all the template knows."""
    asked = {"reasoning_effort": request.reasoning_effort, "enable_thinking": request.enable_thinking}
    if asked["reasoning_effort"] == "none" and "enable_thinking" in template and "reasoning_effort" not in template:
        asked = {"enable_thinking": False}
    given = {name: value for name, value in asked.items() if value is not None}
    for name in given:
        if name not in template:
            raise PacelineError(f"{name} is not read by this model's chat template; leave it out")
    return given


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
