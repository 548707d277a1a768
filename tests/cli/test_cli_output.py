"""Where answers go when that is full, gone, or cut short: one line or none, and never a torn one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest
from tests.disk import full_after

from paceline.cli.show import plain_table, standard_output

FULL = Path("/dev/full")
PACELINE = (sys.executable, "-m", "paceline")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")


@needs_full
@pytest.mark.parametrize("arguments", [("generate", "--json"), ("generate",), ("methods",)], ids=" ".join)
def test_a_full_disk_behind_standard_output(command, tiny, monkeypatch, arguments):
    name, *options = arguments
    with FULL.open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        done = command(name, *((tiny, "the cat", "-n", "4", *options) if name == "generate" else ()))
        full.close()  # as at exit; nothing is left that could not be written
    assert done.code == 2
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].endswith("output cannot be written: No space left on device")


def test_tables_in_a_file_are_not_folded(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    table = plain_table("name", "figure", text=("name",))
    table.add_row("a name of fifty letters " * 4, "1")
    standard_output().print(table)
    assert len(capsys.readouterr().out.splitlines()) == 2
    monkeypatch.setenv("COLUMNS", "60")
    standard_output().print(table)
    assert len(capsys.readouterr().out.splitlines()) > 2


@needs_full
def test_a_full_disk_behind_a_process():
    """Which has an exit too."""
    with FULL.open("wb") as full:
        done = subprocess.run([*PACELINE, "--version"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (2, "error: the output cannot be written: No space left on device\n")


def test_a_full_disk_behind_out(command, tiny, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "the cat"}\n' * 20)
    with full_after(1200):
        result = command("generate", tiny, "-p", prompts, "-o", out, "-n", 2)
    assert result.code == 2
    assert result.err.splitlines()[-1].startswith(f"error: {out} cannot be written: ")
    lines = out.read_text().split("\n")
    assert lines.pop() == ""
    assert 1 <= len([json.loads(line) for line in lines]) < 20


def test_nobody_reads_on(command, endless, tmp_path, monkeypatch):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the cat", "max_tokens": 2}\n' * 2000)
    read, write = os.pipe()

    def leave():
        with open(read) as pipe:
            pipe.readline()

    reader = Thread(target=leave)
    reader.start()
    with open(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        done = command("generate", endless, "-p", tmp_path / "prompts.jsonl", "--json")
        pipe.close()
    reader.join()
    assert (done.code, done.err) == (141, "")


PRESSED_AT = """
import os, signal, sys

MODULE = sys.argv.pop(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a process that a shell began in the background has another

class Presses:
    def find_spec(self, name, *_):
        if name == MODULE:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Presses())
from paceline.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("module", ["paceline.cli", "rich.table", "torch.nn"])
def test_ctrl_c_while_a_module_is_imported(tiny, tmp_path, module):
    done = subprocess.run(
        [sys.executable, "-c", PRESSED_AT, module, "generate", tiny, "the cat", "-o", tmp_path / "out.jsonl"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
    assert not list(tmp_path.iterdir())


def test_ctrl_c_while_a_model_is_loaded(command, tiny, tmp_path, monkeypatch):
    """A library turns it into an error of its own, as imports of extensions do."""
    import paceline.target.load

    def loading(*_, **__):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("initialization failed") from None

    monkeypatch.setattr(paceline.target.load, "load", loading)
    result = command("generate", tiny, "hi", "-o", tmp_path / "out.jsonl")
    assert (result.code, result.out, result.err) == (130, "", "interrupted\n")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(paceline.target.load, "load", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    result = command("generate", tiny, "hi")
    assert (result.code, result.out, result.err) == (130, "", "interrupted\n")


def test_an_argument_that_is_not_text(command, tiny, tmp_path):
    for more in ((), ("-o", tmp_path / "out.jsonl"), ("--json",), ("--compare",)):
        result = command("generate", tiny, "the \udcff", *more)
        assert result.code == 2
        assert result.err.startswith("error: ")
        assert "half of a surrogate pair" in result.err
    assert not list(tmp_path.iterdir())


def test_values_no_machine_holds(command, tiny, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    lines = [f'{{"prompt": "a", "temperature": 1{"0" * 400}}}', f'{{"prompt": "a", "top_k": {10**30}}}']
    lines += [f'{{"prompt": "a", "id": {"9" * 5000}}}', '{"prompt": "a", "id": "\\ud800"}']
    prompts.write_text("\n".join([*lines, '{"prompt": "the cat", "max_tokens": 2, "temperature": 1}']))
    result = command("generate", tiny, "-p", prompts, "--json")
    assert (result.code, len(result.out.splitlines())) == (1, 1)
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert [f"line {n}: " in error for n, error in enumerate(errors, 1)] == [True] * 4
    assert max(map(len, errors)) < len(str(prompts)) + 260
    assert command("generate", tiny, "hi", "--top-k", 10**30).code == 2
    result = command("generate", tiny, "hi", "--draft", f"sam,past={10**15}")
    assert result.code == 2
    assert f"past is {10**15}; there is no memory" in result.err


def test_a_corpus_on_a_full_disk(command, tiny, tmp_path):
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 500)
    with full_after(1000):
        result = command("corpus", "build", tmp_path / "out", "--text", tmp_path / "a.txt", "--tokenizer", tiny)
    assert result.code == 2
    assert result.err.splitlines()[-1].startswith(f"error: {tmp_path / 'out'} cannot be written: ")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
