"""Files of Spec-Bench, read back by its scripts' rules, written here anew: speed.py, equal.py, reorg_answer_file."""

import json

import numpy as np
import pytest
from tests.bench.turns import reply

from paceline.bench.metrics import (
    identical,
    mean_accepted_tokens,
    speedup_spec_bench,
    tokens_per_second_spec_bench,
)
from paceline.bench.record import Answer
from paceline.bench.specbench import export
from paceline.bench.suites import Question, Suite
from paceline.errors import PacelineError

CATEGORIES = ("writing", "coding", "translation", "rag", "rag", "qa")
EIGHT = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
ENCODE = lambda text: ["<s>", *text.split(" ")]  # noqa: E731 - a tokenizer that adds a BOS


def task_of(category):
    return "mt-bench" if category in EIGHT else category


def suite(ids):
    questions = [
        Question(id, category, task_of(category), ("a", "b") if category in EIGHT else ("a",))
        for id, category in zip(ids, CATEGORIES, strict=True)
    ]
    return Suite("test", "here", "0", tuple(questions))


IDS = ["83", "81", "300", "9", "10", "161"]
SUITE = suite(IDS)


def answers(repeats=1, asked=SUITE):
    """Plain decoding, a drafter and a peer that tells nothing, on every question; times and rounds by a seed."""
    random = np.random.default_rng(0)
    found = []
    for repeat in range(repeats):
        for group, question in enumerate(asked.questions):
            texts = [" ".join(str(w) for w in random.integers(0, 99, random.integers(5, 40))) for _ in question.turns]
            for method, speed in (("none", 10.0), ("sam,draft=8", 31.0), ("peer:vllm-ngram", 20.0)):
                turns = [_turn(text, speed, random, method) for text in texts]
                answer = Answer(method, repeat, question.id, question.category, question.task, group, turns)
                found.append(answer)
    return found


def _turn(text, speed, random, method):
    tokens = [int(word) for word in text.split()] + [100]  # an end token, which the text does not show
    lengths = [1]
    while sum(lengths) < len(tokens):
        lengths.append(min(1 if method == "none" else int(random.integers(1, 6)), len(tokens) - sum(lengths)))
    seconds = round(len(tokens) / speed * float(random.uniform(0.8, 1.2)), 6)
    return reply(
        prompt_tokens=3, tokens=tokens, text=f" {text}\n", seconds=seconds,
        lengths=None if method.startswith("peer") else lengths, plain_tokens=len(ENCODE(text)) - 1,
    )


def read(file):
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def reorganized(file):
    """reorg_answer_file: sorted by question_id, of several lines of one question the last."""
    by_id = {json.loads(line)["question_id"]: line for line in file.read_text("utf-8").splitlines(keepends=True)}
    return [by_id[id] for id in sorted(by_id)]


def speed(file, base, task):
    """speed.py: tokens a second, the baseline's, their ratio, and all accepted lengths."""

    def wanted(rows):
        kinds = EIGHT if task == "mt_bench" else (task,)
        return [row["choices"][0] for row in rows if task == "overall" or row["category"] in kinds]

    mine, others = wanted(read(file)), wanted(read(base))
    speeds = [sum(one["new_tokens"]) / sum(one["wall_time"]) for one in mine]
    recounted = [sum(len(ENCODE(turn)) - 1 for turn in one["turns"]) / sum(one["wall_time"]) for one in others]
    lengths = [length for one in mine for length in one["accept_lengths"]]
    return float(np.mean(speeds)), float(np.mean(recounted)), float(np.mean(speeds) / np.mean(recounted)), lengths


def equal(one, other):
    """equal.py: a line of text for each question's turns, compared line by line as far as both go."""
    texts = [[str(row["choices"][0]["turns"]) for row in read(file)] for file in (one, other)]
    return all(a == b for a, b in zip(*texts, strict=False))


def exported(tmp_path, found, asked=SUITE):
    return export(found, tmp_path / "out", model="demo 8M", dtype="float32", temperature=0, suite=asked)


SAM, NONE = "demo_8M-sam_draft=8-float32-temp-0.0.jsonl", "demo_8M-vanilla-float32-temp-0.0.jsonl"


def test_speed_py_finds_our_figures(tmp_path):
    found = answers()
    notes = exported(tmp_path, found)
    assert notes == ["peer:vllm-ngram has no Spec-Bench file: its engine does not tell the tokens of each round"]
    folder = tmp_path / "out" / "model_answer"
    assert sorted(path.name for path in folder.iterdir()) == sorted([SAM, NONE])
    for task in ("mt_bench", "translation", "qa", "rag", "overall"):
        chosen = [a for a in found if task in ("overall", a.task.replace("-", "_"))]
        none, sam = ([a for a in chosen if a.method == method] for method in ("none", "sam,draft=8"))
        mine, baseline, ratio, lengths = speed(folder / SAM, folder / NONE, task)
        assert mine == pytest.approx(tokens_per_second_spec_bench(sam))
        assert baseline == pytest.approx(tokens_per_second_spec_bench(none))
        assert ratio == pytest.approx(speedup_spec_bench(sam, none))
        assert np.mean(lengths) == pytest.approx(mean_accepted_tokens(sam))
    plain_tokens = sum(a.num_new for a in found if a.method == "none")
    assert speed(folder / NONE, folder / NONE, "overall")[3] == [1] * plain_tokens


