"""The one place that knows the processor: levels, what they lack, and which libraries follow."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline import processor
from paceline.cli import main
from paceline.errors import PacelineError
from paceline.target import kernels
from paceline.target.kernels import amx, integer
from tests import models

FEATURES = ("avx2", "fma", "f16c", "avxvnni", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "amx-bf16")


@pytest.fixture
def all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that has everything."""
    monkeypatch.setattr(processor, "_host", lambda: dict.fromkeys(FEATURES, True))
    monkeypatch.setattr(processor, "_features", lambda: frozenset(k for k, v in processor.features().items() if v))
    monkeypatch.delenv(processor.VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("level", "there", "lacking"),
    [
        ("avx2", ("avx2", "fma", "f16c"), ("avxvnni", "avx512f", "avx512vnni", "amx-bf16")),
        ("avx-vnni", ("avx2", "avxvnni"), ("avx512f", "avx512vnni", "amx-bf16")),
        ("avx512", ("avx2", "avx512f", "avx512vnni"), ("amx-bf16",)),
        ("amx", FEATURES, ()),
    ],
)
@pytest.mark.usefixtures("all_there")
def test_a_level_has_what_is_below_it_and_nothing_beyond(
    level: str, there: tuple[str, ...], lacking: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert processor.levels() == list(processor.LEVELS)
    assert processor.level() == "amx"
    monkeypatch.setenv(processor.VARIABLE, level)
    assert processor.level() == level
    assert processor.has(*there)
    assert not any(processor.has(name) or processor.allows(name) for name in lacking)


def test_a_level_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(processor.VARIABLE, "avx3")
    with pytest.raises(PacelineError, match=r"PACELINE_CPU is 'avx3'; there are avx2, .*Did you mean 'avx2'"):
        processor.has("avx2")


@pytest.mark.usefixtures("level")
def test_kernels_follow(level: str) -> None:
    assert amx.supported() <= (level == "amx")
    assert ("vnni" in integer.paths()) <= (level in ("avx512", "amx"))
    assert kernels.preferred(torch.bfloat16) <= (level == "avx512")
    assert kernels.preferred(torch.float32) == (level != "amx")


def test_doctor_says_what_would_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = models.make("llama2", tmp_path / "tiny")
    assert main(["doctor", str(folder), "--dtype", "int8-float32"]) == 0
    shown = capsys.readouterr().out
    blocks = f"our kernel of blocks ({integer.path()}, inputs of 16 bits)"
    inputs = "rounded to 16 bits: the weights take at most 256 MB"
    for words in (f"level {processor.level()}", torch.__version__, blocks, inputs, "128 tokens"):
        assert words in shown
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["level"], facts["levels"]) == (processor.level(), processor.levels())


def test_other_libraries_follow_where_they_are_told_in_time() -> None:
    code = "import paceline, torch; from paceline import processor; print(torch.backends.cpu.get_cpu_capability())"
    environment = {key: value for key, value in os.environ.items() if key != "ATEN_CPU_CAPABILITY"}
    forced = environment | {processor.VARIABLE: "avx2"}
    done = subprocess.run([sys.executable, "-c", code], env=forced, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "AVX2"
