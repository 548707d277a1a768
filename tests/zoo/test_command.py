"""The command line: help that teaches, one line for a user's mistake, and a tokenizer from one small file."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.train.__main__ import main
from zoo.__main__ import app

COMMANDS = ("sources", "synth", "tokenizer", "pretrain", "chat", "card", "prompts", "overlap", "drafters")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    if command != "synth":
        assert f"python -m zoo {command}" in " ".join(result.output.split())


def test_a_mistake_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["zoo", "sources", "mine=/no/such/file.txt"])
    with pytest.raises(SystemExit) as stopped:
        main(app)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: source 'mine': no such file: /no/such/file.txt\n"


def test_sources_and_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "cats.txt").write_text("The cat sat on the mat.\n\n" * 50)
    shown = CliRunner().invoke(app, ["sources", f"cats={tmp_path / 'cats.txt'}"])
    assert "cats: 1 documents" in shown.output
    out = tmp_path / "tokenizer"
    options = ["--out", str(out), "--vocabulary", "270", "--generated", "0"]
    made = CliRunner().invoke(app, ["tokenizer", str(tmp_path / "cats.txt"), *options], catch_exceptions=False)
    assert "270 tokens" in made.output
    assert (out / "tokenizer.json").exists()


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys; import zoo.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
