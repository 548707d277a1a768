"""The one reader of prompts, questions, recorded answers and texts, in every form that Paceline accepts.

    for conversation in read("log.jsonl.gz"): ...
    answered = read_trace("log.jsonl", categories=["qa"])

A file is JSON Lines, gzipped or not. A record has one of these forms, any of them with a "category" or without:

    {"prompt": text}                                    with the answer, if there is one, as "response", "completion" or
                                                        "text" (which `paceline generate --json` writes)
    {"messages": [{"role", "content"}]}                 likewise; without one, the assistant's messages are answers
    {"turns": [{"role", "text"}]}
    {"turns": [text]}                                   a question of Spec-Bench: the user's text of each turn
    {"instruction", "input", "output"}                  Alpaca; Dolly has "context" and "response". A blank line joins
                                                        the parts of the prompt
    {"question", "answer"}
    {"prompt_tokens": [ids], "tokens": [ids]}           which `paceline serve --log` writes
    {"question_id", "choices": [{"turns": [text]}]}     an answer of Spec-Bench; its questions are in another file
    {"title", "text"}                                   a plain text; the title is optional

Spec-Bench: Xia et al. 2024, arXiv 2401.07851.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.jsonl import Piece, as_object, objects

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""Categories of MT-bench. Spec-Bench counts them as one task."""
SPEC_BENCH = {
    **dict.fromkeys(MT_BENCH, 10),
    **dict.fromkeys(("translation", "summarization", "qa", "math_reasoning", "rag"), 80),
}
"""Number of questions by category in Spec-Bench's own file."""

RESPONSES = ("response", "completion", "text")
"""Keys of an answer to a "prompt" or to "messages"."""
FORMS = (
    '{"prompt": ..., "response": ...}, {"messages": [...]}, {"turns": [...]}, {"instruction": ..., "output": ...}, '
    '{"question": ..., "answer": ...}, {"text": ...}, a line of `serve --log` or a Spec-Bench answer'
)
"""The forms, for messages."""

METADATA = {
    "answer_id", "author", "category", "dataset", "datasplit", "date", "error", "finish_reason", "generator", "id",
    "index", "language", "logprobs", "meta", "metadata", "model", "model_id", "question_id", "source", "split", "tags",
    "time", "timestamp", "topic", "url", "user",
}  # fmt: skip
"""Keys that describe a record: their text belongs to no prompt."""
LABEL_WORDS, LABEL_CHARACTERS = 3, 64
"""A longer text under an unknown key is an error; see `conversation`."""

MAX_TOKEN_ID = 1 << 31

