"""Running servers over HTTP: identify them, read counts of drafts from /metrics, and send requests under a load.

    server = Server.find("http://127.0.0.1:8000/v1")
    requests = read_requests("log.jsonl")
    answers = server.send([server.body(one, 128) for one in requests], concurrency=8)
    answers[0].times                    # seconds from the request to each delivery of tokens

vLLM, SGLang, llama.cpp and our own server are known by name; any other with OpenAI's API can be asked."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from hashlib import sha256
from itertools import chain, islice, zip_longest
from math import isfinite
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Self
from urllib.parse import urlsplit

from paceline.errors import PacelineError, printable
from paceline.jsonl import loads
from paceline.logs.bodies import ConversationError, Message
from paceline.logs.conversations import Reading, read
from paceline.logs.formats import Conversation
from paceline.net.client import Retry, find_models, get, only_model, parse, up_to_v1
from paceline.net.completion import Completion, CompletionError
from paceline.net.endpoint import LOOK_SECONDS, Answer, Body, Remote, answer_all, check_addresses
from paceline.net.keys import Keys

VERSIONS = {"/version": "version", "/server_info": "version", "/get_server_info": "version", "/props": "build_info"}
"""Where servers say their version, and under which key."""
METRICS = {
    "num_requests_running": "running", "num_running_reqs": "running", "requests_processing": "running",
    "generation_tokens": "tokens", "tokens_predicted": "tokens", "spec_decode_num_drafts": "drafts",
    "spec_decode_num_draft_tokens": "drafted", "spec_decode_num_accepted_tokens": "accepted",
    "spec_accept_length": "length",
}  # fmt: skip
"""Fields of Drafting by the names of metrics of vLLM, ours, llama.cpp and SGLang, without prefix and `_total`."""
BY_POSITION = "spec_decode_num_accepted_tokens_per_pos"
BY_DRAFTER = {"spec_decode_drafter_draft_tokens": 0, "spec_decode_drafter_accepted_tokens": 1}
COUNTS = ("tokens", "drafts", "drafted", "accepted")
ARRIVED = ("time", "timestamp", "created", "created_at", "start_time", "startTime")
"""Keys of a record that say when a request came, or for `serve --log` when it ended."""
MILLISECONDS_FROM = 1e11  # Larger times since 1970 are in milliseconds.
AT_ONCE = 1 << 16  # No limit on requests at once: the caller decides.
LATEST = 1e15  # Numbers from here on, and NaN, are no times.


@dataclass(frozen=True)
class Drafting:
    """Counts of drafts in /metrics, since the server started or between two readings.

    engine       vllm, sglang, llamacpp, paceline; "" if no metric has a known name.
    running      requests in the batch now; tokens: tokens of answers.
    drafts       rounds of requests with a draft; drafted, accepted: tokens.
    by_position  accepted tokens at each position of a draft.
    by_drafter   (drafted, accepted) of each drafter, from our server.
    length       mean tokens of a round, the target's own included, if the server reports no counts (SGLang)."""

    engine: str = ""
    running: float = 0.0
    tokens: float = 0.0
    drafts: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    by_position: Sequence[float] = ()
    by_drafter: Mapping[str, Sequence[float]] = field(default_factory=dict)
    length: float | None = None

    @property
    def round_tokens(self) -> float | None:
        """Mean tokens of a round with a draft, the target's own included; None if unknown."""
        return 1 + self.accepted / self.drafts if self.drafts else self.length

    @property
    def survival(self) -> list[float]:
        """Share of the drafts whose token at each position was accepted."""
        return [count / self.drafts for count in self.by_position] if self.drafts else []

    def since(self, before: Drafting) -> Drafting:
        """The counts between an earlier reading and this one."""
        if any(getattr(self, name) < getattr(before, name) for name in COUNTS):
            return self  # The server was restarted, and counts from 0.
        places = zip_longest(self.by_position, before.by_position, fillvalue=0.0)
        moved: dict[str, Any] = {name: getattr(self, name) - getattr(before, name) for name in COUNTS}
        drafters = {
            name: [now - then for now, then in zip(counts, before.by_drafter.get(name, (0, 0)), strict=True)]
            for name, counts in self.by_drafter.items()
        }
        return replace(self, by_position=[now - then for now, then in places], by_drafter=drafters, **moved)

    def counts(self) -> dict[str, int]:
        """Counts by name: drafts, drafted and accepted tokens, and both by position and drafter;
        empty without drafts."""
        if not self.drafts:
            return {}
        found = {name: int(getattr(self, name)) for name in ("drafts", "drafted", "accepted")}
        found |= {f"accepted_{place}": int(count) for place, count in enumerate(self.by_position)}
        for name, (drafted, accepted) in self.by_drafter.items():
            found |= {f"drafted by {name}": int(drafted), f"accepted by {name}": int(accepted)}
        return found

    @classmethod
    def of_answers(cls, answers: Sequence[object]) -> Drafting | None:
        """The sums of these answers' own counts; None if any answer has none.

        If a server does not count rounds with a draft (llama.cpp), all its rounds count."""
        counted = [{"num_spec_steps": one.rounds, **one.speculation} for one in answers if isinstance(one, Completion)]
        if len(counted) < len(answers) or not all("num_draft_tokens" in one for one in counted):
            return None
        names = {"drafts": "num_spec_steps", "drafted": "num_draft_tokens", "accepted": "num_accepted_draft_tokens"}
        sums: dict[str, Any] = {name: sum(one.get(theirs) or 0 for one in counted) for name, theirs in names.items()}
        histograms = [one.get("acceptance_histogram") or () for one in counted]
        places = range(1, max(map(len, histograms), default=0))
        drafters: dict[str, list[float]] = {}
        for name, counts in chain.from_iterable(one.get("by_drafter", {}).items() for one in counted):
            drafters[name] = [a + b for a, b in zip(drafters.get(name, (0, 0)), counts, strict=True)]
        by_position = [sum(sum(counts[place:]) for counts in histograms) for place in places]
        return cls(by_position=by_position, by_drafter=drafters, **sums)

    @classmethod
    def read(cls, url: str, key: str | None = None) -> Drafting | None:
        """Read a server's counts; None if it has no /metrics. Raises CompletionError if they cannot be read."""
        page = get(url, "/metrics", key)
        try:
            return None if page is None else cls.parse(page.decode("utf-8", "replace"))
        except (ValueError, KeyError, IndexError) as error:
            raise CompletionError(f"/metrics of {url} is not in Prometheus' text format: {str(error)[:200]}") from None

    @classmethod
    def parse(cls, text: str) -> Drafting:
        """Parse a page in Prometheus' text format. Counts of several engines or ranks are summed."""
        from prometheus_client.parser import text_string_to_metric_families

        found: dict[str, Any] = {}
        places: dict[int, float] = {}
        drafters: dict[str, list[float]] = {}
        for sample in chain.from_iterable(family.samples for family in text_string_to_metric_families(text)):
            prefix, _, name = sample.name.removesuffix("_total").partition(":")
            if not isfinite(sample.value) or not prefix.isidentifier():
                continue
            if name == BY_POSITION:
                place = int(sample.labels["position"])
                places[place] = places.get(place, 0.0) + sample.value
            elif name in BY_DRAFTER:
                drafters.setdefault(printable(sample.labels["drafter"]), [0.0, 0.0])[BY_DRAFTER[name]] += sample.value
            elif what := METRICS.get(name):
                before = found.get(what, 0.0)
                found[what] = max(before, sample.value) if what == "length" else before + sample.value
                found["engine"] = prefix
        return cls(by_position=[places[place] for place in sorted(places)], by_drafter=drafters, **found)


