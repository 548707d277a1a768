"""What a line of a log says: a table of the formats that are read. A new format is one entry of FORMATS.

    one = conversation(json.loads(line))
    one.messages, one.answers

Lines of data sets and our own may have a "category". A "prompt" or "messages" may come with the answer as "response",
"completion" or "text"; without one, the assistant's messages are answers. Logs of servers, proxies and tracers hold a
request and a response, whose bodies are those of Chat Completions, Completions or Responses.
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from paceline.errors import PacelineError
from paceline.jsonl import NotJSON, loads
from paceline.workbench.tool_calls import as_text, calls

RESPONSES = ("response", "completion", "text")
"""Keys of an answer to a "prompt" or to "messages"."""
METADATA = {
    "answer_id", "author", "category", "dataset", "datasplit", "date", "error", "finish_reason", "generator", "id",
    "index", "language", "logprobs", "meta", "metadata", "model", "model_id", "question_id", "source", "split", "tags",
    "time", "timestamp", "topic", "url", "user",
}  # fmt: skip
"""Keys that describe a record: their text belongs to no prompt."""
OF_A_MESSAGE = {"role", "content", "tool_calls", "function_call", "refusal", "tool_call_id", "name", "id", "status"}
LABEL_WORDS, LABEL_CHARACTERS = 3, 64
"""A longer text under an unknown key is an error; see `conversation`."""
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
"""Types of a content's parts that are text."""
ROLES = {"developer": "system", "function": "tool", "human": "user", "gpt": "assistant", "observation": "tool"}
"""Other words for roles."""
MAX_TOKEN_ID = 1 << 31

Record = Mapping[str, Any]
Ignore = Collection[str] | None
Message = Mapping[str, Any]
"""{"role": "system" | "user" | "assistant" | "tool", "content": text}. "tool_calls": [{"function": {"name",
"arguments"}}] where it makes calls; "missing": the number of its parts that are no text, such as images."""


class ConversationError(PacelineError):
    """A record that is no conversation, or a file that cannot be read. The message, one line, names the place."""


@dataclass(frozen=True)
class Conversation:
    """One record.

    messages      from the first message, of the system or the user, to the last answer.
    answers       indices of the messages that the model wrote.
    category      "" without one.
    where         "file, line 3", for messages.
    tokens        (prompt, answer) as token ids, where the record has them; prompt None: unknown.
    text          of a record that is a plain text; else "".
    has_response  the last message is an answer that the record gave separately from the prompt.
    is_rendered   the first message is the whole prompt as the model read it: no chat template is wanted.
    tools         what the model might call: [{"type": "function", "function": {"name", ...}}].
    usage         tokens of the last answer as the log counts them; None: it does not.
    key           (name, id) that the other half of the conversation has too, where a record holds the prompt or the
                  answers alone; None: it is whole.
    parts         texts by key, of a record with one prompt and one answer; the title of a plain text.
    record        the record itself."""

    messages: Sequence[Message] = ()
    answers: Sequence[int] = ()
    category: str = ""
    where: str = ""
    tokens: tuple[Sequence[int] | None, Sequence[int]] | None = None
    text: str = ""
    has_response: bool = False
    is_rendered: bool = False
    tools: Sequence[Mapping[str, Any]] = ()
    usage: int | None = None
    key: tuple[str, str] | None = None
    parts: Mapping[str, str] = field(default_factory=dict)
    record: Record = field(default_factory=dict, repr=False, compare=False)

    @property
    def prompt(self) -> Sequence[Message]:
        """The messages without an answer that the record gave separately."""
        return self.messages[:-1] if self.has_response else self.messages

    @property
    def first_prompt(self) -> Sequence[Message]:
        """The prompt up to the first of two user messages in a row: the model answers there."""
        prompt = self.prompt
        second = (i for i in range(1, len(prompt)) if prompt[i - 1]["role"] == prompt[i]["role"] == "user")
        return prompt[: next(second, len(prompt))]

    @property
    def is_cut(self) -> bool:
        """Whether the record says that the model did not end its answer itself."""
        return self.record.get("finish_reason", "stop") != "stop"

    @property
    def missing(self) -> int:
        """Parts of its messages that are no text."""
        return sum(message.get("missing", 0) for message in self.messages)

    def texts(self) -> list[str]:
        """The text of every message, or the plain text."""
        return [as_text(message)["content"] for message in self.messages] or [self.text]


