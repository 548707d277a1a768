"""The one reader of prompts, questions, recorded answers and texts, in every format that Paceline accepts.

    for conversation in read("log.jsonl.gz"): ...
    answered = read_trace("log.jsonl", categories=["qa"])

A file is JSON Lines, JSON over several lines, a table or vLLM's log, packed or not. `formats.py` says what a record can
be.

Spec-Bench: Xia et al. 2024, arXiv 2401.07851."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BufferedReader
from itertools import chain, islice
from pathlib import Path
from typing import Any

from paceline.jsonl import NotJSON, loads
from paceline.logs.bodies import ConversationError, Ignore, Record
from paceline.logs.formats import FORMS, Conversation, conversation
from paceline.logs.sessions import AGENTS, Agent, agent_of, answered, expanded, sessions
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
_AGENTS = ", ".join(dict.fromkeys(agent.name for agent in AGENTS))


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
    if isinstance(value, list) and value and all(isinstance(one, dict) and _is_message(one) for one in value):
        return [{"messages": value}]
    items: Sequence[Any] = value["data"] if _is_page(value) else listed(value)
    return items


def _is_message(value: Record) -> bool:
    return "role" in value and ("content" in value or "tool_calls" in value)


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
