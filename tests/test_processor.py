"""The one place that knows the processor: levels, what they lack, and which libraries follow."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from paceline import kernels, processor
from paceline.cli import ahead, main
from paceline.cli.doctor import _inside
from paceline.compiled import Compiling
from paceline.errors import PacelineError
from paceline.kernels import amx, integer
from paceline.runs import environment
from paceline.target.load import load
from tests import gguf_files, models
from tests.draft import mtps

X86 = ("avx2", "fma", "f16c", "avxvnni", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "amx-bf16")
ARM = ("neon", "dotprod")


def has_all(of, monkeypatch):
    """As on a processor with these features, without regard to what this one is."""
    monkeypatch.setattr(processor, "LEVELS", processor._ARM_LEVELS if of is ARM else processor._X86_LEVELS)
    monkeypatch.setattr(processor, "_host", lambda: dict.fromkeys(of, True))
    monkeypatch.setattr(processor, "_features", lambda: frozenset(k for k, v in processor.features().items() if v))
    monkeypatch.delenv(processor.VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("of", "level", "there", "lacking"),
    [
        (X86, "library", ("avx2", "fma", "avx512f", "avx512vnni"), ("amx-bf16",)),
        (X86, "avx2", ("avx2", "fma", "f16c"), ("avxvnni", "avx512f", "avx512vnni", "amx-bf16")),
        (X86, "avx-vnni", ("avx2", "avxvnni"), ("avx512f", "avx512vnni", "amx-bf16")),
        (X86, "avx512", ("avx2", "avx512f", "avx512vnni"), ("amx-bf16",)),
        (X86, "amx", X86, ()),
        (ARM, "neon", ("neon",), ("dotprod",)),
        (ARM, "dotprod", ARM, ()),
    ],
)
def test_a_level_has_what_is_below_it_and_nothing_beyond(of, level, there, lacking, monkeypatch):
    has_all(of, monkeypatch)
    assert processor.levels() == list(processor.LEVELS)
    assert processor.level() == processor.levels()[-1]
    monkeypatch.setenv(processor.VARIABLE, level)
    assert processor.level() == level
    assert processor.has(*there)
    assert not any(processor.has(name) or processor.allows(name) for name in lacking)


def test_a_level_that_is_not_there_is_named(monkeypatch):
    has_all(X86, monkeypatch)
    monkeypatch.setenv(processor.VARIABLE, "avx3")
    with pytest.raises(PacelineError, match=r"PACELINE_CPU is 'avx3'; there are .*avx2, .*Did you mean 'avx2'"):
        processor.has("avx2")


@pytest.mark.usefixtures("level")
def test_kernels_follow(level):
    assert amx.supported() <= (level == "amx")
    assert ("vnni" in integer.instruction_sets()) <= (level in ("library", "avx512", "amx"))
    assert ("dotprod" in integer.instruction_sets()) == (level == "dotprod")
    assert kernels.preferred(torch.bfloat16) <= (level == "avx512")
    assert kernels.supported(torch.float32)
    assert kernels.preferred(torch.float32) == (level not in ("amx", "library") and not processor.ARM)


def test_doctor_says_what_would_run(tmp_path, capsys):
    folder = models.make("llama2", tmp_path / "tiny")
    assert main(["doctor", str(folder), "--dtype", "int8-float32"]) == 0
    shown = capsys.readouterr().out
    blocks = f"our kernel of blocks ({integer.instruction_set()}, inputs of 16 bits)"
    inputs = "rounded to 16 bits: the weights take at most 256 MB"
    for words in (f"level {processor.level()}", torch.__version__, blocks, inputs, "128 tokens", "on any processor"):
        assert words in shown
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["level"], facts["levels"]) == (processor.level(), processor.levels())


def test_doctor_says_which_drafter_a_model_brings(tmp_path, capsys):
    def said(model):
        assert main(["doctor", str(model), "--json", "--dtype", "float32"]) == 0
        return str(json.loads(capsys.readouterr().out)["model"].get("inside", ""))

    model = models.model("qwen3.5", tie_word_embeddings=False)
    folder = models.make("qwen3.5", tmp_path / "folder", tie_word_embeddings=False)
    assert said(folder) == ""
    head = mtps.random_head(model)
    mtps.add(folder, mtps.in_layout(head, "deepseek", 3))
    more = lambda writer: (writer.add_block_count(4), writer.add_nextn_predict_layers(1))  # noqa: E731
    file = gguf_files.write(folder, tmp_path / "m.gguf", more=more)
    target = load(file, dtype="float32")
    read = 4 * sum(tensor.numel() for tensor in [*head.values(), model.lm_head.weight])
    for one in (folder, file):
        assert f"with --draft mtp a drafted token reads {read / target.weight_bytes:.2f} of the model's" in said(one)
    other = mtps.add(models.make("llama2", tmp_path / "llama"), mtps.random_head(models.model("llama2")))
    assert "cannot draft here: mtp runs a layer of the target's kind" in str(_inside(load(other, native=False)))


@pytest.mark.parametrize(("load", "said"), [
    (0.1, "0.1 of 8 processors in the last minute"), (5.0, "others want them"), (None, "unknown here"),
])  # fmt: skip
def test_doctor_says_how_busy_the_machine_is(load, said, monkeypatch, capsys):
    monkeypatch.setattr("paceline.runs.environment.load", lambda: load)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert main(["doctor"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("load"))
    assert said in line
    assert ("--threads 1" in line) == (load == 5.0)


def test_doctor_shows_the_name_that_the_maker_gave(capsys, monkeypatch, tmp_path):
    """LLVM's name is that of a family of processors, which others share."""
    monkeypatch.setattr(processor, "name", lambda: "rocketlake")
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: Some Xeon Gold\n")
    monkeypatch.setattr(environment, "CPUINFO", file)
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert f"processor  Some Xeon Gold, level {processor.level()}" in shown
    assert "rocketlake" not in shown
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["processor"] == "Some Xeon Gold"


