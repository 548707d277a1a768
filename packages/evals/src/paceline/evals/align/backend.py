"""A backend completes turns of conversations at an endpoint; `local` opens our own engine's. It knows no rules.

A request may have a prefix, the beginning of the assistant's turn. It is prefilled; the response is what follows. An
engine of this process gets token ids: a prefix that repeats an earlier response has the generated tokens."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING, Any

from paceline.evals.align.options import Decoding
from paceline.evals.align.prompts import Message
from paceline.evals.align.types import Call, Output, digest
from paceline.net.completion import Completion, in_common
from paceline.net.endpoint import Endpoint

if TYPE_CHECKING:
    from paceline.formats.tokenizer import Tokenizer

MOST_TURNS = 256  # Most turns whose tokens are kept, for prefixes that continue them.
OPEN, CLOSE = "<think>", "</think>"
"""The marks around a thought."""


@dataclass(frozen=True)
class Request:
    """One completion.

    phase   its purpose, as in `Call`.
    scope   the item, or the scenario for a judge. Our engine's drafter remembers texts within a scope.
    prefix  the assistant's turn so far, with the marker that opens its thought. A backend that renders the chat
            template itself omits the part that the template has written (`continued`).
    forced  the end of the prefix, if a method wrote it and no earlier request had it.
    stop    texts that end the response and are not part of it.
    sample  number among several answers to the same request; it shifts the seed.
    schema  JSON schema of the response, for servers with guided decoding."""

    messages: tuple[Message, ...]
    decoding: Decoding
    phase: str
    scope: str = ""
    prefix: str = ""
    forced: str = ""
    stop: tuple[str, ...] = ()
    sample: int = 0
    schema: dict[str, Any] | None = None

    @property
    def seeded(self) -> Decoding:
        """The decoding with this sample's own seed."""
        seed = self.decoding.seed
        return self.decoding if seed is None else replace(self.decoding, seed=seed + self.sample)


def split_thought(
    reply: Completion, opened: bool = False, before: str | None = None, keep_open: bool = False
) -> Output:
    """Split a response into thought and answer, at its last closing marker.

    opened     the chat template opens the thought.
    before     the thought so far, if the response continues a forced one; None if the model began its turn.
    keep_open  take a thought without an end as the answer, as the official code does."""
    text = reply.text
    thinking = before is not None or opened or text.lstrip().startswith(OPEN)
    if CLOSE in text:
        thought, _, response = text.rpartition(CLOSE)
    elif thinking and not reply.reasoning and not keep_open:
        why = "the budget ended within the thought" if reply.finish_reason == "length" else "the thought never ended"
        return Output((before or "") + text, "", reply.finish_reason, why, True)
    else:
        thought, response = reply.reasoning, text
    thought = thought if before is not None else thought.strip().removeprefix(OPEN)
    response = response.strip()
    return Output((before or "") + thought, response, reply.finish_reason, None if response else "the answer is empty")


def opens(prompt: str) -> bool:
    """Whether a rendered conversation ends with the marker of a thought: some chat templates open it."""
    return prompt.rstrip().endswith(OPEN)


def continued(request: Request, prompt: str) -> Request:
    """`request` without the part of its prefix that `prompt`, its rendered messages, already ends with."""
    if not opens(prompt):
        return request
    prefix, opening = request.prefix, prompt[prompt.rindex(OPEN) :]
    written = in_common(opening, prefix)
    if written < len(OPEN):  # the prefix does not begin with a thought
        return request
    return replace(request, prefix=prefix[written:], forced=prefix[max(written, len(prefix) - len(request.forced)) :])


