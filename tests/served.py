"""A fake of a server with drafts: real HTTP, made-up times of rounds, and the counters that vLLM has at /metrics.

    with Served(seconds=lambda running: 0.004, accepted=(2, 0, 1), drafted=3) as server:
        ...                      # server.url, server.asked: bodies of the requests, server.headers: of all, pages too

Every answer is `words`, as many as max_tokens allows; a token is a word. A round of an answer takes seconds(requests
that are being answered) and brings one word and as many more as `accepted` says for it.
"""

import json
import threading
import time
from collections import Counter
from contextlib import suppress
from functools import partial

from tests.web import Handler, serving


class Served:
    """seconds: of a round, by the requests that run; accepted: drafted tokens accepted in the rounds, over and over,
    empty: it does not draft; fails: whether to answer a request, by its number, with status 500; told: what whole
    answers have beside their choices, and streams beside their usage; drafter: the counters name it, as ours do."""

    def __init__(
        self,
        engine="vllm",
        seconds=lambda running: 0.002,
        words=("the ", "cat ", "and ", "the ", "dog "),
        accepted=(),
        drafted=3,
        fails=lambda number: False,
        told=None,
        drafter="",
    ):
        self.engine, self.seconds, self.words, self.accepted, self.drafted = engine, seconds, words, accepted, drafted
        self.fails, self.told, self.drafter = fails, told or {}, drafter
        self.asked = []
        self.when = []
        self.headers = []
        self.running = self.most_running = 0
        self.counts = Counter()
        self._lock = threading.Lock()
        fake = self

        class Fake(Handler):
            wbufsize = 0

            def do_GET(self):
                fake.headers.append(dict(self.headers))
                if self.path == "/metrics":
                    self.reply(200, fake.metrics().encode(), "text/plain")
                elif self.path == "/version":
                    self.reply(200, {"version": "0.32.0"})
                elif self.path == "/v1/models":
                    listed = {"id": "fake", "owned_by": engine, "object": "model", "created": 0}
                    self.reply(200, {"data": [listed], "object": "list"})
                else:
                    self.reply(404, {})

            def do_POST(self):
                fake.headers.append(dict(self.headers))
                body = json.loads(self.body())
                with suppress(ConnectionError):
                    fake._answer(self, body)

        self._server = serving(Fake)

    def __enter__(self):
        self.url = self._server.__enter__()
        return self

    def __exit__(self, *left):
        self._server.__exit__(*left)

    def metrics(self):
        """/metrics in vLLM's words, under the engine's prefix."""
        name = f"{self.engine}:spec_decode_num_"
        lines = [f"{self.engine}:num_requests_running {self.running}.0"]
        lines += [f"{self.engine}:generation_tokens_total {self.counts['tokens']}.0"]
        lines += [f"{name}{what}_total {self.counts[what]}.0" for what in ("drafts", "draft_tokens", "accepted_tokens")]
        places = [self.counts[f"at {place}"] for place in range(self.drafted if self.accepted else 0)]
        lines += [f'{name}accepted_tokens_per_pos_total{{position="{p}"}} {n}.0' for p, n in enumerate(places)]
        for what in ("draft_tokens", "accepted_tokens") if self.drafter else ():
            labelled = f'{self.engine}:spec_decode_drafter_{what}_total{{drafter="{self.drafter}"}}'
            lines += [f"{labelled} {self.counts[what]}.0"]
        return "\n".join(lines) + "\n"

    def _answer(self, handler, body):
        with self._lock:
            self.asked.append(body)
            self.when.append(time.perf_counter())
            number = len(self.asked)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        try:
            if self.fails(number):
                end = partial(handler.reply, 500, {"error": {"message": "made up"}})
            elif not body.get("stream"):
                text = "".join(self.words[i % len(self.words)] for i in range(body["max_tokens"]))
                whole = {"index": 0, "message": {"content": text}, "text": text, "finish_reason": "length"}
                end = partial(handler.reply, 200, {"choices": [whole], **self.told})
            else:
                handler.begin(Content_Type="text/event-stream", Connection="close")
                handler.close_connection = True
                self._stream(handler, body)
                end = partial(handler.wfile.write, b"data: [DONE]\n\n")
        finally:
            with self._lock:
                self.running -= 1
        end()  # last: whoever has all of an answer may ask again at once

    def _stream(self, handler, body):
        done, rounds = 0, 0
        while done < body["max_tokens"]:
            time.sleep(self.seconds(self.running))
            drafts = bool(self.accepted) and done > 0 and body.get("draft") != "none"
            stood = self.accepted[rounds % len(self.accepted)] if drafts else 0
            stood = min(stood, body["max_tokens"] - done - 1)
            ids = [(done + i) % len(self.words) for i in range(1 + stood)]
            text = "".join(self.words[i] for i in ids)
            event = {"choices": [{"index": 0, "delta": {"content": text}, "text": text, "token_ids": ids}]}
            with self._lock:
                self.counts["tokens"] += len(ids)
                if drafts:
                    self.counts += Counter({"drafts": 1, "draft_tokens": self.drafted, "accepted_tokens": stood})
                    self.counts += Counter(f"at {place}" for place in range(stood))
            _event(handler, event)
            done, rounds = done + len(ids), rounds + drafts
        _event(handler, {"choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": "length"}]})
        usage = {"prompt_tokens": 5, "completion_tokens": done, "total_tokens": done}
        _event(handler, {"choices": [], "usage": usage, **self.told})


def _event(handler, value):
    handler.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
