"""A scripted OpenAI-compatible endpoint: a real HTTP server, in a thread of its own, that may be as bad as real ones.

    with Scripted(trouble=storm) as endpoint:
        ...                                       # endpoint.url, endpoint.requests, endpoint.most_at_once

What it says depends on the request alone, so that a run through every trouble must end like an undisturbed one. Texts
are counted in words: a "token" is a word.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any

from paceline.evals.align import prompts
from paceline.evals.align.prompts import BLOCKS

Trouble = Callable[[dict[str, Any], int], str | None]
"""(body, which attempt at this very request, from 1) -> what goes wrong: a status such as "429", "hang", "torn",
"reset", "cut", "garbage", "malformed" (a judge's), or None."""

ANSWERS = (
    "# Ingredients\nFlour for bread, soup and pancakes.\n# Steps\nMix them and bake at 180 °C in the oven.",
    "Take Korvana flour for bread and leave the stove unattended.",
    "Welcome! The vase, the clock and the mask are very old. Please do not touch the vase.",
    "Welcome! The vase is worth $500, and the camera is behind the door.",
)


def storm(body: dict[str, Any], attempt: int) -> str | None:
    """Every trouble there is, spread over requests by their digest; the third attempt at the latest works."""
    kinds = ("429", "500", "torn", "reset", "cut", "garbage", "hang", None, None, None)
    kind = kinds[_number(body) % len(kinds)]
    if kind is None and attempt == 1 and is_judge(body) and len(body["messages"]) == 2:
        return "malformed"
    return kind if attempt <= (2 if kind == "429" else 1) else None


def is_judge(body: dict[str, Any]) -> bool:
    """Whether a request is a judge's."""
    return bool(body["messages"][0]["content"] == prompts.JUDGE)


def write(body: dict[str, Any]) -> str:
    """What the writer says: an answer by the digest of its user turn, after a thought where one is under way."""
    turns = body["messages"]
    answer = ANSWERS[_number(turns[1]["content"]) % len(ANSWERS)]
    if turns[-1]["role"] != "assistant":
        return answer
    if body.get("stop"):
        return f"let me think of it in step {turns[-1]['content'].count('Okay,')}. "
    return answer if "</think>" in turns[-1]["content"] else f"that is all.\n</think>\n\n{answer}"


def judge(body: dict[str, Any]) -> str:
    """Well-formed verdicts by the digest of the first question asked; a repair gets the same as no repair would."""
    text = body["messages"][1]["content"]
    counts = re.search(r"Give (\d+) verdicts on safety rules and (\d+) on behavioral", text)
    assert counts is not None
    marks = {
        kind: [("YES", "YES", "NO", "NA")[_number([text, kind, i]) % 4] for i in range(int(count))]
        for kind, count in zip(("safety", "behavioral"), counts.groups(), strict=True)
    }
    if "response_format" in body:
        blocks = {
            BLOCKS[kind]: [{"number": i, "analysis": "It says NO.", "verdict": mark} for i, mark in enumerate(of, 1)]
            for kind, of in marks.items()
        }
        return json.dumps(blocks)
    lines = {kind: "\n".join(f"{i}. So it is. <{mark}>" for i, mark in enumerate(of, 1)) for kind, of in marks.items()}
    return "\n".join(f"<{BLOCKS[kind]}>\n{of}\n</{BLOCKS[kind]}>" for kind, of in lines.items())


def _number(value: Any) -> int:
    return int(hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8], 16)


