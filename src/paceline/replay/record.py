"""Read recorded generations: what was asked, what the model answered. Text only; knows no tokenizer and no drafter.

A trace is a JSON Lines file, gzipped or not, and each line one of

    {"prompt": "text", "response": "text"}
    {"instruction": "text", "input": "text", "output": "text"}
    {"messages": [{"role": "user", "content": "text"}, ...], "response": "text"}
    {"messages": [..., {"role": "assistant", "content": "text"}]}
    {"prompt_tokens": [ids], "tokens": [ids]}
    {"question_id": 81, "choices": [{"turns": ["text", ...]}]}

An "instruction" (Alpaca's form) and its "input", if that is not empty, make one prompt with a blank line between them.
"messages" with a "response" hold one answer, messages without one an answer for each assistant's message. Token ids are
what `paceline serve --log` writes. The last form is Spec-Bench's answer file, whose questions come from a file of their
own. A "category" may stand beside them. Any other text that is longer than a label is an error: a prompt without a part
of it would give other figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.jsonl import Piece, objects

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""Spec-Bench counts MT-bench's eight categories as one task."""
SPEC_BENCH = {
    **dict.fromkeys(MT_BENCH, 10),
    **dict.fromkeys(("translation", "summarization", "qa", "math_reasoning", "rag"), 80),
}
"""Questions of each category in Spec-Bench's own file."""

PAIRS = ((("prompt",), "response"), (("instruction", "input"), "output"))
"""Keys of a prompt's parts, the first of which must be there, and of the answer."""
FORMS = '{"prompt": ..., "response": ...}, {"messages": [...]}, a line of `serve --log` or a Spec-Bench answer'

METADATA = {
    "answer_id", "author", "category", "dataset", "datasplit", "date", "finish_reason", "generator", "id", "index",
    "language", "meta", "metadata", "model", "model_id", "question_id", "source", "split", "tags", "time", "timestamp",
    "topic", "url", "user",
}  # fmt: skip
"""Keys that are about an answer and not part of it."""
LABEL_WORDS, LABEL_CHARACTERS = 3, 64
"""Most words and characters of a label: a text that another key may hold without being read."""

MOST_IDS = 1 << 31
"""Token ids are smaller."""

Message = Mapping[str, str]


class TraceError(PacelineError):
    """A recording that cannot be read or replayed."""


@dataclass(frozen=True)
class Exchange:
    """One conversation.

    messages  all of it, from the system's or the user's first to the assistant's last.
    answers   which of the messages are replayed: indices of the assistant's.
    where     "file, line 3", for error messages.
    tokens    (prompt, answer) in token ids, where the recording has those instead of messages."""

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
    ignore: Collection[str] = (),
) -> list[Exchange]:
    """Every conversation of a trace in one file or several, or the first `limit` of those in `categories`.

    questions  Spec-Bench's question.jsonl, for an answer file.
    ignore     keys whose text is left out.

    Raises TraceError, one line: what is wrong, and in which line of which file."""
    exchanges = chain.from_iterable(read_piece(Piece(Path(path)), questions, ignore) for path in paths)
    if categories is None:
        return list(islice(exchanges, limit))
    every = list(exchanges)
    there = list(dict.fromkeys(exchange.category for exchange in every if exchange.category))
    absent = [name for name in categories if name not in there]
    if absent:
        has = f"its categories: {', '.join(there)}" if there else "its lines name none"
        raise TraceError(f"{', '.join(map(str, paths))} has no category {absent[0]!r}; {has}")
    return [exchange for exchange in every if exchange.category in categories][:limit]


def is_spec_bench(categories: Iterable[str]) -> bool:
    """Whether a file whose questions have these categories is Spec-Bench's own."""
    return Counter(categories) == SPEC_BENCH


def read_piece(piece: Piece, questions: str | Path | None = None, ignore: Collection[str] = ()) -> Iterator[Exchange]:
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
        yield from (_exchange(record, where, ignore) for where, record in rows)


def _is_answer(record: Mapping[str, Any]) -> bool:
    return "question_id" in record and "choices" in record


