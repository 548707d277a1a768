"""Reading a completion that comes as server-sent events: pieces of text, why it ended, and what it cost.

A stream that ends without saying why was torn: nothing of it counts.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from paceline.evals.align.backends.retry import Passing


@dataclass
class Parts:
    """A completion as far as it has come."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def take(self, body: dict[str, Any]) -> None:
        """Add one event, or a whole response: both have `choices` and perhaps `usage`."""
        if body.get("error"):
            error = body["error"]
            raise Passing(f"the server broke off: {error.get('message') if isinstance(error, dict) else error}")
        self.usage = body.get("usage") or self.usage
        for choice in body.get("choices") or ():
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            self.text.append(said.get("content") or "")
            self.reasoning.append(said.get("reasoning_content") or said.get("reasoning") or "")
            self.logprobs += (choice.get("logprobs") or {}).get("content") or ()
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


async def read_stream(lines: AsyncIterator[str]) -> Parts:
    """All events. Raises Passing if the stream was torn or holds what is not JSON."""
    parts = Parts()
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            break
        parts.take(_body(data))
    if parts.finish_reason is None:
        raise Passing("the stream was torn: it ended without a finish_reason")
    return parts


def read_whole(content: bytes) -> Parts:
    """A response that came in one piece."""
    parts = Parts()
    parts.take(_body(content))
    if parts.finish_reason is None:
        raise Passing("the response has no finish_reason")
    return parts


def _body(data: str | bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except ValueError:
        raise Passing("the server sent what is not JSON") from None
    if not isinstance(body, dict):
        raise Passing("the server sent JSON that is not an object")
    return body