class Server(Remote):
    """A model of a running server. engine: as in Drafting; version: "" if unknown. A failed request is not tried again,
    because a load generator counts it."""

    def __init__(self, url: str, model: str, engine: str = "", version: str = "", key: str | None = None):
        super().__init__(f"{url}#{model}", key=key, slots=AT_ONCE, retry=Retry(tries=1), name=urlsplit(url).netloc)
        self.facts = {"url": url, "model": model, "engine": engine, "version": version}
        self.engine = engine

    @classmethod
    def find(cls, spec: str, keys: Keys = Keys()) -> Self:
        """Find the server at "URL[#model]". Raises CompletionError if it cannot be reached or offers several models.

        keys  options that choose its key."""
        urls, model = parse(spec)
        check_addresses(urls)
        if len(urls) != 1:
            raise PacelineError(f"{spec!r} is no address of one server, such as http://127.0.0.1:8000/v1")
        url = up_to_v1(urls[0])
        key = keys.of(url)
        owners = asyncio.run(find_models(url, key))
        model = model or only_model(url, owners)
        return cls(url, model, owners.get(model, ""), _version(url, key), key)

    def drafting(self) -> Drafting | None:
        """Read its counts of drafts; None if it has no /metrics."""
        return Drafting.read(self.url, self.key)

    def body(self, request: Request, max_tokens: int, **more: Any) -> dict[str, Any]:
        """The body that asks for a stream of at most `max_tokens` tokens, greedy unless `more` says otherwise."""
        return {**request.body(), "max_tokens": max_tokens, "temperature": 0.0, **self.streaming, **more}

    @property
    def streaming(self) -> dict[str, Any]:
        """Fields that ask for a stream, with token ids if the server has them."""
        ids = {"return_token_ids": True} if self.engine in ("vllm", "paceline") else {}
        return {"stream": True, "stream_options": {"include_usage": True}, **ids}

    def send(
        self, bodies: Sequence[Body], concurrency: int = 1, due: Sequence[float] | None = None,
        stopped: Callable[[], bool] = lambda: False, began: float | None = None,
    ) -> list[Answer]:  # fmt: skip
        """Answer each body as `endpoint.answer_all`, over new connections."""

        async def sent() -> list[Answer]:
            try:
                return await answer_all(self.complete, bodies, concurrency, stopped, due, began)
            finally:
                await self.aclose()

        return asyncio.run(sent())


