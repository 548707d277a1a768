"""Completions from OpenAI-compatible servers: vLLM, SGLang, llama.cpp, paceline's own, a vendor's.

    urls, model = parse("http://a:8000/v1,http://b:8000/v1#Qwen/Qwen3-14B")
    async with Client(urls, slots=64) as client:
        completion = await client.complete({"model": model, "messages": messages, "max_tokens": 100})

Requests go to the servers in turn. Timeouts, broken connections, torn streams and the statuses 408, 409, 425, 429 and
5xx may pass: the request is tried again after a jittered, exponentially growing pause, and not before Retry-After.
Other 4xx are the request's own fault. A server that answered 429 gets no request until its Retry-After is over."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from ipaddress import ip_address
from itertools import count
from pathlib import Path
from random import uniform
from time import monotonic, perf_counter
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2
import openai

from paceline.errors import PacelineError, printable
from paceline.net.completion import Completion, CompletionError, Passing

T = TypeVar("T")
CONNECT_SECONDS, LIST_SECONDS = 10.0, 60.0
OPENAI = "https://api.openai.com/"
UNREADABLE = (AttributeError, TypeError, KeyError, ValueError, RecursionError)  # JSON of another shape causes these.
PASSING = frozenset({408, 409, 425, 429})
SHORT_TRIES = 3
"""Attempts at a completion that ended before its budget: a server also does that at the end of its context."""
MOST_BYTES = 1 << 26  # Most bytes of any answer.
MOST_SECONDS = 4 * 3600.0  # Most seconds of an attempt, streams included.
PAGE_BYTES, PAGE_SECONDS = 16 << 20, 60.0  # Limits of a page such as /metrics.


class _CutShort(Passing):
    """A completion was cut off before its budget was spent. It is taken if further tries end so too."""

    def __init__(self, partial: Completion):
        super().__init__("the completion was cut off before its budget was spent")
        self.partial = partial


@dataclass(frozen=True)
class Retry:
    """tries: most attempts; base, longest: seconds of the first and the longest pause."""

    tries: int = 8
    base: float = 0.5
    longest: float = 30.0

    async def run(self, attempt: Callable[[int], Awaitable[T]]) -> T:
        """Call attempt(number), from 1, until it works.
        Returns its result; raises CompletionError after the last try."""
        for number in count(1):
            try:
                return await attempt(number)
            except _CutShort as error:
                if number >= min(SHORT_TRIES, self.tries):
                    return error.partial  # type: ignore[return-value]
                asked = 0.0
            except Passing as error:
                if number >= self.tries:
                    raise CompletionError(f"{error}; given up after {number} tries") from None
                asked = error.after
            await asyncio.sleep(uniform(0, min(self.longest, self.base * 2 ** (number - 1))) + min(asked, self.longest))
        raise AssertionError("the loop has no end")


@dataclass
class _Host:
    """A server. free_at: when it may be asked again (time.monotonic)."""

    url: str
    api: openai.AsyncOpenAI
    free_at: float = 0.0


class Client:
    """A model behind one server or several.

    urls     base addresses, each up to and including /v1; slots: most requests under way, over all servers.
    key      the API key, which is sent and never written anywhere.
    timeout  seconds without a byte after which an attempt is given up."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        key: str | None = None,
        slots: int = 8,
        timeout: float = 600.0,
        retry: Retry = Retry(),
    ):
        self.retry = retry
        self._slots = asyncio.Semaphore(slots)
        self._http = _http(key, timeout, slots)
        self._hosts = [_Host(url.rstrip("/"), _api(url, self._http)) for url in urls]
        self._next = 0

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def complete(self, body: dict[str, Any]) -> Completion:
        """Ask for a completion. body: has "messages" or a "prompt"; "stream" asks for events, but a whole answer is
        read too. Raises CompletionError."""

        async def attempt(number: int) -> Completion:
            async with self._slots:
                completion = await self._ask(await self._turn(), dict(body))
            completion.tries = number
            spent = completion.usage.get("completion_tokens")
            if completion.finish_reason == "length" and spent is not None and spent < body.get("max_tokens", 0):
                raise _CutShort(completion)
            return completion

        return await self.retry.run(attempt)

    async def post(self, body: dict[str, Any]) -> Any:
        """Post `body` to the first server's own address. Returns the JSON of its answer. Raises CompletionError."""
        host = self._hosts[0]

        async def attempt(number: int) -> Any:
            async with self._slots, self._mapped(host):
                return await host.api.post(host.url, body=body, cast_to=object)

        return await self.retry.run(attempt)

    # One attempt ------------------------------------------------------------------------------------------------------

    async def _turn(self) -> _Host:
        """The next server that is not resting. Waits if all rest."""
        while True:
            now = monotonic()
            for offset in range(len(self._hosts)):
                host = self._hosts[(self._next + offset) % len(self._hosts)]
                if host.free_at <= now:
                    self._next = (self._next + offset + 1) % len(self._hosts)
                    return host
            await asyncio.sleep(max(min(host.free_at for host in self._hosts) - now, 0.01))

    async def _ask(self, host: _Host, body: dict[str, Any]) -> Completion:
        of = host.api.chat.completions if "messages" in body else host.api.completions
        asked = {key: body.pop(key) for key in ("model", "messages", "prompt", "stream") if key in body}
        began = perf_counter()
        async with (
            self._mapped(host),
            of.with_streaming_response.create(**asked, extra_body=body) as response,
        ):
            completion = await _read(response, began)
        if not completion.finish_reason:
            raise Passing(f"{host.url}: the answer was torn, it ended without a finish_reason")
        return completion

    @asynccontextmanager
    async def _mapped(self, host: _Host) -> AsyncIterator[None]:
        """Context that turns errors which may pass into Passing, and others, and MOST_SECONDS, into CompletionError."""
        try:
            async with asyncio.timeout(MOST_SECONDS):
                yield
        except TimeoutError:
            raise CompletionError(f"{host.url} did not come to an end within {MOST_SECONDS / 3600:g} hours") from None
        except openai.APIStatusError as error:
            why = f"{host.url} answered {error.status_code}: {printable(error.response.text[:4096])[:300]}"
            if error.status_code not in PASSING and error.status_code < 500:
                raise CompletionError(why) from None
            after = _seconds(error.response.headers.get("retry-after"))
            if error.status_code == 429:
                host.free_at = max(host.free_at, monotonic() + min(after, self.retry.longest))
            raise Passing(why, after) from None
        except (openai.APITimeoutError, httpx2.TimeoutException):
            raise Passing(f"{host.url} timed out") from None
        except httpx2.InvalidURL as error:
            raise CompletionError(f"{host.url} is no address: {error}") from None
        except (openai.APIError, httpx2.HTTPError) as error:
            raise Passing(f"{host.url} broke off: {_cause(error)}") from None
        except (json.JSONDecodeError, RecursionError):
            raise Passing(f"{host.url} sent what is not JSON") from None


