"""Runs: rows survive cut-off lines, another run is refused, and two processes do not write at once."""

import json
import multiprocessing

import pytest

from paceline.errors import PacelineError
from paceline.runs.runs import RUN, Lines, Run, is_run, read_about, rows

IDENTITY = {"model": "demo", "options": {"n": 1, "seed": 0}}


def test_a_run_goes_on_with_what_it_holds(tmp_path):
    with Run.open(tmp_path / "run", "bench", IDENTITY, note="first") as run:
        run.lines("answers.jsonl").append({"key": "a", "text": "one"}, {"key": "b", "text": "zwölf"})
        run.update(note="second")
    with Run.open(tmp_path / "run", "bench", IDENTITY, note="third") as run:
        answers = run.lines("answers.jsonl")
        assert "a" in answers
        assert "c" not in answers
        answers.append({"key": "a", "text": "again"})
        assert answers.get("a") == {"key": "a", "text": "again"}
        assert answers.get("b") == {"key": "b", "text": "zwölf"}
        assert answers.get("c") is None
        answers.append({"key": "d", "text": "größer"})
        answers.append({"key": "e", "text": "last"})
        assert answers.get("e") == {"key": "e", "text": "last"}
        assert ([row["text"] for row in answers], len(answers)) == (["one", "zwölf", "again", "größer", "last"], 4)
    assert read_about(tmp_path / "run", "bench")["note"] == "second"
    assert is_run(tmp_path / "run", "bench")
    assert not is_run(tmp_path / "run", "align")


def test_a_line_that_was_cut_off_is_dropped(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"id": 1}\n{"id": 2, "te')
    with Lines(path, "id") as lines:
        assert "1" in lines
        assert "2" not in lines
        lines.append({"id": 2})
        assert lines.get("2") == {"id": 2}
    assert [row["id"] for row in rows(path)] == [1, 2]


def test_a_broken_line_is_named(tmp_path):
    (tmp_path / "lines.jsonl").write_text('{"id": 1}\nnonsense\n')
    with pytest.raises(PacelineError, match=r"lines\.jsonl holds a line that is not JSON"):
        Lines(tmp_path / "lines.jsonl")


@pytest.mark.parametrize(("content", "message"), [
    ({"other.txt": "x"}, "holds other files and no run"),
    ({RUN: "{"}, "cannot be read"),
    ({RUN: '{"model": "demo"}'}, "cannot be read; name the folder of a run"),
    ({RUN: json.dumps({"kind": "align", "identity": IDENTITY})}, "kind 'align', not 'bench'"),
    (
        {RUN: json.dumps({"kind": "bench", "identity": {**IDENTITY, "options": {"n": 2, "seed": 0}}})},
        r'its options was \{"n": 2\} and now is \{"n": 1\}',
    ),
    ({RUN: json.dumps({"kind": "bench", "identity": {"model": "demo"}})}, r"its options was null and now is \{"),
])
def test_another_folder_is_refused_and_left_as_it_is(tmp_path, content, message):
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(PacelineError, match=message):
        Run.open(tmp_path, "bench", IDENTITY)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == content


def _open(path, answer):
    try:
        Run.open(path, "bench", IDENTITY).close()
        answer.put("opened")
    except PacelineError as error:
        answer.put(str(error))


def test_two_processes_do_not_write_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    answer = context.Queue()
    with Run.open(tmp_path, "bench", IDENTITY):
        process = context.Process(target=_open, args=(tmp_path, answer))
        process.start()
        assert "another run is writing" in answer.get(timeout=30)
        process.join()
    _open(tmp_path, answer)
    assert answer.get(timeout=30) == "opened"
