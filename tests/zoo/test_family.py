"""The family's plan: every stage once, in order, resumable, and bad files refused."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from paceline.errors import PacelineError
from zoo.__main__ import app
from zoo.family import HEADS, TOKENS, Zoo, read_zoo, run, steps

OTHERS = {"family", "sources", "synth", "drafters", "prompts", "overlap"}
"""Commands that are no stage of the demo family."""


def written(folder: Path, text: str) -> Path:
    path = folder / "zoo.toml"
    path.write_text(text)
    return path


def test_the_shipped_file_can_be_read() -> None:
    zoo = read_zoo(Path(__file__).parents[2] / "zoo" / "zoo.toml")
    assert dict(zoo.tokens) == TOKENS
    assert "dolly=hf:databricks/databricks-dolly-15k" in zoo.sources
    assert zoo.categories == "mt-bench"


def test_paths_are_relative_to_the_file_and_budgets_scale(tmp_path: Path) -> None:
    zoo = read_zoo(written(tmp_path, '[sources]\na = "x.txt"\nb = ["y.txt", "/z.txt"]\n[tokens]\nchat = 100\n'), 0.1)
    assert zoo.sources == (f"a={tmp_path}/x.txt", f"b={tmp_path}/y.txt", "b=/z.txt")
    assert zoo.tokens["chat"] == 10
    assert zoo.tokens["pretrain"] == TOKENS["pretrain"] // 10


def test_every_stage_reads_what_an_earlier_one_wrote(tmp_path: Path) -> None:
    zoo = read_zoo(written(tmp_path, '[sources]\nsgd = "x.jsonl"\n'))
    plan = steps(zoo, tmp_path / "models", tmp_path / "ck")
    written_before: set[str] = set()
    for step in plan:
        if step.name in ("kangaroo", "sorted", "amphista", "vocab"):
            assert step.arguments[1] in written_before
        for option in ("--tokenizer", "--model", "--draft", "--drafter"):
            if option in step.arguments:
                assert step.arguments[step.arguments.index(option) + 1] in written_before
        if "--out" in step.arguments:
            written_before.add(step.arguments[step.arguments.index("--out") + 1])
    names = [step.name for step in plan]
    assert names[:7] == ["tokenizer", "pretrain", "chat", "settle", "distil", "kangaroo", "sorted"]
    assert names[7:13] == [*HEADS, "vocab"]
    answers = str(tmp_path / "ck" / "run-kangaroo" / "answers.jsonl")  # written by the first, read by the others
    assert answers in plan[names.index("sorted")].arguments
    assert answers in plan[names.index("vocab")].arguments


def test_what_is_done_is_skipped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr("subprocess.call", lambda command: ran.append(command) or int("chat" in command))
    zoo = read_zoo(written(tmp_path, '[sources]\na = "x.txt"\n'))
    tokenizer = tmp_path / "ck" / "tokenizer"
    tokenizer.mkdir(parents=True)
    (tokenizer / "tokenizer.json").write_text("{}")
    plan = steps(zoo, tmp_path / "models", tmp_path / "ck")
    assert run(plan, dry_run=True) == 0
    assert not ran
    assert run(plan, processes=2) == 1  # chat failed: the rest waits
    assert [next(n for n in ("tokenizer", "pretrain", "chat") if n in c) for c in ran] == ["pretrain", "chat"]
    assert "torch.distributed.run" in ran[0]
    settle = next(step for step in steps(zoo, tmp_path, tmp_path) if step.name == "settle")
    assert settle.command(2)[-2:] == ["--threads", "2"]
    assert "--threads" not in settle.command(1)
    assert "tokenizer: done" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[source]\na = 1", "Did you mean 'sources'"),
        ("", "has no \\[sources\\]"),
        ("[sources]\na = 1", "must be a path or a list of paths"),
        ('[sources]\na = "x"\n[tokens]\nchatting = 3', "stages are pretrain"),
        ("[sources", "cannot be read"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PacelineError, match=message):
        read_zoo(written(tmp_path, text))


def test_every_stage_is_a_command() -> None:
    listed = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    plan = steps(Zoo(("a=b",), TOKENS, 1, (), ""), Path("o"), Path("c"))
    assert {step.name for step in plan if step.module == "zoo"} | OTHERS == listed


@pytest.mark.parametrize(
    "words",
    [
        ("pretrain", "a.txt", "--tokenizer", ".", "--out", "out", "--checkpoints", "/dev/null/x"),
        ("tokenizer", "a.txt", "--out", "/dev/null/x"),
        ("family", "nowhere.toml", "--out", "/dev/null/x"),
        ("held-out", "a.txt", "--out", "/dev/null/x"),
        ("evaluate", ".", "a.txt", "--out", "/dev/null/x"),
        ("card", ".", "--out", "/dev/null/x"),
        ("prompts", "dolly=a.jsonl", "--out", "/dev/null/x"),
        ("drafters", "a.toml", "--out", "/dev/null/x"),
    ],
    ids=lambda words: words[0],
)
def test_what_cannot_be_written_is_said_at_once(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, PacelineError)
    assert "/dev/null/x" in str(result.exception)
