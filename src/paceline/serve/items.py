"""OpenAI's newer route, /v1/responses: items in, items out. A request becomes a chat and is answered as one.

Nothing is kept between requests: what would need that, such as `previous_response_id`, is refused by name."""

import json
from collections.abc import Iterable
from time import time
from typing import Any, Literal
from uuid import uuid4

from pydantic import Field

from paceline.core.request import Completion, Delta
from paceline.errors import PacelineError, shortened
from paceline.serve.chats import Chats, Form
from paceline.serve.fields import ChatRequest, JsonSchema, Seed, Strict, validated
from paceline.serve.reading import Piece, Reader
from paceline.serve.responses import usage
from paceline.serve.said import public
from paceline.serve.settings import Refused
from paceline.workbench.worker import Job


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"]


class Text(Strict):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Strict):
    effort: str | None = None
    summary: Literal["auto"] | None = None


class FlatTool(Strict):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FlatName(Strict):
    type: Literal["function"]
    name: str


class FlatAllowed(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FlatName]


class StreamOptions(Strict):
    include_obfuscation: Literal[False] = False


class ItemsRequest(Strict):
    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: Seed = None
    tools: list[FlatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatName | FlatAllowed | None = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    draft: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    # These name things for the caller and change nothing, or ask for what there is anyway.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    store: Literal[False] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None  # reasoning comes as text, and may be sent back

    def chat(self) -> ChatRequest:
        """The same request as a chat."""
        same = ("model", "temperature", "top_p", "top_k", "seed", "parallel_tool_calls", "stream", "draft", "metadata",
                "store", "chat_template_kwargs", "enable_thinking")  # fmt: skip
        given: dict[str, Any] = {name: getattr(self, name) for name in same}
        given |= {"messages": self._messages(), "max_tokens": self.max_output_tokens}
        given["reasoning_effort"] = None if self.reasoning is None else self.reasoning.effort
        if self.tools is not None:
            given["tools"] = [_nested(tool.model_dump(exclude_none=True)) for tool in self.tools]
        choice = self.tool_choice
        if isinstance(choice, FlatAllowed):
            names = [_nested(one.model_dump()) for one in choice.tools]
            given["tool_choice"] = {"type": choice.type, choice.type: {"mode": choice.mode, "tools": names}}
        else:
            given["tool_choice"] = _nested(choice.model_dump()) if isinstance(choice, FlatName) else choice
        if self.text is not None and self.text.format is not None:
            form = self.text.format.model_dump(by_alias=True, exclude_none=True)
            kind = form.pop("type")
            given["response_format"] = {"type": kind} | ({"json_schema": form} if kind == "json_schema" else {})
        return validated(ChatRequest, given)

    def _messages(self) -> list[dict[str, Any]]:
        """The items as messages; what belongs to one turn of the assistant is one message."""
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        if not items:
            raise Refused("input is empty; give a text or a list of items", "input")
        made = [{"role": "system", "content": self.instructions}] if self.instructions else []
        own: dict[str, Any] | None = None  # the turn of the assistant that is not over
        for i, item in enumerate(items):
            part = _message(item, f"input.{i}")
            if part["role"] != "assistant":
                own = None
                made.append(part)
            elif own is None or (own["content"] and part.get("content")):
                own = {"content": None, **part}
                made.append(own)
            else:
                calls = [*own.get("tool_calls", []), *part.pop("tool_calls", [])]
                own |= {name: value for name, value in part.items() if value} | ({"tool_calls": calls} if calls else {})
        return made


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """A function as chats have it."""
    return {"type": flat.pop("type"), "function": flat}


def _message(item: dict[str, Any], where: str) -> dict[str, Any]:
    """An item as a message, or as a part of an assistant's; Refused for what is neither."""
    kind = item.get("type", "message")
    if kind == "message" and isinstance(item.get("role"), str):
        return {"role": item["role"], "content": _text(item.get("content"), where)}
    if kind == "function_call":
        function = {"name": _field(item, "name", where), "arguments": _field(item, "arguments", where)}
        call = {"id": _field(item, "call_id", where), "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        output = _text(item.get("output"), where)
        return {"role": "tool", "tool_call_id": _field(item, "call_id", where), "content": output}
    if kind == "reasoning":
        return {"role": "assistant", "reasoning_content": _text(item.get("content") or item.get("summary"), where)}
    known = "a message with a role, function_call, function_call_output or reasoning"
    raise Refused(f"{where} is of type {shortened(repr(kind))}; it can be {known}", "input")


def _field(item: dict[str, Any], name: str, where: str) -> str:
    if not isinstance(item.get(name), str):
        raise Refused(f"{where}: {name} is missing or no text", "input")
    return str(item[name])


def _text(content: Any, where: str) -> str:
    """A content as one text."""
    if content is None or isinstance(content, str):
        return content or ""
    kinds = ("input_text", "output_text", "reasoning_text", "summary_text", "text")
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict) or part.get("type") not in kinds or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise Refused(f"{where}: content of type {shortened(str(kind), 80)} is not supported; give text", "input")
    return "".join(part["text"] for part in content)


# What goes back -------------------------------------------------------------------------------------------------------

PARTS = {"content": "output_text", "reasoning": "reasoning_text"}


class Items:
    """Puts the pieces of an answer together as items, and says each step as an event of a stream."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._kind = ""  # of the item that is open
        self._said = ""

    def push(self, pieces: Iterable[Piece]) -> list[dict[str, Any]]:
        """The events of more pieces."""
        events = []
        for kind, text, _ in pieces:
            if kind == "call":
                events += [*self.close("incomplete"), *self._open("call", {"name": text, "arguments": ""})]
            elif kind == "called":
                events += self.close()
            elif kind == "arguments":
                events.append(self._event("function_call_arguments.delta", delta=text))
                self._said += text
            else:
                if self._kind != kind:
                    events += [*self.close("incomplete"), *self._open(kind, {})]
                more: dict[str, Any] = {"logprobs": []} if kind == "content" else {}
                events.append(self._event(f"{PARTS[kind]}.delta", content_index=0, delta=text, **more))
                self._said += text
        return events

    def close(self, status: str = "completed") -> list[dict[str, Any]]:
        """The events that end the open item, if there is one. status: of a call that is not whole."""
        kind, text, self._kind, self._said = self._kind, self._said, "", ""
        if not kind:
            return []
        item = self.items[-1]
        item["status"] = status if kind == "call" else "completed"
        if kind == "call":
            item["arguments"] = text
            events = [self._event("function_call_arguments.done", name=item["name"], arguments=text)]
        else:
            item["content"] = [_part(kind, text)]
            more: dict[str, Any] = {"logprobs": []} if kind == "content" else {}
            events = [
                self._event(f"{PARTS[kind]}.done", content_index=0, text=text, **more),
                self._event("content_part.done", content_index=0, part=item["content"][0]),
            ]
        return [*events, self._event("output_item.done", item=item)]

    def _open(self, kind: str, more: dict[str, Any]) -> list[dict[str, Any]]:
        self._kind = kind
        # Templates of Mistral take ids of calls of nine letters and digits only.
        begun: dict[str, Any] = {
            "call": {"id": f"fc_{uuid4().hex}", "type": "function_call", "call_id": uuid4().hex[:9], **more},
            "content": {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant", "content": []},
            "reasoning": {"id": f"rs_{uuid4().hex}", "type": "reasoning", "summary": [], "content": []},
        }[kind]
        self.items.append(begun | {"status": "in_progress"})
        events = [self._event("output_item.added", item=dict(self.items[-1]))]
        if kind != "call":
            events.append(self._event("content_part.added", content_index=0, part=_part(kind, "")))
        return events

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        place = {"output_index": len(self.items) - 1}
        if "item" not in more:
            place["item_id"] = self.items[-1]["id"]
        return {"type": f"response.{kind}", **place, **more}


def _part(kind: str, text: str) -> dict[str, Any]:
    made: dict[str, Any] = {"type": PARTS[kind], "text": text}
    return made | ({"annotations": [], "logprobs": []} if kind == "content" else {})


class Answer(Form):
    """The response object of one request, as it stands, and its events."""

    def __init__(self, chats: Chats, asked: ItemsRequest):
        self._tokenizer, self._out, self._number = chats.tokenizer, Items(), 0
        given = asked.model_dump(by_alias=True)
        own = ("instructions", "max_output_tokens", "metadata", "user", "safety_identifier", "prompt_cache_key")
        tools = [{"description": None, "parameters": None, "strict": False, **tool} for tool in given["tools"] or []]
        self.facts: dict[str, Any] = {
            "id": f"resp_{uuid4().hex}", "object": "response", "created_at": int(time()),
            "model": chats.settings.model,
            **{name: given[name] for name in own}, "metadata": asked.metadata or {},
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "tools": tools, "tool_choice": given["tool_choice"] or "auto",
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "text": {"format": (given["text"] or {}).get("format") or {"type": "text"}},
            "reasoning": {"effort": asked.reasoning and asked.reasoning.effort, "summary": None},
            "truncation": "disabled", "service_tier": "default", "store": False, "background": False,
            "previous_response_id": None, "incomplete_details": None, "error": None,
        }  # fmt: skip

    def whole(self, done: Completion, reader: Reader) -> dict[str, Any]:
        """The object of a whole answer, without calls that are broken."""
        pieces = [*reader.push(done.text), *reader.end()]
        calls = {piece.number for piece in pieces if piece.kind == "called"}
        self._out.push(piece for piece in pieces if piece.kind in PARTS or piece.number in calls)
        self._out.close("incomplete")
        return self.now(done)

    def now(self, done: Completion | None = None) -> dict[str, Any]:
        """The object; done: the answer, once it is over."""
        if done is None:
            return {**self.facts, "status": "in_progress", "output": list(self._out.items), "usage": None}
        reason = done.finish_reason
        status = {"stop": "completed", "length": "incomplete", "context": "incomplete", "error": "failed"}
        why = {"reason": "max_output_tokens"} if reason in ("length", "context") else None
        thought = "".join(i["content"][0]["text"] for i in self._out.items if i["type"] == "reasoning" and i["content"])
        counts = usage([done])
        used = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": len(self._tokenizer.encode_text(thought))},
            "total_tokens": counts["total_tokens"],
        }
        ended = {"status": status.get(reason, "cancelled"), "output": self._out.items, "usage": used}
        return {**self.facts, **ended, "incomplete_details": why}

    def begin(self) -> str:
        kinds = ("created", "in_progress")
        return self._events({"type": f"response.{kind}", "response": self.now()} for kind in kinds)

    async def more(self, i: int, delta: Delta, pieces: list[Piece]) -> str:
        return self._events(self._out.push(pieces))

    def end(self, i: int, done: Completion, pieces: list[Piece], called: bool) -> str:
        events = [*self._out.push(pieces), *self._out.close("incomplete")]
        made = self.now(done)
        kind = "completed" if made["status"] == "completed" else "incomplete"
        return self._events([*events, {"type": f"response.{kind}", "response": made}])

    def over(self) -> str:
        return ""

    def broken(self, error: PacelineError, left: dict[int, Job]) -> str:
        events = self._out.close("incomplete")
        failed = {"status": "failed", "error": {"code": "server_error", "message": public(str(error))}}
        return self._events([*events, {"type": "response.failed", "response": self.now() | failed}])

    def _events(self, events: Iterable[dict[str, Any]]) -> str:
        made = ""
        for event in events:
            data = json.dumps({**event, "sequence_number": self._number}, ensure_ascii=False)
            made += f"event: {event['type']}\ndata: {data}\n\n"
            self._number += 1
        return made
