"""What a command is to write is looked at before it reads a model or measures anything."""

import re
import typing
from pathlib import Path

import pytest
import typer
from tests.cli.command import WHERE, commands

from paceline.cli import app
from paceline.cli.later import recipe
from paceline.core.rules import RULES
from paceline.errors import PacelineError
from paceline.outputs import (
    GGUF,
    OUTPUTS,
    PAGE,
    RECORDS,
    TABLE,
    Appender,
    appends,
    check_file,
    check_folder,
    check_new_folder,
)

NOWHERE = "nowhere/model"


def refused(command, *arguments):
    """The one line that a command ends with."""
    result = command(*arguments)
    assert (result.code, result.out) == (2, ""), result
    (line,) = (one for one in result.err.splitlines() if not one.startswith("note: "))
    assert line.startswith("error: ")
    return line


def test_what_can_be_written(tmp_path):
    """Nothing is made; a folder may be made with its parents, a file stays as it is."""
    file, folder, check_log = tmp_path / "file", tmp_path / "folder", appends(RECORDS)
    file.touch()
    folder.mkdir()
    before = sorted(tmp_path.rglob("*"))
    for path in (file, tmp_path / "new"):
        assert check_file(path) == check_log(path) == path
    for path in (folder, tmp_path / "new" / "deep"):
        assert check_folder(path) == path
    assert check_new_folder(tmp_path / "new") == tmp_path / "new"
    assert check_log(Path("/dev/null")) == Path("/dev/null")
    assert check_file(None) is check_log(None) is check_folder(None) is None
    assert (sorted(tmp_path.rglob("*")), file.read_text()) == (before, "")
    for old, kind in (("<!doctype html>\n", PAGE), ('{\n  "paceline": "tune",', TABLE)):
        file.write_text(old)
        assert check_file(file, kind) == file
        for check in (check_file, check_log):
            with pytest.raises(PacelineError, match="another file"):
                check(file)
    file.write_text('{"tokens": [1]}\n')
    assert check_log(file) == file
    with pytest.raises(PacelineError, match="exists already; name a new folder"):
        check_new_folder(folder)
    with pytest.raises(PacelineError, match="/dev/null is no regular file"):
        check_file(Path("/dev/null"))  # it would be replaced


