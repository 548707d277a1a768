"""Endpoint: an OpenAI-compatible server, or several of one model.

    urls, model = parse("http://a:8000/v1,http://b:8000/v1#Qwen/Qwen3-14B")
    reply = await Endpoint(urls, model, slots=64).complete(request)

A turn that goes on from a prefix needs the prefix to reach the model as it is. With a tokenizer at hand the prompt is
rendered here and goes to /completions; without one it goes to /chat/completions as an assistant message that the server
is to continue (`continue_final_message`, vLLM's name for it), and the server's template must not strip thoughts.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from paceline.evals.align.backends.base import Reply, Request
from paceline.evals.align.thoughts import continued, opened
from paceline.evals.align.types import Call
from paceline.workbench.client import Client, Completion, Retry

if TYPE_CHECKING:
    from paceline.target.tokenizer import Tokenizer


class Endpoint:
    """A model behind HTTP.

    stream     ask for server-sent events; a server that cannot is asked for whole responses.
    tokenizer  renders prefixes and counts injected tokens.
    Everything else is as in `Client`."""

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
        self.stream, self.tokenizer = stream, tokenizer
        self._client = Client(urls, key=key, slots=slots, timeout=timeout, retry=retry)

    async def complete(self, request: Request) -> Reply:
        began = perf_counter()
        rendered = "" if self.tokenizer is None else self.tokenizer.render_chat(request.messages)
        completion = await self._client.complete(self._body(request, rendered))
        return self._reply(continued(request, rendered), completion, perf_counter() - began, rendered)

    async def close(self) -> None:
        await self._client.close()

    def _body(self, request: Request, rendered: str) -> dict[str, Any]:
        """A request's body. rendered: its messages through the chat template, "" without a tokenizer."""
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
            return body | {"prompt": prompt, "add_special_tokens": False}
        messages = [dict(message) for message in request.messages]
        if request.prefix:
            messages.append({"role": "assistant", "content": request.prefix})
            body |= {"add_generation_prompt": False, "continue_final_message": True}
        return body | {"messages": messages}

    def _reply(self, request: Request, completion: Completion, seconds: float, rendered: str) -> Reply:
        usage = completion.usage
        call = Call(
            request.phase,
            completion.finish_reason,
            round(seconds, 6),
            prefilled=usage.get("prompt_tokens"),
            cached=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            injected=self._count(request.forced),
            generated=usage.get("completion_tokens"),
            tries=completion.tries,
        )
        return Reply(completion.text, call, completion.reasoning, completion.logprobs, opened(rendered))

    def _count(self, text: str) -> int | None:
        if not text:
            return 0
        return None if self.tokenizer is None else len(self.tokenizer.encode_text(text))
