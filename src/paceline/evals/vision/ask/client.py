"""Requests to an OpenAI-compatible server: tried again when it is busy.

async with Client("http://localhost:8000/v1", "NAME", options) as client:
    reply = await client.ask(messages)
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Any

import httpx2

from paceline.errors import PacelineError

TRIES = 5
WAIT = 0.5
"""Seconds before the second try; twice as long before each later one."""
TOP_TOKENS = 20
"""Likeliest tokens asked for where probabilities are scores."""


@dataclass(frozen=True)
class Reply:
    text: str
    finish: str
    tops: list[dict[str, Any]]
    """The first token's likeliest, {"token", "logprob"}; empty if the server tells none."""
    prompt_tokens: int
    tokens: int


class Client:
    def __init__(self, url: str, model: str, *, max_tokens: int, timeout: float, key: str = "", logprobs: bool = False):
        self._url, self._logprobs = url.rstrip("/"), logprobs
        self._body = {"model": model, "temperature": 0, "max_tokens": max_tokens}
        secret = os.environ.get(key, "")
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        self._http = httpx2.AsyncClient(headers=headers, timeout=timeout)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(self, messages: list[dict[str, Any]]) -> Reply:
        """Raises PacelineError with the server's reason if it refuses or stays busy."""
        body: dict[str, Any] = {**self._body, "messages": messages}
        if self._logprobs:
            body |= {"logprobs": True, "top_logprobs": TOP_TOKENS}
        reason = ""
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(WAIT * 2 ** (attempt - 1))
            try:
                response = await self._http.post(f"{self._url}/chat/completions", json=body)
            except httpx2.HTTPError as error:
                reason = f"{type(error).__name__}: {error}"
                continue
            if response.status_code == 200:
                return _reply(response)
            reason = f"status {response.status_code}: {' '.join(response.text.split())[:200]}"
            if response.status_code < 500 and response.status_code not in (408, 409, 429):
                break
        raise PacelineError(f"{self._url} does not answer: {reason}")


def _reply(response: httpx2.Response) -> Reply:
    try:
        answer = response.json()
        choice, usage = answer["choices"][0], answer.get("usage") or {}
        tokens = (choice.get("logprobs") or {}).get("content") or []
        tops = tokens[0].get("top_logprobs", []) if tokens else []
        message = choice["message"]
        text = message.get("content") or message.get("refusal") or ""
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise PacelineError(f"the server's reply is not a chat completion: {error!r}") from error
    finish = choice.get("finish_reason") or ""
    return Reply(text, finish, tops, usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0)