NOTHING = Conversation()
"""In a record about something else, such as a request that has only arrived."""


def conversation(record: Any, ignore: Ignore = None, where: str = "") -> Conversation:
    """The conversation in a record. Raises ConversationError if it has none of the formats.

    where   the record's place, for messages.
    ignore  keys whose text need not be read. Other text that would not be read and is longer than a label is an error,
            since a prompt without a part of it gives other figures. None: no such check."""
    try:
        if not isinstance(record, Mapping):
            raise ConversationError(f"a record must be an object, not a {type(record).__name__}; read are: {FORMS}")
        read = next((format.read for format in FORMATS if format.fits(record)), None)
        if read is None:
            keys = ", ".join(sorted(map(str, record))) or "none"
            raise ConversationError(f"unknown record with the keys {keys}; read are: {FORMS}")
        one = read(record, ignore)
    except ConversationError as error:
        if not where:
            raise
        raise ConversationError(f"{where}: {error}") from None
    category = record.get("category")
    return replace(one, category=category if isinstance(category, str) else "", where=where, record=record)


# Data sets and our own -------------------------------------------------------------------------------------------


def _pair(asked: Sequence[str], answers: Sequence[str]) -> Callable[[Record, Ignore], Conversation]:
    """A reader of one prompt and one answer. asked: keys of the prompt's parts, which a blank line joins, and the first
    of which exists; answers: keys of which one holds the answer, which only a "prompt" can do without."""

    def read(record: Record, ignore: Ignore) -> Conversation:
        answer = next((key for key in answers if key in record), None)
        if answer is None and asked[0] != "prompt":
            raise ConversationError(f'no response: there is no "{answers[0]}"')
        _refuse_unread(record, {*asked, answer}, ignore)
        used = [key for key in asked if record.get(key) is not None and key not in (ignore or ())]
        parts = {key: _text(record, key) for key in (asked[0], *used)}
        messages = [_message("user", "\n\n".join(filter(None, parts.values())))]
        if answer is None:
            return Conversation(messages, parts=parts)
        parts[answer] = _text(record, answer)
        return Conversation([*messages, _message("assistant", parts[answer])], [1], has_response=True, parts=parts)

    return read


def _chat(record: Record, ignore: Ignore) -> Conversation:
    one = _dialogue("messages", "role", "content")(record, ignore)
    # After an answer, "text" repeats the whole conversation.
    keys = RESPONSES[:1] if one.messages[-1]["role"] == "assistant" else RESPONSES
    response = next((key for key in keys if key in record), None)
    if response is not None and isinstance(record[response], Mapping):
        return _exchange(record, record[response], ignore)
    _refuse_unread(record, {"messages", "tools", response}, ignore)
    if response is not None:
        messages = [*one.messages, _message("assistant", _text(record, response))]
        one = Conversation(messages, [len(messages) - 1], has_response=True)
    return replace(one, tools=_tools(record))


def _dialogue(key: str, role: str, content: str) -> Callable[[Record, Ignore], Conversation]:
    """A reader of messages, with their role and content under these keys, whose answers are all the assistant's."""

    def read(record: Record, ignore: Ignore) -> Conversation:
        messages = _messages(record[key], ignore, key, role, content)
        return Conversation(messages, [i for i, one in enumerate(messages) if one["role"] == "assistant" and i > 0])

    return read


def _questions(record: Record, ignore: Ignore) -> Conversation:
    key = ("question_id", str(record["question_id"])) if "question_id" in record else None
    return Conversation([_message("user", turn) for turn in record["turns"]], key=key)


def _spec_bench_answer(record: Record, ignore: Ignore) -> Conversation:
    match record["choices"]:
        case [{"turns": list() as turns}, *_] if turns and all(isinstance(turn, str) for turn in turns):
            key = ("question_id", str(record.get("question_id")))
            return Conversation([_message("assistant", turn) for turn in turns], range(len(turns)), key=key)
    raise ConversationError("an answer without a response: choices[0].turns must be a list of texts")


def _token_ids(record: Record, ignore: Ignore) -> Conversation:
    prompt = _ids(record, "prompt_tokens") if record.get("prompt_tokens") is not None else None
    return Conversation(tokens=(prompt, _ids(record, "tokens")))


