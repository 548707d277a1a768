"""Anthropic's route, /v1/messages: a request becomes a chat, and its answer goes back as content blocks and events.

Nothing is kept between requests, and no tool runs here."""

import json
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator

from paceline.core.request import Completion, Delta
from paceline.errors import PacelineError, shortened
from paceline.formats.tokenizer import Tokenizer
from paceline.jsonl import loads
from paceline.serve.chats import Chats
from paceline.serve.fields import IMAGE, ChatRequest, Seed, Strict, Thinking, validated
from paceline.serve.reading import Piece, Reader
from paceline.serve.said import once, problem_of_messages
from paceline.serve.settings import Refused
from paceline.serve.streams import Event, Form, Parts
from paceline.serve.worker import Job, Unavailable

BILLING = "x-anthropic-billing-header:"
"""How a block begins that Claude Code puts before its system prompt. It differs from session to session, and would keep
all that follows from being reused."""
THEIRS = "^(web_search|web_fetch|code_execution|tool_search_tool)_[a-z0-9_]*$"
REASONS = {"stop": "end_turn", "length": "max_tokens", "context": "max_tokens", "abort": "max_tokens"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class OwnTool(Strict):
    type: Literal["custom"] = "custom"
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    defer_loading: bool | None = None  # All tools are loaded at once.
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, Any]] | None = None


class TheirTool(BaseModel):
    """A tool that Anthropic runs. It is left out, and named once."""

    model_config = ConfigDict(extra="allow")
    type: Annotated[str, Field(pattern=THEIRS)]


def _whose(tool: Any) -> str:
    """The tag of a tool in the union: "custom" or "theirs"."""
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "custom" if kind in (None, "custom") else "theirs"


AnyTool = Annotated[
    Annotated[OwnTool, Tag("custom")] | Annotated[TheirTool, Tag("theirs")], Discriminator(_whose)
]


class Choice(Strict):
    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Edit(Strict):
    """An edit of the conversation that removes nothing; others are refused."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class Context(Strict):
    edits: list[Edit] = []


class Output(Strict):
    effort: str | None = None
    format: dict[str, Any] | None = None


class MessagesRequest(Strict):
    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[AnyTool] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: Output | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool = False
    # Fields of this server.
    seed: Seed = None
    draft: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # These name things for the caller, or ask for what the server does anyway.
    metadata: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    betas: list[str] | None = None
    context_management: Context | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    @field_validator("tools", mode="before")
    @classmethod
    def refuse_what_has_no_schema(cls, given: Any) -> Any:
        """Raise Refused for the client's tools in a form that only Anthropic's models know."""
        for tool in given if isinstance(given, list) else []:
            kind = str(tool.get("type") or "custom") if isinstance(tool, dict) else "custom"
            if kind != "custom" and not re.match(THEIRS, kind):
                what = f"tools has one of type {shortened(repr(kind))}, whose form this model does not know"
                raise Refused(f"{what}; give it a name and an input_schema, and no type", "tools")
        return given

    def chat(self) -> ChatRequest:
        """The same request as a chat."""
        same = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "seed", "draft", "metadata",
                "chat_template_kwargs")  # fmt: skip
        given: dict[str, Any] = {name: getattr(self, name) for name in same}
        given |= {"messages": self._messages(), "stop": self.stop_sequences, "tools": self._tools()}
        given["thinking"] = self.thinking and self.thinking.model_dump(exclude_none=True)
        output = self.output_config or Output()
        if output.effort != "high":  # "high" is the default.
            given["reasoning_effort"] = output.effort
        if output.format is not None:
            if output.format.get("type") != "json_schema" or not isinstance(output.format.get("schema"), dict):
                raise Refused("output_config.format has type json_schema and a schema", "output_config")
            given["response_format"] = {"type": "json_schema", "json_schema": {"schema": output.format["schema"]}}
        if (choice := self.tool_choice) is not None:
            named = {"type": "function", "function": {"name": choice.name or ""}}
            given["tool_choice"] = CHOICES.get(choice.type, named)
            given["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if given["messages"][-1]["role"] == "assistant" and "tool_calls" not in given["messages"][-1]:
            given["continue_final_message"] = True
        return validated(ChatRequest, given)

    def _tools(self) -> list[dict[str, Any]] | None:
        for tool in self.tools or []:
            if isinstance(tool, TheirTool):
                once(f"tools of type {tool.type!r} cannot run here, and are left out")
        own = [tool for tool in self.tools or [] if isinstance(tool, OwnTool)]
        made = [
            {"name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
            for tool in own
        ]
        return [{"type": "function", "function": one} for one in made] or None

    def _messages(self) -> list[dict[str, Any]]:
        made = []
        blocks = [one for one in _blocks(self.system, "system") if not _is_billing(one)]
        if system := _text(blocks, "system", between="\n\n"):
            made.append({"role": "system", "content": system})
        for i, message in enumerate(self.messages):
            made += _turn(message, f"messages.{i}")
        return made


def _is_billing(block: dict[str, Any]) -> bool:
    """Whether a block of the system prompt is only for billing, and so left out."""
    billing = str(block.get("text")).startswith(BILLING)
    if billing:
        once(f"the block {BILLING!r}, which differs by session, is left out of system prompts")
    return billing


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    """The blocks of a content that is a text, a list of blocks or null."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    if not isinstance(blocks, list) or not all(isinstance(one, dict) for one in blocks):
        raise Refused(f"{where} must be a text or a list of content blocks", where)
    return blocks


