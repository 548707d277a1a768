"""Data to train on: every kind of source, answers of a target as rows, and mixtures that resume."""

import gzip
import json

import datasets
import numpy as np
import pytest
import torch

from paceline.errors import PacelineError
from paceline.target.load import load_tokenizer
from paceline.train.data import (
    Document,
    Example,
    Mixture,
    assistant,
    parse_source,
    parse_sources,
    read,
    read_examples,
    rows_of,
    split_rows,
    user,
)  # fmt: skip
from paceline.train.loss import IGNORE
from tests import models


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path


def documents(path):
    return list(read(parse_source(str(path))))


def test_records_become_documents(tmp_path):
    dolly = {"instruction": " Do it", "context": "With this", "response": "Done", "category": "closed_qa"}
    turns = [{"role": "user", "text": "Hi"}, {"role": "assistant", "text": "Hello"}]
    read_documents = documents(write(
        tmp_path / "rows.jsonl", {"title": "Title", "text": "body"}, dolly, {"question": "Why?", "answer": "So. "},
        {"turns": turns}, {"turns": ["one", "two"]}, {"prompt": "alone"},
    ))  # fmt: skip
    fields = {"instruction": "Do it", "response": "Done", "category": "closed_qa"}
    asked = (user("Do it\n\nWith this"), assistant("Done"))
    assert read_documents[:2] == [
        Document("rows", "Title\n\nbody"), Document("rows", messages=asked, context="With this", fields=fields),
    ]  # fmt: skip
    assert [d.messages for d in read_documents[2:]] == [
        (user("Why?"), assistant("So.")), (user("Hi"), assistant("Hello")), (user("one"),), (user("alone"),),
    ]  # fmt: skip


def test_plain_text_is_cut_at_paragraphs(tmp_path):
    paragraphs = [f"Absatz {i}, größer. " + "word " * 300 for i in range(30)]
    text = "\n\n".join(paragraphs).encode()
    (tmp_path / "a.txt").write_bytes(text)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text))
    plain, packed = ([d.text for d in documents(tmp_path / name)] for name in ("a.txt", "b.txt.gz"))
    assert plain == packed
    assert len(plain) > 2
    assert "\n\n".join(plain) == "\n\n".join(paragraphs)


@pytest.mark.parametrize(("name", "content", "complaint"), [
    ("a.jsonl", b"{not json", "line 1: not JSON"),
    ("a.jsonl", b'{"body": "x", "kind": "y"}', "line 1: unknown record with the keys body, kind; a line is"),
    ("a.jsonl", b'{"turns": [{"role": "robot", "text": "x"}]}', "line 1: the role 'robot' is none of system, user"),
    ("a.jsonl", b'{"tokens": [1]}', "line 1: token ids and no text"),
    ("a.txt", b"fine\nM\xe4rz\n", "line 2: not UTF-8"),
    ("a.txt.gz", gzip.compress(b"text " * 1000, mtime=0)[:40], "is cut off or damaged"),
    ("a.csv", b"a,b", "a.csv is not .txt"),
])
def test_what_is_no_source_is_one_line(tmp_path, name, content, complaint):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PacelineError) as caught:
        documents(tmp_path / name)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_specs(tmp_path):
    path = write(tmp_path / "some.rows.jsonl", {"text": "x"})
    assert parse_source(str(path)).name == "some.rows"
    assert [s.name for s in parse_sources([f"mine={path}", f"mine={path}"])] == ["mine", "mine"]
    for spec, complaint in (
        ("mine=/no/such.txt", "no such file"), ("=x", "not a source"), (f"a={tmp_path}", "no such"),
        ("x=hf:gsm8k", "is not hf:OWNER/DATA"),
    ):  # fmt: skip
        with pytest.raises(PacelineError, match=complaint):
            parse_source(spec)


