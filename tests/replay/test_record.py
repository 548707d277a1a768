"""Recordings in every form that is read, and one line for each that cannot be."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.replay.record import TraceError, read_trace

PAIR = {"prompt": "Hello?", "response": "Hi."}
ASKED = [{"role": "user", "content": "Hello?"}]
SAID = [{"role": "assistant", "content": "Hi."}]


def write(folder: Path, *records: Any, name: str = "log.jsonl") -> Path:
    file = folder / name
    file.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n", "utf-8")
    return file


@pytest.mark.parametrize(
    "record",
    [
        PAIR,
        {"instruction": "Hello?", "output": "Hi.", "dataset": "whatever"},
        {"messages": ASKED, "response": "Hi."},
        {"messages": ASKED + SAID},
    ],
    ids=lambda record: " ".join(record),
)
def test_one_answer_in_each_of_its_forms(tmp_path: Path, record: dict[str, Any]) -> None:
    (exchange,) = read_trace(write(tmp_path, record | {"category": "greetings"}))
    assert list(exchange.messages) == ASKED + SAID
    assert list(exchange.answers) == [1]
    assert exchange.category == "greetings"
    assert exchange.where.endswith("log.jsonl, line 1")


def test_messages_alone_hold_an_answer_for_each_of_the_assistants(tmp_path: Path) -> None:
    system = [{"role": "system", "content": "Be brief."}]
    (exchange,) = read_trace(write(tmp_path, {"messages": system + (ASKED + SAID) * 2 + ASKED}))
    assert list(exchange.answers) == [2, 4]
    assert len(exchange.messages) == 5


def test_messages_with_a_response_hold_one_answer(tmp_path: Path) -> None:
    (exchange,) = read_trace(write(tmp_path, {"messages": ASKED + SAID + ASKED, "response": "Hi again."}))
    assert list(exchange.answers) == [3]


def test_gzip_blank_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf" + json.dumps(PAIR).encode() + b"\n\n" + json.dumps(PAIR).encode() + b"\n"
    (tmp_path / "log.gz").write_bytes(gzip.compress(content))
    assert [e.where[-6:] for e in read_trace(tmp_path / "log.gz")] == ["line 1", "line 3"]


def answer(id: int, turns: list[str], category: str = "qa") -> dict[str, Any]:
    return {"question_id": id, "category": category, "choices": [{"index": 0, "turns": turns}]}


def test_spec_bench_answers_join_their_questions(tmp_path: Path) -> None:
    questions = write(tmp_path, {"question_id": 7, "category": "writing", "turns": ["A?", "B?"]}, name="questions")
    (exchange,) = read_trace(write(tmp_path, answer(7, ["a", "b"], "writing")), questions=questions)
    assert [m["content"] for m in exchange.messages] == ["A?", "a", "B?", "b"]
    assert list(exchange.answers) == [1, 3]
    assert exchange.category == "mt-bench"


def test_limit_and_categories(tmp_path: Path) -> None:
    file = write(tmp_path, *(PAIR | {"category": "ab"[i % 2]} for i in range(10)))
    assert len(read_trace(file, limit=3)) == 3
    assert [e.where[-6:] for e in read_trace(file, limit=2, categories=["b"])] == ["line 2", "line 4"]


def complains(file: Path, *words: str, **options: Any) -> None:
    with pytest.raises(TraceError) as raised:
        read_trace(file, **options)
    assert "\n" not in str(raised.value)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a", ', ("line 2", "not JSON", "column")),
        ("[1, 2]", ("line 2", "JSON object", "list")),
        ({"prompt": "a"}, ("line 2", 'no "response"')),
        ({"prompt": "a", "response": None}, ("line 2", '"response" must be a text', "NoneType")),
        ({"text": "a"}, ("line 2", "neither a prompt nor messages", "text")),
        ({"messages": ASKED}, ("line 2", "no response")),
        ({"messages": []}, ("line 2", '"messages" must be')),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, ("line 2", '"messages" must be')),
        (PAIR | {"category": 3}, ("line 2", '"category" must be a text')),
    ],
)
def test_a_line_that_cannot_be_used(tmp_path: Path, line: Any, words: tuple[str, ...]) -> None:
    complains(write(tmp_path, PAIR, line), *words)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    complains(tmp_path / "none.jsonl", "none.jsonl", "No such file")
    complains(write(tmp_path, "", name="empty"), "holds no answers", '{"prompt"')
    (tmp_path / "cut.gz").write_bytes(gzip.compress(json.dumps(PAIR).encode() * 99)[:40])
    complains(tmp_path / "cut.gz", "cut off or damaged")
    (tmp_path / "latin").write_bytes(b'{"prompt": "\xe9"}')
    complains(tmp_path / "latin", "line 1", "not UTF-8")
    complains(write(tmp_path, PAIR), "no Spec-Bench answer file", questions=write(tmp_path, PAIR, name="q"))
    complains(write(tmp_path, PAIR | {"category": "a"}), "no category 'b'", "a", categories=["b"])
    complains(write(tmp_path, PAIR), "no category 'b'", "name none", categories=["b"])


def test_spec_bench_answers_without_their_questions(tmp_path: Path) -> None:
    trace = write(tmp_path, *(answer(id, ["a"]) for id in (1, 2, 3)))
    complains(trace, "--questions")
    some = write(tmp_path, {"question_id": 2, "turns": ["A?"]}, name="some")
    complains(trace, "2 of the 3 answers", "the first is question_id 1", questions=some)
    short = write(tmp_path, *({"question_id": id, "turns": ["A?"]} for id in (1, 2, 3)), name="short")
    complains(write(tmp_path, answer(1, ["a", "b"])), "line 1", "2 answers", "1 turns", questions=short)
    complains(write(tmp_path, answer(1, [3])), "must be a list of texts", questions=short)  # type: ignore[list-item]
    complains(write(tmp_path, {"question_id": 1, "choices": []}), "without a response", questions=short)
