"""OpenAI's newer route, /v1/responses: items in, items out. A request becomes a chat, and its answer becomes items.

Nothing is kept between requests. Fields that would need it, such as `previous_response_id`, are refused by name."""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from time import time
from typing import Annotated, Any, Literal, NamedTuple
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field

from paceline.core.request import Completion, Delta
from paceline.errors import PacelineError, shortened
from paceline.jsonl import loads
from paceline.serve.chats import Chats
from paceline.serve.fields import IMAGE, ChatRequest, JsonSchema, Reasoning, Seed, Strict, validated
from paceline.serve.reading import Piece, Reader
from paceline.serve.responses import usage
from paceline.serve.said import once, public
from paceline.serve.settings import Refused
from paceline.serve.streams import Event, Form, Parts
from paceline.serve.worker import Job


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"]


class Text(Strict):
    format: TextFormat | None = None
    verbosity: str | None = None


class FlatTool(Strict):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None  # All tools are loaded at once.
    cache_control: dict[str, Any] | None = None


class CustomFormat(Strict):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(Strict):
    """A tool that takes a text. The model sees it as a function with one text argument."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: CustomFormat | None = None

    def flat(self) -> FlatTool:
        """The tool as a strict function: a call with any other arguments is no call."""
        said = [self.description]
        if self.format is not None and self.format.type == "grammar":
            said.append(f"The input has to fit this {self.format.syntax} grammar:\n{self.format.definition}")
        described = "\n".join(filter(None, said))
        return FlatTool(type="function", name=self.name, description=described, parameters=INPUT, strict=True)


class Namespace(Strict):
    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[Annotated[FlatTool | CustomTool, Field(discriminator="type")]]


class Elsewhere(BaseModel):
    """A tool that OpenAI runs, or that only its models know. It is left out, and named once."""

    model_config = ConfigDict(extra="allow")
    type: Literal["web_search", "web_search_preview", "tool_search", "local_shell", "image_generation"]


INPUT = {
    "type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"], "additionalProperties": False,
}  # fmt: skip
"""Schema of the arguments of a custom tool."""


class FlatName(Strict):
    type: Literal["function", "custom"]
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
    tools: list[Annotated[FlatTool | CustomTool | Namespace | Elsewhere, Field(discriminator="type")]] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatName | FlatAllowed | None = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    draft: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    # These name things for the caller, or ask for what the server does anyway.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    client_metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "default"] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    store: Literal[False] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None  # Reasoning comes as plain text.

    def chat(self) -> ChatRequest:
        """The same request as a chat."""
        same = ("model", "temperature", "top_p", "top_k", "seed", "parallel_tool_calls", "stream", "draft", "metadata",
                "store", "chat_template_kwargs", "enable_thinking")  # fmt: skip
        given: dict[str, Any] = {name: getattr(self, name) for name in same}
        given |= {"messages": self._messages(), "max_tokens": self.max_output_tokens}
        given["reasoning"] = self.reasoning and self.reasoning.model_dump(exclude_none=True)
        if self.tools is not None:
            own = {"description", "parameters", "strict"}
            named = [(name, one.tool.model_dump(include=own, exclude_none=True)) for name, one in self.offered.items()]
            given["tools"] = [_function({"name": name, **tool}) for name, tool in named]
        choice = self.tool_choice
        if isinstance(choice, FlatAllowed):
            names = [_function({"name": one.name}) for one in choice.tools]
            given["tool_choice"] = {"type": choice.type, choice.type: {"mode": choice.mode, "tools": names}}
        else:
            given["tool_choice"] = _function({"name": choice.name}) if isinstance(choice, FlatName) else choice
        if self.text is not None and self.text.format is not None:
            form = self.text.format.model_dump(by_alias=True, exclude_none=True)
            kind = form.pop("type")
            given["response_format"] = {"type": kind} | ({"json_schema": form} if kind == "json_schema" else {})
        given["verbosity"] = self.text and self.text.verbosity
        return validated(ChatRequest, given)

    @cached_property
    def offered(self) -> dict[str, "Offered"]:
        """The functions by the names shown to the model. A function of a namespace has the namespace as a prefix only
        if another function has the same name."""
        made: dict[str, Offered] = {}
        for tool in self.tools or []:
            if isinstance(tool, Elsewhere):
                once(f"tools of type {tool.type!r} cannot run here, and are left out")
                continue
            for one in tool.tools if isinstance(tool, Namespace) else [tool]:
                space = tool.name if isinstance(tool, Namespace) else None
                name = f"{space.removesuffix('__')}__{one.name}" if space and one.name in made else one.name
                made[name] = Offered(one.flat() if isinstance(one, CustomTool) else one, one.type == "custom", space)
        return made

    def name_of(self, name: str, space: Any) -> str:
        """The name shown to the model for a function. space: its namespace, or None."""
        known = (shown for shown, one in self.offered.items() if (one.tool.name, one.space) == (name, space))
        return next(known, name)

    def _messages(self) -> list[dict[str, Any]]:
        """The items as messages. Items of one turn of the assistant become one message."""
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        if not items:
            raise Refused("input is empty; give a text or a list of items", "input")
        made = [{"role": "system", "content": self.instructions}] if self.instructions else []
        own: dict[str, Any] | None = None  # The assistant's open turn.
        for i, item in enumerate(items):
            part = _message(item, f"input.{i}", self.name_of)
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


class Offered(NamedTuple):
    """A function as shown to the model. is_custom: its argument is a text; space: its namespace, if it has one."""

    tool: FlatTool
    is_custom: bool
    space: str | None


def _function(flat: dict[str, Any]) -> dict[str, Any]:
    """A function in the form of chats."""
    return {"type": "function", "function": flat}


def _message(item: dict[str, Any], where: str, name_of: Callable[[str, Any], str]) -> dict[str, Any]:
    """Turn an item into a message, or a part of an assistant's message. Raises Refused for other items."""
    kind = item.get("type", "message")
    if kind == "message" and isinstance(item.get("role"), str):
        return {"role": item["role"], "content": _text(item.get("content"), where)}
    if kind in ("function_call", "custom_tool_call"):
        name = name_of(_field(item, "name", where), item.get("namespace"))
        arguments = _field(item, "input" if kind == "custom_tool_call" else "arguments", where)
        if kind == "custom_tool_call":
            arguments = json.dumps({"input": arguments}, ensure_ascii=False)
        call = {"id": _field(item, "call_id", where), **_function({"name": name, "arguments": arguments})}
        return {"role": "assistant", "tool_calls": [call]}
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = _text(item.get("output"), where, images=True)
        return {"role": "tool", "tool_call_id": _field(item, "call_id", where), "content": output}
    if kind == "reasoning":
        return {"role": "assistant", "reasoning_content": _text(item.get("content") or item.get("summary"), where)}
    known = "a message with a role, a function_call or custom_tool_call, the output of one, or reasoning"
    raise Refused(f"{where} is of type {shortened(repr(kind))}; it can be {known}", "input")