def _plain_text(record: Record, ignore: Ignore) -> Conversation:
    title = {"title": _text(record, "title")} if record.get("title") is not None else {}
    return Conversation(text=_text(record, next(key for key in RESPONSES if key in record)), parts=title)


# Bodies of requests and responses --------------------------------------------------------------------------------


def _exchange(asked: Any, said: Any, ignore: Ignore, usage: Any = None) -> Conversation:
    """The conversation of a request's body and its response's. usage: tokens of the answer, if they are known."""
    one, answer = _asked(asked, ignore), _said(said, ignore)
    messages = [*one.messages, *answer.messages]
    usage = usage if isinstance(usage, int) else answer.usage
    return replace(one, messages=messages, answers=[len(messages) - 1], has_response=True, usage=usage)


def _asked(body: Any, ignore: Ignore) -> Conversation:
    """The prompt of a request: its body, its messages or a text; any of them may be JSON in a text."""
    match body := _decoded(body):
        case str():
            return Conversation([_message("user", body)])
        case list():
            return Conversation(_messages(body, ignore))
        case {"messages": messages}:
            return replace(_asked(messages, ignore), tools=_tools(body))
        case {"input": str() | list() as items}:
            told = [_message("system", body["instructions"])] if body.get("instructions") else []
            return Conversation([*told, *_items(items, ignore)], tools=_tools(body))
        case {"prompt": str() as prompt}:
            return Conversation([_message("user", prompt)], is_rendered=True)
    raise ConversationError("no prompt in the request: neither messages nor an input nor a text as prompt")


def _said(body: Any, ignore: Ignore) -> Conversation:
    """The answer of a response: its body, a message or a text; any of them may be JSON in a text."""
    match body := _decoded(body):
        case str():
            message = _message("assistant", body)
        case {"choices": [{"text": str() as text}, *_]} | {"output": str() as text}:
            message = _message("assistant", text)
        case {"choices": [{"message": {"role": _} as said}, *_]} | ({"role": _} as said):
            (message,) = _messages([said], ignore)
        case {"output": list() as items} if messages := _items(items, ignore):
            message = messages[-1]
        case _:
            raise ConversationError("no answer in the response")
    usage = body.get("usage") if isinstance(body, Mapping) else None
    counts = usage if isinstance(usage, Mapping) else {}
    return Conversation([message], [0], usage=counts.get("completion_tokens", counts.get("output_tokens")))


def _items(items: str | list[Any], ignore: Ignore) -> list[Message]:
    """Messages of the items in the input or the output of the Responses API. What a model says and calls without a
    result between them is one message."""
    messages: list[Message] = []
    for item in [_message("user", items)] if isinstance(items, str) else items:
        match item:
            case {"type": "function_call", "name": name}:
                call = {"type": "function", "function": {"name": name, "arguments": item.get("arguments")}}
                item = {"role": "assistant", "content": "", "tool_calls": [call]}
            case {"type": "function_call_output", "output": output}:
                item = _message("tool", output)
            case {"role": _}:
                item = {key: value for key, value in item.items() if key != "type"}
            case _:
                continue  # reasoning, and what happens on the server
        (message,) = _messages([item], ignore)
        if messages and message["role"] == messages[-1]["role"] == "assistant":
            before = messages.pop()
            made = [*before.get("tool_calls", ()), *message.get("tool_calls", ())]
            message = _message("assistant", before["content"] + message["content"]) | ({"tool_calls": made} if made else {})
        messages.append(message)
    return messages


def _tools(body: Record) -> list[Mapping[str, Any]]:
    """The functions of a request, in the form of Chat Completions."""
    functions = [tool.get("function", tool) for tool in body.get("tools") or () if isinstance(tool, Mapping)]
    return [{"type": "function", "function": one} for one in functions if isinstance(one, Mapping) and one.get("name")]


def _decoded(value: Any) -> Any:
    """What the JSON in a text says; the value itself where it is none."""
    try:
        return loads(value) if isinstance(value, str) and value[:1] in ("{", "[") else value
    except NotJSON:
        return value


# Logs of servers, proxies and tracers ----------------------------------------------------------------------------


def _batch(record: Record, ignore: Ignore) -> Conversation:
    """A line of an OpenAI batch: of its input file, or of its output file."""
    key = ("custom_id", str(record["custom_id"]))
    if "body" in record:
        return replace(_asked(record["body"], ignore), key=key)
    response = record["response"]
    if not isinstance(response, Mapping) or response.get("status_code", 200) != 200:
        raise ConversationError("the request failed, so there is no answer")
    return replace(_said(response.get("body"), ignore), key=key)


