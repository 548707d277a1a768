"""The one reader of prompts, questions, recorded answers and texts, in every format that Paceline accepts.

    for conversation in read("log.jsonl.gz"): ...
    answered = read_trace("log.jsonl", categories=["qa"])

A file is JSON Lines, one JSON list, or a server's log, gzipped or not. `formats` says what a record of it can be.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from paceline.jsonl import NotJSON, Piece, as_object, loads, numbered, opened
from paceline.workbench.formats import FORMS, LOG, LOGGED, Conversation, ConversationError, Ignore, conversation

__all__ = ["ConversationError", "Reading", "parse", "read", "read_pieces", "read_trace"]

log = logging.getLogger("paceline")

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""Categories of MT-bench. Spec-Bench counts them as one task."""
SPEC_BENCH = {
    **dict.fromkeys(MT_BENCH, 10),
    **dict.fromkeys(("translation", "summarization", "qa", "math_reasoning", "rag"), 80),
}
"""Number of questions by category in Spec-Bench's own file."""
TOKENS_DIFFER = 0.03
"""Share by which two counts of tokens may differ."""


@dataclass
class Reading:
    """What became of a recording's records.

    records  all of them; answered: those with an answer; skipped: those that could not be read.
    first    the place of the first that was skipped, and why.
    missing  parts of messages that are no text, such as images: the model read them, and a drafter does not.
    logged   tokens of answers as the log counts them; counted: the same answers' as the tokenizer does."""

    records: int = 0
    answered: int = 0
    skipped: int = 0
    first: str = ""
    missing: int = 0
    logged: int = 0
    counted: int = 0

    def skip(self, error: ConversationError) -> None:
        self.skipped += 1
        self.first = self.first or str(error)

    def __iadd__(self, other: Reading) -> Reading:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) or value if name == "first" else getattr(self, name) + value)
        return self

    def check(self, name: str) -> None:
        """ConversationError if nothing could be read, or more than half could not. name: the recording's."""
        if self.skipped and self.skipped > min(self.records / 2, self.records - 1):
            more = f" ({self.skipped:,} of {self.records:,} lines cannot be read)" if self.records > 1 else ""
            raise ConversationError(self.first + more)
        if not self.answered:
            raise ConversationError(f"{name} holds no answers; read are: {FORMS}")

    def notes(self, redact: bool = False) -> Iterator[str]:
        """What a reader of the figures should know, a line each. redact: without anything from the log."""
        if self.skipped:
            first = "" if redact else f": first at {self.first}"
            yield f"{self.skipped:,} of {self.records:,} lines skipped{first}"
        if self.missing:
            yield f"{self.missing:,} parts of messages are no text (images, sound) and are missing from the prompts"
        if abs(self.counted - self.logged) > TOKENS_DIFFER * self.logged:
            yield (
                f"the log counts {self.logged:,} tokens in answers that have {self.counted:,} here "
                f"({self.counted / self.logged - 1:+.1%}): another tokenizer, or text that is not in the log"
            )


# Files -----------------------------------------------------------------------------------------------------------


def read(
    source: str | Path | Piece, questions: str | Path | None = None, ignore: Ignore = None
) -> Iterator[Conversation]:
    """The conversations of a file, or of a piece of one. Raises ConversationError.

    questions  a file of the prompts, such as Spec-Bench's question.jsonl, for a file of answers.
    ignore     see `conversation`."""
    every = _read(source if isinstance(source, Piece) else Piece(Path(source)), ignore, None)
    return every if questions is None else _joined(every, questions, None)


