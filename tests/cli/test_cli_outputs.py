"""What a command is to write is looked at before it reads a model or measures anything; so are its numbers."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path

import pytest
import typer
from tests.cli.command import Command

from paceline.cli import app
from paceline.engine.sampling import RULES
from paceline.errors import PacelineError
from paceline.jsonl import check_file, check_folder, check_log, check_new_folder

OUT, HERE, NOWHERE = "<out>", "<here>", "nowhere/model"
FOLDERS = [
    ("bench", NOWHERE, "--out", OUT),
    ("certify", NOWHERE, "--out", OUT),
    ("quantize", NOWHERE, OUT),
    ("corpus", "build", OUT, "--text", "nowhere.txt", "--tokenizer", NOWHERE),
    ("eval", "align", "--model", NOWHERE, "--out", OUT),
    ("eval", "vision", "build", OUT),
    ("eval", "vision", "run", NOWHERE, "--model", "random", "--out", OUT),
    ("train", "draft", HERE, "--out", OUT),
    ("train", "draft", HERE, "--out", "out", "--checkpoints", OUT),
    ("train", "medusa", HERE, "--out", "out", "--states", OUT),
    ("train", "vllm", HERE, HERE, "--out", OUT),
    ("train", "vocab", HERE, "--text", "nowhere.jsonl", "--out", OUT + "/in"),
    ("train", "vision", NOWHERE, "--out", OUT),
]
FILES = [
    ("certify", NOWHERE, "--report", OUT),
    ("certify", NOWHERE, "--junit", OUT),
    ("generate", NOWHERE, "hi", "--out", OUT),
    ("replay", "nowhere.jsonl", "--tokenizer", NOWHERE, "--html", OUT),
    ("report", NOWHERE, "--out", OUT),
    ("tune", NOWHERE, "--out", OUT),
    ("serve", NOWHERE, "--log", OUT),
    ("eval", "vision", "report", NOWHERE, "--out", OUT),
]


def refused(command: Command, *arguments: object) -> str:
    """The one line that a command ends with."""
    result = command(*arguments)
    assert (result.code, result.out) == (2, ""), result
    (line,) = result.err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(
    ("words", "is_file"),
    [*((words, False) for words in FOLDERS), *((words, True) for words in FILES)],
    ids=lambda words: "-".join(word for word in words if word.isalpha()) if isinstance(words, tuple) else "",
)
def test_what_cannot_be_written_is_said_at_once(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], is_file: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    places = ["/dev/null/x", *(["folder", "none/x"] if is_file else ["file"])]
    for place in [*places, *(["/proc/x"] if Path("/proc").is_dir() else [])]:  # where not even root can write
        line = refused(command, *(word.replace(OUT, place).replace(HERE, ".") for word in words))
        assert place in line, line
        assert "nowhere" not in line
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_text() == ""


def test_what_can_be_written(tmp_path: Path) -> None:
    """Nothing is made; a folder may be made with its parents, a file stays as it is."""
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_text("old")
    folder.mkdir()
    before = sorted(tmp_path.rglob("*"))
    for path in (file, tmp_path / "new"):
        assert check_file(path) == check_log(path) == path
    for path in (folder, tmp_path / "new" / "deep"):
        assert check_folder(path) == path
    assert check_new_folder(tmp_path / "new") == tmp_path / "new"
    assert check_log(Path("/dev/null")) == Path("/dev/null")
    assert check_file(None) is check_log(None) is check_folder(None) is None
    assert sorted(tmp_path.rglob("*")) == before
    assert file.read_text() == "old"
    with pytest.raises(PacelineError, match="exists already; name a new folder"):
        check_new_folder(folder)
    with pytest.raises(PacelineError, match="/dev/null is no regular file"):
        check_file(Path("/dev/null"))  # it would be replaced


def test_a_run_that_names_no_folder_is_refused_too(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("")
    for words in (("bench", NOWHERE), ("eval", "align", "--model", NOWHERE)):
        assert "runs is no folder" in refused(command, *words)


@pytest.mark.parametrize(
    "words",
    [
        *(("serve", NOWHERE, option, value) for option, value in (
            ("--threads", -2), ("--threads", 0), ("--deadline", -3), ("--deadline", 0), ("--grace", -1),
            ("--max-batch", 0), ("--max-waiting", 0), ("--max-body", 0), ("--port", -1), ("--port", 65536),
        )),
        *(("bench", NOWHERE, option, value) for option, value in (("-n", 0), ("-t", -1), ("-t", "nan"))),
        *(("eval", "align", "--model", NOWHERE, option, value) for option, value in (
            ("--timeout", 0), ("--alpha", 2), ("-t", -1), ("--top-p", 2), ("--min-p", -1),
        )),
        ("corpus", "build", "out", "--text", "a.txt", "--tokenizer", NOWHERE, "--max-tokens", 1),
        *(("train", "draft", ".", "--out", "out", option, value) for option, value in (
            ("--threads", 0), ("--lr", -1), ("--save-every", -1), ("--seed", -1),
        )),
    ],
    ids=lambda words: " ".join(map(str, (*words[:2], *words[-2:]))),
)  # fmt: skip
def test_a_number_that_means_nothing(command: Command, words: tuple[object, ...]) -> None:
    line = refused(command, *words)
    assert any(str(word) in line for word in words[-2:])
    assert "nowhere" not in line


def commands(group: typer.Typer, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Callable[..., object]]]:
    for one in group.registered_commands:
        assert one.callback is not None
        yield " ".join((*path, one.name or one.callback.__name__)), one.callback
    for other in group.registered_groups:
        assert other.typer_instance is not None
        yield from commands(other.typer_instance, (*path, str(other.name)))


def test_every_number_has_a_smallest_one_and_every_output_is_looked_at() -> None:
    """Sampling parameters have their rules in SamplingParams."""
    free, unseen = [], []
    for path, function in commands(app):
        hints = typing.get_type_hints(function, include_extras=True)
        for name in signature(function).parameters:
            kind, *more = typing.get_args(hints[name]) if hasattr(hints[name], "__metadata__") else (hints[name],)
            kinds, info = {kind, *typing.get_args(kind)}, more[0] if more else None
            if kinds & {int, float} and getattr(info, "min", None) is None and name not in RULES:
                free.append(f"{path}: {name}")
            if name in ("out", "html", "log") and getattr(info, "callback", None) is None:
                unseen.append(f"{path}: {name}")
    assert free == unseen == []
