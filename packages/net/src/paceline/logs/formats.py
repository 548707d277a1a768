"""Formats of records: what a line of a file or of a log can be, and the conversation in it.

    one = conversation({"prompt": "hello", "response": "hi"})

FORMATS says what a record can be; a new format is one entry of it. Records of data sets and our own may have a
"category". The logs of servers, proxies and tracers hold requests and responses, whose bodies are those of Chat
Completions or Completions."""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from paceline.errors import PacelineError, kind_of
from paceline.jsonl import NotJSON, as_object
from paceline.logs import bodies
from paceline.logs.bodies import ConversationError, Ignore, Message, Record
from paceline.logs.tool_calls import as_text

RESPONSES = ("response", "completion", "text")
"""Keys of an answer to a "prompt" or to "messages"."""


@dataclass(frozen=True)
class Conversation:
    """One record.

    messages      from the first message, of the system or the user, to the last answer.
    answers       indices of the messages that the model wrote.
    category      "" without one.
    where         "file, line 3", for messages.
    tokens        (prompt, answer) as token ids, if the record has them; prompt None: unknown.
    text          the text of a record that is a plain text; else "".
    has_response  whether the last message is an answer that the record gave separately from the prompt.
    is_rendered   whether the first message is the whole prompt as the model read it, so no chat template is needed.
    tools         functions that the model might call: [{"type": "function", "function": {"name", ...}}].
    usage         tokens of the last answer by the log's count; None: unknown.
    key           (name, id) shared with the other half of the conversation, if a record holds the prompt or the
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

    def texts(self) -> list[str]:
        """The text of every message, or the plain text."""
        return [as_text(message)["content"] for message in self.messages] or [self.text]


def conversation(record: Any, ignore: Ignore = None, where: str = "") -> Conversation:
    """The conversation in a record, or in a line of bytes. Raises ConversationError if no format of FORMATS fits.

    where   the record's place, for messages.
    ignore  keys whose text need not be read. Other text that would not be read and is longer than a label is an error,
            since a prompt without a part of it gives other figures. None: no such check."""
    try:
        if isinstance(record, bytes):
            record = _line(record)
        if not record:
            return Conversation(where=where)
        if not isinstance(record, Mapping):
            raise ConversationError(f"a record must be an object, not {kind_of(record)}; a line is {FORMS}")
        read = next((format.read for format in FORMATS if format.fits(record)), None)
        if read is None:
            keys = ", ".join(sorted(map(str, record))) or "none"
            raise ConversationError(f"unknown record with the keys {keys}; a line is {FORMS}")
        one = read(record, ignore)
    except PacelineError as error:
        raise ConversationError(f"{where}: {error}" if where else str(error)) from None
    category = record.get("category")
    return replace(one, category=category if isinstance(category, str) else "", where=where, record=record)


def _pair(asked: Sequence[str], answers: Sequence[str]) -> Callable[[Record, Ignore], Conversation]:
    """A reader of one prompt and one answer. asked: keys of the prompt's parts, which a blank line joins, and the first
    of which exists; answers: keys of which one holds the answer, which only a "prompt" can do without."""

    def read(record: Record, ignore: Ignore) -> Conversation:
        answer = next((key for key in answers if key in record), None)
        if answer is None and asked[0] != "prompt":
            raise ConversationError(f'no response: there is no "{answers[0]}"')
        bodies.refuse_unread(record, {*asked, answer}, ignore)
        used = [key for key in asked if record.get(key) is not None and key not in (ignore or ())]
        parts = {key: bodies.text_of(record, key) for key in (asked[0], *used)}
        messages = [bodies.message("user", "\n\n".join(filter(None, parts.values())))]
        if answer is None:
            return Conversation(messages, parts=parts)
        parts[answer] = bodies.text_of(record, answer)
        messages.append(bodies.message("assistant", parts[answer]))
        return Conversation(messages, [1], has_response=True, parts=parts)

    return read


def _dialogue(key: str, role: str, content: str) -> Callable[[Record, Ignore], Conversation]:
    """A reader of messages, with their role and content under these keys, whose answers are all the assistant's."""

    def read(record: Record, ignore: Ignore) -> Conversation:
        messages = bodies.messages_of(record[key], ignore, key, role, content)
        return Conversation(messages, [i for i, one in enumerate(messages) if one["role"] == "assistant" and i > 0])

    return read


