"""Prompts for a real model: nine kinds, and none that shares text with an evaluation."""

import json

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from paceline.errors import PacelineError
from paceline.target.load import load_tokenizer
from paceline.train.data import parse_source, parse_sources, read
from paceline.train.generated import openings
from tests import models
from zoo.__main__ import app
from zoo.overlap import RUN, Overlap, words
from zoo.page import write
from zoo.prompts import KINDS
from zoo.text import plain

ASKED = "Who wrote the long letter about the seven bridges of Koenigsberg, and to whom was it sent in that year?"
SHORT = "Who built the seven bridges?"
TINY = "Explain it."


@pytest.fixture
def evaluation(tmp_path):
    file = tmp_path / "question.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in (ASKED, SHORT, TINY)))
    return file


@pytest.mark.parametrize(("prompt", "overlaps"), [
    (ASKED, True), ("WHO WROTE: the long -- letter\n\nabout the SEVEN bridges of Koenigsberg?", True),
    (f"A passage. {' '.join(words(ASKED)[4 : 4 + RUN])} and so on", True),
    (f"A passage. {' '.join(words(ASKED)[4 : 3 + RUN])} and so on", False),
    ("Tell me: who built the seven bridges", True), ("Who built the eight bridges?", False), ("explain it", True),
    ("Explain it to a child.", False), ("", False),
])
def test_an_overlap_is_a_long_run_or_the_whole_of_a_shorter_text(prompt, overlaps):
    assert (Overlap([ASKED, SHORT, TINY]).shared(prompt) is not None) == overlaps


def written(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"{file.stem}={file}"


@pytest.fixture
def sources(tmp_path):
    """Data sets in the forms of Dolly, GSM8K and MBPP; in each a record of the evaluation."""
    categories = ("open_qa", "closed_qa", "summarization", "information_extraction")
    dolly = [
        {
            "instruction": f"What is number {i} for?",
            "context": "" if i % 4 == 0 else f"Passage {i}: " + "it stands on the shelf of a room. " * 6,
            "response": f"The thing with number {i} is for the shelf. " + "It is used by people in the house. " * 6,
            "category": categories[i % 4],
        }
        for i in range(40)
    ]
    dolly[0]["instruction"], dolly[1]["context"] = ASKED, f"{ASKED} {dolly[1]['context']}"
    gsm8k = [
        {"question": f"Ann has {i} pens and buys {i}. How many?", "answer": "#### 1"} for i in range(20)
    ]
    gsm8k[1]["question"] = ASKED
    mbpp = [
        {
            "task_id": i, "text": ASKED if i == 3 else f"Write a function to add {i}.",
            "code": f"def add_{i}(x):\r\n    return x + {i}", "test_list": [f"assert add_{i}(1) == {i + 1}"],
        }
        for i in (1, 3, 11, 510, 600)
    ]
    return [written(tmp_path / f"{n}.jsonl", rows) for n, rows in (("dolly", dolly), ("gsm8k", gsm8k), ("mbpp", mbpp))]


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_prompts_of_nine_kinds_without_any_of_the_evaluation(sources, evaluation, tmp_path):
    done = run("prompts", *sources, "--without", evaluation, "--out", tmp_path / "made")
    assert done.exit_code == 0, done.output
    files = {file.stem: file for file in (tmp_path / "made").iterdir()}
    assert files.keys() == set(KINDS)
    texts = {kind: [plain(d) for d in read(parse_source(f"a={file}"))] for kind, file in files.items()}
    assert all(texts.values())
    assert not any("Koenigsberg" in text for some in texts.values() for text in some)
    assert not any("add_11" in text or "add_510" in text for text in texts["code"]), "MBPP's test split"
    assert any("add_600" in text for text in texts["code"])
    assert "left out, which share text with an evaluation" in done.output


def test_chats_are_asked_at_either_turn(sources, tmp_path):
    assert run("prompts", *sources, "--out", tmp_path / "made").exit_code == 0
    tokenizer = load_tokenizer(models.make("llama2", tmp_path / "model"))
    asked = openings(parse_sources([f"chat={tmp_path / 'made' / 'chat.jsonl'}"]), tokenizer, 4096)
    lengths = [len(ids) for _, ids in asked]
    assert min(lengths) < 60 < max(lengths)


def test_the_page_has_what_the_drafters_say_of_themselves(tmp_path):
    fit = {"top1": 0.25}
    config = {
        "recipe": {"spent": {"step": 9, "tokens": 12_345, "minutes": 6.02}},
        "held_out": {"all": [fit, {"top1": 0.125}, fit, fit]}, "accepted_length": 1.375,
        "learnt_tokens": {"code": 2_000, "chat": 1_000},
        "target": {"name": "Small", "weights_fingerprint": "aa", "tokenizer_fingerprint": "bb"},
        "blocks": {"w": "Q8_0"},
    }
    medusa, hydra = tmp_path / "smollm2-medusa", tmp_path / "work" / "hydra"
    for folder in (medusa, hydra):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        save_file({"w": torch.zeros(1000, 340, dtype=torch.uint8)}, folder / "model.safetensors")
    write("smollm2", tmp_path, tmp_path / "work")
    text = (tmp_path / "smollm2.md").read_text("utf-8")
    ship, made = text.split("These do not ship; ")
    figures = "0.3 M | 0.3 | 3,000 | 12,345 | 6.0 | 0.250 | 0.125 | 0.250 | 1.38 |"
    assert f"| `medusa:{medusa}` | {figures}\n" in ship
    assert f"| `hydra:{hydra}` | {figures}\n" in made
    hydra.rename(tmp_path / "gone")
    write("smollm2", tmp_path, tmp_path / "work")
    assert (tmp_path / "smollm2.md").read_text("utf-8") == text, "a line stays where the weights are gone"
    with pytest.raises(PacelineError, match="has no drafter of smollm2"):
        write("smollm2", tmp_path / "empty", tmp_path / "work")