@pytest.mark.skipif(processor.ARM, reason="other libraries have no such levels")
def test_other_libraries_follow_where_they_are_told_in_time():
    code = "import paceline, torch; from paceline import processor; print(torch.backends.cpu.get_cpu_capability())"
    environment = {key: value for key, value in os.environ.items() if key != "ATEN_CPU_CAPABILITY"}
    forced = environment | {processor.VARIABLE: "avx2"}
    done = subprocess.run([sys.executable, "-c", code], env=forced, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "AVX2"


def test_doctor_compiles_ahead(monkeypatch, capsys):
    """One part after the other, without the word that a first use has; Ctrl-C leaves what is done."""
    done = []

    def stopped():
        raise KeyboardInterrupt

    def compiled(name):
        done.append(name)
        with Compiling():
            pass

    first, second = ((name, partial(compiled, name)) for name in ("first", "second"))
    monkeypatch.setattr("paceline.cli.ahead.parts", lambda: [first, second])
    assert main(["doctor", "--compile"]) == 0
    shown = capsys.readouterr()
    assert "kernels    compiled and kept, 2 parts" in shown.out
    assert "first time" not in shown.err
    monkeypatch.setattr("paceline.cli.ahead.parts", lambda: [first, ("stopped", stopped), second])
    assert main(["doctor", "--compile"]) == 130
    assert done == ["first", "second", "first"]
    with Compiling():
        pass
    assert "`paceline doctor --compile`" in capsys.readouterr().err


def test_all_that_is_compiled_ahead_has_a_part():
    """Loops that commands call are in modules that some part imports."""
    source = Path(ahead.__file__).parents[1]
    modules = {path.stem for path in (source / "kernels").glob("*.py") if "@cfunc" in path.read_text("utf-8")}
    assert modules == set(ahead.KERNELS)