def _answers(rows: Iterator[tuple[str, Any]], path: str | Path, questions: str | Path | None) -> Iterator[Exchange]:
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
    grouped = MT_BENCH if is_spec_bench(str(record.get("category")) for _, record in asked.values()) else ()
    for where, record in every:
        yield _joined(record, where, *asked[record["question_id"]], grouped)


def _joined(
    answer: Mapping[str, Any], where: str, beside: str, question: Mapping[str, Any], grouped: Sequence[str]
) -> Exchange:
    """An answer and its question. grouped: categories that count as MT-bench."""
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
    return Exchange(messages, range(1, len(messages), 2), "mt-bench" if category in grouped else category, where)


def _texts(value: object) -> list[str]:
    """`value` if it is a list of texts, else an empty one."""
    return value if isinstance(value, list) and all(isinstance(text, str) for text in value) else []


def _exchange(record: Mapping[str, Any], where: str, ignore: Collection[str]) -> Exchange:
    """A server's log: a prompt or messages, and what came back."""
    category = _category(record, where)
    if "messages" in record:
        _refuse_unread(record, {"messages", "response", *ignore}, where)
        messages = _messages(record["messages"], where, ignore)
        if "response" in record:
            messages.append({"role": "assistant", "content": _text(record, "response", where)})
            return Exchange(messages, [len(messages) - 1], category, where)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > 0]
        if not answers:
            raise TraceError(f'{where}: no response: neither a "response" nor a message of the assistant')
        return Exchange(messages[: answers[-1] + 1], answers, category, where)
    for asked, said in PAIRS:
        if asked[0] in record:
            answer = _text(record, said, where)
            _refuse_unread(record, {*asked, said, *ignore}, where)
            parts = [_text(record, key, where) for key in asked if record.get(key) is not None and key not in ignore]
            prompt = "\n\n".join(filter(None, parts))
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            return Exchange(messages, [1], category, where)
    if "prompt_tokens" in record and "tokens" in record:
        prompt_ids, answer_ids = (_ids(record, key, where) for key in ("prompt_tokens", "tokens"))
        return Exchange((), (), category, where, (prompt_ids, answer_ids))
    raise TraceError(f"{where}: neither a prompt nor messages in it (keys: {', '.join(record)}); a line is {FORMS}")


def _refuse_unread(record: Mapping[str, Any], read: Collection[str], where: str) -> None:
    """TraceError for a key with more text than a label that is neither in `read` nor METADATA."""
    for key, value in record.items():
        if key not in read and key not in METADATA and _holds_text(value):
            raise TraceError(
                f'{where}: the text under "{key}" would not be read; make it part of the prompt or of a message, put '
                f'it under "metadata", or leave it out with --ignore {key}'
            )


def _holds_text(value: object) -> bool:
    if isinstance(value, str):
        return len(value) > LABEL_CHARACTERS or len(value.split()) > LABEL_WORDS
    if isinstance(value, (dict, list)):
        return any(map(_holds_text, value.values() if isinstance(value, dict) else value))
    return False


def _ids(record: Mapping[str, Any], key: str, where: str) -> list[int]:
    value = record[key]
    if not isinstance(value, list) or not all(type(id) is int and 0 <= id < MOST_IDS for id in value):
        raise TraceError(f'{where}: "{key}" must be a list of token ids')
    return value


def _category(record: Mapping[str, Any], where: str) -> str:
    return _text(record, "category", where) if record.get("category") is not None else ""


def _text(record: Mapping[str, Any], key: str, where: str) -> str:
    if key not in record:
        raise TraceError(f'{where}: no response: there is no "{key}"')
    if not isinstance(record[key], str):
        raise TraceError(f'{where}: "{key}" must be a text, not a {type(record[key]).__name__}')
    return str(record[key])


def _messages(value: object, where: str, ignore: Collection[str]) -> list[Message]:
    fits = isinstance(value, list) and all(
        isinstance(each, dict) and isinstance(each.get("role"), str) and isinstance(each.get("content"), str)
        for each in value
    )
    if not fits or not value:
        raise TraceError(f'{where}: "messages" must be a list of {{"role": "user", "content": "text"}}')
    for each in value:  # type: ignore[attr-defined]
        _refuse_unread(each, {"role", "content", *ignore}, f"{where}, a message")
    return [{"role": each["role"], "content": each["content"]} for each in value]  # type: ignore[attr-defined]
