"""Ollama's chats, /api/chat: a request becomes a chat, and its answer goes back as one object, or as a line of JSON for
each part. The routes beside it list the model and its abilities, for clients that ask first."""

import json
from datetime import UTC, datetime
from typing import Any, Literal

from paceline.core.request import Completion, Delta
from paceline.errors import PacelineError
from paceline.jsonl import loads
from paceline.serve.chats import Chats
from paceline.serve.fields import ChatRequest, Seed, Strict, Tool, validated
from paceline.serve.reading import Piece, Reader
from paceline.serve.said import problem_of_ollama
from paceline.serve.settings import Refused
from paceline.serve.streams import Form
from paceline.serve.worker import Job

VERSION = "0.9.0"
"""The version of Ollama whose chats these are: clients decide by it what they may ask."""


class Options(Strict):
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: Seed = None
    stop: str | list[str] | None = None
    num_predict: int | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # These decide how a model is loaded, and change no answer.
    num_ctx: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    num_keep: int | None = None
    use_mmap: bool | None = None


class OllamaRequest(Strict):
    messages: list[dict[str, Any]]
    model: str | None = None
    tools: list[Tool] | None = None
    think: bool | str | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options = Options()
    stream: bool = True
    keep_alive: str | float | None = None  # The model stays as long as the server.

    def chat(self) -> ChatRequest:
        """The same request as a chat."""
        given = self.options.model_dump(include={
            "temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty",
        })  # fmt: skip
        given |= {"model": self.model, "stream": self.stream, "repetition_penalty": self.options.repeat_penalty}
        given["messages"] = [_message(one, f"messages.{i}") for i, one in enumerate(self.messages)]
        given["tools"] = self.tools and [tool.model_dump(exclude_none=True) for tool in self.tools]
        most = self.options.num_predict
        given["max_tokens"] = None if most is None or most < 0 else most  # -1 means as many as fit.
        given["enable_thinking" if isinstance(self.think, bool) else "reasoning_effort"] = self.think
        if self.format:
            schema = {"type": "json_schema", "json_schema": {"schema": self.format}}
            given["response_format"] = {"type": "json_object"} if self.format == "json" else schema
        return validated(ChatRequest, given)


class ShowRequest(Strict):
    model: str | None = None
    verbose: bool | None = None  # The answer is the same either way.


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    """A message in the form of chats. Raises Refused for images."""
    if message.get("images"):
        raise Refused(f"{where}: images are not supported; this model reads text, so give text", where)
    names = {"thinking": "reasoning_content", "tool_name": "name"}
    made = {names.get(name, name): value for name, value in message.items() if name != "images"}
    if isinstance(calls := made.get("tool_calls"), list):
        made["tool_calls"] = [
            {"id": f"call{i:05}", "type": "function", **call} if isinstance(call, dict) else call
            for i, call in enumerate(calls)
        ]
    return made


class Lines(Form):
    """Writes the answer to a request, whole or as lines."""

    def __init__(self, chats: Chats):
        self._model = chats.settings.model

    def whole(self, done: Completion, reader: Reader) -> dict[str, Any]:
        """The whole answer as one object."""
        return self._made([*reader.push(done.text), *reader.end()], done)

    def begin(self) -> str:
        return self.ping()

    def ping(self) -> str:
        return self._line([])

    async def more(self, i: int, delta: Delta, pieces: list[Piece]) -> str:
        return self._line(pieces) if pieces else ""

    def end(self, i: int, done: Completion, pieces: list[Piece], called: bool) -> str:
        return self._line(pieces, done)

    def over(self) -> str:
        return ""

    def broken(self, error: PacelineError, left: dict[int, Job]) -> str:
        return json.dumps(problem_of_ollama(str(error)), ensure_ascii=False) + "\n"

    def _line(self, pieces: list[Piece], done: Completion | None = None) -> str:
        return json.dumps(self._made(pieces, done), ensure_ascii=False) + "\n"

    def _made(self, pieces: list[Piece], done: Completion | None) -> dict[str, Any]:
        """An object with the text of `pieces`. done: the whole answer, once it is over. Times are in nanoseconds."""
        said: dict[str, list[str]] = {kind: [] for kind in ("content", "reasoning", "call", "arguments")}
        for piece in pieces:
            said[piece.kind].append(piece.text)
        message: dict[str, Any] = {"role": "assistant", "content": "".join(said["content"])}
        if said["reasoning"]:
            message["thinking"] = "".join(said["reasoning"])
        if said["call"]:
            calls = zip(said["call"], map(loads, said["arguments"]), strict=True)
            message["tool_calls"] = [{"function": {"name": name, "arguments": given}} for name, given in calls]
        made = {"model": self._model, "created_at": now(), "message": message, "done": done is not None}
        if done is None:
            return made
        took = round(1e9 * done.seconds)
        return made | {
            "done_reason": "stop" if done.finish_reason == "stop" else "length",
            "total_duration": took, "load_duration": 0, "prompt_eval_count": done.prompt_tokens,
            "prompt_eval_duration": 0, "eval_count": done.new_tokens, "eval_duration": took,
        }  # fmt: skip


def now() -> str:
    """The time in Ollama's form."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def listed(name: str) -> dict[str, Any]:
    """A model in /api/tags."""
    return {"name": name, "model": name, "modified_at": now()}


def shown(chats: Chats) -> dict[str, Any]:
    """The model in /api/show: its abilities, and its longest context."""
    skills = ["completion", *["tools"] * bool(chats.formats), *["thinking"] * (chats.marks is not None)]
    facts = {"general.architecture": "paceline", "paceline.context_length": chats.engine.longest}
    return {"capabilities": skills, "model_info": facts, "details": {}, "modified_at": now()}
