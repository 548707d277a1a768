"""Prepare tools for a chat template: the functions, earlier calls and their results."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from paceline.errors import PacelineError
from paceline.jsonl import NotJSON, loads

INTRODUCTION = (
    'You can call these functions. To call one, answer with nothing but JSON: {"name": function, "arguments": {...}}.\n'
)


def prepared(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], reads_tools: bool
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns (messages, other inputs) for a chat template. A template that knows no tools gets tools, calls and
    results as text.

    tools        [{"type": "function", "function": {"name", ...}}].
    reads_tools  whether the template knows tools."""
    given = [_with_objects(message) if reads_tools else as_text(message) for message in messages]
    if tools and reads_tools:
        return given, {"tools": list(tools)}
    functions = "\n".join(json.dumps(tool["function"]) for tool in tools)
    return [{"role": "system", "content": INTRODUCTION + functions}, *given] if tools else given, {}


def _with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    made = [{**call, "function": _with_object(call["function"])} for call in calls(message)]
    plain = _without_calls(message)
    return {**plain, "tool_calls": made} if made else plain


def _without_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Drop `tool_calls`: templates take a message that has them, even an empty list, for a message without text."""
    return {name: value for name, value in message.items() if name != "tool_calls"}


def calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The earlier calls of a message. Raises PacelineError if they are wrong."""
    made = message.get("tool_calls") or []
    if not isinstance(made, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in made
    ):
        raise PacelineError("messages: tool_calls is a list of objects with a function, its name and arguments")
    return made


def _with_object(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        with suppress(NotJSON):  # A broken call stays as it is.
            arguments = loads(arguments)
    return {**function, "arguments": Arguments(arguments) if isinstance(arguments, dict) else arguments}


class Arguments(dict[str, Any]):
    """Arguments of a call for chat templates: an object for those that turn it into JSON, which is JSON where one
    joins it to text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


def as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with tools as text: a call as INTRODUCTION asks for it, its result as the user's words."""
    if message.get("role") == "tool":
        return {"role": "user", "content": f"Result: {message.get('content', '')}"}
    made = [_with_object(call["function"]) for call in calls(message)]
    if not made:
        return _without_calls(message)
    written = [str(Arguments(name=call.get("name"), arguments=call["arguments"])) for call in made]
    return {"role": message.get("role"), "content": "\n".join(filter(None, [message.get("content"), *written]))}