def test_speed_py_s_mean_report_finds_our_figures(tmp_path):
    exported(tmp_path, answers(repeats=2))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model_answer"], "three runs or none"
    found = answers(repeats=4)
    exported(tmp_path, found)
    three = [a for a in found if a.repeat < 3]
    none, sam = ([a for a in three if a.method == method] for method in ("none", "sam,draft=8"))
    folders = [tmp_path / "out" / f"model_answer_temp0_run_{n}" for n in (1, 2, 3)]
    reports = [speed(folder / SAM, folder / NONE, "overall") for folder in folders]
    assert np.mean([mine for mine, *_ in reports]) == pytest.approx(tokens_per_second_spec_bench(sam))
    assert np.mean([ratio for _, _, ratio, _ in reports]) == pytest.approx(speedup_spec_bench(sam, none))
    assert np.mean([n for *_, lengths in reports for n in lengths]) == pytest.approx(mean_accepted_tokens(sam))
    assert read(folders[0] / SAM)[0]["choices"] == read(tmp_path / "out" / "model_answer" / SAM)[0]["choices"]


def test_equal_py_agrees_with_us(tmp_path):
    found = answers()
    exported(tmp_path, found)
    folder = tmp_path / "out" / "model_answer"
    none, sam = ([a for a in found if a.method == method] for method in ("none", "sam,draft=8"))
    assert equal(folder / SAM, folder / NONE)
    assert identical(sam, none) == 1
    sam[3].turns[0].tokens[1] += 1
    sam[3].turns[0].text = "other " + sam[3].turns[0].text
    exported(tmp_path, found)
    assert not equal(folder / SAM, folder / NONE)
    assert identical(sam, none) == pytest.approx(5 / 6)


def test_a_line_is_spec_bench_s(tmp_path):
    found = answers()
    exported(tmp_path, found)
    folder = tmp_path / "out" / "model_answer"
    for file in (folder / SAM, folder / NONE):
        rows = read(file)
        assert [row["question_id"] for row in rows] == [9, 10, 81, 83, 161, 300]
        assert reorganized(file) == file.read_text("utf-8").splitlines(keepends=True)
        assert len({row["answer_id"] for row in rows}) == 6
        for row in rows:
            assert set(row) == {"question_id", "category", "answer_id", "model_id", "choices", "tstamp"}
            assert row["model_id"] == file.stem
            (choice,) = row["choices"]
            assert set(choice) == {"index", "turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths"}
            counts = choice["accept_lengths"] + choice["decoding_steps"] + choice["new_tokens"]
            assert all(type(count) is int for count in counts)
            assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"])
            assert sum(choice["decoding_steps"]) == len(choice["accept_lengths"])
            per_turn = [len(choice[key]) for key in ("turns", "decoding_steps", "new_tokens", "wall_time")]
            assert per_turn == [2 if row["category"] in EIGHT else 1] * 4
            assert all(turn == turn.strip() for turn in choice["turns"])


def test_ids_that_are_not_numbers_are_counted(tmp_path):
    for ids in (["demo-1", "2", "3", "4", "5", "6"], ["007", "2", "3", "4", "5", "6"]):
        asked = suite(ids)
        exported(tmp_path, answers(asked=asked), asked)
        rows = read(tmp_path / "out" / "model_answer" / SAM)
        assert [row["question_id"] for row in rows] == [1, 2, 3, 4, 5, 6]
        assert [row["category"] for row in rows] == list(CATEGORIES)


def test_failed_answers_are_left_out_and_said(tmp_path):
    found = [a for a in answers() if not a.method.startswith("peer")]
    next(a for a in found if a.method == "sam,draft=8").failed = "it died"
    found.append(Answer("peer:x", 0, IDS[0], "writing", "mt-bench", 0, failed="never came up"))
    assert exported(tmp_path, found) == [
        "sam,draft=8 has 5 of 6 questions in model_answer", "peer:x has no file in model_answer: no answers",
    ]
    assert len(read(tmp_path / "out" / "model_answer" / SAM)) == 5
    assert exported(tmp_path, [a for a in found if a.question not in (IDS[0], "81") and a.method == "none"]) == []


def test_methods_whose_names_look_alike_keep_apart(tmp_path):
    found = answers()
    for answer in found:
        answer.method = {"none": "none", "sam,draft=8": "rest:a/b", "peer:vllm-ngram": "rest:a:b"}[answer.method]
        for turn in answer.turns:
            turn.lengths = turn.lengths or [1] * len(turn.tokens)
    assert exported(tmp_path, found) == []
    names = sorted(path.name for path in (tmp_path / "out" / "model_answer").iterdir())
    apart = ["demo_8M-rest_a_b-float32-temp-0.0.jsonl", "demo_8M-rest_a_b-float32-temp-0.0_.jsonl"]
    assert names == [*apart, NONE]


def test_commands_longer_than_a_name_of_a_file_may_be_keep_apart(tmp_path):
    long, found = f"peer:/{'x' * 300}/llama-server -m a.gguf", answers()
    for answer in found:
        answer.method = {"none": "none", "sam,draft=8": long, "peer:vllm-ngram": f"{long} --port 1"}[answer.method]
        for turn in answer.turns:
            turn.lengths = turn.lengths or [1] * len(turn.tokens)
    assert exported(tmp_path, found) == []
    assert len([*(tmp_path / "out" / "model_answer").iterdir()]) == 3


def test_what_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "out").write_text("in the way")
    with pytest.raises(PacelineError, match=r"out/model_answer/.* cannot be written: Not a directory"):
        exported(tmp_path, answers())