def parse(record: Any, where: str, ignore: Ignore = None) -> Conversation:
    """The conversation in a record, or in a line of bytes that holds one; `where` names it. Raises ConversationError."""
    try:
        if isinstance(record, bytes):
            record = {LOG: record.decode("utf-8", "replace")} if LOGGED.match(record) else as_object(record, FORMS)
    except NotJSON as error:
        raise ConversationError(f"{where}: {error}") from None
    return conversation(record, ignore, where)


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
    ignore     keys whose text is left out; in a line with other text that would not be read nothing is read.
    reading    counts the lines that cannot be read, and are skipped; None: they are logged as a warning.

    Raises ConversationError, which names the file and the line, if nothing or less than half can be read."""
    told, name = Reading() if reading is None else reading, ", ".join(map(str, paths))
    every: Iterable[Conversation] = read_pieces([Piece(Path(path)) for path in paths], questions, ignore, told)
    if categories is not None:
        every = list(every)
        known = list(dict.fromkeys(one.category for one in every if one.category))
        absent = [name for name in categories if name not in known]
        if absent:
            told.check(name)
            has = f"its categories: {', '.join(known)}" if known else "its lines name none"
            raise ConversationError(f"{name} has no category {absent[0]!r}; {has}")
    chosen = list(islice((one for one in every if categories is None or one.category in categories), limit))
    told.check(name)
    for note in told.notes() if reading is None else ():
        log.warning(note)
    return chosen


def read_pieces(
    pieces: Iterable[Piece],
    questions: str | Path | None = None,
    ignore: Collection[str] = (),
    reading: Reading | None = None,
) -> Iterator[Conversation]:
    """The answered conversations in pieces of a recording; reading None: an error for a line that cannot be read. The
    rest as for `read_trace`."""
    for one in _joined(chain.from_iterable(_read(piece, ignore, reading) for piece in pieces), questions, reading):
        try:
            answered = _answered(one)
        except ConversationError as error:
            _skip(error, reading)
            continue
        if reading is not None:
            reading.answered += 1
            reading.missing += answered.missing
        yield answered


def _read(piece: Piece, ignore: Ignore, reading: Reading | None) -> Iterator[Conversation]:
    for where, record in _records(piece):
        if reading is not None:
            reading.records += 1
        try:
            one = parse(record, where, ignore)
        except ConversationError as error:
            _skip(error, reading)
            continue
        if one.messages or one.text or one.tokens is not None:
            yield one


def _records(piece: Piece) -> Iterator[tuple[str, Any]]:
    """("file, line n", line) of every line that is not blank; of a file that is one JSON list, ("file, item n", item)."""
    with opened(piece.path, ConversationError) as file:
        for number, line in numbered(piece.within(file), piece.line):
            if number == 1 and line.lstrip().startswith(b"["):
                try:
                    items = loads(line + file.read())
                except NotJSON as error:
                    raise ConversationError(f"{piece.path}: {error}") from None
                yield from ((f"{piece.path}, item {n}", item) for n, item in enumerate(items, 1))
                return
            yield f"{piece.path}, line {number}", line


def _skip(error: ConversationError, reading: Reading | None) -> None:
    if reading is None:
        raise error
    reading.skip(error)


def _answered(one: Conversation) -> Conversation:
    """`one` up to its last answer. Raises ConversationError without an answer or without a prompt."""
    if not isinstance(one.record.get("category", ""), (str, type(None))):
        raise ConversationError(f'{one.where}: "category" must be a text')
    if one.tokens is not None and one.tokens[0] is not None:
        return one
    if not one.messages or list(one.answers[:1]) == [0]:
        keys = ", ".join(one.record)
        raise ConversationError(f"{one.where}: neither a prompt nor messages in it (keys: {keys})")
    if not one.answers:
        raise ConversationError(f'{one.where}: no response: there is no "response" and no message of the assistant')
    return replace(one, messages=one.messages[: one.answers[-1] + 1])


# Prompts and answers in different records ------------------------------------------------------------------------


def _joined(
    every: Iterable[Conversation], questions: str | Path | None, reading: Reading | None
) -> Iterator[Conversation]:
    """Conversations in order; of those whose prompt and answers stand in two records, each as soon as it has both."""
    asked = {one.key: one for one in ([] if questions is None else read(questions)) if one.key is not None}
    # Other questions that use these categories are not grouped.
    if is_spec_bench(one.category for one in asked.values()):
        grouped = {one.key: replace(one, category="mt-bench") for one in asked.values() if one.category in MT_BENCH}
        asked |= grouped
    waiting: dict[tuple[str, str], Conversation] = {}
    for one in every:
        if one.key is None:
            yield one
            continue
        if one.answers:
            waiting[one.key] = one
        elif asked.setdefault(one.key, one).messages != one.messages:
            _skip(ConversationError(f"{one.where}: {one.key[0]} {one.key[1]} is another prompt's too"), reading)
            continue
        if one.key in asked and one.key in waiting:
            try:
                whole = _together(asked[one.key], waiting.pop(one.key))
            except ConversationError as error:
                _skip(error, reading)
                continue
            yield whole
    for one in waiting.values():
        assert one.key is not None
        _skip(ConversationError(f"{one.where}: no prompt has the {' '.join(one.key)}; add its file"), reading)


def _together(asked: Conversation, said: Conversation) -> Conversation:
    """A conversation whose prompt and answers stood in two records. Spec-Bench's answers follow a question each."""
    messages = [*asked.messages, *said.messages]
    if said.key is not None and said.key[0] == "question_id":
        if len(asked.messages) < len(said.messages):
            have = f"{asked.where} has {len(asked.messages)} turns for them"
            raise ConversationError(f"{said.where}: {len(said.messages)} answers, and {have}")
        messages = [*chain.from_iterable(zip(asked.messages, said.messages, strict=False))]
    answers = [i for i, message in enumerate(messages) if any(message is one for one in said.messages)]
    return replace(
        asked,
        messages=messages,
        answers=answers,
        category=asked.category or said.category,
        where=said.where,
        usage=said.usage,
        record=said.record,
        has_response=len(answers) == 1,
        key=None,
    )


def is_spec_bench(categories: Iterable[str]) -> bool:
    """Whether questions with these categories, one each, are Spec-Bench's own file."""
    return Counter(categories) == SPEC_BENCH
