"""`paceline demo`, and the prompts it comes with."""

import json
import re
import signal

import pytest
from tests.paths import source

from paceline.bench.record import is_looping
from paceline.cli.compare import Driven
from paceline.cli.demo import OTHERS, SETTINGS, _is_there, _meaning
from paceline.cli.prompts import from_file
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.formats import place

CLI = source("cli/demo.py").parent
PROMPTS = CLI / "demo-prompts-tiny.jsonl"


@pytest.mark.parametrize("setting", SETTINGS.values())
def test_the_prompts_are_six_of_six_kinds_and_fit_a_table(setting):
    jobs, broken = from_file(str(CLI / setting.prompts), SamplingParams())
    assert not broken
    assert len({job.id for job in jobs}) == 6
    assert sum(1 + len(str(job.id)) for job in jobs) <= 80 - OTHERS


def test_the_table_says_what_the_engine_did(command, endless):
    more = ("-d", "sam", "--also", "prompt-lookup", "--also", "recycling,tree=8", "--repeats", 1)
    result = command("demo", endless, "-p", PROMPTS, "-n", 40, *more)
    assert result.code == 0
    jobs, _ = from_file(str(PROMPTS), SamplingParams(max_tokens=40))
    chats = [[{"role": "user", "content": job.prompt}] if isinstance(job.prompt, str) else job.prompt for job in jobs]
    engine = Engine(endless, "sam", max_batch=1)
    answers = [engine.generate([chat], job.params)[0] for chat, job in zip(chats, jobs, strict=True)]
    for spec in ("sam", "prompt-lookup", "recycling,tree=8"):
        # Folded where it is longer than its column.
        row = re.search(rf"^{re.escape(spec[:15])}8? +((?:[\d.]+ +){{8}})6 of 6 *$", result.out, re.MULTILINE)
        assert row is not None, result.out
        if spec == "sam":  # the others learn from one answer for the next
            mean = sum(answer.new_tokens for answer in answers) / sum(answer.rounds for answer in answers)
            assert row[1].split()[7] == f"{mean:.2f}"
            counts = re.search(r"^new tokens +([\d ]+)$", result.out, re.MULTILINE)
            new = [answer.new_tokens for answer in answers]
            assert list(map(int, counts[1].split())) == [*new, sum(new)]
            loops = sum(is_looping(answer.tokens) for answer in answers)
    assert re.search(r"^plain, tokens/s +(\d+ +){7}1.00 *$", result.out, re.MULTILINE)
    assert "18 of 18 drafted answers are plain decoding's, token for token." in result.out
    assert f"{loops} of 6 answers run into a loop" in result.out


def _compared(ratio, *, same=True, name="x", loops=False):
    """What `_meaning` reads of a comparison."""
    from types import SimpleNamespace

    return SimpleNamespace(
        job=SimpleNamespace(name=name), speedup=ratio, first_difference=None if same else 3, loops=loops
    )


def test_what_is_said_follows_from_the_table():
    pays = {"a": [_compared(1.5, name="long"), _compared(0.9, name="short", loops=True)], "b": [_compared(1.0)] * 2}
    said = " ".join(_meaning(pays, [("a", 1.2, 1.6), ("b", 1.0, 1.1)]))
    assert "Drafting with a pays here: over all prompts it is 1.20 times as fast" in said
    assert "long gains most (1.50), short least (0.90, slower than without)" in said
    assert "4 of 4 drafted answers" in said
    assert "1 of 2 answers run" in said
    lost = {"a": [_compared(0.8, same=False)]}
    said = " ".join(_meaning(lost, [("a", 1.02, 1.3)]))
    assert "No drafter pays" in said
    assert "pays here" not in said
    assert "0 of 1 drafted answers" in said
    assert "--exact rules that out" in said


def test_figures_that_cannot_be_are_not_said_to_pay():
    said = " ".join(_meaning({"a": [_compared(3.0)]}, [("a", 3.0, 1.5)]))
    assert "a ratio of 3.00 at 1.50 mean accepted tokens is impossible" in said
    assert "pays" not in said


def test_many_prompts_have_no_columns_of_their_own(command, endless, tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "the cat", "id": f"prompt {i}"}) + "\n" for i in range(7)))
    out = command("demo", endless, "-p", prompts, "-n", 4, "--repeats", 1).out
    assert re.search(r"^suffix +[\d.]+ +[\d.]+ +7 of 7 *$", out, re.MULTILINE), out


def test_drafters_of_the_demo_model_are_compared_where_they_are(tmp_path):
    assert _is_there("recycling,tree=16")
    assert not _is_there(f"model:{tmp_path / 'none'}")
    assert _is_there(f"model:{tmp_path}")
    assert _is_there(f"model:{tmp_path},vocab=2048")
    assert not _is_there(f"sam+model:{tmp_path / 'none'},vocab=2048")


def test_both_answers_are_shown(command, endless, tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"prompt": "the cat", "id": "x"}) + "\n" + json.dumps({"prompt": "the dog"}))
    result = command("demo", endless, "-p", prompts, "-n", 20, "--repeats", 1)
    assert result.out.count("\n[plain]\n") == result.out.count("\n[suffix]\n") == 2
    first = result.out.split("[plain]\n")[1].split("[suffix]\n")
    assert first[0].strip() == first[1].split("\n\n")[0].strip() != ""
    assert result.err.count("20 new tokens in") == 4


def test_ctrl_c_leaves_what_was_measured(command, endless, monkeypatch):
    ask, calls = Driven.ask, []

    def interrupting(self, *words):
        calls.append(self.name)
        if len(calls) == 5:  # both have answered the first two prompts
            signal.raise_signal(signal.SIGINT)
        return ask(self, *words)

    monkeypatch.setattr(Driven, "ask", interrupting)
    result = command("demo", endless, "-p", PROMPTS, "-n", 20)
    assert result.code == 130
    assert "interrupted; the figures above are of the answers so far" in result.err
    assert "2 of 2 drafted answers are plain decoding's" in result.out


def test_without_smollm2_the_tiny_model_answers_and_a_line_says_how_to_get_it(command, endless, tmp_path, monkeypatch):
    monkeypatch.setitem(place.PACKAGES, "smollm2", ("no-such-package", "0", "a model"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "demo").symlink_to(endless)
    result = command("demo", "-n", 4, "--repeats", 1)
    assert result.code == 0
    line, *_ = result.err.splitlines()
    assert "pip install --no-deps no-such-package==0" in line
    assert "the tiny model models/demo answers" in line
    assert re.search(r"^sam .* 6 of 6 *$", result.out, re.MULTILINE)