def _langfuse(record: Record, ignore: Ignore) -> Conversation:
    if record["type"] != "GENERATION":
        return NOTHING
    usages = [record.get(name) for name in ("usageDetails", "usage_details", "usage")]
    usage = next((usage["output"] for usage in usages if isinstance(usage, Mapping) and "output" in usage), None)
    return _exchange(record.get("input"), record.get("output"), ignore, usage)


def _sglang(record: Record, ignore: Ignore) -> Conversation:
    """A line of `--log-requests --log-requests-format json`."""
    if record["event"] != "request.finished":
        return NOTHING
    asked, said = record["obj"], record["out"]
    if _are_ids(asked.get("input_ids")) and _are_ids(said.get("output_ids")):
        return Conversation(tokens=(asked["input_ids"], said["output_ids"]))
    texts = asked.get("text"), said.get("text")
    # Level 2 keeps 1,024 characters from the beginning of a text and as many from its end.
    if not all(isinstance(text, str) and (len(text) != 2051 or text[1024:1027] != "...") for text in texts):
        raise ConversationError("its texts are not whole; log with --log-requests-level 3")
    return _exchange({"prompt": texts[0]}, texts[1], ignore, said.get("meta_info", {}).get("completion_tokens"))


LOG = "a line of a server's log"
"""Key of a line that is no JSON and begins as LOGGED says: as vLLM's and uvicorn's do."""
LOGGED = re.compile(rb"(\(\S+ pid=\d+\) )?(DEBUG|INFO|WARNING|ERROR)(:? +\d\d-\d\d |: )")
_QUOTED = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"), """
_PROMPT = re.compile(rf"(?:Received request|Request) (\S+?)(?: (?:prompt )?details)?: prompt: {_QUOTED}")
_OUTPUT = re.compile(rf"Generated response (\S+?)(?: \(streaming complete\))?: output: {_QUOTED}")


def _vllm_log(record: Record, ignore: Ignore) -> Conversation:
    """A line of vLLM's log with `--enable-log-requests --enable-log-outputs` and VLLM_LOGGING_LEVEL=DEBUG."""
    asked, said = _PROMPT.search(record[LOG]), _OUTPUT.search(record[LOG])
    if (found := asked or said) is None:
        return NOTHING
    id = re.sub(r"^(cmpl-.*)-\d+$", r"\1", found[1])  # a prompt of a text completion has a number of its own
    message = _message("user" if asked else "assistant", literal_eval(found[2]))
    return Conversation([message], () if asked else [0], is_rendered=True, key=("request", id))


# The table -------------------------------------------------------------------------------------------------------


class Format(NamedTuple):
    """A format of records.

    name  for messages.
    fits  whether a record has it. The first of FORMATS that fits is taken.
    read  (record, ignore as for `conversation`) to the conversation; ConversationError if there is none."""

    name: str
    fits: Callable[[Record], bool]
    read: Callable[[Record, Ignore], Conversation]


def _has(*keys: str, either: Sequence[str] = ()) -> Callable[[Record], bool]:
    """Whether a record has all of `keys`, and one of `either`."""
    return lambda record: all(key in record for key in keys) and (not either or any(key in record for key in either))