def _chat(record: Record, ignore: Ignore) -> Conversation:
    one = _dialogue("messages", "role", "content")(record, ignore)
    # After an answer, "text" repeats the whole conversation.
    keys = RESPONSES[:1] if one.messages[-1]["role"] == "assistant" else RESPONSES
    response = next((key for key in keys if key in record), None)
    if response is not None and isinstance(record[response], Mapping):
        return _exchange(record, record[response], ignore)
    bodies.refuse_unread(record, {"messages", "tools", response}, ignore)
    if response is not None:
        messages = [*one.messages, bodies.message("assistant", bodies.text_of(record, response))]
        one = Conversation(messages, [len(messages) - 1], has_response=True)
    return replace(one, tools=bodies.tools_of(record))


def _token_ids(record: Record, ignore: Ignore) -> Conversation:
    prompt = bodies.ids_of(record, "prompt_tokens") if record.get("prompt_tokens") is not None else None
    return Conversation(tokens=(prompt, bodies.ids_of(record, "tokens")))


def _spec_bench_answer(record: Record, ignore: Ignore) -> Conversation:
    match record["choices"]:
        case [{"turns": list() as turns}, *_] if turns and all(isinstance(turn, str) for turn in turns):
            messages = [bodies.message("assistant", turn) for turn in turns]
            return Conversation(messages, range(len(turns)), key=_question(record))
    raise ConversationError("an answer without a response: choices[0].turns must be a list of texts")


def _benchmarked(record: Record, ignore: Ignore) -> Conversation:
    """A row of a benchmark: its answers, whose questions are in the suite."""
    messages = [bodies.message("assistant", bodies.text_of(turn, "text")) for turn in record["turns"]]
    return Conversation(messages, range(len(messages)), key=("question_id", str(record["question"])))


def _question(record: Record) -> tuple[str, str] | None:
    return ("question_id", str(record["question_id"])) if "question_id" in record else None


def _exchange(asked: Any, said: Any, ignore: Ignore, usage: Any = None) -> Conversation:
    """The conversation of a request's body and its response's. usage: tokens of the answer, if they are known."""
    one, answer = _asked(asked, ignore), _said(said, ignore)
    messages = [*one.messages, *answer.messages]
    usage = usage if isinstance(usage, int) else answer.usage
    return replace(one, messages=messages, answers=[len(messages) - 1], has_response=True, usage=usage)


def _asked(body: Any, ignore: Ignore) -> Conversation:
    """The prompt of a request's body."""
    messages, tools, is_rendered = bodies.asked(body, ignore)
    return Conversation(messages, tools=tools, is_rendered=is_rendered)


def _said(body: Any, ignore: Ignore) -> Conversation:
    """The answer of a response's body."""
    message, usage = bodies.said(body, ignore)
    return Conversation([message], [0], usage=usage)


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
        return Conversation()
    usages = [record.get(name) for name in ("usageDetails", "usage_details", "usage")]
    usage = next((usage["output"] for usage in usages if isinstance(usage, Mapping) and "output" in usage), None)
    return _exchange(record.get("input"), record.get("output"), ignore, usage)


def _langsmith(record: Record, ignore: Ignore) -> Conversation:
    """A run of a model; runs of chains and tools hold no answer of their own."""
    if record["run_type"] != "llm":
        return Conversation()
    asked, said = record["inputs"], record["outputs"]
    if isinstance(said, Mapping) and (generations := said.get("generations")):
        first = generations[0][0] if isinstance(generations[0], list) else generations[0]
        said = first.get("message") or first.get("text")
    messages = asked.get("messages") if isinstance(asked, Mapping) else None
    if isinstance(messages, list):
        nested = messages[0] if messages and isinstance(messages[0], list) else messages
        asked = {"messages": [_of_langchain(one) for one in nested]}
    elif isinstance(asked, Mapping) and isinstance(asked.get("prompts"), list):
        asked = {"prompt": asked["prompts"][0]}
    return _exchange(asked, _of_langchain(said), ignore)


LANGCHAIN = {"human": "user", "ai": "assistant", "HumanMessage": "user", "AIMessage": "assistant",
             "SystemMessage": "system", "ToolMessage": "tool"}  # fmt: skip


def _of_langchain(message: Any) -> Any:
    """A message of LangChain as OpenAI has it; anything else as it is."""
    if not isinstance(message, Mapping) or "role" in message or not {"type", "kwargs", "data"} & message.keys():
        return message
    own = message.get("kwargs") or message.get("data") or message
    kind = message["id"][-1] if isinstance(message.get("id"), list) else message.get("type")
    if not isinstance(own, Mapping) or "content" not in own:
        return message
    return {"role": LANGCHAIN.get(str(kind), str(kind)), "content": own["content"]}