def _version(url: str, key: str | None) -> str:
    for path, name in VERSIONS.items():
        with suppress(CompletionError, ValueError, AttributeError):
            if said := loads(get(url, path, key) or b"{}").get(name):
                return printable(said)[:80]
    return ""


@dataclass(frozen=True)
class Request:
    """A request: `messages` with the `tools` that may be called, or a `prompt` as the model reads it, in token ids or
    as a text. length: tokens of the logged answer, 0: unknown; at: its time, in seconds since any moment, or None."""

    id: str
    messages: Sequence[Message] = ()
    prompt: Sequence[int] | str = ()
    tools: Sequence[Mapping[str, Any]] = ()
    length: int = 0
    at: float | None = None

    def body(self) -> dict[str, Any]:
        """A body with its prompt and tools."""
        messages = [{key: value for key, value in one.items() if key != "missing"} for one in self.messages]
        raw = self.prompt if isinstance(self.prompt, str) else list(self.prompt)
        prompt: dict[str, Any] = {"messages": messages} if messages else {"prompt": raw}
        return prompt | ({"tools": list(self.tools)} if self.tools else {})


def read_requests(
    path: str | Path, ignore: Collection[str] = (), limit: int | None = None, reading: Reading | None = None
) -> list[Request]:
    """The requests of a log or of a file of prompts. Raises ConversationError.

    ignore, reading  as for `conversations.read_trace`."""
    reading = reading or Reading()
    every = (requests_of(one, str(n)) for n, one in enumerate(read(path, ignore=ignore, reading=reading), 1))
    found = list(islice(chain.from_iterable(every), limit))
    reading.check_skipped()
    if not found:
        raise ConversationError(f"{path} holds no prompt that could be asked")
    return found