FORMATS = [
    # Token ids come before text. A number of "tokens" only describes a text.
    Format('{"prompt_tokens": [ids], "tokens": [ids]} (serve --log)',
           lambda r: list in (type(r.get("tokens")), type(r.get("prompt_tokens"))), _token_ids),
    Format("OpenAI batch files", _has("custom_id", either=("body", "response")), _batch),
    Format("SGLang's request log", lambda r: str(r.get("event")).startswith("request."), _sglang),
    Format("vLLM's log", _has(LOG), _vllm_log),
    Format("vLLM's RequestOutput", lambda r: "prompt_token_ids" in r and bool(r.get("outputs")),
           lambda r, _: Conversation(tokens=(_ids(r, "prompt_token_ids"), _ids(r["outputs"][0], "token_ids")))),
    Format("Langfuse's observations", _has("type", either=("traceId", "trace_id")), _langfuse),
    Format("LiteLLM's log", _has("call_type", "messages"),
           lambda r, ignore: _exchange(r, r.get("response"), ignore, r.get("completion_tokens"))),
    Format('{"request", "response"}', _has("request", "response"),
           lambda r, ignore: _exchange(r["request"], r["response"], ignore)),
    Format('{"messages" or "prompt", "choices"}', _has("choices", either=("messages", "prompt")),
           lambda r, ignore: _exchange(r, r, ignore)),
    Format("Spec-Bench's answers", _has("choices"), _spec_bench_answer),
    Format('{"messages": [...], "response"}', _has("messages"), _chat),
    Format('{"turns": [text]}', lambda r: bool(r.get("turns")) and set(map(type, r["turns"])) == {str}, _questions),
    Format('{"turns": [{"role", "text"}]}', _has("turns"), _dialogue("turns", "role", "text")),
    Format("ShareGPT", _has("conversations"), _dialogue("conversations", "from", "value")),
    Format('{"prompt", "response"}', _has("prompt"), _pair(("prompt",), RESPONSES)),
    Format('{"instruction", "output"} (Alpaca, Dolly)', _has("instruction"),
           _pair(("instruction", "input", "context"), ("output", "response"))),
    Format('{"question", "answer"}', _has("question"), _pair(("question",), ("answer",))),
    Format('{"input", "output"}', _has("input", "output"), lambda r, ignore: _exchange(r, r, ignore)),
    Format('{"title", "text"}', _has(either=RESPONSES), _plain_text),
]  # fmt: skip
FORMS = ", ".join(format.name for format in FORMATS)
"""The formats, for messages."""


# Values ----------------------------------------------------------------------------------------------------------


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _messages(
    value: Any, ignore: Ignore, name: str = "messages", role: str = "role", content: str = "content"
) -> list[dict[str, Any]]:
    """The messages in the list under the key `name`, with their role and content under these keys."""
    try:
        if value and isinstance(value, list):
            return [_read_message(each, ignore, role, content) for each in value]
    except (AttributeError, KeyError, TypeError):
        pass
    raise ConversationError(f'"{name}" must be a list of {{"{role}": "user", "{content}": "text"}}')


def _read_message(raw: Any, ignore: Ignore, role: str, content: str) -> dict[str, Any]:
    """The message in an object; KeyError, TypeError or AttributeError if there is none."""
    _refuse_unread(raw, OF_A_MESSAGE | {role, content}, ignore, "a message: ")
    made = raw.get("tool_calls") or ([{"function": raw["function_call"]}] if raw.get("function_call") else [])
    said = raw.get(content) or raw.get("refusal") or "" if made or raw.get("refusal") else raw[content]
    parts = said if isinstance(said, list) else [{"type": "text", "text": said}]
    texts = [part.get("text", part.get("refusal")) for part in parts if part["type"] in TEXT_PARTS]
    message = _message(ROLES.get(raw[role], raw[role] + ""), "".join(texts))
    if len(parts) > len(texts):
        message["missing"] = len(parts) - len(texts)
    if made:
        message["tool_calls"] = made
        try:
            calls(message)
        except PacelineError as error:
            raise ConversationError(str(error)) from None
    return message


def _text(record: Record, key: str) -> str:
    if not isinstance(record[key], str):
        raise ConversationError(f'"{key}" must be a text, not a {type(record[key]).__name__}')
    return str(record[key])


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(id) is int and 0 <= id < MAX_TOKEN_ID for id in value)


def _ids(record: Record, key: str) -> list[int]:
    if not _are_ids(value := record.get(key)):
        raise ConversationError(f'"{key}" must be a list of token ids')
    return list(value)


def _refuse_unread(record: Record, read: Collection[str | None], ignore: Ignore, place: str = "") -> None:
    """Raise ConversationError for text longer than a label under a key outside `read`, METADATA and `ignore`."""
    if ignore is None:
        return
    for key, value in record.items():
        if key not in read and key not in METADATA and key not in ignore and _holds_text(value):
            raise ConversationError(
                f'{place}the text under "{key}" would not be read; make it part of the prompt or of a message, put '
                f'it under "metadata", or leave it out with --ignore {key}'
            )


def _holds_text(value: object) -> bool:
    if isinstance(value, str):
        return len(value) > LABEL_CHARACTERS or len(value.split()) > LABEL_WORDS
    if isinstance(value, (dict, list)):
        return any(map(_holds_text, value.values() if isinstance(value, dict) else value))
    return False
