"""The one reader of prompts, questions, recorded answers and texts, in every format that Paceline accepts.

    for conversation in read("log.jsonl.gz"): ...
    answered = read_trace("log.jsonl", categories=["qa"])

A file is JSON Lines, JSON over several lines, a table or vLLM's log, packed or not. FORMATS says what a record can be;
a new format is one entry of it. Records of data sets and our own may have a "category". The logs of servers, proxies
and tracers hold requests and responses, whose bodies are those of Chat Completions or Completions.

Spec-Bench: Xia et al. 2024, arXiv 2401.07851."""

from __future__ import annotations

import logging
import re
from ast import literal_eval
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import BufferedReader
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import PacelineError, kind_of
from paceline.jsonl import NotJSON, as_object, loads
from paceline.logs import bodies
from paceline.logs.bodies import ConversationError, Ignore, Message, Record
from paceline.logs.sessions import AGENTS, Agent, agent_of, answered, expanded, sessions
from paceline.logs.tool_calls import as_text
from paceline.textfiles import Piece, listed, opened, records

log = logging.getLogger("paceline")

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""Categories of MT-bench. Spec-Bench counts them as one task."""
SPEC_BENCH = {
    **dict.fromkeys(MT_BENCH, 10),
    **dict.fromkeys(("translation", "summarization", "qa", "math_reasoning", "rag"), 80),
}
"""Number of questions by category in Spec-Bench's own file."""
TOKENS_DIFFER = 0.03  # A log's count of tokens may differ from the tokenizer's by this share.
RESPONSES = ("response", "completion", "text")
"""Keys of an answer to a "prompt" or to "messages"."""
_AGENTS = ", ".join(dict.fromkeys(agent.name for agent in AGENTS))


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


@dataclass
class Reading:
    """Counts of a recording's lines: all, with an answer, and skipped, and why the first was skipped.

    missing          parts of messages that are no text: the model read them, and a drafter does not.
    logged, counted  tokens of answers as the log counts them, and as the tokenizer does.
    strict           a line that cannot be read is an error."""

    lines: int = 0
    answered: int = 0
    skipped: int = 0
    first: str = ""
    missing: int = 0
    logged: int = 0
    counted: int = 0
    strict: bool = False

    def skip(self, error: ConversationError) -> None:
        """Count a line that cannot be read."""
        if self.strict:
            raise error
        self.skipped += 1
        self.first = self.first or str(error)

    def __iadd__(self, other: Reading) -> Reading:
        first = self.first or other.first
        vars(self).update({name: value + vars(other)[name] for name, value in vars(self).items()}, first=first)
        return self

    def check(self, name: str) -> None:
        """As `check_skipped`, but also raises ConversationError if there is no answer. name: the recording's."""
        self.check_skipped()
        if not self.answered:
            raise ConversationError(f"{name} holds no answers; a line is {FORMS}")

    def check_skipped(self) -> None:
        """Raise ConversationError if nothing could be read, or more than half could not."""
        if self.skipped and self.skipped > min(self.lines / 2, self.lines - 1):
            more = f" ({self.skipped:,} of {self.lines:,} lines cannot be read)" if self.lines > 1 else ""
            raise ConversationError(self.first + more)

    def notes(self, redact: bool = False) -> Iterator[str]:
        """Notes for readers of the figures, a line each. redact: whether to leave out all text of the log."""
        if self.skipped:
            first = "" if redact else f": first at {self.first}"
            yield f"{self.skipped:,} of {self.lines:,} lines skipped{first}"
        if self.missing:
            yield f"{self.missing:,} parts of messages are no text (images, sound) and are missing from the prompts"
        if abs(self.counted - self.logged) > TOKENS_DIFFER * self.logged:
            yield (
                f"the log counts {self.logged:,} tokens in answers that have {self.counted:,} here "
                f"({self.counted / self.logged - 1:+.1%}): another tokenizer, or text that is not in the log"
            )


# Files -----------------------------------------------------------------------------------------------------------


