"""Harmony, in which gpt-oss writes: an answer is messages in channels, and a call is a message to a function.

    <|channel|>analysis<|message|>I add.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"x": 1}<|call|>

The prompt ends with <|start|>assistant. The channel `analysis` is reasoning; `final`, and `commentary` to nobody, are
the answer."""

import json
import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from paceline.jsonl import NotJSON
from paceline.serve.reading import HARMONY, LONGEST, Piece, Reader, Waiting, parsed_value

MESSAGE = "<|message|>"
STARTS = ("<|start|>", "<|channel|>")
BEGINS = (*STARTS, " to=", "to=")
"""What the header of a message begins with."""
ENDS = (HARMONY[1], "<|return|>", "<|call|>", *STARTS)
_CHANNEL, _RECIPIENT = re.compile(r"<\|channel\|>\s*(\w+)"), re.compile(r"\bto=(?:functions\.)?([\w.-]+)")


class HarmonyReader(Reader):
    """Reads one answer in channels. Formats are read in the channel `final`; other arguments are those of `Reader`."""

    def __init__(self, formats: Sequence[Any] = (), names: Any = (), **options: Any):
        super().__init__(formats, names, **options)
        self._kinds: set[str] = set()  # of the pieces with text so far

    def _read(self) -> Waiting:
        while (self._most is None or self.called < self._most) and not (self._over and not self._text):
            header = yield from self._header()
            channel, to = _CHANNEL.search(header or ""), _RECIPIENT.search(header or "")
            kind = "reasoning" if channel is not None and channel[1] == "analysis" else "content"
            if to is not None and to[1] in self._names:
                body = yield from self._body()
                if not self._argue(to[1], body):
                    self._say(kind, body)
            elif kind == "content" and self._formats:
                yield from super()._read()
                return
            else:
                yield from self._told(kind)

    def _header(self) -> Generator[None, None, str | None]:
        """Take what stands before a message. None, and nothing is taken, if the text does not begin with a header. Of
        an answer that ends within a header nothing is left."""
        while not self._over or self._text:
            at = self._text.find(MESSAGE, 0, LONGEST)
            if not self._text.startswith(BEGINS):
                if self._over or not any(one.startswith(self._text) for one in BEGINS):
                    self._text = "" if self._over and self._text.startswith("<|") else self._text
                    return None
            elif at >= 0:
                header, self._text = self._text[:at], self._text[at + len(MESSAGE) :]
                return header
            elif self._over:
                self._text = ""
            elif len(self._text) >= LONGEST:
                mark = next((one for one in STARTS if self._text.startswith(one)), "")
                self._text = self._text[len(mark) :]
                return None
            yield
        return None

    def _told(self, kind: str) -> Waiting:
        """Hand out a message's text, without white space before it, after an empty line if there was text before."""
        self._held = ""
        yield from self._space()
        self._held = "\n\n" if kind in self._kinds else ""
        mark = yield from self._until(kind, ENDS)
        if not mark and kind == "content" and not self.called and self._held.strip(" ") != "\n\n":
            self._out += [Piece(kind, self._held)] * bool(self._held)
        self._held = ""
        self._again(mark)

    def _body(self) -> Generator[None, None, str]:
        """Take a message's text."""
        while True:
            at, mark = min(((at, mark) for mark in ENDS if (at := self._text.find(mark)) >= 0), default=(-1, ""))
            if mark or self._over:
                body, self._text = (self._text[:at], self._text[at + len(mark) :]) if mark else (self._text, "")
                self._again(mark)
                return body
            yield

    def _again(self, mark: str) -> None:
        """Put back a mark that begins the next message."""
        if mark in STARTS:
            self._text = mark + self._text

    def _argue(self, name: str, body: str) -> bool:
        """Hand out a call. Returns False if the body holds no arguments that fit."""
        try:
            value = parsed_value(body.strip() or "{}")
        except NotJSON:
            return False
        return isinstance(value, dict) and self._take(name, json.dumps(value, ensure_ascii=False), 0)

    def _say(self, kind: str, text: str, hold: bool = True) -> None:
        before = len(self._out)
        super()._say(kind, text, hold)
        if len(self._out) > before:
            self._kinds.add(kind)


def with_thinking(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of an earlier turn for gpt-oss's template, which calls reasoning `thinking`. Beside a call it takes
    reasoning or text, so text before a call becomes part of the reasoning."""
    made = dict(message)
    thoughts = [made.pop("reasoning_content", None)]
    if made.get("tool_calls") and thoughts[0] and made.get("content"):
        thoughts.append(made["content"])
        made["content"] = ""
    thinking = "\n\n".join(filter(None, thoughts))
    return made | ({"thinking": thinking} if thinking else {})