class Backend:
    """Asks a model for turns of conversations, which may have a forced beginning.

    endpoint   the model's endpoint; label: its name in reports and files.
    tokenizer  renders prefixes and counts injected tokens. Without one a prefix is sent to /chat/completions as an
               assistant message to continue (vLLM's `continue_final_message`), and the server's chat template must
               not remove thoughts.
    stream     ask for server-sent events; a server without them sends the answer in one piece."""

    def __init__(self, endpoint: Endpoint, label: str, *, tokenizer: Tokenizer | None = None, stream: bool = True):
        self.endpoint, self.label, self.tokenizer, self.stream = endpoint, label, tokenizer, stream
        self._turns: OrderedDict[str, list[int]] = OrderedDict()

    @cached_property
    def opened(self) -> bool:
        """Whether the chat template opens a thought; unknown without a tokenizer."""
        return self.tokenizer is not None and opens(self.tokenizer.render_chat([{"role": "user", "content": "Hello"}]))

    async def complete(self, request: Request) -> tuple[Completion, Call]:
        """The response to a request, and its cost. Raises CompletionError if all attempts fail."""
        began = perf_counter()
        rendered = "" if self.tokenizer is None else self.tokenizer.render_chat(request.messages)
        request = continued(request, rendered)
        if self.endpoint.in_process:
            completion = await self._of_tokens(request)
        else:
            completion = await self.endpoint.complete(self.body(request, rendered))
        completion.seconds = round(perf_counter() - began, 6)
        return completion, self._call(request, completion)

    async def close(self) -> None:
        await self.endpoint.aclose()

    def body(self, request: Request, rendered: str) -> dict[str, Any]:
        """The body of a request. rendered: its messages in the chat template, "" without a tokenizer."""
        body: dict[str, Any] = request.seeded.body()
        if request.stop:
            body["stop"] = list(request.stop)
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if request.schema is not None:
            named = {"name": "reply", "schema": request.schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        if request.prefix and rendered:
            # The template has already written the beginning token.
            return body | {"prompt": rendered + request.prefix, "add_special_tokens": False}
        messages = [dict(message) for message in request.messages]
        if request.prefix:
            messages.append({"role": "assistant", "content": request.prefix})
            body |= {"add_generation_prompt": False, "continue_final_message": True}
        return body | {"messages": messages}

    async def _of_tokens(self, request: Request) -> Completion:
        """The response of an engine of this process, which is asked with token ids."""
        assert self.tokenizer is not None
        stops, prefix = [self.tokenizer.encode_text(stop) for stop in request.stop], self._prefix(request)
        body = {
            **{"temperature": 0.0, **request.seeded.body()},
            "prompt": [*self.tokenizer.encode_chat(request.messages), *prefix],
            "stop": list(request.stop),
            "stop_token_ids": [ids[0] for ids in stops if len(ids) == 1],  # Special tokens are not in the text.
            "user": request.scope,
            "return_token_ids": True,
        }
        completion = await self.endpoint.complete(body)
        remember(self._turns, _turn(request), [*prefix, *completion.tokens], MOST_TURNS)
        return completion

    def _prefix(self, request: Request) -> list[int]:
        """Tokens of the prefix: generated tokens while it repeats an earlier response, then the tokenizer's.

        A model may spell a text in other tokens than the tokenizer, and must continue from its own tokens."""
        if not request.prefix:
            return []
        assert self.tokenizer is not None
        decode, written = self.tokenizer.decode, self._turns.get(_turn(request), [])
        end = next((n for n in range(len(written), 0, -1) if request.prefix.startswith(decode(written[:n]))), 0)
        text = decode(written[:end])
        while end and decode(written[: end - 1]) == text:  # This drops end tokens, which have no text.
            end -= 1
        return [*written[:end], *self.tokenizer.encode_text(request.prefix[len(text) :])]

    def _call(self, request: Request, completion: Completion) -> Call:
        usage, injected = completion.usage, 0 if not request.forced else None
        if request.forced and self.tokenizer is not None:
            injected = len(self.tokenizer.encode_text(request.forced))
        return Call(
            request.phase,
            completion.finish_reason,
            completion.seconds,
            prefilled=usage.get("prompt_tokens"),
            cached=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            injected=injected,
            generated=usage.get("completion_tokens"),
            tries=completion.tries,
            speculation=_speculation(completion),
        )


def _speculation(done: Completion) -> dict[str, Any] | None:
    """Rounds and drafted tokens, if the server reports them, as vLLM and ours do; else None."""
    found = {"rounds": done.rounds, "draft_tokens": done.speculation.get("num_draft_tokens")}
    return found if all(isinstance(count, int) for count in found.values()) else None


def _turn(request: Request) -> str:
    """A key that all requests of one turn share."""
    return digest([request.scope, request.sample, request.messages])


def remember(memory: OrderedDict[str, Any], key: str, value: Any, most: int) -> None:
    """Store a value as the newest, and drop the oldest ones beyond `most`."""
    memory[key] = value
    memory.move_to_end(key)
    while len(memory) > most:
        memory.popitem(last=False)