async def find_model(url: str, key: str | None = None) -> str:
    """The only model that a server offers. Raises CompletionError if it offers none or several."""
    return only_model(url, await find_models(url, key))


def only_model(url: str, names: Iterable[str]) -> str:
    """The only name in `names`. Raises CompletionError if there are none or several."""
    every = list(names)
    if len(every) != 1:
        raise CompletionError(f"{url} offers {', '.join(every) or 'nothing'}; name one after a #: {url}#model")
    return every[0]


async def find_models(url: str, key: str | None = None) -> dict[str, str]:
    """A server's models, each with its owner, where servers put their own name. Raises CompletionError."""
    async with _http(key, CONNECT_SECONDS) as http:
        try:
            async with asyncio.timeout(LIST_SECONDS):
                models = [model async for model in _api(url, http).models.list()]
            return {model.id + "": getattr(model, "owned_by", None) or "" for model in models}
        except (*UNREADABLE, openai.OpenAIError, httpx2.InvalidURL, TimeoutError) as error:
            how = "; a model is named after a #: http://host:8000/v1#model"
            raise CompletionError(_unread(url, f"{url}/models", error) + how) from None


def get(url: str, path: str, key: str | None = None) -> bytes | None:
    """Read the page at `path` beside /v1; None unless its status is 200. Raises CompletionError if the server does not
    answer, and for pages beyond PAGE_BYTES or PAGE_SECONDS."""
    address, page, began = url.rstrip("/").removesuffix("/v1") + path, bytearray(), perf_counter()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx2.stream("GET", address, headers=headers, timeout=CONNECT_SECONDS, verify=_tls()) as response:
            for piece in response.iter_bytes(1 << 16):
                page += piece
                if len(page) > PAGE_BYTES or perf_counter() - began > PAGE_SECONDS:
                    raise CompletionError(f"{address} is longer than {PAGE_BYTES >> 20} MiB, or does not end")
            return bytes(page) if response.status_code == 200 else None
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise CompletionError(_unread(url, address, error)) from None


def _unread(url: str, page: str, error: Exception) -> str:
    """Message why a page of the server at `url` cannot be read."""
    if not is_url(url):
        return f"{url!r} is no address of a server: write http://HOST:PORT or https://HOST"
    return f"{page} cannot be read ({_cause(error)}); is the server up?"


def is_url(text: str) -> bool:
    """Whether a text is a URL of HTTP."""
    return text.startswith(("http://", "https://"))


def parse(spec: str) -> tuple[list[str], str]:
    """Split "URL[,URL...][#model]" into addresses and the model's name, which may be ""."""
    urls, _, model = spec.partition("#")
    return [url.strip() for url in urls.split(",") if url.strip()], model.strip()


def up_to_v1(spec: str) -> str:
    """An address "URL[#model]" that may lack its /v1, with it."""
    url, hash, model = spec.partition("#")
    return f"{url.rstrip('/').removesuffix('/v1')}/v1{hash}{model}"


