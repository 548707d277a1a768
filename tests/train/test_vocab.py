"""Counting what a target writes: answers alone, coverage on answers that were not counted."""

import json
from pathlib import Path

import pytest
import torch

from paceline.errors import MethodError, PacelineError
from paceline.formats.heads.vocab import FILE, Vocabulary, most_frequent, read_vocabulary
from paceline.target.load import load_tokenizer
from paceline.train.data import Example
from paceline.train.saving import coverage, save_vocabulary
from paceline.train.vocab import check, count_tokens, count_vocabulary, end_tokens, report, train_vocabulary
from tests import models


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return models.make("llama2", tmp_path_factory.mktemp("models") / "mine")


@pytest.fixture
def tokenizer(target):
    return load_tokenizer(target)


def answers(file, *tokens, prompt=7):
    file.write_text("".join(json.dumps({"prompt_tokens": [prompt] * 50, "tokens": t}) + "\n" for t in tokens))
    return file


def test_answers_to_every_tenth_prompt_of_a_source_are_kept_aside():
    twice = [Example("a", [i], [i]) for i in range(12)] * 2
    counted, aside, number = count_tokens(twice, 12)
    assert (number, aside["a"].tolist(), counted["a"].tolist()) == (24, [0] * 9 + [2, 0, 0], [2] * 9 + [0, 2, 2])


def test_answers_whose_prompts_are_not_known_stand_for_themselves():
    examples = [Example("a", None, [i % 10]) for i in range(20)] + [Example("b", [1], [5, 5, 11])] * 4
    counted, aside, number = count_tokens(examples, 10)
    assert (number, counted["a"].tolist(), aside["a"].tolist()) == (24, [2] * 9 + [0], [0] * 9 + [2])
    assert counted["b"].tolist() == [0, 0, 0, 0, 0, 8, 0, 0, 0, 0]  # 11 is a row of padding
    assert "b" not in aside


def test_coverage_is_of_what_was_not_counted(tokenizer):
    examples = [Example("a", None, [100] * 3 + [101] if i % 10 < 9 else [100, 200]) for i in range(20)]
    vocabulary = count_vocabulary(examples, tokenizer, [models.EOS], keep=2)
    rows = vocabulary.facts["coverage"]
    # One place is the end token's; of what was put aside half is 100.
    assert (vocabulary.keep.tolist(), rows[0]) == ([models.EOS, 100], {"k": 2, "all": 0.5, "a": 0.5})
    assert vocabulary.facts["aside"]
    assert vocabulary.counts[[100, 101, 200]].tolist() == [3 * 18 + 2, 18, 2]  # in the end all are counted
    assert [row["k"] for row in rows] == [2, 18, 36, 72, 144]
    assert [row["all"] for row in rows] == sorted(row["all"] for row in rows)


def test_only_answers_are_counted_and_the_file_says_from_what(target, tmp_path):
    file = answers(tmp_path / "mine.jsonl", *[[100, 100, 101, models.EOS]] * 30)
    lines = train_vocabulary(target, [file], tmp_path / "drafter")
    known = read_vocabulary(tmp_path / "drafter" / FILE)
    assert (int(known.counts[7]), known.counts[[100, 101, models.EOS]].tolist()) == (0, [60, 30, 30])
    assert (len(known.counts), len(known.keep), known.tokenizer) == (288, 72, load_tokenizer(target).fingerprint)
    assert (known.facts["tokens"], known.facts["replies"]) == ({"mine": 120}, 30)
    assert known.facts["coverage"][-1] == {"k": 144, "all": 1.0, "mine": 1.0}
    assert "30 answers, 120 tokens" in lines[0]
    assert any("50 x 72 tokens would settle it" in line for line in lines)
    assert known.best(3).tolist() == [models.EOS, 100, 101]


def test_the_same_counts_give_the_same_file(target, tmp_path):
    file = answers(tmp_path / "mine.jsonl", *[[100, 101 + i % 3] for i in range(30)])
    for name in ("a.safetensors", "b.safetensors"):
        train_vocabulary(target, [file], tmp_path / name, keep=20)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_few_answers_are_said_to_be_few(tokenizer):
    vocabulary = count_vocabulary([Example("a", None, [100])], tokenizer, [])
    assert "too few prompts to keep some aside" in "\n".join(report(vocabulary, Path("v")))


def test_another_domain_shows_in_the_coverage(target, tmp_path):
    home = answers(tmp_path / "home.jsonl", *[[100, 101, 102]] * 20)
    away = answers(tmp_path / "away.jsonl", *[[100, 200]] * 20)
    train_vocabulary(target, [home], tmp_path / "d", keep=8)
    lines = check(target, [home, away], tmp_path / "d")
    assert "40 answers; " in lines[0]
    assert lines[1].split() == ["K", "all", "home", "away"]
    assert [line.split() for line in lines[2:]] == [
        [str(k), "80.00%", "100.00%", "50.00%"] for k in (8, 18, 36, 72, 144)
    ]
    known = read_vocabulary(tmp_path / "d" / FILE)
    save_vocabulary(tmp_path / "map.safetensors", Vocabulary(known.keep))  # a map without counts has one size
    assert len(check(target, [home], tmp_path / "map.safetensors")) == 3
    assert coverage(torch.tensor([1, 3]), most_frequent(torch.tensor([1, 3]), 1)) == 0.75


def test_end_tokens_of_both_configurations_count(target, tmp_path):
    folder = models.make("llama2", tmp_path / "m")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 9]}')
    assert end_tokens(folder) == [1, 9]


def test_what_cannot_be_is_refused(target, tokenizer, tmp_path):
    with pytest.raises(PacelineError, match="nothing to count"):
        count_vocabulary([], tokenizer, [])
    with pytest.raises(PacelineError, match="nothing to count"):
        count_vocabulary([Example("a", None, [300])], tokenizer, [])
    file = answers(tmp_path / "mine.jsonl", [100])
    with pytest.raises(MethodError, match="of 289 tokens is asked for; the tokenizer has 288"):
        train_vocabulary(target, [file], tmp_path / "d", keep=289)
    assert not (tmp_path / "d").exists()
    other = tmp_path / "other"
    models.make("llama2", other)
    models.tokenizer(300).save_pretrained(other)
    train_vocabulary(other, [file], tmp_path / "d")
    with pytest.raises(PacelineError, match="of another tokenizer"):
        check(target, [file], tmp_path / "d")