def _turn(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The messages of a chat for one message: one for each tool result, and one for each text between them."""
    role, made = message.get("role"), list[dict[str, Any]]()
    if role not in ("user", "assistant", "system"):
        raise Refused(f"{where}: role is {shortened(repr(role))}; it can be user, assistant or system", where)
    text, calls, thought = list[dict[str, Any]](), list[dict[str, Any]](), ""
    for block in _blocks(message.get("content"), where):
        kind = block.get("type")
        if role == "user" and kind == "tool_result":
            if text:
                made.append({"role": role, "content": _text(text, where)})
            text = []
            result = _text(_blocks(block.get("content"), where), where, images=True)
            made.append({"role": "tool", "tool_call_id": _field(block, "tool_use_id", where), "content": result})
        elif role == "assistant" and kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function = {"name": _field(block, "name", where), "arguments": arguments}
            calls.append({"id": _field(block, "id", where), "type": "function", "function": function})
        elif role == "assistant" and kind == "thinking":
            thought += _field(block, "thinking", where)
        elif role != "assistant" or kind != "redacted_thinking":  # Redacted thinking cannot be read.
            text.append(block)
    if text or not made:
        own: dict[str, Any] = {"role": role, "content": _text(text, where)}
        own |= {"tool_calls": calls} if calls else {}
        made.append(own | ({"reasoning_content": thought} if thought else {}))
    return made


def _field(block: dict[str, Any], name: str, where: str) -> str:
    if not isinstance(block.get(name), str):
        raise Refused(f"{where}: {name} is missing or no text", where)
    return str(block[name])


def _text(blocks: Iterable[dict[str, Any]], where: str, *, images: bool = False, between: str = "") -> str:
    """One text of blocks. images: whether a line stands for each image; else images are refused."""
    texts = []
    for block in blocks:
        kind = block.get("type")
        if images and kind == "image":
            texts.append(IMAGE)
        elif kind == "text":
            texts.append(_field(block, "text", where))
        else:
            what = f"{where}: content of type {shortened(str(kind), 80)} is not supported"
            raise Refused(f"{what}; this model reads text, so give text", where)
    return between.join(texts)


# Answers --------------------------------------------------------------------------------------------------------------


class Blocks(Parts):
    """Builds an answer's content blocks and a stream's events."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[Event] = []

    def opened(self, kind: str, name: str) -> list[Event]:
        begun: dict[str, Event] = {
            "content": {"type": "text", "text": ""},
            "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
            # Templates of Mistral take ids of nine letters and digits only.
            "call": {"type": "tool_use", "id": uuid4().hex[:9], "name": name, "input": {}},
        }
        self.blocks.append(begun[kind])
        return [self._event("start", content_block=dict(self.blocks[-1]))]

    def added(self, text: str) -> list[Event]:
        kind, name = {
            "content": ("text_delta", "text"),
            "reasoning": ("thinking_delta", "thinking"),
            "call": ("input_json_delta", "partial_json"),
        }[self.kind]
        return [self._event("delta", delta={"type": kind, name: text})]

    def closed(self, kind: str, text: str) -> list[Event]:
        block = self.blocks[-1]
        if kind == "call":
            block["input"] = loads(text)
        else:
            block["text" if kind == "content" else "thinking"] = text
        signed = [self._event("delta", delta={"type": "signature_delta", "signature": ""})]
        return [*(signed if kind == "reasoning" else []), self._event("stop")]

    def _event(self, kind: str, **more: Any) -> Event:
        return {"type": f"content_block_{kind}", "index": len(self.blocks) - 1, **more}


class Message(Form):
    """The message of a request as it grows, and its events. prompt: token ids."""

    def __init__(self, chats: Chats, asked: ChatRequest, prompt: list[int]):
        self._tokenizer, self._prompt, self._out = chats.tokenizer, prompt, Blocks()
        self._stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        self._facts = {
            "id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant", "model": chats.settings.model,
        }  # fmt: skip

    def whole(self, done: Completion, reader: Reader) -> Event:
        """The message of a whole answer."""
        self._out.take(done, reader)
        ended = self._ended(done, bool(reader.called))
        return {**self._facts, "content": self._out.blocks, **ended, "usage": used(done)}

    def ping(self) -> str:
        return _events([{"type": "ping"}])

    def begin(self) -> str:
        usage = {"input_tokens": len(self._prompt), "output_tokens": 0}
        open_: Event = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _events([{"type": "message_start", "message": {**self._facts, **open_}}])

    async def more(self, i: int, delta: Delta, pieces: list[Piece]) -> str:
        return _events(self._out.push(pieces))

    def end(self, i: int, done: Completion, pieces: list[Piece], called: bool) -> str:
        last = {"type": "message_delta", "delta": self._ended(done, called), "usage": used(done)}
        return _events([*self._out.push(pieces), *self._out.close(), last])

    def over(self) -> str:
        return _events([{"type": "message_stop"}])

    def broken(self, error: PacelineError, left: dict[int, Job]) -> str:
        status = 503 if isinstance(error, Unavailable) else 500
        return _events([*self._out.close(), problem_of_messages(str(error), status)])

    def _ended(self, done: Completion, called: bool) -> Event:
        """Why an answer ended, and at which stop sequence."""
        stop = None
        if done.finish_reason == "stop" and not called:
            stop = _stop_after(done, self._stops, self._tokenizer)
        reason = "tool_use" if called and done.finish_reason == "stop" else REASONS[done.finish_reason]
        return {"stop_reason": "stop_sequence" if stop else reason, "stop_sequence": stop}


def _stop_after(done: Completion, stops: list[str], tokenizer: Tokenizer) -> str | None:
    """The stop sequence that ended an answer; None if none did.
    The answer's tokens go on with it, its text does not."""
    rest = tokenizer.decode(done.tokens).removeprefix(done.text) if stops else ""
    return next((stop for stop in stops if rest.startswith(stop)), None)


def used(done: Completion) -> dict[str, int]:
    """Tokens of prompt and answer. Reused tokens are counted apart, as Anthropic does."""
    return {
        "input_tokens": done.prompt_tokens - done.reused, "output_tokens": done.new_tokens,
        "cache_read_input_tokens": done.reused, "cache_creation_input_tokens": 0,
    }  # fmt: skip


def _events(events: Iterable[Event]) -> str:
    return "".join(f"event: {one['type']}\ndata: {json.dumps(one, ensure_ascii=False)}\n\n" for one in events)