def api_key(
    spec: str, variable: str | None = None, file: str | Path | None = None, *, over_http: bool = False
) -> str | None:
    """Read the API key for the servers of "URL[,URL...][#model]" from an environment variable or a file.

    Without either, only OpenAI's own servers get a key, OPENAI_API_KEY, by https.

    Raises PacelineError if the named place holds no key, or if the key would go to another machine by plain http,
    unless `over_http`."""
    urls = parse(spec)[0]
    if variable is None and file is None:
        return os.environ.get("OPENAI_API_KEY") if all(f"{url}/".startswith(OPENAI) for url in urls) else None
    if variable is not None and file is not None:
        raise PacelineError("give the API key by --api-key-env or by --api-key-file, one of the two")
    where, key = str(file or variable), _read_key(file) if file else os.environ.get(variable or "", "").strip()
    if not key:
        what = "is empty" if file is not None else "is not in the environment"
        raise PacelineError(f"{where}, which was to hold the API key, {what}")
    if not (key.isascii() and key.isprintable()):
        raise PacelineError(f"{where} holds no API key: it has characters that no key has")
    if not over_http and (open_ := next((url for url in urls if not _is_private(url)), None)):
        raise PacelineError(
            f"the API key would go to {open_} over plain http, where all on the way can read it: use https, or allow "
            "it by --key-over-http"
        )
    return key


def _read_key(file: str | Path) -> str:
    try:
        return Path(file).expanduser().read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise PacelineError(f"the API key's file {file} cannot be read: {error}") from None


def _is_private(url: str) -> bool:
    """Whether requests to a server are private: it is asked by https, or runs on this machine."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    with suppress(ValueError):
        return parts.scheme == "https" or ip_address(host).is_loopback
    return parts.scheme == "https" or host == "localhost"


_tls = cache(httpx2.create_ssl_context)  # Cached, because it takes tens of milliseconds and all clients share it.


def _http(key: str | None, timeout: float, slots: int = 1) -> httpx2.AsyncClient:
    """Make the HTTP client. It sends `key` or no key, and reads at most MOST_BYTES of an answer."""

    async def authorise(request: httpx2.Request) -> None:
        request.headers.pop("Authorization", None)
        if key:
            request.headers["Authorization"] = f"Bearer {key}"

    async def bound(response: httpx2.Response) -> None:
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        if "Content-Encoding" in response.headers:
            raise CompletionError(f"{response.url.host} compresses its answer, which nobody asked for")
        response.stream = _Bounded(response.stream, f"the answer of {response.url.host}")

    return httpx2.AsyncClient(
        headers={"Accept-Encoding": "identity"},  # Packed, a few bytes may expand to any number.
        verify=_tls(),
        timeout=httpx2.Timeout(timeout, connect=CONNECT_SECONDS, pool=None),
        limits=httpx2.Limits(max_connections=slots, max_keepalive_connections=slots),
        follow_redirects=False,  # A redirect would take the key along.
        event_hooks={"request": [authorise], "response": [bound]},
    )


class _Bounded(httpx2.AsyncByteStream):
    """The bytes of an answer. Raises CompletionError beyond MOST_BYTES."""

    def __init__(self, inner: httpx2.AsyncByteStream, what: str):
        self.inner, self.what = inner, what

    async def __aiter__(self) -> AsyncIterator[bytes]:
        count = 0
        async for piece in self.inner:
            if (count := count + len(piece)) > MOST_BYTES:
                raise CompletionError(f"{self.what} is longer than {MOST_BYTES >> 20} MiB")
            yield piece

    async def aclose(self) -> None:
        await self.inner.aclose()


def _api(url: str, http: httpx2.AsyncClient) -> openai.AsyncOpenAI:
    """The client of a server. It sends nothing of the environment's settings for OpenAI's own servers."""
    unsent: Any = {"OpenAI-Organization": openai.Omit(), "OpenAI-Project": openai.Omit()}
    api = openai.AsyncOpenAI(
        base_url=url.rstrip("/"), api_key="none", max_retries=0, http_client=http, default_headers=unsent
    )
    api._custom_headers = unsent  # This drops OPENAI_CUSTOM_HEADERS.
    return api


async def _read(response: Any, began: float) -> Completion:
    """Read a response of openai, whole or as events. began: when it was asked for (time.perf_counter). Raises Passing
    if it is no completion."""
    completion = Completion(began=began)
    try:
        if "text/event-stream" in response.headers.get("content-type", ""):
            completion.streamed = True
            async for event in await response.parse():
                completion.take(event.to_dict(warnings=False))
        else:
            completion.take(await response.json())
    except UNREADABLE as error:
        raise Passing(f"the server sent what is not a completion: {error}") from None
    return completion


def _cause(error: BaseException) -> str:
    """An error in words. openai's "Connection error." hides the reason in its cause."""
    inner = error.__cause__ if isinstance(error, openai.APIConnectionError) and error.__cause__ else error
    return str(inner) or type(inner).__name__


def _seconds(text: str | None) -> float:
    """Seconds of a Retry-After; 0 for anything else, such as a date, which is left to the back-off."""
    try:
        seconds = float(text or 0.0)
    except ValueError:
        return 0.0
    return seconds if seconds > 0 else 0.0  # NaN gives 0 too.
