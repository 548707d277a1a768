"""A target's own answers: made by the engine, resumed, and never mixed with others."""

import json
from pathlib import Path

import pytest

from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.errors import PacelineError
from paceline.target.load import load, load_tokenizer
from paceline.train import generated
from paceline.train.data import parse_sources
from paceline.train.generated import generated_rows, openings
from tests import models


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return models.make("llama2", tmp_path_factory.mktemp("models") / "mine")


@pytest.fixture
def tokenizer(target):
    return load_tokenizer(target)


@pytest.fixture
def sources(tmp_path):
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps({"prompt": f"the cat {i}"}) + "\n" for i in range(6)))
    talk = tmp_path / "talk.jsonl"
    turns = [{"role": "user", "text": "hello"}, {"role": "assistant", "text": "there"}, {"role": "user", "text": "dog"}]
    talk.write_text(json.dumps({"turns": [*turns, {"role": "assistant", "text": "sat"}]}) + "\n")
    return parse_sources([f"asked={asked}", f"talk={talk}"])


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_answers_are_the_targets_own(target, sources, tmp_path):
    seen = []
    out = generated_rows(
        target,
        prompts=sources,
        count=10,
        max_tokens=6,
        out=tmp_path / "new" / "own.jsonl",
        progress=lambda *at: seen.append(at),
    )
    rows = lines(out)
    assert sorted(row["id"] for row in rows) == sorted(f"answer {n}" for n in range(10))
    assert ({row["source"] for row in rows}, seen) == ({"asked", "talk"}, [(n, 10) for n in range(1, 11)])
    engine = Engine(str(target), "none")
    for row in rows:
        n = int(row["id"].split()[1])
        params = SamplingParams(max_tokens=6, temperature=n % 2, seed=n)
        [done] = engine.generate([row["prompt_tokens"]], params)
        assert done.tokens == row["tokens"]


def test_an_interrupted_call_goes_on(target, sources, tmp_path):
    def make(out, count):
        generated_rows(target, prompts=sources, count=count, max_tokens=5, seed=3, out=out)
        return sorted(lines(out), key=lambda row: int(row["id"].split()[1]))

    whole = make(tmp_path / "whole.jsonl", 9)
    out = tmp_path / "part.jsonl"
    make(out, 4)
    broken = out.read_bytes()
    out.write_bytes(broken[: len(broken) - 5])  # a kill in the middle of a line
    assert make(out, 9) == whole
    before = out.read_bytes()
    assert (make(out, 9), out.read_bytes()) == (whole, before)


def test_other_settings_do_not_mix(target, sources, tmp_path):
    out = tmp_path / "own.jsonl"
    generated_rows(target, prompts=sources, count=2, max_tokens=5, out=out)
    with pytest.raises(PacelineError, match=r"own.jsonl holds another run: its max_tokens was 5 and now is 6; delete"):
        generated_rows(target, prompts=sources, count=2, max_tokens=6, out=out)
    other = models.make("llama2", tmp_path / "other" / "mine", seed=1)  # another training, same name
    with pytest.raises(PacelineError, match="its weights was"):
        generated_rows(other, prompts=sources, count=2, max_tokens=5, out=out)


def test_greedy_answers_are_made_once_a_prompt(target, sources, tmp_path):
    out = generated_rows(target, prompts=sources, count=50, max_tokens=3, temperature=0, out=tmp_path / "own.jsonl")
    assert len(lines(out)) == 7
    out = generated_rows(target, prompts=sources, count=50, max_tokens=3, temperature=0.7, out=tmp_path / "hot.jsonl")
    assert len(lines(out)) == 50


def test_without_prompts_the_target_writes_freely(target, tmp_path):
    out = generated_rows(target, count=3, max_tokens=4, temperature=1.0, out=tmp_path / "own.jsonl")
    rows = lines(out)
    assert [row["prompt_tokens"] for row in rows] == [[models.BOS]] * 3
    assert len({tuple(row["tokens"]) for row in rows}) > 1