def read(
    source: str | Path | Piece, questions: str | Path | None = None, ignore: Ignore = None,
    reading: Reading | None = None,
) -> Iterator[Conversation]:  # fmt: skip
    """The conversations of a file, or of a piece of one. Raises ConversationError.

    questions  a file of the prompts, such as Spec-Bench's question.jsonl, for a file of answers.
    ignore     see `conversation`.
    reading    counts the lines that cannot be read, and are skipped; None: such a line is an error."""
    reading = reading or Reading(strict=True)
    every = _read(source if isinstance(source, Piece) else Piece(Path(source)), ignore, reading)
    return every if questions is None else _joined(every, questions, reading)


def read_trace(
    *paths: str | Path,
    questions: str | Path | None = None,
    limit: int | None = None,
    categories: Sequence[str] | None = None,
    ignore: Collection[str] = (),
    reading: Reading | None = None,
) -> list[Conversation]:
    """The answered conversations of a recording in one or several files: the first `limit` in any of `categories`.

    questions  a file of the prompts, such as Spec-Bench's question.jsonl, for a file of answers.
    ignore     keys whose text is left out; a line with other text that would not be read cannot be read.
    reading    counts the lines that cannot be read, and are skipped; None: a warning says how many.

    Raises ConversationError, which names the file and the line, if nothing or less than half can be read."""
    found, name = reading or Reading(), ", ".join(map(str, paths))
    every: Iterable[Conversation] = read_pieces([Piece(Path(path)) for path in paths], questions, ignore, found)
    if categories is not None:
        every = list(every)
        known = list(dict.fromkeys(one.category for one in every if one.category))
        absent = [category for category in categories if category not in known]
        if every and absent:
            has = f"its categories: {', '.join(known)}" if known else "its lines name none"
            raise ConversationError(f"{name} has no category {absent[0]!r}; {has}")
    chosen = list(islice((one for one in every if categories is None or one.category in categories), limit))
    found.check(name)
    for note in found.notes() if reading is None else ():
        log.warning(note)
    return chosen


def read_pieces(
    pieces: Iterable[Piece], questions: str | Path | None, ignore: Collection[str], reading: Reading
) -> Iterator[Conversation]:
    """The answered conversations in pieces of a recording, as for `read_trace`."""
    every = chain.from_iterable(_read(piece, ignore, reading) for piece in pieces)
    for one in _joined(every, questions, reading):
        try:
            answered = _answered(one)
        except ConversationError as error:
            reading.skip(error)
            continue
        reading.answered += 1
        reading.missing += sum(message.get("missing", 0) for message in answered.messages)
        yield answered


def _read(piece: Piece, ignore: Ignore, reading: Reading) -> Iterator[Conversation]:
    paths = expanded(piece.path)
    if paths != [piece.path]:
        if not paths:
            reading.skip(ConversationError(f"{piece.path}: in this folder are no sessions of {_AGENTS}"))
        for path in paths:
            yield from _read(Piece(path), ignore, reading)
    elif (agent := agent_of(piece.path)) is not None:
        yield from _sessions(agent, piece.path, reading)
    else:
        yield from _records(piece, ignore, reading)


def _sessions(agent: Agent, path: Path, reading: Reading) -> Iterator[Conversation]:
    """Read a coding agent's sessions, a conversation each. Their category is the agent's name."""
    try:
        for said in sessions(agent, path):
            reading.lines += 1
            yield Conversation(said, answered(said), category=agent.name, where=str(path))
    except ConversationError as error:
        reading.lines += 1
        reading.skip(error)


def _records(piece: Piece, ignore: Ignore, reading: Reading) -> Iterator[Conversation]:
    with opened(piece.path, ConversationError) as file:
        for where, record in read_records(file, piece.path, piece):
            reading.lines += 1
            try:
                one = conversation(record, ignore, where)
            except ConversationError as error:
                reading.skip(error)
                continue
            if one.messages or one.text or one.tokens is not None:
                yield one


def read_records(file: BufferedReader, name: str | Path, piece: Piece | None = None) -> Iterator[tuple[str, Any]]:
    """(where, record) of an opened file, or of a piece of it, as `textfiles.records` has them; but a list of messages
    is one record, and a page of records is many."""
    for where, record in records(file, name, ConversationError, piece, _parts):
        if isinstance(record, bytes) and b'"data"' in record and b'"meta"' in record:
            with suppress(NotJSON):
                if _is_page(value := loads(record)):
                    yield from ((f"{where}, item {n}", item) for n, item in enumerate(value["data"], 1))
                    continue
        yield where, record


