"""Tuning our engine: the command writes a table that `auto` reads."""

import json
import re
import shlex

import pytest

from paceline.cli import main
from paceline.replay import tune
from paceline.replay.tune import Tuning
from tests import models
from tests.served import Served
from tests.test_docs import complaint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return models.make_repetitive(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)


def test_the_command_writes_a_table_that_auto_reads(tiny, tmp_path, capsys):
    log, out = tmp_path / "log.jsonl", tmp_path / "tune.json"
    line = {"prompt": "the little cat and the little dog", "response": "the little cat and the little dog " * 2}
    log.write_text((json.dumps(line) + "\n") * 4)
    arguments = ["tune", tiny, "--log", log, "-o", out, "--batch", "1,2", "--seconds", "0.1", "--json"]
    assert main([str(argument) for argument in arguments]) == 0
    printed = capsys.readouterr()
    assert "only 4 prompts" in printed.err
    facts = json.loads(printed.out)
    assert facts["table"]["drafting_us"]["sam"]["row"] > 0
    kept = json.loads(out.read_text())
    assert kept["round_ms"]["2 rows"]["plain"] > 0
    assert kept["acceptance"]["sam"]
    assert main(["generate", str(tiny), "the little", "-n", "8", "--draft", "auto", "--tune", str(out)]) == 0
    assert main(["generate", str(tiny), "the little", "-n", "8", "--draft", "sam", "--tune", str(out)]) == 2
    assert "--tune is a table for auto" in capsys.readouterr().err


def test_acceptance_at_a_depth_is_of_the_drafts_that_reached_it(monkeypatch):
    def ten_rounds(drafter, answer, id, tally):
        """Drafts of two tokens: of ten, eight have the first accepted, and four both."""
        tally.depths[2] += 10
        tally.accepted[:3] += [2, 4, 4]

    monkeypatch.setattr(tune, "replayable", lambda spec, target: None)
    monkeypatch.setattr(tune, "replay", ten_rounds)
    monkeypatch.setattr(Tuning, "recording", None)
    assert Tuning(None, None, ["sam"], [1])._replayed("sam", ["answer"])[1] == [0.8, 0.5]


def test_what_it_advises_is_known_to_every_command_that_drafts(tiny, tmp_path, capsys):
    log, out = tmp_path / "log.jsonl", tmp_path / "a tune.json"
    log.write_text(json.dumps({"prompt": "the little cat", "response": "and the little dog " * 3}) + "\n")
    arguments = ["tune", tiny, "--log", log, "-o", out, "--batch", "1,2", "--seconds", "0.1", "-d", "sam,draft=4"]
    assert main([str(argument) for argument in arguments]) == 0
    (advice,) = re.findall(r"Use (--draft .*): at each load", capsys.readouterr().out)
    for command in ("generate", "serve", "bench", "chat"):
        assert not complaint([command, str(tiny), *shlex.split(advice)], whole=False)
    assert main(["generate", str(tiny), "the little", "--raw", "-n", "8", *shlex.split(advice)]) == 0


def test_what_a_template_refuses_is_skipped(tiny, tmp_path, capsys):
    log, picky = tmp_path / "log.jsonl", tmp_path / "picky.jinja"
    refuses = "{% if m.role == 'system' %}{{ raise_exception('no \x1b system') }}{% endif %}"
    picky.write_text("{% for m in messages %}" + refuses + "{{ m.content }}{% endfor %}")
    said = [{"role": "user", "content": "the little cat"}, {"role": "assistant", "content": "and the little dog"}]
    system = [{"role": "system", "content": "cat"}, *said]
    log.write_text("".join(json.dumps({"messages": one}) + "\n" for one in (system, said, said)))
    shared = ["--log", log, "--template", picky, "--batch", "1,2"]
    assert main([str(one) for one in ("tune", tiny, *shared, "-o", tmp_path / "tune.json", "--seconds", "0.1")]) == 0
    skipped = f"1 of 3 lines skipped: first at {log}, line 1: the chat template refuses these messages: no ? system"
    assert skipped in capsys.readouterr().err
    with Served(seconds=lambda n: 0.01) as fake:
        more = ["--tokenizer", tiny, "-n", "8", "--minutes", "0.05", "-o", tmp_path / "out"]
        assert main([str(one) for one in ("tune", "server", fake.url, *shared, *more)]) == 0
        assert all(len(body["messages"]) == 1 for body in fake.asked)
    assert skipped in capsys.readouterr().err
