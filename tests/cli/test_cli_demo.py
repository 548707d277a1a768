"""`paceline demo`, and the six prompts it comes with."""

import json
import re
import shutil
from pathlib import Path

from tests.cli.command import Command
from tests.paths import REPOSITORY

from paceline.bench.looping import is_looping
from paceline.cli.demo import _is_there
from paceline.cli.prompts import from_file
from paceline.engine.engine import Engine
from paceline.engine.sampling import SamplingParams

PROMPTS = REPOSITORY / "src" / "paceline" / "cli" / "demo-prompts.jsonl"


def test_the_prompts_are_six_of_six_kinds() -> None:
    jobs, broken = from_file(str(PROMPTS), SamplingParams())
    assert not broken
    assert {job.id for job in jobs} == {
        "chat", "translation", "summary", "question answering", "arithmetic", "retrieval"
    }  # fmt: skip


def test_the_table_says_what_the_engine_did(command: Command, endless: Path) -> None:
    result = command("demo", endless, "-p", PROMPTS, "-n", 80, "--repeats", 1)
    assert result.code == 0
    jobs, _ = from_file(str(PROMPTS), SamplingParams(max_tokens=80))
    engine = Engine(endless, "sam", max_batch=1)
    loops = 0
    for job in jobs:
        messages = [{"role": "user", "content": job.prompt}] if isinstance(job.prompt, str) else job.prompt
        (expected,) = engine.generate([messages], job.params)
        pattern = rf"^{job.id} +(\d+) +([\d.]+) +(\d+) +(\d+) +([\d.]+) +yes +(yes|no)\s*$"
        found = re.search(pattern, result.out, re.MULTILINE)
        assert found is not None, result.out
        assert int(found[1]) == expected.new_tokens
        assert float(found[2]) == round(expected.mean_accepted_tokens, 2)
        assert abs(float(found[5]) - int(found[4]) / int(found[3])) < 0.05 * float(found[5])
        assert (found[6] == "yes") == is_looping(expected.tokens)
        loops += is_looping(expected.tokens)
    assert "6 of 6 outputs are identical" in result.out
    assert f"{loops} of 6 run into a loop" in result.out
    assert "tiny" not in result.out


def test_other_drafters_stand_below(command: Command, endless: Path) -> None:
    more = ("--also", "prompt-lookup", "--also", "recycling,tree=8", "--repeats", 1)
    result = command("demo", endless, "-p", PROMPTS, "-n", 20, *more)
    out = result.out
    assert result.code == 0, result.err
    for spec in ("sam", "prompt-lookup", "recycling,tree=8"):
        found = re.search(rf"^{re.escape(spec)} +([\d.]+) +\d+ +\d+ +[\d.]+ +6 of 6 *$", out, re.MULTILINE)
        assert found is not None, out
        assert float(found[1]) > 1
    assert "all prompts" not in command("demo", endless, "-p", PROMPTS, "-n", 5, "--repeats", 1).out


def test_drafters_of_the_demo_model_are_compared_where_they_are(tmp_path: Path) -> None:
    assert _is_there("recycling,tree=16")
    assert not _is_there(f"model:{tmp_path / 'none'}")
    assert _is_there(f"model:{tmp_path}")
    assert _is_there(f"model:{tmp_path},vocab=2048")
    assert not _is_there(f"sam+model:{tmp_path / 'none'},vocab=2048")


def test_repetitions_teach_a_drafter_nothing(command: Command, endless: Path) -> None:
    def accepted(repeats: int) -> str:
        arguments = ("-d", "recycling,tree=8", "-p", PROMPTS, "-n", 24, "--repeats", repeats)
        out = command("demo", endless, *arguments).out
        found = re.search(r"^all +\d+ +([\d.]+) ", out, re.MULTILINE)
        assert found is not None, out
        return found[1]

    assert accepted(1) == accepted(3)


def test_both_answers_are_shown(command: Command, endless: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"prompt": "the cat", "id": "x"}) + "\n" + json.dumps({"prompt": "the dog"}))
    out = command("demo", endless, "-p", prompts, "-n", 20, "--repeats", 1).out
    assert out.count("[plain]") == out.count("[sam]") == 2
    first = out.split("[plain]\n")[1].split("[sam]\n")
    assert first[0].strip() == first[1].split("\n\n")[0].strip() != ""


def test_without_the_demo_model(command: Command, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    shutil.copy(PROMPTS, tmp_path)
    monkeypatch.chdir(tmp_path)
    assert command("demo").code == 2
    result = command("demo", "-p", "demo-prompts.jsonl")
    assert result.code == 2
    assert "models/demo" in result.err
