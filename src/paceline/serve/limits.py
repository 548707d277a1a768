"""How much one request may ask for. Counts are checked before anything is made of a body, so that none is expensive.

limits = Limits(messages=100)
limits.check(body)                      # Refused, for the first count that is too high
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sized
from dataclasses import dataclass, field, fields
from typing import Any

from paceline.serve.refusal import Refused

PIECE = 1 << 16
"""Bytes that are looked at in one go; other threads run in between."""


def _most(default: int, what: str) -> Any:
    return field(default=default, metadata={"help": what})


@dataclass(frozen=True)
class Limits:
    """The most of everything; each field is an option of `paceline serve`, such as --max-messages."""

    messages: int = _most(2048, "messages of a chat")
    parts: int = _most(2048, "content parts and tool calls in all messages of a chat")
    prompts: int = _most(256, "prompts of one text completion")
    answers: int = _most(128, "answers to a prompt (n)")
    stops: int = _most(16, "stop strings")
    stop_length: int = _most(1000, "characters of a stop string")
    stop_ids: int = _most(128, "stop_token_ids")
    logit_bias: int = _most(1024, "entries of logit_bias")
    logprobs: int = _most(20, "alternatives of logprobs and top_logprobs")
    tools: int = _most(128, "tools")
    schema: int = _most(128 << 10, "bytes of a JSON schema, of all tools, and of chat_template_kwargs")
    text: int = _most(1 << 18, "characters that /tokenize takes")
    ids: int = _most(1 << 15, "token ids that /detokenize takes")
    values: int = _most(250_000, "JSON values of a body")

    @classmethod
    def described(cls) -> dict[str, str]:
        """Name -> what it counts."""
        return {one.name: one.metadata["help"] for one in fields(cls)}

    def check(self, body: dict[str, Any]) -> None:
        """Refused for a body that asks for more. What has a wrong type is left to the fields' own check."""
        for name, param, size in _sizes(body):
            self.hold(name, param, size)

    def hold(self, name: str, param: str, size: int) -> None:
        """Refused if `size` is more than the limit `name`."""
        if size > (most := getattr(self, name)):
            what = f"{param} has {size:,}, and this server takes at most {most:,} {self.described()[name]}"
            raise Refused(f"{what} (--max-{name.replace('_', '-')})", param)

    def check_raw(self, raw: bytes) -> None:
        """Refused for a body of more JSON values than may be, before it is parsed: parsing cannot be interrupted."""
        most = self.values
        if sum(map(raw.count, (b"[", b"{", b","))) <= most // 5:
            return
        values = holders = 0
        for piece in _outside_strings(raw):
            holders += piece.count(b"[") + piece.count(b"{")
            values += piece.count(b",")
            if values + holders > most or holders > most // 5:
                raise Refused(f"the body has more than {most:,} JSON values, or {most // 5:,} lists and objects")


def _outside_strings(raw: bytes) -> Iterator[bytes]:
    """What stands outside the strings of a JSON text, piece by piece."""
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # what is escaped ends no string
    inside = 0
    for at in range(0, len(plain), PIECE):
        parts = plain[at : at + PIECE].split(b'"')
        yield b"".join(parts[inside::2])
        inside ^= len(parts) - 1 & 1


def _sizes(body: dict[str, Any]) -> Iterator[tuple[str, str, int]]:
    """(limit, field, size) of everything in a body that is counted."""
    for name, limit in (("messages", "messages"), ("tools", "tools"), ("stop_token_ids", "stop_ids")):
        yield limit, name, _length(body.get(name), list)
    yield "logit_bias", "logit_bias", _length(body.get("logit_bias"), dict)
    for name, limit in (("n", "answers"), ("logprobs", "logprobs"), ("top_logprobs", "logprobs")):
        if type(value := body.get(name)) is int:
            yield limit, name, value
    prompt, stop, messages = body.get("prompt"), body.get("stop"), _list(body.get("messages"))
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        yield "prompts", "prompt", len(prompt)
    yield "stops", "stop", _length(stop, list)
    yield "stop_length", "stop", max((_length(one, str) for one in [stop, *_list(stop)]), default=0)
    lists = [value for message in messages if isinstance(message, dict) for value in message.values()]
    yield "parts", "messages", sum(_length(value, list) for value in lists)
    for name in ("response_format", "tools", "chat_template_kwargs", "tool_choice", "metadata"):
        if body.get(name) is not None:
            yield "schema", name, len(json.dumps(body[name]))


def _length(value: Any, kind: type[Sized]) -> int:
    return len(value) if isinstance(value, kind) else 0


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