def _field(item: dict[str, Any], name: str, where: str) -> str:
    if not isinstance(item.get(name), str):
        raise Refused(f"{where}: {name} is missing or no text", "input")
    return str(item[name])


def _text(content: Any, where: str, *, images: bool = False) -> str:
    """One text of a content. images: whether a line stands for each image; else images are refused, because a person's
    question about one must not be ignored."""
    if content is None or isinstance(content, str):
        return content or ""
    kinds, texts = ("input_text", "output_text", "reasoning_text", "summary_text", "text"), []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else part
        if images and kind == "input_image":
            texts.append(IMAGE)
        elif kind in kinds and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise Refused(f"{where}: content of type {shortened(str(kind), 80)} is not supported; give text", "input")
    return "".join(texts)


# Answers --------------------------------------------------------------------------------------------------------------

PARTS = {"content": "output_text", "reasoning": "reasoning_text"}


class Items(Parts):
    """Builds an answer's items and a stream's events. offered: the functions, by the names shown to the model."""

    def __init__(self, offered: Mapping[str, Offered]) -> None:
        super().__init__()
        self.items: list[Event] = []
        self._offered = offered

    def opened(self, kind: str, name: str) -> list[Event]:
        # Templates of Mistral take ids of calls of nine letters and digits only.
        begun: dict[str, Event] = {
            "call": {"call_id": uuid4().hex[:9], **self._call(name)},
            "content": {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant", "content": []},
            "reasoning": {"id": f"rs_{uuid4().hex}", "type": "reasoning", "summary": [], "content": []},
        }
        self.items.append(begun[kind] | {"status": "in_progress"})
        events = [self._event("output_item.added", item=dict(self.items[-1]))]
        if kind != "call":
            events.append(self._event("content_part.added", content_index=0, part=_part(kind, "")))
        return events

    def _call(self, name: str) -> Event:
        """The beginning of a call, under the client's name of the function."""
        one = self._offered.get(name)
        space = {"namespace": one.space} if one and one.space is not None else {}
        known = {"name": one.tool.name if one else name, **space}
        if one and one.is_custom:
            return {"id": f"ctc_{uuid4().hex}", "type": "custom_tool_call", **known, "input": ""}
        return {"id": f"fc_{uuid4().hex}", "type": "function_call", **known, "arguments": ""}

    def added(self, text: str) -> list[Event]:
        if self.items[-1]["type"] == "custom_tool_call":
            return []  # The text is read from the whole arguments later.
        if self.kind == "call":
            return [self._event("function_call_arguments.delta", delta=text)]
        more: Event = {"logprobs": []} if self.kind == "content" else {}
        return [self._event(f"{PARTS[self.kind]}.delta", content_index=0, delta=text, **more)]

    def closed(self, kind: str, text: str) -> list[Event]:
        item = self.items[-1]
        item["status"] = "completed"
        if item["type"] == "custom_tool_call":
            item["input"] = given = loads(text)["input"]
            part = "custom_tool_call_input"
            events = [self._event(f"{part}.delta", delta=given), self._event(f"{part}.done", input=given)]
        elif kind == "call":
            item["arguments"] = text
            events = [self._event("function_call_arguments.done", name=item["name"], arguments=text)]
        else:
            item["content"] = [_part(kind, text)]
            more: Event = {"logprobs": []} if kind == "content" else {}
            events = [
                self._event(f"{PARTS[kind]}.done", content_index=0, text=text, **more),
                self._event("content_part.done", content_index=0, part=item["content"][0]),
            ]
        return [*events, self._event("output_item.done", item=item)]

    def _event(self, kind: str, **more: Any) -> Event:
        place = {"output_index": len(self.items) - 1}
        if "item" not in more:
            place["item_id"] = self.items[-1]["id"]
        return {"type": f"response.{kind}", **place, **more}


def _part(kind: str, text: str) -> dict[str, Any]:
    made: dict[str, Any] = {"type": PARTS[kind], "text": text}
    return made | ({"annotations": [], "logprobs": []} if kind == "content" else {})


class Answer(Form):
    """The response object of a request as it grows, and its events."""

    def __init__(self, chats: Chats, asked: ItemsRequest):
        self._tokenizer, self._out, self._number = chats.tokenizer, Items(asked.offered), 0
        given = asked.model_dump(by_alias=True)
        own = ("instructions", "max_output_tokens", "metadata", "user", "safety_identifier", "prompt_cache_key")
        absent = {"function": {"description": None, "parameters": None, "strict": False}}
        tools = [{**absent.get(tool["type"], {}), **tool} for tool in given["tools"] or []]
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
        """The object of a whole answer."""
        self._out.take(done, reader)
        return self.now(done)

    def now(self, done: Completion | None = None) -> dict[str, Any]:
        """The object at this moment. done: the whole answer, once it is over."""
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

    def ping(self) -> str:
        """An event without news, because codex gives up if only comments come."""
        return self._events([{"type": "response.in_progress", "response": self.now()}])

    async def more(self, i: int, delta: Delta, pieces: list[Piece]) -> str:
        return self._events(self._out.push(pieces))

    def end(self, i: int, done: Completion, pieces: list[Piece], called: bool) -> str:
        events = [*self._out.push(pieces), *self._out.close()]
        made = self.now(done)
        kind = "completed" if made["status"] == "completed" else "incomplete"
        return self._events([*events, {"type": f"response.{kind}", "response": made}])

    def over(self) -> str:
        return ""

    def broken(self, error: PacelineError, left: dict[int, Job]) -> str:
        events = self._out.close()
        failed = {"status": "failed", "error": {"code": "server_error", "message": public(str(error))}}
        return self._events([*events, {"type": "response.failed", "response": self.now() | failed}])

    def _events(self, events: Iterable[dict[str, Any]]) -> str:
        made = ""
        for event in events:
            data = json.dumps({**event, "sequence_number": self._number}, ensure_ascii=False)
            made += f"event: {event['type']}\ndata: {data}\n\n"
            self._number += 1
        return made