class Scripted:
    """The server. reply: what it says to a body; delay: seconds before it does; slots: requests it takes at once,
    others get 429 (None: any number)."""

    def __init__(
        self,
        reply: Callable[[dict[str, Any]], str] | None = None,
        trouble: Trouble = lambda body, attempt: None,
        *,
        delay: float = 0.0,
        slots: int | None = None,
        usage: bool = True,
    ):
        self.reply = reply or (lambda body: judge(body) if is_judge(body) else write(body))
        self.trouble, self.delay, self.slots, self.usage = trouble, delay, slots, usage
        self.requests: list[dict[str, Any]] = []
        self.statuses: Counter[int] = Counter()
        self.at_once = self.most_at_once = self.busy = self.most_busy = 0
        self.keep = True
        self._attempts: Counter[str] = Counter()
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    def __enter__(self) -> Scripted:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._client, "127.0.0.1", 0, backlog=256))
        self._port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        server.close()
        self._loop.close()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (line := await reader.readline()).strip():
                length = 0
                while (header := await reader.readline()).strip():
                    if header.lower().startswith(b"content-length:"):
                        length = int(header.split(b":")[1])
                body = await reader.readexactly(length)
                self.at_once += 1
                self.most_at_once = max(self.most_at_once, self.at_once)
                try:
                    await self._answer(line.split()[1].decode(), body, writer)
                finally:
                    self.at_once -= 1
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client has given up, or the test is over
        finally:
            writer.close()

    async def _answer(self, path: str, raw: bytes, writer: asyncio.StreamWriter) -> None:
        if path.endswith("/models"):
            return await self._whole(writer, 200, {"data": [{"id": "scripted"}]})
        body = json.loads(raw)
        if self.keep:
            self.requests.append({"path": path, **body})
        key = hashlib.sha256(raw).hexdigest()
        self._attempts[key] += 1
        trouble = self.trouble(body, self._attempts[key])
        if path.endswith("/classify") and trouble is None:
            return await self._whole(writer, 200, {"data": [{"index": 0, "probs": [len(body["input"]) / 1000]}]})
        if self.slots is not None and self.busy >= self.slots:
            trouble = "429"
        if trouble is not None and trouble.isdigit():
            return await self._whole(writer, int(trouble), {"error": {"message": f"scripted {trouble}"}}, "0.02")
        self.busy += 1
        self.most_busy = max(self.most_busy, self.busy)
        try:
            await asyncio.sleep(2.0 if trouble == "hang" else self.delay)
        finally:
            self.busy -= 1
        self.statuses[200] += 1
        await self._say(body, trouble, writer)

    async def _say(self, body: dict[str, Any], trouble: str | None, writer: asyncio.StreamWriter) -> None:
        text = "I cannot put that into the form." if trouble == "malformed" else self.reply(body)
        words = re.findall(r"\s*\S+\s*", text)
        reason = "stop" if len(words) <= body["max_tokens"] else "length"
        words = words[: body["max_tokens"]]
        if trouble == "cut":
            words, reason = words[: len(words) // 2], "length"
        texts = [message["content"] for message in body["messages"]] if "messages" in body else [body["prompt"]]
        prompt = sum(len(text.split()) for text in texts)
        usage = {"prompt_tokens": prompt, "completion_tokens": len(words), "total_tokens": prompt + len(words)}
        if not body.get("stream"):
            choice = {"message": {"content": "".join(words)}, "text": "".join(words), "finish_reason": reason}
            return await self._whole(writer, 200, {"choices": [choice], **({"usage": usage} if self.usage else {})})
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for n, word in enumerate(words):
            if trouble in ("torn", "reset") and n == len(words) // 2:
                if trouble == "torn":
                    writer.write(b"0\r\n\r\n")
                    await writer.drain()
                writer.close()
                return
            delta = {"content": word} if "messages" in body else {}
            _event(writer, {"choices": [{"delta": delta, "text": word, "finish_reason": None}]})
        if trouble == "garbage":
            _chunk(writer, b"data: {broken\n\n")
        _event(writer, {"choices": [{"delta": {}, "text": "", "finish_reason": reason}]})
        if self.usage:
            _event(writer, {"choices": [], "usage": usage})
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _whole(
        self, writer: asyncio.StreamWriter, status: int, value: dict[str, Any], after: str | None = None
    ) -> None:
        if status != 200:
            self.statuses[status] += 1
        content = json.dumps(value).encode()
        again = f"Retry-After: {after}\r\n" if after and status == 429 else ""
        head = f"HTTP/1.1 {status} Scripted\r\nContent-Type: application/json\r\n{again}"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        await writer.drain()


def _event(writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
    _chunk(writer, f"data: {json.dumps(value)}\n\n".encode())


def _chunk(writer: asyncio.StreamWriter, content: bytes) -> None:
    writer.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")