def requests_of(one: Conversation, id: str) -> Iterator[Request]:
    """Yield the requests of a conversation: a request for each answer, or its prompt alone; none for a plain text."""
    at = _arrival(one.record)
    if one.tokens is not None:
        if one.tokens[0]:
            yield Request(id, prompt=one.tokens[0], length=len(one.tokens[1]), at=at)
    elif list(one.answers[:1]) == [0]:
        return  # A record of an answer alone: its prompt has another record.
    elif one.is_rendered:
        yield Request(id, prompt=one.messages[0]["content"], at=at)
    elif one.answers:
        for turn, answer in enumerate(one.answers):
            yield Request(f"{id}.{turn}" if turn else id, one.messages[:answer], tools=one.tools, at=at)
    elif one.first_prompt:
        yield Request(id, one.first_prompt, tools=one.tools, at=at)


def fingerprint(requests: Sequence[Request]) -> str:
    """16 hex digits of SHA-256 over prompts and times. Equal ones mean equal requests."""
    parts = [(one.id, list(one.messages), list(one.prompt), one.at, *one.tools) for one in requests]
    return sha256(repr(parts).encode()).hexdigest()[:16]


def _arrival(record: Mapping[str, Any]) -> float | None:
    """Seconds of a record's time, a number or a text in ISO 8601."""
    for key in ARRIVED:
        value = record.get(key)
        if isinstance(value, str):
            with suppress(ValueError, OverflowError):
                return datetime.fromisoformat(value).timestamp()
        elif isinstance(value, (int, float)) and abs(value) < LATEST:
            took = record.get("seconds") if key == "time" else 0.0  # A line of `serve --log` has its end's time.
            late = took if isinstance(took, (int, float)) and 0 <= took < LATEST else 0.0
            return (value / 1000 if value > MILLISECONDS_FROM else value) - late
    return None


class Senders:
    """`Server.send` from several processes, so that no client is slower than the server; 1: from this process.

        with Senders(2) as senders:
            answers, busy = senders.send(server, bodies, concurrency=64)

    The processes take requests in turn, and share the number under way."""

    def __init__(self, processes: int = 1):
        context = multiprocessing.get_context("spawn")  # A fork would copy a progress bar's thread.
        self._stop = context.Event()
        many = processes if processes > 1 else 0
        self._pools = [ProcessPoolExecutor(1, context, _begin, (self._stop,)) for _ in range(many)]
        for ready in [pool.submit(perf_counter) for pool in self._pools]:
            ready.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)

    def send(
        self, server: Server, bodies: Sequence[Body], concurrency: int = 1,
        due: Sequence[float] | None = None, stopped: Callable[[], bool] = lambda: False,
    ) -> tuple[list[Answer], float]:  # fmt: skip
        """Returns the answers in the order of their requests, and the share of a core that the busiest process used."""
        pools = self._pools[:concurrency]
        asked = server.url, server.model, server.key
        if len(pools) < 2:
            return _sent(asked, bodies, concurrency, due, stopped, None)
        self._stop.clear()
        size, began = len(pools), perf_counter()
        parts = [
            pool.submit(
                _sent, asked, bodies[i::size], len(range(i, concurrency, size)), due and due[i::size], None, began
            )
            for i, pool in enumerate(pools)
        ]  # fmt: skip
        while wait(parts, LOOK_SECONDS)[1]:
            if stopped():
                self._stop.set()
        answers: list[Answer] = [None] * len(bodies)
        for i, part in enumerate(parts):
            answers[i::size] = part.result()[0]
        return answers, max(part.result()[1] for part in parts)


_stop: Any
"""In a process of `Senders`: an event that ends its sending."""


def _begin(stop: Any) -> None:
    global _stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Only the parent reacts to Ctrl-C.
    _stop = stop


def _sent(
    asked: tuple[str, str, str | None], bodies: Sequence[Body], concurrency: int, due: Sequence[float] | None,
    stopped: Callable[[], bool] | None, began: float | None,
) -> tuple[list[Answer], float]:  # fmt: skip
    """Send bodies to a server (url, model, key). Returns the answers, and the share of a core that this process used.
    stopped None: the event of `_begin` decides."""
    used, since = process_time(), perf_counter()
    url, model, key = asked
    answers = Server(url, model, key=key).send(bodies, concurrency, due, stopped or _stop.is_set, began)
    return answers, (process_time() - used) / (perf_counter() - since)