def test_a_run_that_names_no_folder_is_refused_too(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("")
    for words in (("bench", NOWHERE), ("eval", "align", "--model", NOWHERE)):
        assert "runs is no folder" in refused(command, *words)


def every_command():
    """(words, Click's command) of every command, those of recipes among them."""
    for path, found in commands(typer.main.get_command(app)).items():
        words = tuple(path.split())
        yield [*words], recipe(WHERE[words]) if words in WHERE else found


def files_of(of):
    """(what a command writes, what may name something that it reads), parameters of the command."""
    outputs = [one for one in of.params if one.type_descriptor.parameter_info.callback in OUTPUTS]
    return outputs, [one for one in of.params if one.type_descriptor.annotation in (str, Path) and one not in outputs]


def given(parameter, value):
    return [*(name for name in parameter.opts[:1] if name.startswith("-")), str(value)]


def is_taken(parameter, value):
    """Whether a parameter's own check lets a value pass: dtypes, devices and sizes name no file."""
    check = parameter.type_descriptor.parameter_info.callback
    try:
        return check is None or bool(check(value))
    except PacelineError:
        return False


def is_folder(out):
    return "older" in (out.help or "") and ".safetensors" not in out.help


def filled(of, values, other):
    """The words of a command: `values` by its parameters' names, and `other` for what else has to be given."""
    line = []
    for one in of.params:
        if one.name in values:
            line += given(one, values[one.name])
        elif one.required:
            line += given(one, {str: other, Path: other, list[Path]: "-"}.get(one.type_descriptor.annotation, 1))
    return line


def test_what_cannot_be_written_is_said_at_once(command, tmp_path, monkeypatch):
    """Of any command, before anything is read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "file").write_text("")
    before, tried = sorted(tmp_path.rglob("*")), 0
    proc = ["/proc/x"] if Path("/proc").is_dir() else []  # where not even root can write
    for words, of in every_command():
        for out in files_of(of)[0]:
            places = ["/dev/null/x", *(["file"] if is_folder(out) else ["folder", "none/x"]), *proc]
            for place in places[: None if ".safetensors" not in out.help else 1]:
                line = refused(command, *words, *filled(of, {out.name: place}, "other"))
                assert place in line, (words, line)
                tried += 1
    assert tried > 100
    assert (sorted(tmp_path.rglob("*")), (tmp_path / "file").read_text()) == (before, "")


def test_no_output_is_one_of_the_inputs(command, tmp_path, monkeypatch):
    """Of any command; the input is an empty file, or a folder where one is written."""
    monkeypatch.chdir(tmp_path)
    every = [*every_command()]  # imports what looks at what is installed
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: True)
    folder, file, other = tmp_path / "folder", tmp_path / "file.safetensors", tmp_path / "other"
    folder.mkdir()
    file.touch()
    other.mkdir()
    before, tried = sorted(tmp_path.rglob("*")), 0
    for words, of in every:
        outputs, inputs = files_of(of)
        for out, read in ((out, read) for out in outputs for read in inputs):
            place = folder if is_folder(out) else file
            named = f"model:{place}" if read.name == "draft" else str(place)
            if not is_taken(read, named):
                continue
            line = filled(of, {out.name: place, read.name: named}, other)
            said = refused(command, *words, *line)
            said_so = any(text in said for text in ("is read (", "a directory", "a folder", "exists already"))
            assert said_so, (words, said)
            if names := re.search(r"is read \((.+)\), and (.+) would write it; name another (.+)$", said):
                known = {name for one in of.params for name in (*one.opts, one.metavar, one.name.upper())}
                assert {*names.groups()} <= known, (words, said)
            tried += 1
    assert tried > 150
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("line", [
    "replay LOG --tokenizer . --out LOG", "replay LOG --tokenizer . --out OTHER", "tune . --log LOG -o LOG",
    "tune . -o OTHER", "report RUN --output RUN/answers.jsonl", "report RUN --output RUN/report.html",
    "certify . --junit OTHER", "certify . --report OTHER", "serve . --log README", "generate . hi -o README",
    "generate . hi -o OTHER", "report RUN --output OTHER",
    "train tools vocab . --text LOG --out x.safetensors",
    "train model . --generate 1 --out MODEL", "eval vision train small --out MODEL",
    "certify . --junit new --report new", "serve . --log NOVEL", "generate . hi -o NOVEL",
    "replay LOG --tokenizer . --out KEPT", "certify . --out KEPT", "certify . --out HELD",
])
def test_a_file_of_another_kind_stays(command, tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    for folder in ("RUN", "MODEL", "KEPT", "HELD"):
        (tmp_path / folder).mkdir()
    contents = {
        "LOG": '{"tokens": [1]}\n', "OTHER": '{"tokens": [2]}\n', "README": "# Words\n",
        "NOVEL": "My novel.", "RUN/report.html": "mine\n",
        "RUN/answers.jsonl": "{}\n", "MODEL/config.json": "{}", "MODEL/model.safetensors": "weights",
        "KEPT/replay.json": '{"mine": 1}', "KEPT/certificate.json": "[]", "HELD/certificate.html": "my page",
        "x.safetensors": "weights of mine\n", "RUN/run.json": '{"kind": "align"}',
    }  # fmt: skip
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    monkeypatch.setattr("paceline.evals.align.page.page", lambda run: "<!doctype html>")
    said = refused(command, *line.split())
    assert "holds something else, which would be lost" in said or not line.endswith(("KEPT", "HELD")), said
    assert {str(file.relative_to(tmp_path)): file.read_text() for file in tmp_path.rglob("*") if file.is_file()} == (
        contents
    )


@pytest.mark.parametrize("content", [
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"PK\3\4\x14\0\0\0\x08\0", b'\x0e\0\0\0\0\0\0\0{"weight": {}}',
    bytes(range(99)), b"My novel.",
], ids=["picture", "zip", "safetensors", "bytes", "text"])  # fmt: skip
def test_what_llama_cpp_reads_replaces_its_own_kind_only(content, tmp_path):
    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(PacelineError, match="holds something else, which would be lost"):
        check_file(file, GGUF)
    file.write_bytes(b"GGUF" + content)
    assert check_file(file, GGUF) == file


def test_a_file_into_which_another_process_writes_is_refused_at_once(command, tmp_path):
    file = tmp_path / "a.jsonl"
    with Appender.open(file, RECORDS) as lines:
        lines.append([{"index": 0}])
        for words in (("generate", NOWHERE, "hi", "-o", file), ("serve", NOWHERE, "--log", file)):
            assert f"another process is writing into {file}; wait for it" in refused(command, *words)
    assert file.read_text() == '{"index": 0}\n'


def test_every_number_has_a_smallest_one_and_every_output_is_looked_at():
    """Sampling parameters have their rules in SamplingParams."""
    free, unseen = [], []
    for path, of in commands(typer.main.get_command(app)).items():
        for one in of.params:
            info, kind = one.type_descriptor.parameter_info, one.type_descriptor.annotation
            if {kind, *typing.get_args(kind)} & {int, float} and info.min is None and one.name not in RULES:
                free.append(f"{path}: {one.name}")
            writes = one.name in ("out", "output", "html") or (path, one.name) == ("serve", "log")
            if writes and info.callback is None:
                unseen.append(f"{path}: {one.name}")
    assert free == unseen == []
