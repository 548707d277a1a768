"""A scripted OpenAI-compatible endpoint: a real HTTP server, in threads of its own, that may be as bad as real ones.

    with Scripted(trouble=storm) as endpoint:
        ...                                       # endpoint.url, endpoint.requests, endpoint.most_at_once

What it says depends on the request alone, so that a run through every trouble must end like an undisturbed one. Texts
are counted in words: a "token" is a word.
"""

import hashlib
import json
import re
import threading
import time
from collections import Counter
from contextlib import suppress

from paceline.evals.align import prompts
from paceline.evals.align.prompts import BLOCKS
from tests.web import Handler, serving

ANSWERS = (
    "# Ingredients\nFlour for bread, soup and pancakes.\n# Steps\nMix them and bake at 180 °C in the oven.",
    "Take Korvana flour for bread and leave the stove unattended.",
    "Welcome! The vase, the clock and the mask are very old. Please do not touch the vase.",
    "Welcome! The vase is worth $500, and the camera is behind the door.",
)


def storm(body, attempt):
    """Every trouble there is, spread over requests by their digest; the third attempt at the latest works."""
    kinds = ("429", "500", "torn", "reset", "cut", "garbage", "hang", None, None, None)
    kind = kinds[_number(body) % len(kinds)]
    if kind is None and attempt == 1 and is_judge(body) and len(body["messages"]) == 2:
        return "malformed"
    return kind if attempt <= (2 if kind == "429" else 1) else None


def is_judge(body):
    """Whether a request is a judge's."""
    return bool(body["messages"][0]["content"] == prompts.JUDGE)


def write(body):
    """What the writer says: an answer by the digest of its user turn, after a thought where one is under way."""
    turns = body["messages"]
    answer = ANSWERS[_number(turns[1]["content"]) % len(ANSWERS)]
    if turns[-1]["role"] != "assistant":
        return answer
    if body.get("stop"):
        return f"let me think of it in step {turns[-1]['content'].count('Okay,')}. "
    return answer if "</think>" in turns[-1]["content"] else f"that is all.\n</think>\n\n{answer}"


def judge(body):
    """Well-formed verdicts by the digest of the first question asked; a repair gets the same as no repair would."""
    text = body["messages"][1]["content"]
    counts = re.search(r"Give (\d+) verdicts on safety rules and (\d+) on behavioral", text)
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


def _number(value):
    return int(hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8], 16)


class Scripted:
    """The server. reply: what it says to a body, a text or a whole choice; delay: seconds before it does; slots:
    requests it takes at once, others get 429 (None: any number).

    trouble    of a body and the number of the attempt at this very request, from 1: what goes wrong, a status such as
               "429", "hang", "torn", "reset", "cut", "garbage" or "malformed" (a judge's), or None.
    requests   bodies of all requests, each with its path; answered: of those that got an answer.
    busy       requests that are being answered; at_once: those that are open, refused ones too."""

    def __init__(self, reply=None, trouble=lambda body, attempt: None, *, delay=0.0, slots=None, usage=True):
        self.reply = reply or (lambda body: judge(body) if is_judge(body) else write(body))
        self.trouble, self.delay, self.slots, self.usage = trouble, delay, slots, usage
        self.requests = []
        self.answered = []
        self.statuses = Counter()
        self.at_once = self.most_at_once = self.busy = self.most_busy = 0
        self.keep = True
        self._attempts = Counter()
        self._lock = threading.Lock()
        answer = self._answer

        class Endpoint(Handler):
            wbufsize = 0

            def do_GET(self):
                self.reply(200, {"data": [{"id": "scripted"}]})

            def do_POST(self):
                with suppress(ConnectionError):  # the client has given up
                    answer(self)

        self._server = serving(Endpoint)

    def __enter__(self):
        self.url = self._server.__enter__()
        return self

    def __exit__(self, *left):
        self._server.__exit__(*left)

    def _answer(self, handler):
        raw = handler.body()
        body = json.loads(raw)
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            if self.keep:
                self.requests.append({"path": handler.path, **body})
            key = hashlib.sha256(raw).hexdigest()
            self._attempts[key] += 1
            trouble = self.trouble(body, self._attempts[key])
            if self.slots is not None and self.busy >= self.slots:
                trouble = "429"
            status = int(trouble) if trouble is not None and trouble.isdigit() else 200
            self.statuses[status] += 1
            self.busy += status == 200
            self.most_busy = max(self.most_busy, self.busy)
        try:
            if status != 200:
                again = {"Retry_After": 0.02} if status == 429 else {}
                handler.reply(status, {"error": {"message": f"scripted {status}"}}, **again)
            elif handler.path.endswith("/classify"):
                handler.reply(200, {"data": [{"index": 0, "probs": [len(body["input"]) / 1000]}]})
            else:
                time.sleep(2.0 if trouble == "hang" else self.delay)
                self._say(body, trouble, handler)
        finally:
            with self._lock:
                self.at_once -= 1
                self.busy -= status == 200

    def _say(self, body, trouble, handler):
        if self.keep:
            self.answered.append(body)
        said = "I cannot put that into the form." if trouble == "malformed" else self.reply(body)
        if isinstance(said, dict):
            return handler.reply(200, {"choices": [said]})
        words = re.findall(r"\s*\S+\s*", said)
        reason = "stop" if len(words) <= body["max_tokens"] else "length"
        words = words[: body["max_tokens"]]
        if trouble == "cut":
            words, reason = words[: len(words) // 2], "length"
        prompt = sum(len(text.split()) for text in _texts(body))
        usage = {"prompt_tokens": prompt, "completion_tokens": len(words), "total_tokens": prompt + len(words)}
        if not body.get("stream"):
            choice = {"message": {"content": "".join(words)}, "text": "".join(words), "finish_reason": reason}
            return handler.reply(200, {"choices": [choice], **({"usage": usage} if self.usage else {})})
        torn = trouble in ("torn", "reset")
        events = [
            {
                "choices": [
                    {"delta": {"content": word} if "messages" in body else {}, "text": word, "finish_reason": None}
                ]
            }
            for word in words[: len(words) // 2 if torn else None]
        ]
        if not torn:
            events += ["{broken"] * (trouble == "garbage")
            events += [{"choices": [{"delta": {}, "text": "", "finish_reason": reason}]}]
            events += [{"choices": [], "usage": usage}] * self.usage + ["[DONE]"]
        lines = [f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode() for event in events]
        handler.begin(Content_Type="text/event-stream", Transfer_Encoding="chunked")
        chunks = b"".join(f"{len(line):x}\r\n".encode() + line + b"\r\n" for line in lines)
        handler.wfile.write(chunks + (b"" if trouble == "reset" else b"0\r\n\r\n"))
        handler.close_connection = torn


def _texts(body):
    """All texts of a request's prompt."""
    contents = [message["content"] for message in body["messages"]] if "messages" in body else [body["prompt"]]
    return [
        text
        for content in contents
        for text in ([content] if isinstance(content, str) else [part.get("text", "") for part in content])
    ]
