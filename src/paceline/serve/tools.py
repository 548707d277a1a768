"""Tool calls: how a model learns of tools, the grammar that makes it call one, and calls found in its answer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from paceline.errors import PacelineError
from paceline.records import NotJSON, loads
from paceline.serve.fields import ChatRequest, Tool, ToolChoice

_BLOCK = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
INTRODUCTION = (
    'You can call these functions. To call one, answer with nothing but JSON: {"name": function, "arguments": {...}}.\n'
)


def chosen(request: ChatRequest) -> list[Tool]:
    """The tools that the answer may call; PacelineError for a choice that names none of them."""
    tools, choice = request.tools or [], request.tool_choice
    if choice == "none":
        return []
    if isinstance(choice, ToolChoice):
        name = choice.function.name
        named = [tool for tool in tools if tool.function.name == name]
        if not named:
            names = ", ".join(tool.function.name for tool in tools) or "none"
            raise PacelineError(f"tool_choice names the function {name!r}; tools has: {names}")
        return named
    if choice == "required" and not tools:
        raise PacelineError("tool_choice is required, and tools is empty")
    return tools


def must_call(request: ChatRequest) -> bool:
    """Whether the answer has to be a call."""
    return request.tool_choice == "required" or isinstance(request.tool_choice, ToolChoice)


def schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """JSON schema of a call of one of `tools`."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": tool.function.parameters or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def described(tools: Sequence[Tool]) -> str:
    """What a model without a template for tools learns of them."""
    return INTRODUCTION + "\n".join(json.dumps(tool.function.model_dump(exclude_none=True)) for tool in tools)


def split_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """An answer's text without the calls in it, and the calls."""
    blocks = _BLOCK.findall(text)
    rest = _BLOCK.sub("", text).strip() if blocks else text
    calls = [call for call in map(_call, blocks or [text]) if call is not None]
    return (rest if blocks or not calls else "", calls)


def _call(text: str) -> dict[str, Any] | None:
    try:
        value = loads(text.strip())
    except NotJSON:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or "arguments" not in value:
        return None
    arguments = value["arguments"]
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    function = {"name": value["name"], "arguments": written}
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}