def _span(record: Record, ignore: Ignore) -> Conversation:
    """A span of a model's call, its attributes an object or OTLP's list. Others hold no answer."""
    given = record["attributes"]
    if isinstance(given, list):
        given = {one.get("key"): next(iter((one.get("value") or {}).values()), None) for one in given}
    if not isinstance(given, Mapping):
        return Conversation()
    asked, said = (given.get(f"gen_ai.{way}.messages") for way in ("input", "output"))
    if asked is None or said is None:
        return Conversation()
    system = given.get("gen_ai.system_instructions")
    before = [] if system is None else [{"role": "system", "parts": bodies.decoded(system)}]
    messages = [_of_span(one) for one in (*before, *bodies.decoded(asked), *bodies.decoded(said)[:1])]
    usage = given.get("gen_ai.usage.output_tokens")
    own = bodies.messages_of(messages, ignore)
    return Conversation(own, [len(own) - 1], has_response=True, usage=int(usage) if usage is not None else None)


def _of_span(message: Record) -> Record:
    """A message of a span as OpenAI has it."""
    parts = message.get("parts") or ()
    thought = "".join(str(part.get("content")) for part in parts if part.get("type") == "reasoning")
    text = [{"type": "text", "text": part.get("content")} for part in parts if part.get("type") == "text"]
    return {"role": message.get("role"), "content": text, "reasoning_content": thought}


def _sglang(record: Record, ignore: Ignore) -> Conversation:
    """A line of `--log-requests --log-requests-format json`."""
    if record["event"] != "request.finished":
        return Conversation()
    asked, said = record.get("obj"), record.get("out")
    if not isinstance(asked, Mapping) or not isinstance(said, Mapping):
        raise ConversationError('no "obj" and "out" with the request and its answer')
    if bodies.are_ids(asked.get("input_ids")) and bodies.are_ids(said.get("output_ids")):
        return Conversation(tokens=(asked["input_ids"], said["output_ids"]))
    texts = asked.get("text"), said.get("text")
    # Level 2 keeps 1,024 characters from the beginning of a text and as many from its end.
    if not all(isinstance(text, str) and (len(text) != 2051 or text[1024:1027] != "...") for text in texts):
        raise ConversationError("its texts are not whole; log with --log-requests-level 3")
    of = said.get("meta_info")
    usage = of.get("completion_tokens") if isinstance(of, Mapping) else None
    return _exchange({"prompt": texts[0]}, texts[1], ignore, usage)


def _line(line: bytes) -> Record:
    """The record in a line: JSON, or a line of a server's log. What containers put around it is taken off, and a line
    of theirs that is neither holds no record."""
    is_wrapped = WRAPPED.match(line)
    inner = line[is_wrapped.end() :] if is_wrapped else line
    try:
        record: Record = {LOG: inner.decode("utf-8", "replace")} if LOGGED.match(inner) else as_object(inner, FORMS)
    except NotJSON:
        if is_wrapped:
            return {}
        raise
    held = next((record[key] for key, beside in HOLDERS.items() if key in record and beside in record), None)
    if not isinstance(held, str):
        return record
    return _line(held.encode()) if LOGGED.match(held.encode()) or held.lstrip().startswith("{") else {}


WRAPPED = re.compile(rb"\S+ std(?:out|err) [FP] |[A-Z][a-z]{2} +\d+ [\d:]{8} \S+ [^\s:]+: ")
"""What Kubernetes and journald put before a line of a container."""
HOLDERS = {"log": "stream", "MESSAGE": "_HOSTNAME"}  # Keys of a line in docker's file and journald's export.
LOG = "a line of a server's log"  # Key of a line that is no JSON and fits LOGGED, such as vLLM's and uvicorn's.
LOGGED = re.compile(rb"(\(\S+ pid=\d+\) )?(DEBUG|INFO|WARNING|ERROR)(:? +\d\d-\d\d |: )")
_QUOTED = r"""('(?:[^'\\]++|\\.)*+'|"(?:[^"\\]++|\\.)*+"), """
_PROMPT = re.compile(rf"(?:Received request|Request) (\S+?)(?: (?:prompt )?details)?: prompt: {_QUOTED}")
_IDS = re.compile(r"(?:prompt|output)_token_ids: \[([\d, ]+)\]")
_OUTPUT = re.compile(rf"Generated response (\S+?)(?: \(streaming complete\))?: output: {_QUOTED}")