Message = Mapping[str, str]
"""{"role": "system" | "user" | "assistant", "content": text}"""


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
    parts         texts by key, of a record with one prompt and one answer; the title of a plain text.
    record        the record itself."""

    messages: Sequence[Message] = ()
    answers: Sequence[int] = ()
    category: str = ""
    where: str = ""
    tokens: tuple[Sequence[int] | None, Sequence[int]] | None = None
    text: str = ""
    has_response: bool = False
    parts: Mapping[str, str] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

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
        return [message["content"] for message in self.messages] or [self.text]


# Files -----------------------------------------------------------------------------------------------------------


def read(
    source: str | Path | Piece, questions: str | Path | None = None, ignore: Collection[str] | None = None
) -> Iterator[Conversation]:
    """The conversations of a file, or of a piece of one. Raises ConversationError.

    questions  Spec-Bench's question.jsonl, for a file of its answers.
    ignore     see `conversation`."""
    rows = objects(source, ConversationError, FORMS)
    first = next(rows, None)
    if first is None:
        return
    rows = chain([first], rows)
    if questions is not None and _is_answer(first[1]):
        yield from _joined(list(rows), source, questions)
    else:
        for where, record in rows:
            yield conversation(record, ignore, where)


def parse(line: bytes, where: str, ignore: Collection[str] | None = None) -> Conversation:
    """The conversation in a line of JSON; `where` names the line. Raises ConversationError."""
    try:
        record = as_object(line, FORMS)
    except PacelineError as error:
        raise ConversationError(f"{where}: {error}") from None
    return conversation(record, ignore, where)


def read_trace(
    *paths: str | Path,
    questions: str | Path | None = None,
    limit: int | None = None,
    categories: Sequence[str] | None = None,
    ignore: Collection[str] = (),
) -> list[Conversation]:
    """The answered conversations of a recording in one or several files: the first `limit` in any of `categories`.

    questions  Spec-Bench's question.jsonl, for a file of its answers.
    ignore     keys whose text is left out; other text that would not be read is an error.

    Raises ConversationError, which names the file and the line."""
    conversations = chain.from_iterable(read_piece(Piece(Path(path)), questions, ignore) for path in paths)
    if categories is None:
        return list(islice(conversations, limit))
    every = list(conversations)
    known = list(dict.fromkeys(one.category for one in every if one.category))
    absent = [name for name in categories if name not in known]
    if absent:
        has = f"its categories: {', '.join(known)}" if known else "its lines name none"
        raise ConversationError(f"{', '.join(map(str, paths))} has no category {absent[0]!r}; {has}")
    return [one for one in every if one.category in categories][:limit]


def read_piece(
    piece: Piece, questions: str | Path | None = None, ignore: Collection[str] = ()
) -> Iterator[Conversation]:
    """The answered conversations in a piece of a recording. The rest as for `read_trace`."""
    is_empty = True
    for one in read(piece, questions, ignore):
        if is_empty and _is_answer(one.record) != (questions is not None):
            problem = (
                "is a Spec-Bench answer file and holds no questions; add --questions FILE" if questions is None
                else "is no Spec-Bench answer file, so questions mean nothing to it; leave --questions out"
            )  # fmt: skip
            raise ConversationError(f"{piece.path} {problem}")
        is_empty = False
        yield _answered(one)
    if is_empty and piece.begin == 0:
        raise ConversationError(f"{piece.path} holds no answers; a line is {FORMS}")


def _answered(one: Conversation) -> Conversation:
    """`one` up to its last answer. Raises ConversationError without an answer or without a prompt."""
    if not isinstance(one.record.get("category", ""), (str, type(None))):
        raise ConversationError(f'{one.where}: "category" must be a text')
    if one.tokens is not None and one.tokens[0] is not None:
        return one
    if not one.messages or list(one.answers[:1]) == [0]:
        keys = ", ".join(one.record)
        raise ConversationError(f"{one.where}: neither a prompt nor messages in it (keys: {keys}); a line is {FORMS}")
    if not one.answers:
        raise ConversationError(f'{one.where}: no response: there is no "response" and no message of the assistant')
    return replace(one, messages=one.messages[: one.answers[-1] + 1])


# Spec-Bench ------------------------------------------------------------------------------------------------------


def is_spec_bench(categories: Iterable[str]) -> bool:
    """Whether questions with these categories, one each, are Spec-Bench's own file."""
    return Counter(categories) == SPEC_BENCH


def _is_answer(record: Mapping[str, Any]) -> bool:
    return "question_id" in record and "choices" in record


def _joined(
    rows: Sequence[tuple[str, Mapping[str, Any]]], source: str | Path | Piece, questions: str | Path
) -> Iterator[Conversation]:
    """Spec-Bench's answers, each with its question."""
    path = source.path if isinstance(source, Piece) else source
    asked = {one.record.get("question_id"): one for one in read(questions)}
    absent = [record.get("question_id") for _, record in rows if record.get("question_id") not in asked]
    if absent:
        raise ConversationError(
            f"{len(absent)} of the {len(rows)} answers in {path} have no question in {questions}; "
            f"the first is question_id {absent[0]}"
        )
    # Other questions that use these categories are not grouped.
    grouped = MT_BENCH if is_spec_bench(one.category for one in asked.values()) else ()
    for where, record in rows:
        answer, question = conversation(record, None, where), asked[record["question_id"]]
        if len(question.messages) < len(answer.messages):
            count = len(question.messages) or "no"
            raise ConversationError(
                f"{where}: {len(answer.messages)} answers, and {question.where} has {count} turns for them"
            )
        messages = [*chain.from_iterable(zip(question.messages, answer.messages, strict=False))]
        category = answer.category or question.category
        yield replace(
            answer,
            messages=messages,
            answers=range(1, len(messages), 2),
            category="mt-bench" if category in grouped else category,
        )


# Records ---------------------------------------------------------------------------------------------------------


def conversation(record: Any, ignore: Collection[str] | None = None, where: str = "") -> Conversation:
    """The conversation in a record. Raises ConversationError if it has none of the forms.

    where   the record's place, for messages.
    ignore  keys whose text need not be read. Other text that would not be read and is longer than a label is an error,
            since a prompt without a part of it gives other figures. None: no such check."""
    try:
        read = _in_any_form(record, ignore)
    except ConversationError as error:
        if not where:
            raise
        raise ConversationError(f"{where}: {error}") from None
    category = record.get("category")
    return replace(read, category=category if isinstance(category, str) else "", where=where, record=record)


