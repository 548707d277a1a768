"""Ctrl-C, bugs and input that is not text; users' mistakes are in test_mistakes.py."""

import json
import signal
import sys

import huggingface_hub
import pytest

from paceline.errors import ModelError


def test_a_hub_name_without_a_connection(command, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    result = command("generate", "nobody/nothing-7b", "hi")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: 'nobody/nothing-7b'")
    assert "no connection" in result.err


def test_standard_input_that_is_not_text(command, tiny):
    result = command("generate", tiny, "-", stdin=b"\xff\xfe")
    assert (result.code, result.out) == (2, "")
    assert "UTF-8" in result.err


def test_a_bug_of_ours_keeps_its_traceback(command, tiny, monkeypatch):
    import paceline.engine.engine

    def broken(self):
        raise RuntimeError("a bug")

    monkeypatch.setattr(paceline.engine.engine.Engine, "step", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        command("generate", tiny, "hi")


def pressed_at(monkeypatch, text):
    """Ctrl-C as soon as something with `text` in it is written to standard output."""
    write, presses = sys.stdout.write, iter([signal.SIGINT])

    def pressing(words):
        written = write(words)
        if text in words and (pressed := next(presses, None)):
            signal.raise_signal(pressed)
        return written

    monkeypatch.setattr(sys.stdout, "write", pressing)


def test_ctrl_c_prints_what_was_generated(command, endless, monkeypatch):
    pressed_at(monkeypatch, "")
    result = command("generate", endless, "the cat", "--ignore-eos", "-n", 40_000)
    assert result.code == 130
    assert result.out.endswith("\n")
    statistics, notice = result.err.splitlines()
    assert 1 <= int(statistics.split()[0]) < 40_000
    assert statistics.endswith("stopped")
    assert notice.startswith("interrupted")


def test_ctrl_c_in_a_file_of_prompts_keeps_whole_objects(command, endless, tmp_path, monkeypatch):
    path = tmp_path / "prompts.jsonl"
    lines = ['{"prompt": "the cat", "max_tokens": 3, "ignore_eos": true}']
    lines += ['{"prompt": "the dog", "max_tokens": 40000, "ignore_eos": true}'] * 3
    path.write_text("\n".join(lines))
    pressed_at(monkeypatch, "\n")
    result = command("generate", endless, "-p", path, "--batch", 2, "--json")
    assert result.code == 130
    records = [json.loads(line) for line in result.out.splitlines()]
    reasons = [r["finish_reason"] for r in records]
    assert reasons in (["length", "abort"], ["length", "abort", "abort"])  # the third may or may not have begun
    assert 1 <= records[1]["new_tokens"] < 40_000
    assert "interrupted" in result.err


@pytest.mark.parametrize(
    "command_line",
    [f"{name} MODEL" for name in ("chat", "demo", "tune", "eval align --limit 1 --model", "certify", "doctor")],
)
def test_commands_that_load_a_model_pass_on_the_bits_of_its_inputs(command, command_line, demo, tmp_path, monkeypatch):
    def refuse(model, **asked):
        raise ModelError(f"inputs of {asked['activations']} bits")

    monkeypatch.chdir(tmp_path)
    for place in ("paceline.target.load", "paceline.certify.command"):
        monkeypatch.setattr(f"{place}.load", refuse)
    words = [str(demo) if word == "MODEL" else word for word in command_line.split()]
    result = command(*words, "--activations", "8")
    assert result.code != 0
    assert "inputs of 8 bits" in result.err
