"""Endpoint: an OpenAI-compatible server, or several of one model (vLLM, paceline's own, llama.cpp, a vendor's).

    urls, model = parse("http://a:8000/v1,http://b:8000/v1#Qwen/Qwen3-14B")
    reply = await Endpoint(urls, model, slots=64).complete(request)

A turn that goes on from a prefix needs the prefix to reach the model as it is. With a tokenizer at hand the prompt is
rendered here and goes to /completions; without one it goes to /chat/completions as an assistant message that the server
is to continue (`continue_final_message`, vLLM's name for it), and the server's template must not strip thoughts.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

import httpx2

from paceline.evals.align.backends.base import BackendError, Reply, Request
from paceline.evals.align.backends.hosts import Host, Hosts
from paceline.evals.align.backends.retry import CutShort, Passing, Retry, passes
from paceline.evals.align.backends.stream import Parts, read_stream, read_whole
from paceline.evals.align.thoughts import continued, opened
from paceline.evals.align.types import Call

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from paceline.target.tokenizer import Tokenizer

CONNECT_SECONDS = 10.0


class Endpoint:
    """A model behind HTTP.

    urls       base addresses, each up to and including /v1. slots: requests under way at once, over all of them.
    key        the API key; it is sent and never written anywhere.
    timeout    seconds without a byte before an attempt is given up.
    stream     ask for server-sent events; a server that cannot is asked for whole responses.
    tokenizer  renders prefixes and counts injected tokens."""

    def __init__(
        self,
        urls: list[str],
        model: str,
        *,
        key: str | None = None,
        slots: int = 8,
        timeout: float = 600.0,
        retry: Retry = Retry(),
        stream: bool = True,
        tokenizer: Tokenizer | None = None,
    ):
        self.label = model
        self.hosts, self.retry, self.stream, self.tokenizer = Hosts.of(urls), retry, stream, tokenizer
        self._slots = asyncio.Semaphore(slots)
        self._client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(timeout, connect=CONNECT_SECONDS, pool=None),
            limits=httpx2.Limits(max_connections=slots, max_keepalive_connections=slots),
        )

    async def complete(self, request: Request) -> Reply:
        began = perf_counter()
        rendered = "" if self.tokenizer is None else self.tokenizer.render_chat(request.messages)
        path, body = self._body(request, rendered)
        request = continued(request, rendered)

        async def attempt(number: int) -> Reply:
            async with self._slots:
                parts = await self._ask(await self.hosts.turn(), path, body)
            return self._reply(request, parts, number, perf_counter() - began, rendered)

        return await self.retry.run(attempt)

    async def close(self) -> None:
        await self._client.aclose()

    # One attempt --------------------------------------------------------------------------------------------------

    async def _ask(self, host: Host, path: str, body: dict[str, Any]) -> Parts:
        async with self._post(host, path, body) as response:
            if response.status_code != 200:
                await self._complain(host, response)
            if "text/event-stream" in response.headers.get("content-type", ""):
                return await read_stream(response.aiter_lines())
            return read_whole(await response.aread())

    @asynccontextmanager
    async def _post(self, host: Host, path: str, body: dict[str, Any]) -> AsyncIterator[httpx2.Response]:
        try:
            async with self._client.stream("POST", f"{host.url}/{path}", json=body) as response:
                yield response
        except httpx2.TimeoutException as error:
            raise Passing(f"{host.url} timed out ({type(error).__name__})") from None
        except httpx2.InvalidURL as error:
            raise BackendError(f"{host.url} is no address: {error}") from None
        except httpx2.HTTPError as error:
            raise Passing(f"{host.url} broke off: {error or type(error).__name__}") from None

    async def _complain(self, host: Host, response: httpx2.Response) -> None:
        """Raise what a status other than 200 means."""
        text = " ".join((await response.aread()).decode("utf-8", "replace").split())[:300]
        why = f"{host.url} answered {response.status_code}: {text}"
        if not passes(response.status_code):
            raise BackendError(why)
        after = _seconds(response.headers.get("retry-after"))
        if response.status_code == 429:
            self.hosts.rest(host, min(after or 0.0, self.retry.longest))
        raise Passing(why, after)

    def _body(self, request: Request, rendered: str) -> tuple[str, dict[str, Any]]:
        """Path and body of a request. rendered: its messages through the chat template, "" without a tokenizer."""
        body: dict[str, Any] = {"model": self.label, **request.seeded.told()}
        if request.stop:
            body["stop"] = list(request.stop)
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if request.schema is not None:
            named = {"name": "reply", "schema": request.schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        if request.prefix and rendered:
            # The template has written the beginning token already.
            prompt = rendered + continued(request, rendered).prefix
            return "completions", body | {"prompt": prompt, "add_special_tokens": False}
        messages = [dict(message) for message in request.messages]
        if request.prefix:
            messages.append({"role": "assistant", "content": request.prefix})
            body |= {"add_generation_prompt": False, "continue_final_message": True}
        return "chat/completions", body | {"messages": messages}

    def _reply(self, request: Request, parts: Parts, tries: int, seconds: float, rendered: str) -> Reply:
        usage = parts.usage or {}
        details = usage.get("prompt_tokens_details") or {}
        generated = usage.get("completion_tokens")
        call = Call(
            request.phase,
            parts.finish_reason or "",
            round(seconds, 6),
            prefilled=usage.get("prompt_tokens"),
            cached=details.get("cached_tokens"),
            injected=self._count(request.forced),
            generated=generated,
            tries=tries,
        )
        reply = Reply(_text(parts.text), call, _text(parts.reasoning), parts.logprobs, opened(rendered))
        if parts.finish_reason == "length" and generated is not None and generated < request.decoding.max_tokens:
            raise CutShort(reply)
        return reply

    def _count(self, text: str) -> int | None:
        if not text:
            return 0
        return None if self.tokenizer is None else len(self.tokenizer.encode_text(text))


async def find_model(url: str, key: str | None = None) -> str:
    """The model that a server offers; BackendError if there is none, or more than one to choose from."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        async with httpx2.AsyncClient(headers=headers, timeout=CONNECT_SECONDS) as client:
            response = await client.get(f"{url.rstrip('/')}/models")
            names = [str(one["id"]) for one in response.raise_for_status().json()["data"]]
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise BackendError(
            f"{url}/models cannot be read ({error or type(error).__name__}); is the server up? "
            "A model is named after a #: http://host:8000/v1#model"
        ) from None
    if len(names) != 1:
        offered = ", ".join(names) or "nothing"
        raise BackendError(f"{url} offers {offered}; name one after a #: {url}#model")
    return names[0]


def is_url(text: str) -> bool:
    """Whether a model is named by an address."""
    return text.startswith(("http://", "https://"))


def parse(spec: str) -> tuple[list[str], str]:
    """Addresses and the model's name, "" if it is not given, of "URL[,URL...][#model]"."""
    urls, _, model = spec.partition("#")
    return [url.strip() for url in urls.split(",") if url.strip()], model.strip()


def _text(pieces: list[str]) -> str:
    """Pieces joined; half a surrogate pair, which JSON may hold and no file can, becomes a question mark."""
    return "".join(pieces).encode("utf-8", "replace").decode()


def _seconds(text: str | None) -> float | None:
    """A Retry-After that is a number of seconds; dates are left to the back-off."""
    try:
        return max(float(text), 0.0) if text else None
    except ValueError:
        return None