def test_nothing_to_do_is_said(target, sources, tmp_path):
    with pytest.raises(PacelineError, match="nothing to train on"):
        generated_rows(target, count=0, out=tmp_path / "own.jsonl")
    with pytest.raises(PacelineError, match="source 'asked' has no prompt of at most 1 tokens"):
        generated_rows(target, prompts=sources, count=1, max_tokens=127, out=tmp_path / "own.jsonl")
    assert not list(tmp_path.glob("own*"))
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{")
    with pytest.raises(PacelineError, match="not JSON"):
        generated_rows(target, answers=[broken], count=0, out=tmp_path / "out-run" / "answers.jsonl")
    assert not (tmp_path / "out-run").exists()
    recorded = tmp_path / "log.jsonl"
    for line in ("{", '{"prompt": "hello", "response": "there"}\n'):  # mended, and tried again with other settings
        recorded.write_text(line)
        if line == "{":
            with pytest.raises(PacelineError, match="not JSON"):
                generated_rows(target, answers=[recorded], count=0, out=tmp_path / "own.jsonl")
    generated_rows(target, answers=[recorded], count=1, max_tokens=3, out=tmp_path / "own.jsonl")
    assert len(lines(tmp_path / "own.jsonl")) == 2


def test_prompts_end_where_the_assistant_speaks(sources, tokenizer, tmp_path):
    asked, talk = sources
    prompts = openings([asked], tokenizer, 100)
    wanted = [tokenizer.encode_chat([{"role": "user", "content": f"the cat {i}"}]) for i in range(6)]
    assert sorted(ids for _, ids in prompts) == sorted(wanted)
    hello, there, dog = ("user", "hello"), ("assistant", "there"), ("user", "dog")
    cuts = [
        tokenizer.encode_chat([{"role": role, "content": text} for role, text in turns])
        for turns in ([hello], [hello, there, dog])
    ]
    drawn = [ids for seed in range(8) for _, ids in openings([talk], tokenizer, 100, seed)]
    assert set(map(tuple, drawn)) == set(map(tuple, cuts))
    questions = tmp_path / "question.jsonl"
    questions.write_text('{"question_id": 81, "category": "writing", "turns": ["the dog", "and then"]}\n')
    [(name, ids)] = openings(parse_sources([f"bench={questions}"]), tokenizer, 100)
    assert (name, ids) == ("bench", tokenizer.encode_chat([{"role": "user", "content": "the dog"}]))
    book = tmp_path / "book.txt"
    book.write_text("the cat and the dog sat on the mat " * 40)
    [(_, ids)] = openings(parse_sources([str(book)]), tokenizer, 100)
    assert 16 <= len(ids) <= 64
    assert ids == tokenizer.encode(book.read_text())[: len(ids)]
    mixed = [{"messages": [{"role": "user", "content": "hello"}], "id": 1}, {"prompt": "the dog"}]
    questions.write_text("".join(json.dumps(line) + "\n" for line in mixed))
    assert len(openings(parse_sources([f"own={questions}"]), tokenizer, 100)) == 2
    questions.write_text('{"prompt": 3}\n')
    with pytest.raises(PacelineError, match='line 1: "prompt" must be a text'):
        openings(parse_sources([f"bench={questions}"]), tokenizer, 100)


def test_recorded_and_generated_answers_go_into_one_file(target, tmp_path):
    recorded = tmp_path / "log.jsonl"
    recorded.write_text('{"prompt": "hello", "response": "there", "category": "mine"}\n' * 2)
    out = tmp_path / "own.jsonl"
    for _ in range(2):
        generated_rows(target, answers=[recorded], count=1, max_tokens=2, out=out)
        assert [row["id"] for row in lines(out)] == ["recorded 0", "recorded 1", "answer 0"]
    assert [row["source"] for row in lines(out)] == ["mine", "mine", "free"]


def test_answers_without_their_prompts_are_not_learnt_from(target, tmp_path):
    recorded = tmp_path / "log.jsonl"
    recorded.write_text('{"text": "there", "prompt": "hello"}\n{"text": "there"}\n')
    with pytest.raises(PacelineError, match=r'log.jsonl: answer 2 has no prompt: give it a "prompt" or'):
        generated_rows(target, answers=[recorded], count=0, out=tmp_path / "own.jsonl")


def test_blocks_are_expanded_where_products_of_16_bits_are_faster(target, tmp_path, monkeypatch):
    asked, file = [], tmp_path / "mine.gguf"
    file.write_bytes(bytes(100))

    def stand_in(place, dtype):
        asked.append((Path(place).name, dtype))
        return load(target)

    monkeypatch.setattr(generated, "load", stand_in)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for units, free in ((True, 1000), (True, 700), (False, 1000)):
        monkeypatch.setattr(generated, "has_units", lambda dtype, units=units: units)
        monkeypatch.setattr(generated, "free_memory", lambda device, free=free: free)
        for number, place in enumerate((file, target)):
            out = tmp_path / f"{units} {free} {number}.jsonl"
            generated_rows(place, count=1, max_tokens=2, out=out)
    auto = [("mine.gguf", "auto"), ("mine", "auto")]
    assert asked == [("mine.gguf", "bfloat16"), ("mine", "auto"), *auto, *auto]
