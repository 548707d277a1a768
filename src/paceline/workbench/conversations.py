"""Conversations: the one reader of prompts, questions, recorded answers and texts, in every form that is known.

    for conversation in read("log.jsonl.gz"): ...
    answered = read_trace("log.jsonl", categories=["qa"])

A file is JSON Lines, gzipped or not. A record is one of

    {"prompt": text}                                    with the answer as "response", "completion" or "text" (which
                                                        `paceline generate --json` writes), if there is one
    {"messages": [{"role", "content"}]}                 likewise; without one, the assistant's messages are answers
    {"turns": [{"role", "text"}]}
    {"turns": [text]}                                   a question of Spec-Bench: what the user says, turn by turn
    {"instruction", "input", "output"}                  Alpaca's; Dolly's has "context" and "response"
    {"question", "answer"}
    {"prompt_tokens": [ids], "tokens": [ids]}           which `paceline serve --log` writes
    {"question_id", "choices": [{"turns": [text]}]}     answers of Spec-Bench, whose questions are in another file
    {"title", "text"}                                   a plain text; the title may be left out

The parts of a prompt are joined by a blank line. A "category" may stand in any of them. Knows no tokenizer and no
drafter. Spec-Bench: Xia et al. 2024, arXiv 2401.07851.
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
"""Spec-Bench counts MT-bench's eight categories as one task."""
SPEC_BENCH = {
    **dict.fromkeys(MT_BENCH, 10),
    **dict.fromkeys(("translation", "summarization", "qa", "math_reasoning", "rag"), 80),
}
"""Questions of each category in Spec-Bench's own file."""

RESPONSES = ("response", "completion", "text")
"""Keys of an answer to a "prompt" or to "messages"."""
PAIRS = (
    (("prompt",), RESPONSES),
    (("instruction", "input", "context"), ("output", "response")),
    (("question",), ("answer",)),
)
"""Keys of a prompt's parts, the first of which must be there, and keys of which one holds the answer."""
FORMS = (
    '{"prompt": ..., "response": ...}, {"messages": [...]}, {"turns": [...]}, {"instruction": ..., "output": ...}, '
    '{"question": ..., "answer": ...}, {"text": ...}, a line of `serve --log` or a Spec-Bench answer'
)

METADATA = {
    "answer_id", "author", "category", "dataset", "datasplit", "date", "error", "finish_reason", "generator", "id",
    "index", "language", "logprobs", "meta", "metadata", "model", "model_id", "question_id", "source", "split", "tags",
    "time", "timestamp", "topic", "url", "user",
}  # fmt: skip
"""Keys that are about an answer and not part of it."""
LABEL_WORDS, LABEL_CHARACTERS = 3, 64
"""Most words and characters of a label: a text that another key may hold without being read."""

MAX_TOKEN_ID = 1 << 31
"""Token ids are smaller."""

Message = Mapping[str, str]
"""{"role": "system" | "user" | "assistant", "content": text}"""


class ConversationError(PacelineError):
    """A record that is no conversation, or a file of them that cannot be read or used; the message names the line."""


@dataclass(frozen=True)
class Conversation:
    """One record.

    messages      all of it, from the system's or the user's first message to the assistant's last.
    answers       which of the messages the model wrote: indices.
    text          the text of a record that is no conversation; "" for one that is.
    tokens        (prompt, answer) in token ids, where the record has those; prompt None: not known.
    has_response  the last message was given as an answer beside the prompt.
    parts         texts by their keys, of a record that has one prompt and one answer; the title of a text.
    where         "file, line 3", for messages. record: as it was read."""

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
        """The messages without the answer that was given beside them."""
        return self.messages[:-1] if self.has_response else self.messages

    @property
    def first_prompt(self) -> Sequence[Message]:
        """The prompt up to where the model is first to answer: before the second of two messages of the user."""
        asked = self.prompt
        second = (i for i in range(1, len(asked)) if asked[i - 1]["role"] == asked[i]["role"] == "user")
        return asked[: next(second, len(asked))]

    @property
    def is_cut(self) -> bool:
        """Whether the answer is known not to have been ended by the model itself."""
        return self.record.get("finish_reason", "stop") != "stop"

    def texts(self) -> list[str]:
        """Every text in it."""
        return [message["content"] for message in self.messages] or [self.text]


# Files -----------------------------------------------------------------------------------------------------------