def test_a_data_set_of_the_hub(monkeypatch):
    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        if name == "a/b":
            raise ConnectionError("no network")
        return [{"question": "2 + 2?", "answer": "4"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    plain, full = parse_source("hf:openai/gsm8k"), parse_source("sums=hf:openai/gsm8k:main@test")
    assert (plain.name, full.name) == ("gsm8k", "sums")
    assert [next(iter(read(source))).messages[1]["content"] for source in (full, plain)] == ["4", "4"]
    assert asked == [("openai/gsm8k", "main", "test"), ("openai/gsm8k", None, "train")]
    with pytest.raises(PacelineError, match=r"cannot be loaded from the hub \(no network\); give a file instead: x=P"):
        list(read(parse_source("x=hf:a/b")))


@pytest.fixture
def tokenizer(tmp_path_factory):
    return load_tokenizer(models.make("llama2", tmp_path_factory.mktemp("models") / "mine"))


def examples(tmp_path, tokenizer, *records):
    return list(read_examples(write(tmp_path / "answers.jsonl", *records), tokenizer))


def test_recorded_answers_are_read(tmp_path, tokenizer):
    said, end = tokenizer.encode_text("the dog"), [models.EOS]
    asked = tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    assert examples(tmp_path, tokenizer, {"prompt_tokens": [1, 2], "tokens": [3], "source": "s"}) == [
        Example("s", [1, 2], [3])
    ]
    # What `paceline generate --json` writes: its prompt_tokens is a number.
    own = {"text": "the dog", "prompt_tokens": 9, "finish_reason": "stop"}
    cut = own | {"finish_reason": "length", "prompt": "hello", "category": "c"}
    assert examples(tmp_path, tokenizer, own, cut) == [Example("answers", None, said + end), Example("c", asked, said)]
    bench = {"question_id": 1, "choices": [{"turns": ["the dog", "hello"]}]}
    answered = examples(tmp_path, tokenizer, bench)
    assert [one.tokens for one in answered] == [said + end, tokenizer.encode_text("hello") + end]
    questions = tmp_path / "question.jsonl"
    questions.write_text('{"question_id": 1, "category": "qa", "turns": ["hello", "and then"]}\n')
    first, second = read_examples(tmp_path / "answers.jsonl", tokenizer, questions)
    assert first == Example("qa", asked, said + end)
    assert (second.source, second.tokens) == ("qa", tokenizer.encode_text("hello") + end)
    logged = {"messages": [{"role": "user", "content": "hello"}], "response": "the dog"}
    assert examples(tmp_path, tokenizer, logged, {"prompt": "hello", "response": "the dog", "category": "x"}) == [
        Example("answers", asked, said + end), Example("x", asked, said + end),
    ]
    tokenizer.inner.chat_template = None
    [plain] = examples(tmp_path, tokenizer, {"prompt": "hello", "response": "the dog"})
    assert plain == Example("answers", tokenizer.encode("hello"), said + end)
    zipped = tmp_path / "vicuna-v1.3.jsonl.gz"
    zipped.write_bytes(gzip.compress(b'{"tokens": [4]}\n'))
    assert list(read_examples(zipped, tokenizer)) == [Example("vicuna-v1.3", None, [4])]


@pytest.mark.parametrize(("content", "says"), [
    ("", "holds no answers"), ("{", "line 1: not JSON"),
    ('{"tokens": "x"}', 'line 1: "tokens" must be a list of token ids'),
    ('{"text": 3}', 'line 1: "text" must be a text'), ('{"other": 3}', "line 1: unknown record with the keys other"),
    ('{"prompt": "a"}', r"line 1: no answer \(keys: prompt\)"),
])
def test_what_is_no_answer_is_refused(tmp_path, tokenizer, content, says):
    (tmp_path / "answers.jsonl").write_text(content)
    with pytest.raises(PacelineError, match=says) as caught:
        list(read_examples(tmp_path / "answers.jsonl", tokenizer))
    assert str(tmp_path) in str(caught.value)


def test_only_the_targets_own_tokens_are_labels(tmp_path):
    ids, labels = rows_of([Example("s", *r) for r in (([5, 6, 7], [8, 9]), ([1], [2, 3]), ([4] * 20, [8]))], 8, pad=0)
    assert ids.tolist() == [[5, 6, 7, 8, 1, 2, 0, 0]]
    assert labels.tolist() == [[IGNORE, IGNORE, 8, 9, 2, 3, IGNORE, IGNORE]]
    (tmp_path / "b.jsonl").write_text('{"tokens": [1]}\n')
    with pytest.raises(PacelineError, match='line 1: "prompt_tokens" and "tokens" must be lists'):
        split_rows(tmp_path / "b.jsonl", 8)


def test_all_answers_to_a_prompt_are_on_one_side(tmp_path):
    rows = [
        {"prompt_tokens": [p, p + 1], "tokens": [50 + p, k], "source": "odd" if p % 2 else "even"}
        for p in range(40) for k in range(3)
    ]  # fmt: skip
    training, held = split_rows(write(tmp_path / "a.jsonl", *rows), 16, held_out=0.2)

    def prompts(side):
        return {int(i) - 50 for ids, _ in side.values() for i in ids.ravel() if 50 <= i < 90}

    assert (len(prompts(held)), prompts(training) | prompts(held)) == (8, set(range(40)))
    assert not prompts(training) & prompts(held)
    assert training.keys() == {"even", "odd"}
    again = split_rows(tmp_path / "a.jsonl", 16, held_out=0.2)
    assert all(np.array_equal(again[1][name][0], held[name][0]) for name in held)
    assert not split_rows(write(tmp_path / "one.jsonl", rows[0]), 16)[1]


def test_a_source_weighs_what_it_has_and_mixtures_resume():
    rows = {n: (np.full((c, 2), v), np.full((c, 2), v)) for n, c, v in (("a", 6, 1), ("b", 2, 2))}
    one, two = Mixture(rows, 8), Mixture(rows, 8)
    drawn = torch.cat([one.next(0.1)["input_ids"] for _ in range(100)])[:, 0]
    assert 0.68 < (drawn == 1).float().mean() < 0.82
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert torch.equal(one.next(0.1)["input_ids"], two.next(0.1)["input_ids"])
    many = np.arange(40).reshape(20, 2)
    orders = [Mixture({"a": (many, many)}, 20, seed).next(0.1)["input_ids"][:, 0].tolist() for seed in (0, 1)]
    again = Mixture({"a": (many, many)}, 20, 0)
    orders += [again.next(0.1)["input_ids"][:, 0].tolist() for _ in range(2)]
    assert orders[0] == orders[2], "a seed gives an order"
    assert orders[0] not in (orders[1], orders[3]), "every epoch, and every seed, has its own"
    assert {frozenset(order) for order in orders} == {frozenset(range(0, 40, 2))}
    grown = Mixture(rows | {"b": (np.full((3, 2), 2), np.full((3, 2), 2))}, 8)
    with pytest.raises(PacelineError, match=r"began with other rows \(\{'a': 6, 'b': 2\}\) than there are now"):
        grown.load_state_dict(one.state_dict())