def _vllm(record: Record, ignore: Ignore) -> Conversation:
    """A line of vLLM's log with `--enable-log-requests --enable-log-outputs` and VLLM_LOGGING_LEVEL=DEBUG."""
    asked, said = _PROMPT.search(record[LOG]), _OUTPUT.search(record[LOG])
    if (found := asked or said) is None:
        return Conversation()
    id = re.sub(r"^(cmpl-.*)-\d+$", r"\1", found[1])  # Each prompt of a text completion has a number.
    try:
        text = literal_eval(found[2])
    except (ValueError, SyntaxError):
        raise ConversationError("the text in quotes is broken") from None
    message = bodies.message("user" if asked else "assistant", text)
    ids = _IDS.search(record[LOG])
    exact = [int(one) for one in ids[1].split(",")] if ids else None
    tokens = None if exact is None else (exact, ()) if asked else (None, exact)
    return Conversation([message], () if asked else [0], is_rendered=True, key=("request", id), tokens=tokens)


class Format(NamedTuple):
    """A format of records.

    name  for messages.
    fits  whether a record has it. The first of FORMATS that fits is taken.
    read  (record, ignore as for `conversation`) to the conversation, which is empty where the record is about something
          else, such as a request that has only arrived; ConversationError if there is none."""

    name: str
    fits: Callable[[Record], bool]
    read: Callable[[Record, Ignore], Conversation]


def _has(*keys: str, either: Sequence[str] = ()) -> Callable[[Record], bool]:
    """Whether a record has all of `keys`, and one of `either`."""
    return lambda record: all(key in record for key in keys) and (not either or any(key in record for key in either))


FORMATS = [
    # Token ids come before text. A number of "tokens" only describes a text.
    Format('{"prompt_tokens": [ids], "tokens": [ids]} (serve --log)',
           lambda r: list in (type(r.get("tokens")), type(r.get("prompt_tokens"))) or set(r) == {"tokens"}, _token_ids),
    Format("OpenAI batch files", _has("custom_id", either=("body", "response")), _batch),
    Format("SGLang's request log", lambda r: str(r.get("event")).startswith("request."), _sglang),
    Format("vLLM's log", _has(LOG), _vllm),
    Format("Langfuse's observations", _has("type", either=("traceId", "trace_id")), _langfuse),
    Format("Helicone's export", _has("request_body", "response_body"),
           lambda r, ignore: _exchange(r["request_body"], r["response_body"], ignore)),
    Format("LangSmith's runs", _has("run_type", "inputs", "outputs"), _langsmith),
    Format("OpenTelemetry's GenAI spans", _has("attributes"), _span),
    Format("LiteLLM's log", _has("call_type", "messages"),
           lambda r, ignore: _exchange({"messages": r["messages"]}, r.get("response"), ignore,
                                       r.get("completion_tokens"))),
    Format("verl's rollouts", _has("input", "output", "step"),
           lambda r, ignore: _exchange({"prompt": r["input"]}, r["output"], ignore)),
    Format('{"request", "response"}', _has("request", "response"),
           lambda r, ignore: _exchange(r["request"], r["response"], ignore)),
    Format('{"messages" or "prompt", "choices"}', _has("choices", either=("messages", "prompt")),
           lambda r, ignore: _exchange(r, r, ignore)),
    Format("Spec-Bench's answers", _has("choices"), _spec_bench_answer),
    Format('{"messages": [...], "response"}', _has("messages"), _chat),
    Format('{"turns": [text]}', lambda r: isinstance(r.get("turns"), list) and {*map(type, r["turns"])} == {str},
           lambda r, _: Conversation([bodies.message("user", turn) for turn in r["turns"]], key=_question(r))),
    Format("answers.jsonl of paceline bench", _has("question", "method", "turns"), _benchmarked),
    Format('{"turns": [{"role", "text"}]}', _has("turns"), _dialogue("turns", "role", "text")),
    Format("ShareGPT", _has("conversations"), _dialogue("conversations", "from", "value")),
    Format('{"prompt", "response"}', _has("prompt"), _pair(("prompt",), RESPONSES)),
    Format('{"instruction", "output"} (Alpaca, Dolly)', _has("instruction"),
           _pair(("instruction", "input", "context"), ("output", "response"))),
    Format('{"question", "answer"}', _has("question"), _pair(("question",), ("answer",))),
    Format('{"title", "text"}', _has(either=RESPONSES),
           lambda r, _: Conversation(
               text=bodies.text_of(r, next(key for key in RESPONSES if key in r)),
               parts={key: bodies.text_of(r, key) for key in ("title",) if r.get(key) is not None})),
]  # fmt: skip
FORMS = ", ".join(format.name for format in FORMATS)  # The formats, for messages.
