"""Read recorded generations: what was asked, what the model answered. Text only; knows no tokenizer and no drafter.

A trace is a JSON Lines file, gzipped or not, and each line one of

    {"prompt": "text", "response": "text"}              {"instruction": ..., "output": ...} is the same
    {"messages": [{"role": "user", "content": "text"}, ...], "response": "text"}
    {"messages": [..., {"role": "assistant", "content": "text"}]}
    {"question_id": 81, "choices": [{"turns": ["text", ...]}]}

where "messages" with a "response" hold one answer, messages without one an answer for each assistant's message; the
last is Spec-Bench's answer file, whose questions come from a file of their own. A "category" may stand beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.records import Piece, objects

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""Spec-Bench counts MT-bench's eight categories as one task."""

PAIRS = (("prompt", "response"), ("instruction", "output"))
FORMS = '{"prompt": ..., "response": ...}, {"messages": [...]} or a Spec-Bench answer'

Message = Mapping[str, str]


class TraceError(PacelineError):
    """A recording that cannot be read or replayed."""


@dataclass(frozen=True)
class Exchange:
    """One conversation.

    messages  all of it, from the system's or the user's first to the assistant's last.
    answers   which of the messages are replayed: indices of the assistant's.
    where     "file, line 3", for error messages.
    tokens    ids of prompt and answer instead of messages, as `paceline serve --log` writes them."""

    messages: Sequence[Message]
    answers: Sequence[int]
    category: str = ""
    where: str = ""
    tokens: tuple[Sequence[int], Sequence[int]] | None = None


def read_trace(
    *paths: str | Path,
    questions: str | Path | None = None,
    limit: int | None = None,
    categories: Sequence[str] | None = None,
) -> list[Exchange]:
    """Every conversation of a trace in one file or several, or the first `limit` of those in `categories`.

    questions  Spec-Bench's question.jsonl, for an answer file.

    Raises TraceError, one line: what is wrong, and in which line of which file."""
    exchanges = chain.from_iterable(read_piece(Piece(Path(path)), questions) for path in paths)
    if categories is None:
        return list(islice(exchanges, limit))
    every = list(exchanges)
    there = list(dict.fromkeys(exchange.category for exchange in every if exchange.category))
    absent = [name for name in categories if name not in there]
    if absent:
        has = f"its categories: {', '.join(there)}" if there else "its lines name none"
        raise TraceError(f"{', '.join(map(str, paths))} has no category {absent[0]!r}; {has}")
    return [exchange for exchange in every if exchange.category in categories][:limit]


def read_piece(piece: Piece, questions: str | Path | None = None) -> Iterator[Exchange]:
    """The conversations in a piece of a trace, or in a whole file. Raises TraceError."""
    lines = objects(piece, TraceError, FORMS)
    first = next(lines, None)
    if first is None:
        if piece.begin == 0:
            raise TraceError(f"{piece.path} holds no answers; a line is {FORMS}")
        return
    rows = chain([first], lines)
    if _is_answer(first[1]):
        yield from _answers(rows, piece.path, questions)
    elif questions is not None:
        raise TraceError(
            f"{piece.path} is no Spec-Bench answer file, so questions mean nothing to it; leave --questions out"
        )
    else:
        yield from (_exchange(record, where) for where, record in rows)


def _is_answer(record: Mapping[str, Any]) -> bool:
    return "question_id" in record and "choices" in record


def _answers(
    rows: Iterator[tuple[str, Any]], path: str | Path, questions: str | Path | None
) -> Iterator[Exchange]:
    """Spec-Bench's answers joined with their questions."""
    if questions is None:
        raise TraceError(f"{path} is a Spec-Bench answer file and holds no questions; add --questions FILE")
    asked = {record.get("question_id"): (where, record) for where, record in objects(questions, TraceError, FORMS)}
    every = list(rows)
    absent = [record.get("question_id") for _, record in every if record.get("question_id") not in asked]
    if absent:
        raise TraceError(
            f"{len(absent)} of the {len(every)} answers in {path} have no question in {questions}; "
            f"the first is question_id {absent[0]}"
        )
    for where, record in every:
        yield _joined(record, where, *asked[record["question_id"]])


def _joined(answer: Mapping[str, Any], where: str, beside: str, question: Mapping[str, Any]) -> Exchange:
    try:
        said = answer["choices"][0]["turns"]
    except (KeyError, IndexError, TypeError):
        raise TraceError(f"{where}: an answer without a response: it has no choices[0].turns") from None
    asked = _texts(question.get("turns"))
    if not _texts(said):
        raise TraceError(f"{where}: choices[0].turns must be a list of texts")
    if len(asked) < len(said):
        raise TraceError(f"{where}: {len(said)} answers, and {beside} has {len(asked) or 'no'} turns for them")
    messages: list[Message] = []
    for ask, say in zip(asked, said, strict=False):
        messages += [{"role": "user", "content": ask}, {"role": "assistant", "content": say}]
    category = _category(answer, where) or _category(question, beside)
    return Exchange(
        messages, range(1, len(messages), 2), "mt-bench" if category in MT_BENCH else category, where
    )


def _texts(value: object) -> list[str]:
    """`value` if it is a list of texts, else an empty one."""
    return value if isinstance(value, list) and all(isinstance(text, str) for text in value) else []


def _exchange(record: Mapping[str, Any], where: str) -> Exchange:
    """A server's log: a prompt or messages, and what came back."""
    category = _category(record, where)
    if "prompt_tokens" in record:
        return Exchange([], [], category, where, (_ids(record, "prompt_tokens", where), _ids(record, "tokens", where)))
    if "messages" in record:
        messages = _messages(record["messages"], where)
        if "response" in record:
            messages.append({"role": "assistant", "content": _text(record, "response", where)})
            return Exchange(messages, [len(messages) - 1], category, where)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > 0]
        if not answers:
            raise TraceError(f'{where}: no response: neither a "response" nor a message of the assistant')
        return Exchange(messages[: answers[-1] + 1], answers, category, where)
    for asked, said in PAIRS:
        if asked in record:
            messages = [
                {"role": "user", "content": _text(record, asked, where)},
                {"role": "assistant", "content": _text(record, said, where)},
            ]
            return Exchange(messages, [1], category, where)
    raise TraceError(f"{where}: neither a prompt nor messages in it (keys: {', '.join(record)}); a line is {FORMS}")


def _category(record: Mapping[str, Any], where: str) -> str:
    return _text(record, "category", where) if record.get("category") is not None else ""


def _text(record: Mapping[str, Any], key: str, where: str) -> str:
    if key not in record:
        raise TraceError(f'{where}: no response: there is no "{key}"')
    if not isinstance(record[key], str):
        raise TraceError(f'{where}: "{key}" must be a text, not a {type(record[key]).__name__}')
    return str(record[key])


def _ids(record: Mapping[str, Any], key: str, where: str) -> list[int]:
    ids = record.get(key)
    if not isinstance(ids, list) or not all(type(id) is int and id >= 0 for id in ids):
        raise TraceError(f'{where}: "{key}" must be a list of token ids')
    return ids


def _messages(value: object, where: str) -> list[Message]:
    fits = isinstance(value, list) and all(
        isinstance(each, dict) and isinstance(each.get("role"), str) and isinstance(each.get("content"), str)
        for each in value
    )
    if not fits or not value:
        raise TraceError(f'{where}: "messages" must be a list of {{"role": "user", "content": "text"}}')
    return [{"role": each["role"], "content": each["content"]} for each in value]  # type: ignore[attr-defined]
