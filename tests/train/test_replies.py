"""Recorded answers of a target: read from every kind of file, and turned into rows to train on."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import PacelineError
from paceline.target.load import load_tokenizer
from paceline.target.tokenizer import Tokenizer
from paceline.train.data import Example, read_examples, rows_of, split_rows
from paceline.train.loss import IGNORE
from tests import models


@pytest.fixture
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(models.make("llama2", tmp_path_factory.mktemp("models") / "mine"))


def replies(tmp_path: Path, tokenizer: Tokenizer, *records: object) -> list[Example]:
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return list(read_examples(file, tokenizer))


def test_recorded_answers_are_read(tmp_path: Path, tokenizer: Tokenizer) -> None:
    said, end = tokenizer.encode_text("the dog"), [models.EOS]
    asked = tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    assert replies(tmp_path, tokenizer, {"prompt_tokens": [1, 2], "tokens": [3], "source": "s"}) == [
        Example("s", [1, 2], [3])
    ]
    # What `paceline generate --json` writes: its prompt_tokens is a number.
    own = {"text": "the dog", "prompt_tokens": 9, "finish_reason": "stop"}
    cut = own | {"finish_reason": "length", "prompt": "hello", "category": "c"}
    assert replies(tmp_path, tokenizer, own, cut) == [Example("answers", None, said + end), Example("c", asked, said)]
    bench = {"question_id": 1, "choices": [{"turns": ["the dog", "hello"]}]}
    assert [r.tokens for r in replies(tmp_path, tokenizer, bench)] == [said + end, tokenizer.encode_text("hello") + end]
    questions = tmp_path / "question.jsonl"
    questions.write_text('{"question_id": 1, "category": "qa", "turns": ["hello", "and then"]}\n')
    first, second = read_examples(tmp_path / "answers.jsonl", tokenizer, questions)
    assert first == Example("qa", asked, said + end)
    assert (second.source, second.tokens) == ("qa", tokenizer.encode_text("hello") + end)
    logged = {"messages": [{"role": "user", "content": "hello"}], "response": "the dog"}
    assert replies(tmp_path, tokenizer, logged, {"prompt": "hello", "response": "the dog", "category": "x"}) == [
        Example("answers", asked, said + end),
        Example("x", asked, said + end),
    ]
    tokenizer.inner.chat_template = None
    [plain] = replies(tmp_path, tokenizer, {"prompt": "hello", "response": "the dog"})
    assert plain == Example("answers", tokenizer.encode("hello"), said + end)
    zipped = tmp_path / "vicuna-v1.3.jsonl.gz"
    zipped.write_bytes(gzip.compress(b'{"tokens": [4]}\n'))
    assert list(read_examples(zipped, tokenizer)) == [Example("vicuna-v1.3", None, [4])]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "holds no answers"),
        ("{", "line 1: not JSON"),
        ("[1]", "line 1: a JSON object is wanted"),
        ('{"tokens": "x"}', 'line 1: "tokens" must be a list of token ids'),
        ('{"text": 3}', 'line 1: "text" must be a text'),
        ('{"other": 3}', r"line 1: unknown record with the keys other"),
    ],
)
def test_what_is_no_answer_is_refused(tmp_path: Path, tokenizer: Tokenizer, content: str, says: str) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text(content)
    with pytest.raises(PacelineError, match=says) as caught:
        list(read_examples(file, tokenizer))
    assert str(file) in str(caught.value)
    with pytest.raises(PacelineError, match="cannot be read: No such file"):
        list(read_examples(tmp_path / "none.jsonl", tokenizer))


def write(file: Path, *rows: tuple[list[int], list[int], str]) -> Path:
    file.write_text(
        "".join(json.dumps({"prompt_tokens": p, "tokens": t, "source": s}) + "\n" for p, t, s in rows)
    )
    return file


def test_only_the_targets_own_tokens_are_labels(tmp_path: Path) -> None:
    ids, labels = rows_of([Example("s", *r) for r in (([5, 6, 7], [8, 9]), ([1], [2, 3]), ([4] * 20, [8]))], 8, pad=0)
    assert ids.tolist() == [[5, 6, 7, 8, 1, 2, 0, 0]]
    assert labels.tolist() == [[IGNORE, IGNORE, 8, 9, 2, 3, IGNORE, IGNORE]]
    (tmp_path / "b.jsonl").write_text('{"tokens": [1]}\n')
    with pytest.raises(PacelineError, match='line 1: "prompt_tokens" and "tokens" must be lists'):
        split_rows(tmp_path / "b.jsonl", 8)


def test_all_answers_to_a_prompt_are_on_one_side(tmp_path: Path) -> None:
    rows = [([p, p + 1], [50 + p, k], "even" if p % 2 == 0 else "odd") for p in range(40) for k in range(3)]
    training, held = split_rows(write(tmp_path / "a.jsonl", *rows), 16, held_out=0.2)

    def prompts(side: dict) -> set[int]:
        return {int(i) - 50 for ids, _ in side.values() for i in ids.ravel() if 50 <= i < 90}

    assert len(prompts(held)) == 8
    assert prompts(training) | prompts(held) == set(range(40))
    assert not prompts(training) & prompts(held)
    assert training.keys() == {"even", "odd"}
    again = split_rows(tmp_path / "a.jsonl", 16, held_out=0.2)
    assert all(np.array_equal(again[1][name][0], held[name][0]) for name in held)
    assert not split_rows(write(tmp_path / "one.jsonl", ([1, 2], [3], "s")), 16)[1]