def _parts(value: Any) -> Sequence[Any]:
    """The records in a file's only value."""
    of_messages = _has("role", either=("content", "tool_calls"))
    if isinstance(value, list) and value and all(isinstance(one, dict) and of_messages(one) for one in value):
        return [{"messages": value}]
    items: Sequence[Any] = value["data"] if _is_page(value) else listed(value)
    return items


def _is_page(value: Any) -> bool:
    """Whether a value is a page of records, as the API of Langfuse gives it."""
    return isinstance(value, dict) and value.keys() == {"data", "meta"} and isinstance(value["data"], list)


def _answered(one: Conversation) -> Conversation:
    """`one` up to its last answer. Raises ConversationError without an answer or without a prompt."""
    if not isinstance(one.record.get("category", ""), (str, type(None))):
        raise ConversationError(f'{one.where}: "category" must be a text')
    if one.tokens is not None and one.tokens[0] is not None:
        return one
    if not one.messages or list(one.answers[:1]) == [0]:
        raise ConversationError(f"{one.where}: neither a prompt nor messages in it (keys: {', '.join(one.record)})")
    if not one.answers:
        raise ConversationError(f'{one.where}: no response: there is no "response" and no message of the assistant; '
                                "`paceline generate MODEL -p FILE -o ANSWERS` has a model answer prompts")
    return replace(one, messages=one.messages[: one.answers[-1] + 1])


def _joined(
    every: Iterable[Conversation], questions: str | Path | None, reading: Reading
) -> Iterator[Conversation]:
    """Conversations in order. If prompt and answers are in two records, a conversation comes when it has both."""
    asked = {one.key: one for one in (() if questions is None else read(questions)) if one.key is not None}
    if is_spec_bench(one.category for one in asked.values()):  # Other questions with these categories are not grouped.
        asked |= {key: replace(one, category="mt-bench") for key, one in asked.items() if one.category in MT_BENCH}
    waiting: dict[tuple[str, str] | None, Conversation] = {}
    for one in every:
        if one.key is None:
            yield one
        elif one.answers:
            waiting[one.key] = one
        elif asked.setdefault(one.key, one).messages != one.messages:
            reading.skip(ConversationError(f"{one.where}: another prompt has the {' '.join(one.key)} too"))
        if one.key in asked and one.key in waiting:
            prompt, said = asked[one.key], waiting.pop(one.key)
            if len(prompt.messages) >= len(said.messages):
                yield _together(prompt, said)
                continue
            what = f"{len(said.messages)} answers, and {prompt.where} has {len(prompt.messages)} turns for them"
            reading.skip(ConversationError(f"{said.where}: {what}"))
    for key, one in waiting.items():
        what = f"no prompt has the {' '.join(key or ())}; add its file (--questions)"
        reading.skip(ConversationError(f"{one.where}: {what}"))


def _together(prompt: Conversation, said: Conversation) -> Conversation:
    """Join two records to a conversation. Spec-Bench's answers follow a question each."""
    by_turn = said.key is not None and said.key[0] == "question_id"
    pairs = [*chain.from_iterable(zip(prompt.messages, said.messages, strict=False))]
    exact = None  # Token ids count only if both halves have them.
    if prompt.tokens and prompt.tokens[0] is not None and said.tokens:
        exact = prompt.tokens[0], said.tokens[1]
    messages = pairs if by_turn else [*prompt.messages, *said.messages]
    return replace(
        prompt,
        messages=messages,
        answers=range(1, len(messages), 2) if by_turn else [len(messages) - 1],
        category=prompt.category or said.category,
        where=said.where,
        usage=said.usage,
        record=said.record,
        tokens=exact,
        key=None,
    )


def is_spec_bench(categories: Iterable[str]) -> bool:
    """Whether questions with these categories, one each, are Spec-Bench's own file."""
    return Counter(categories) == SPEC_BENCH


# Records ---------------------------------------------------------------------------------------------------------


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


# The table -------------------------------------------------------------------------------------------------------


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