def read(
    source: str | Path | Piece, questions: str | Path | None = None, ignore: Collection[str] | None = None
) -> Iterator[Conversation]:
    """The conversations of a file, or of a piece of one; ConversationError for a line that is none.

    questions  Spec-Bench's question.jsonl, for an answer file.
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
            yield placed(record, where, ignore)


def parse(line: bytes, where: str, ignore: Collection[str] | None = None) -> Conversation:
    """The conversation in a line of JSON. ConversationError, which names the place."""
    try:
        record = as_object(line, FORMS)
    except PacelineError as error:
        raise ConversationError(f"{where}: {error}") from None
    return placed(record, where, ignore)


def placed(record: Any, where: str, ignore: Collection[str] | None = None) -> Conversation:
    """The conversation in a record. ConversationError, which names the place."""
    try:
        return replace(conversation(record, ignore), where=where)
    except ConversationError as error:
        raise ConversationError(f"{where}: {error}") from None


def read_trace(
    *paths: str | Path,
    questions: str | Path | None = None,
    limit: int | None = None,
    categories: Sequence[str] | None = None,
    ignore: Collection[str] = (),
) -> list[Conversation]:
    """Every answered conversation of a recording in one file or several, or the first `limit` of those in `categories`.

    questions  Spec-Bench's question.jsonl, for an answer file.
    ignore     keys whose text is left out.

    Raises ConversationError, one line: what is wrong, and in which line of which file."""
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
    """The answered conversations in a piece of a recording, or in a whole file. Raises ConversationError."""
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
    """A conversation up to its last answer; ConversationError without one, or without its prompt."""
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
    """Whether a file whose questions have these categories is Spec-Bench's own."""
    return Counter(categories) == SPEC_BENCH


def _is_answer(record: Mapping[str, Any]) -> bool:
    return "question_id" in record and "choices" in record


def _joined(
    rows: Sequence[tuple[str, Mapping[str, Any]]], source: str | Path | Piece, questions: str | Path
) -> Iterator[Conversation]:
    """Spec-Bench's answers with their questions."""
    path = source.path if isinstance(source, Piece) else source
    asked = {one.record.get("question_id"): one for one in read(questions)}
    absent = [record.get("question_id") for _, record in rows if record.get("question_id") not in asked]
    if absent:
        raise ConversationError(
            f"{len(absent)} of the {len(rows)} answers in {path} have no question in {questions}; "
            f"the first is question_id {absent[0]}"
        )
    # One's own questions are not grouped as in the paper.
    grouped = MT_BENCH if is_spec_bench(one.category for one in asked.values()) else ()
    for where, record in rows:
        answer, question = placed(record, where, None), asked[record["question_id"]]
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


def conversation(record: Mapping[str, Any], ignore: Collection[str] | None = None) -> Conversation:
    """The conversation in a record; ConversationError if it has none of the forms.

    ignore  keys whose text need not be read. Any other text that is longer than a label and that would not be read is
            an error, since a prompt without a part of it gives other figures. None: no such check."""
    if not isinstance(record, Mapping):
        raise ConversationError(f"a record must be an object, not a {type(record).__name__}; a line is {FORMS}")
    category = record.get("category")
    return replace(_parsed(record, ignore), category=category if isinstance(category, str) else "", record=record)


def _parsed(record: Mapping[str, Any], ignore: Collection[str] | None) -> Conversation:
    pair = next((pair for pair in PAIRS if pair[0][0] in record), None)
    if isinstance(record.get("tokens"), list) or ("tokens" in record and "messages" not in record and pair is None):
        prompt = _ids(record, "prompt_tokens") if record.get("prompt_tokens") is not None else None
        return Conversation(tokens=(prompt, _ids(record, "tokens")))
    if "choices" in record:
        answers = _choice(record)
        return Conversation([_message("assistant", text) for text in answers], range(len(answers)))
    if "messages" in record:
        return _chat(record, ignore)
    if "turns" in record:
        return _turns(record["turns"])
    if pair is not None:
        return _pair(record, *pair, ignore)
    for key in RESPONSES:
        if key in record:
            title = {"title": _text(record, "title")} if record.get("title") is not None else {}
            return Conversation(text=_text(record, key), parts=title)
    keys = ", ".join(sorted(map(str, record))) or "none"
    raise ConversationError(f"unknown record with the keys {keys}; a line is {FORMS}")


def _chat(record: Mapping[str, Any], ignore: Collection[str] | None) -> Conversation:
    """A list of messages, with or without a response."""
    response = next((key for key in RESPONSES if key in record), None)
    _refuse_unread(record, {"messages", response}, ignore)
    messages = _messages(record["messages"], "messages", "content")
    for message in record["messages"]:
        _refuse_unread(message, {"role", "content"}, ignore, "a message: ")
    if response is not None:
        messages.append(_message("assistant", _text(record, response)))
        return Conversation(messages, [len(messages) - 1], has_response=True)
    return Conversation(messages, _answers_in(messages))


def _turns(turns: Any) -> Conversation:
    """Texts of the user, or messages of both."""
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        return Conversation([_message("user", turn) for turn in turns])
    messages = _messages(turns, "turns", "text")
    return Conversation(messages, _answers_in(messages))


def _answers_in(messages: Sequence[Message]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > 0]


def _pair(
    record: Mapping[str, Any], asked: Sequence[str], answers: Sequence[str], ignore: Collection[str] | None
) -> Conversation:
    """A prompt of one part or several; and its answer, which only a "prompt" can do without."""
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


def _choice(record: Mapping[str, Any]) -> list[str]:
    try:
        turns = record["choices"][0]["turns"]
    except (KeyError, IndexError, TypeError):
        raise ConversationError("an answer without a response: it has no choices[0].turns") from None
    if not isinstance(turns, list) or not turns or not all(isinstance(text, str) for text in turns):
        raise ConversationError("choices[0].turns must be a list of texts")
    return turns


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
    """ConversationError for a key with more text than a label that is in none of `read`, METADATA and `ignore`."""
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