def _in_any_form(record: Any, ignore: Collection[str] | None) -> Conversation:
    """The first form that matches: token ids come before text, and a number of "tokens" only describes a text."""
    match record:
        case {"tokens": list()}:
            return _token_ids(record)
        case {"choices": _}:
            return _spec_bench_answer(record)
        case {"messages": _}:
            return _chat(record, ignore)
        case {"turns": turns}:
            return _turns(turns)
        case {"prompt": _}:
            return _pair(record, ("prompt",), RESPONSES, ignore)
        case {"instruction": _}:
            return _pair(record, ("instruction", "input", "context"), ("output", "response"), ignore)
        case {"question": _}:
            return _pair(record, ("question",), ("answer",), ignore)
        case {"tokens": _}:
            return _token_ids(record)
        case {"response": _} | {"completion": _} | {"text": _}:
            title = {"title": _text(record, "title")} if record.get("title") is not None else {}
            return Conversation(text=_text(record, next(key for key in RESPONSES if key in record)), parts=title)
    if not isinstance(record, Mapping):
        raise ConversationError(f"a record must be an object, not a {type(record).__name__}; a line is {FORMS}")
    keys = ", ".join(sorted(map(str, record))) or "none"
    raise ConversationError(f"unknown record with the keys {keys}; a line is {FORMS}")


def _token_ids(record: Mapping[str, Any]) -> Conversation:
    prompt = _ids(record, "prompt_tokens") if record.get("prompt_tokens") is not None else None
    return Conversation(tokens=(prompt, _ids(record, "tokens")))


def _spec_bench_answer(record: Mapping[str, Any]) -> Conversation:
    try:
        turns = record["choices"][0]["turns"]
    except (KeyError, IndexError, TypeError):
        raise ConversationError("an answer without a response: it has no choices[0].turns") from None
    if not isinstance(turns, list) or not turns or not all(isinstance(text, str) for text in turns):
        raise ConversationError("choices[0].turns must be a list of texts")
    return Conversation([_message("assistant", text) for text in turns], range(len(turns)))


def _chat(record: Mapping[str, Any], ignore: Collection[str] | None) -> Conversation:
    messages = _messages(record["messages"], "messages", "content")
    # After an answer, "text" repeats the whole conversation.
    keys = RESPONSES[:1] if messages[-1]["role"] == "assistant" else RESPONSES
    response = next((key for key in keys if key in record), None)
    _refuse_unread(record, {"messages", response}, ignore)
    for message in record["messages"]:
        _refuse_unread(message, {"role", "content"}, ignore, "a message: ")
    if response is not None:
        messages.append(_message("assistant", _text(record, response)))
        return Conversation(messages, [len(messages) - 1], has_response=True)
    return Conversation(messages, _answers_in(messages))


def _turns(turns: Any) -> Conversation:
    """Texts of the user, or messages of both roles."""
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        return Conversation([_message("user", turn) for turn in turns])
    messages = _messages(turns, "turns", "text")
    return Conversation(messages, _answers_in(messages))


def _answers_in(messages: Sequence[Message]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > 0]


def _pair(
    record: Mapping[str, Any], asked: Sequence[str], answers: Sequence[str], ignore: Collection[str] | None
) -> Conversation:
    """One prompt and one answer. asked: keys of the prompt's parts, the first of which exists; answers: keys of which
    one holds the answer, which only a "prompt" can do without."""
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


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _messages(value: Any, name: str, key: str) -> list[Message]:
    fits = isinstance(value, list) and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get(key), str) for one in value
    )
    if not fits or not value:
        raise ConversationError(f'"{name}" must be a list of {{"role": "user", "{key}": "text"}}')
    return [_message(each["role"], each[key]) for each in value]


def _text(record: Mapping[str, Any], key: str) -> str:
    if not isinstance(record[key], str):
        raise ConversationError(f'"{key}" must be a text, not a {type(record[key]).__name__}')
    return str(record[key])


def _ids(record: Mapping[str, Any], key: str) -> list[int]:
    value = record[key]
    if not isinstance(value, list) or not all(type(id) is int and 0 <= id < MAX_TOKEN_ID for id in value):
        raise ConversationError(f'"{key}" must be a list of token ids')
    return value


def _refuse_unread(
    record: Mapping[str, Any], read: Collection[str | None], ignore: Collection[str] | None, place: str = ""
) -> None:
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
