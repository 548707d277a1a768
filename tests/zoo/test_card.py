"""The card: tables follow from what was measured, and every part of it is there when its report is."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.draft.models.vocab import FILE, Vocabulary
from paceline.train.saving import save_vocabulary
from zoo.answers import PROMPTS, Answer, counts, drawn
from zoo.card import agreement_table, card, drafter_part, draw_loss, loss_table, vocabulary_part


def test_counts() -> None:
    answers = [
        Answer("chat", "?", "!", 10, ended=True, loops=False),
        Answer("chat", "?", "!", 160, ended=False, loops=True),
        Answer("summary", "?", "!", 40, ended=True, loops=False),
    ]
    rows = counts(answers).splitlines()[2:]
    assert rows == ["| chat | 2 | 1 | 1 | 85 |", "| summary | 1 | 1 | 0 | 40 |", "| all | 3 | 2 | 1 | 70 |"]


def test_six_kinds_of_four() -> None:
    assert [len(prompts) for prompts in PROMPTS.values()] == [4] * 6


def test_samples_are_drawn_by_a_seed() -> None:
    prompts = [[{"role": "user", "content": str(i)}] for i in range(50)]
    assert drawn(prompts) == drawn(prompts) != prompts[:6]
    assert len(drawn(prompts[:3])) == 3


def test_tables() -> None:
    report = {
        "loss": [{"source": "a", "answers": True, "tokens": 1000, "model": 1.0, "ngram": 2.0}],
        "agreement": {k: [{"source": "a", "tokens": 9, "overlap": 0.5, "top1": 0.25}] for k in ("answers", "text")},
    }
    assert loss_table(report).splitlines()[-1] == "| a, answers | 1,000 | 1.00 | 2.7 | 2.00 | 7.4 |"
    assert agreement_table(report).splitlines()[2:] == [
        "| a, answers | 9 | 0.500 | 0.250 |",
        "| a, all text | 9 | 0.500 | 0.250 |",
    ]


def a_model(folder: Path) -> Path:
    folder.mkdir()
    shape = {
        "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
        "intermediate_size": 16, "vocab_size": 300,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape))
    for stage in ("pretrain", "chat", "distil"):
        facts = {
            "model": {"parameters": 1234},
            "data": {"length": 8},
            "sources": {"gsm8k": {"rows_seen": 50, "rows": 100}},
        }
        (folder / f"training-{stage}.json").write_text(json.dumps(facts))
        log = [{"step": i, "tokens": 100 * i, "loss": 5.0 / i, "minutes": 60.0 * i} for i in (1, 2)]
        log.append({"step": 2, "tokens": 200, "minutes": 120.0, "valid": {"gsm8k": 2.5}})
        (folder / f"training-{stage}.jsonl").write_text("\n".join(map(json.dumps, log)))
    return folder


def test_the_card_has_what_there_is(tmp_path: Path) -> None:
    model, draft = a_model(tmp_path / "demo"), a_model(tmp_path / "demo-draft")
    answers = [Answer("chat", "Hello?", "Hi!", 10, ended=True, loops=False)]
    text = card(model, None, [], answers, [], "| practice |")
    assert "| gsm8k | GSM8K, train split | MIT, OpenAI | 400 | 0.5 | 2.50 |" in text
    assert "2.0 hours" in text
    assert "### Loops" not in text
    assert "## demo-draft" not in text
    loops = {"prompts": "q", "temperature": 0.0, "answers": 80, "looping": 8, "ended": 70, "mean_tokens": 40}
    (model / "looping.json").write_text(json.dumps([loops | {"share": 0.1}]))
    text = card(model, draft, [], answers, answers, "| practice |")
    assert "| q | 0 | 80 | 8 (10.0%) | 70 | 40 |" in text
    assert "Greedy answers that run into a loop: 8 of 80 (q)." in text
    assert "> Hello?" in text
    assert "## demo-draft" in text
    draw_loss(model, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def a_drafter(folder: Path, kind: str, **facts: Any) -> Path:
    folder.mkdir()
    save_file({"o_proj.weight": torch.zeros(3, 4)}, folder / "model.safetensors")
    config = {"paceline_drafter": kind, "target": {"name": "demo"}, "recipe": {"loop": {"tokens": 5000}}}
    (folder / "config.json").write_text(json.dumps(config | facts))
    return folder


def test_drafters_have_a_section_each(tmp_path: Path) -> None:
    fit = {"entropy": 1.5, "soft_ce": 3.0, "overlap": 0.5, "top1": 0.25}
    held, before = {"all": [fit]}, {"all": [{"soft_ce": 7.0, "overlap": 0.125, "top1": 0.0}]}
    kangaroo = drafter_part(a_drafter(tmp_path / "demo-k", "kangaroo", exit_layer=2, held_out=held, untrained=before))
    assert "## demo-k" in kangaroo
    assert "after layer 2 of demo (12 numbers" in kangaroo
    assert "5,000 tokens" in kangaroo
    assert kangaroo.splitlines()[-2:] == ["| no adapter | 7.00 | 0.125 | 0.000 |", "| adapter | 3.00 | 0.500 | 0.250 |"]
    held = {"all": [{"loss": float(n), "overlap": 0.5, "top1": 0.25} for n in (1, 3)]}
    nested = a_drafter(tmp_path / "demo-s", "s2d", num_hidden_layers=3, exits=[1, 3], held_out=held)
    lines = drafter_part(nested).splitlines()
    assert "first 3 layers of demo, with exits after 1, 3" in lines[2]
    assert lines[-2:] == ["| exit 1 | 1.00 | 0.500 | 0.250 |", "| exit 3 | 3.00 | 0.500 | 0.250 |"]
    held = {"all": [{"positions": n, "top1": one, "top5": 0.25 + one} for n, one in ((900, 0.5), (800, 0.25))]}
    heads = drafter_part(a_drafter(tmp_path / "demo-m", "medusa", held_out=held)).splitlines()
    assert heads[2].startswith("Heads over the last state for demo (12 numbers")
    assert heads[-2:] == ["| 1 | 900 | 0.500 | 0.750 |", "| 2 | 800 | 0.250 | 0.500 |"]


def test_heads_have_their_acceptance_by_depth(tmp_path: Path) -> None:
    rows = [(1200, 0.5, 0.4), (600, 0.25, 0.125)]
    held = {"all": [dict(zip(("reached", "accepted", "overlap"), row, strict=True)) for row in rows]}
    for kind, states in (("eagle", "last state"), ("eagle3", "states of three layers")):
        folder = a_drafter(tmp_path / kind, kind, held_out=held, recipe={"loop": {"tokens": None}})
        (folder / "training.jsonl").write_text('{"tokens": 5}\n{"tokens": 7000, "valid": {}}\n')
        part = drafter_part(folder)
        assert f"A layer over the {states} of demo (12 numbers" in part
        assert "7,000 tokens" in part
        assert part.splitlines()[-2:] == ["| depth 1 | 1,200 | 0.400 | 0.500 |", "| depth 2 | 600 | 0.125 | 0.250 |"]


def test_the_vocabulary_says_what_it_covers(tmp_path: Path) -> None:
    covered = {"k": 1024, "all": 0.5, "sgd": 0.75}
    kept = Vocabulary(torch.tensor([0, 2]), torch.tensor([5, 0, 9]), (), "", {"coverage": [covered]})
    save_vocabulary(tmp_path / FILE, kept)
    assert vocabulary_part(tmp_path).splitlines()[-1] == "| 1,024 | 50.0% | 75.0% |"


def test_the_shipped_card_is_what_the_command_writes() -> None:
    """All but the answers, for which the models would have to run."""
    models = Path(__file__).parents[2] / "models"
    answers = [Answer("chat", "Hello?", "Hi!", 10, ended=True, loops=False)]
    names = ("kangaroo", "sorted", "medusa", "eagle", "eagle3")
    drafters = [folder for name in names if (folder := models / f"demo-{name}").is_dir()]
    text = card(models / "demo", models / "demo-draft", drafters, answers, [], "| practice |")
    shipped = (models / "README.md").read_text()
    beginning, end = "| kind | prompts | ended", "### What it cannot do"
    assert text.split(beginning)[0] == shipped.split(beginning)[0]
    assert text.split(end)[1] == shipped.split(end)[1]
