"""Conversations in every form that is read, and one line for each that cannot be."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.workbench.conversations import SPEC_BENCH, ConversationError, conversation, parse, read_trace

PAIR = {"prompt": "Hello?", "response": "Hi."}
ASKED = [{"role": "user", "content": "Hello?"}]
SAID = [{"role": "assistant", "content": "Hi."}]


def write(folder: Path, *records: Any, name: str = "log.jsonl") -> Path:
    file = folder / name
    file.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n", "utf-8")
    return file


READ = {
    '{"prompt": "a"}': (["user a"], [], "user a"),
    '{"prompt": "a", "completion": "b"}': (["user a", "assistant b"], [1], "user a"),
    '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}], "text": "b"}': (
        ["system s", "user a", "assistant b"], [2], "system s, user a",
    ),
    '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "text": "a b"}': (
        ["user a", "assistant b"], [1], "user a, assistant b",
    ),
    '{"turns": ["a", "b"], "question_id": 81}': (["user a", "user b"], [], "user a"),
    '{"turns": [{"role": "user", "text": "a"}, {"role": "assistant", "text": "b"}]}': (
        ["user a", "assistant b"], [1], "user a, assistant b",
    ),
    '{"instruction": "a", "input": "", "output": "b"}': (["user a", "assistant b"], [1], "user a"),
    '{"instruction": "a", "input": null, "output": "b"}': (["user a", "assistant b"], [1], "user a"),
    '{"instruction": "a", "input": "c", "output": "b"}': (["user a\\n\\nc", "assistant b"], [1], "user a\\n\\nc"),
    '{"instruction": "a", "context": "c", "response": "b"}': (["user a\\n\\nc", "assistant b"], [1], "user a\\n\\nc"),
    '{"question": "a", "answer": "b"}': (["user a", "assistant b"], [1], "user a"),
    '{"choices": [{"turns": ["a", "b"]}]}': (["assistant a", "assistant b"], [0, 1], "assistant a, assistant b"),
}  # fmt: skip


@pytest.mark.parametrize("line", READ)
def test_every_form(line: str) -> None:
    """Messages, which of them are answers, and the prompt up to where the model is first to answer."""
    messages, answers, first = READ[line]
    one = parse(line.encode(), "log, line 3", ignore=())
    said = [f"{message['role']} {message['content']}".replace("\n", "\\n") for message in one.messages]
    assert (said, list(one.answers), one.where) == (messages, answers, "log, line 3")
    assert ", ".join(said[: len(one.first_prompt)]) == first


def test_texts_and_token_ids() -> None:
    book = conversation({"title": "T", "text": "a"})
    assert (book.text, book.parts, book.texts()) == ("a", {"title": "T"}, ["a"])
    assert conversation({"tokens": [3]}).tokens == (None, [3])
    # Ids are what the model read; text beside them is not tokenised again.
    assert conversation(PAIR | {"prompt_tokens": [1], "tokens": [3]}).tokens == ([1], [3])


@pytest.mark.parametrize("about", [{"prompt": "Hello?"}, {"messages": ASKED}], ids=["prompt", "messages"])
def test_what_generate_writes_is_a_recording(tmp_path: Path, about: dict[str, Any]) -> None:
    """A line of `paceline generate --json`, whose prompt_tokens is a number."""
    line = about | {"index": 0, "text": "Hi.", "prompt_tokens": 9, "finish_reason": "length", "weights": "bfloat16"}
    (one,) = read_trace(write(tmp_path, line | {"error": LONG, "logprobs": [{"token": LONG}]}))
    assert (list(one.messages), list(one.answers), one.tokens, one.is_cut) == (ASKED + SAID, [1], None, True)


def test_every_message_of_the_assistant_is_an_answer_unless_there_is_a_response(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "Be brief."}, *(ASKED + SAID) * 2, *ASKED]
    alone, answered = read_trace(write(tmp_path, {"messages": talk}, {"messages": talk, "response": "Hi again."}))
    assert (list(alone.answers), len(alone.messages)) == ([2, 4], 5)
    assert (list(answered.answers), len(answered.messages)) == ([6], 7)


def test_gzip_blank_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf" + json.dumps(PAIR).encode() + b"\n\n" + json.dumps(PAIR).encode() + b"\n"
    (tmp_path / "log.gz").write_bytes(gzip.compress(content))
    assert [e.where[-6:] for e in read_trace(tmp_path / "log.gz")] == ["line 1", "line 3"]


def answer(id: int, turns: list[str], category: str = "qa") -> dict[str, Any]:
    return {"question_id": id, "category": category, "choices": [{"index": 0, "turns": turns}]}


def test_spec_bench_answers_join_their_questions(tmp_path: Path) -> None:
    whole = [name for name, count in SPEC_BENCH.items() for _ in range(count)]
    asked = [{"question_id": id, "category": name, "turns": ["A?", "B?"]} for id, name in enumerate(whole)]
    trace = write(tmp_path, answer(7, ["a", "b"], "writing"))
    (exchange,) = read_trace(trace, questions=write(tmp_path, *asked, name="questions"))
    assert [m["content"] for m in exchange.messages] == ["A?", "a", "B?", "b"]
    assert list(exchange.answers) == [1, 3]
    assert exchange.category == "mt-bench"
    (exchange,) = read_trace(trace, questions=write(tmp_path, *asked[:-1], name="mine"))
    assert exchange.category == "writing"  # one's own questions are not grouped as in the paper


def test_token_ids(tmp_path: Path) -> None:
    logged = {"time": 1.5, "prompt_tokens": [5, 6], "tokens": [7], "finish_reason": "stop", "temperature": 0.0}
    (exchange,) = read_trace(write(tmp_path, logged | {"category": "greetings"}))
    assert exchange.tokens == ([5, 6], [7])
    assert exchange.category == "greetings"


LONG = "the letter that the question is about"


@pytest.mark.parametrize(
    ("record", "key"),
    [
        (PAIR | {"input": LONG}, "input"),
        (PAIR | {"context": [LONG]}, "context"),
        ({"instruction": "Hello?", "output": "Hi.", "system": LONG}, "system"),
        ({"messages": ASKED + SAID, "prompt": LONG}, "prompt"),
        ({"messages": ASKED + SAID, "text": LONG}, "text"),
        ({"messages": ASKED, "response": "Hi.", "tools": [{"function": {"description": LONG}}]}, "tools"),
        ({"messages": [*ASKED, SAID[0] | {"reasoning_content": LONG}]}, "reasoning_content"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_text_that_would_not_be_read_is_an_error_unless_it_is_to_be_ignored(
    tmp_path: Path, record: dict[str, Any], key: str
) -> None:
    file = write(tmp_path, record)
    complains(file, "line 1", f'the text under "{key}" would not be read', '"metadata"', f"--ignore {key}")
    (exchange,) = read_trace(file, ignore=[key])
    assert list(exchange.messages) == ASKED + SAID


def test_what_is_about_an_answer_does_no_harm(tmp_path: Path) -> None:
    about = {"id": LONG, "source": LONG, "metadata": {"note": LONG}, "url": "https://" + "a" * 99, "time": 1.5}
    labels = {"lang": "en", "quality": "needs another look", "flags": ["a", {"b": "c"}], "hash": "0" * 64, "n": [1, 2]}
    (exchange,) = read_trace(write(tmp_path, PAIR | about | labels))
    assert list(exchange.messages) == ASKED + SAID


def test_ignore_takes_alpacas_input_away(tmp_path: Path) -> None:
    file = write(tmp_path, {"instruction": "Hello?", "input": LONG, "output": "Hi."})
    (exchange,) = read_trace(file, ignore=["input"])
    assert list(exchange.messages) == ASKED + SAID


def test_limit_and_categories(tmp_path: Path) -> None:
    file = write(tmp_path, *(PAIR | {"category": "ab"[i % 2]} for i in range(10)))
    assert len(read_trace(file, limit=3)) == 3
    assert [e.where[-6:] for e in read_trace(file, limit=2, categories=["b"])] == ["line 2", "line 4"]


def complains(file: Path, *words: str, **options: Any) -> None:
    with pytest.raises(ConversationError) as raised:
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
        ({"prompt_tokens": [1], "tokens": "a"}, ("line 2", '"tokens" must be a list of token ids')),
        ({"prompt_tokens": [-1], "tokens": [1]}, ("line 2", '"prompt_tokens" must be a list of token ids')),
        ({"prompt_tokens": [1], "tokens": [10**30]}, ("line 2", '"tokens" must be a list of token ids')),
        ({"instruction": "a", "input": 3, "output": "b"}, ("line 2", '"input" must be a text, not a int')),
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
