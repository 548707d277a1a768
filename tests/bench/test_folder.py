"""A run's folder: answers survive whatever happens to the run, and two runs never mix."""

import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from tests.bench.runs import RUN
from tests.disk import full_after

from paceline.bench.folder import RunFolder
from paceline.bench.record import Answer, Reply, settled
from paceline.errors import PacelineError


def answer(question: str = "q", **changes: Any) -> Answer:
    turn = Reply(5, [1, 2, 3], "text", 0.25, lengths=[1, 2], times=[0.1, 0.25], runs=[("", "te", 1), ("sam", "xt", 2)])
    return Answer(**{"method": "sam", "repeat": 0, "question": question, "category": "c", "task": "t", "group": 0,
                     "turns": [turn], **changes})  # fmt: skip


def test_an_answer_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "run", RUN) as folder:
        folder.append([answer("a"), answer("b", failed="no room")])
    with RunFolder.open(tmp_path / "run", RUN) as folder:
        assert folder.answers == [answer("a"), answer("b", failed="no room")]


def test_a_line_that_was_cut_off_is_dropped_and_the_run_goes_on(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, RUN) as folder:
        folder.append([answer("a")])
    file = tmp_path / "answers.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + whole[: len(whole) // 2])
    with RunFolder.open(tmp_path, RUN) as folder:
        assert [a.question for a in folder.answers] == ["a"]
        folder.append([answer("b")])
    assert [json.loads(line)["question"] for line in file.read_text().splitlines()] == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"options": {"max_tokens": 9, "methods": ["none", "sam"]}}, 'its options was {"max_tokens": 8}'),
        ({"fingerprint": "other"}, 'its fingerprint was "f" and now is "other"'),
        ({"machine": {"threads": 1}}, 'was {"threads": 2}'),
    ],
)
def test_another_run_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    RunFolder.open(tmp_path, RUN).__exit__(None, None, None)
    with pytest.raises(PacelineError, match="holds another run") as error:
        RunFolder.open(tmp_path, RUN | changes)
    assert says in str(error.value)


def test_what_may_change_between_two_starts_of_a_run(tmp_path: Path) -> None:
    RunFolder.open(tmp_path, RUN).__exit__(None, None, None)
    with RunFolder.open(tmp_path, RUN | {"environment": {"load": 3.0}}):
        assert json.loads((tmp_path / "run.json").read_text())["environment"] == {"load": 0.1}  # the first start's


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(PacelineError, match="holds other files"):
        RunFolder.open(tmp_path, RUN)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(PacelineError, match="cannot be written"):
        RunFolder.open(tmp_path / "file", RUN)


def test_two_processes_do_not_write_into_one_folder(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, RUN), pytest.raises(PacelineError, match="another run is writing"):
        RunFolder.open(tmp_path, RUN)
    RunFolder.open(tmp_path, RUN).__exit__(None, None, None)  # once it has ended, another may


def test_a_line_that_is_no_answer_is_named(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, RUN) as folder:
        folder.append([answer("a")])
    with (tmp_path / "answers.jsonl").open("a") as file:
        file.write('{"method": "sam"}\n')
    with pytest.raises(PacelineError, match=r"answers.jsonl, line 2: not an answer"):
        RunFolder.open(tmp_path, RUN)


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    long = Reply(1, [1] * 50, "x" * 100, 1.0)
    with (
        RunFolder.open(tmp_path / "run", RUN) as folder,
        full_after(2000),
        pytest.raises(PacelineError, match="cannot be written: File too large; what was answered before is safe"),
    ):
        deque(folder.append([answer(str(n), turns=[long])]) for n in range(100))
    content = (tmp_path / "run" / "answers.jsonl").read_text()
    assert content.endswith("\n")
    assert len(content) <= 2000
    with RunFolder.open(tmp_path / "run", RUN) as folder:
        assert len(folder.answers) == content.count("\n") > 0
        folder.append([answer("more")])
    assert (tmp_path / "run" / "answers.jsonl").read_text().count("\n") == content.count("\n") + 1


def test_a_failure_that_was_made_good_is_forgotten() -> None:
    bad, good, other = answer("a", failed="x"), answer("a"), answer("b", failed="y")
    assert settled([bad, good, other]) == [good, other]


@pytest.mark.parametrize("text", ["[]", "3", "[" * 200_000, '{"model": ' + "9" * 5_000 + "}"], ids=range(4))
def test_a_description_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(PacelineError, match=r"run\.json cannot be read: .*; name a new folder with --out"):
        RunFolder.open(tmp_path, RUN)
