"""Lines that are written whole or not at all, and what a full disk leaves behind."""

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.disk import full_after

from paceline import outputs
from paceline.cli.generate import _appended
from paceline.draft.text.store import writing
from paceline.errors import PacelineError
from paceline.evals.vision import train as vision
from paceline.evals.vision.options import TrainOptions, TuneOptions
from paceline.formats.heads.checkpoint import TargetFacts
from paceline.outputs import RECORDS, REQUESTS, Appender, check_log, replacing, write_whole
from paceline.runs.runs import Lines
from paceline.serve.metrics import RequestLog
from paceline.train.loop import LoopConfig, Progress, Reporter, load_checkpoint, save_checkpoint
from paceline.train.saving import save_drafter

FACTS = TargetFacts("a", "b", "c", 1, 1, 1)


def test_lines_are_appended(tmp_path):
    path = tmp_path / "a.jsonl"
    for line in ({"a": "ü"}, '{"b": 1}'):
        with Appender.open(path, RECORDS) as lines:
            lines.append([line])
            assert path.read_bytes().endswith(b"}\n")
    assert path.read_text("utf-8") == '{"a": "ü"}\n{"b": 1}\n'
    with pytest.raises(PacelineError, match="cannot be written: Not a directory"):
        Appender.open(path / "b", RECORDS)


OURS = '{"time": 1}\n'


@pytest.mark.parametrize(("content", "left"), [
    ("", ""), (OURS, OURS), (OURS + '{"time": 2, "to', OURS), ('{"time": 2, "to', ""), ('{"ti', ""), ("{", ""),
    (OURS + "x" * 200_000, OURS), (OURS + "\0\0", OURS), (OURS + '{"time": 2}', OURS + '{"time": 2}\n'),
    ('{"time": 2}', '{"time": 2}\n'),
    *((text, None) for text in (
        "My novel.", "{}", '{"prompt": "a"}', '{"prompt": "a', '{"prompt": "a"}\n{"prompt": "b', "[1]", '{\n "a": 1\n}',
        "a\nb\nc", OURS + "a\nb", "\0\0",
    )),
])  # fmt: skip
def test_only_a_part_of_our_own_line_is_dropped(tmp_path, content, left):
    """left: None: the file is refused."""
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    if left is None:
        for try_ in (partial(check_log, path, REQUESTS), partial(Appender.open, path, REQUESTS)):
            with pytest.raises(PacelineError, match="holds no JSON Lines, and lines would be added to it"):
                try_()
        assert path.read_text() == content
        return
    check_log(path, REQUESTS)
    assert path.read_text() == content
    with Appender.open(path, REQUESTS) as lines:
        lines.append(['{"time": 3}'])
    assert path.read_text() == left + '{"time": 3}\n'


def test_one_process_at_a_time_appends_to_a_file(tmp_path):
    path = tmp_path / "a.jsonl"
    with Appender.open(path, RECORDS) as lines:
        lines.append([{"a": 1}, {"a": 2}])
        for _ in range(2):
            for try_ in (partial(check_log, path, RECORDS), partial(Appender.open, path, RECORDS)):
                with pytest.raises(PacelineError, match=r"another process is writing into .*a\.jsonl; wait for it, or"):
                    try_()
            lines.replace([{"a": 2}])  # another file, which is locked too
        lines.append([{"a": 3}])
    with Appender.open(path, RECORDS) as lines:
        lines.append([{"a": 4}])
    assert path.read_text() == '{"a": 2}\n{"a": 3}\n{"a": 4}\n'
    for lines in (Appender.open(Path("/dev/null"), RECORDS), Appender.open(Path("/dev/null"), RECORDS)):
        lines.close()


WRITERS = {
    "generate -o": _appended,
    "serve --log": lambda path, _: RequestLog(path),
    "train": lambda path, _: Reporter(LoopConfig(tokens=1), path, quiet=False).start(Progress()),
    "train --generate": lambda path, _: Lines(path, "id"),
    "eval vision run": lambda path, _: Lines(path),
    "eval vision train": lambda path, _: vision.train(
        "small", TuneOptions(), TrainOptions(path.parent / "out", checkpoints=path.parent)
    ),
}  # fmt: skip


@pytest.mark.parametrize("writer", WRITERS)
def test_no_writer_touches_what_is_not_its_own(tmp_path, writer, monkeypatch):
    """A text without a line end, records of somebody else, and a file into which another process writes."""
    monkeypatch.setattr(vision, "small", lambda *_, **__: torch.nn.Module())
    monkeypatch.setattr(vision, "weights", lambda _: {})
    path = tmp_path / "log.jsonl"
    for content in ("My novel.", '{"prompt": "a'):
        path.write_text(content)
        with ExitStack() as stack, pytest.raises(PacelineError, match="holds no JSON Lines"):
            WRITERS[writer](path, stack)
        assert path.read_text() == content
    path.unlink()
    with Appender.open(path, RECORDS), ExitStack() as stack, pytest.raises(PacelineError, match="another process is"):
        WRITERS[writer](path, stack)
    assert path.read_text() == ""


def test_a_lock_of_a_file_that_was_replaced_meanwhile_is_taken_again(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n')

    def locked(raw, message):
        monkeypatch.undo()
        write_whole(path, '{"a": 2}\n')

    monkeypatch.setattr(outputs, "lock", locked)
    with Appender.open(path, RECORDS) as lines:
        lines.append([{"a": 3}])
    assert path.read_text() == '{"a": 2}\n{"a": 3}\n'


def test_a_full_disk_leaves_no_torn_line(tmp_path):
    path = tmp_path / "a.jsonl"
    with Appender.open(path, RECORDS, then="; the rest is safe") as lines:
        lines.append([{"a": 1}])
        with full_after(1000), pytest.raises(PacelineError, match=r"a\.jsonl cannot be written: .*; the rest is safe"):
            lines.append([{"b": "x" * 2000}])
        assert path.read_text() == '{"a": 1}\n'
        lines.append([{"c": 2}])
    assert path.read_text() == '{"a": 1}\n{"c": 2}\n'


def test_a_file_is_replaced_whole_or_stays(tmp_path):
    path = tmp_path / "new" / "a.json"
    write_whole(path, "old")
    with full_after(1000), pytest.raises(PacelineError, match=r"a\.json cannot be written: "):
        write_whole(path, "x" * 2000)
    assert [p.name for p in path.parent.iterdir()] == ["a.json"]
    assert path.read_text() == "old"


def test_two_processes_may_replace_a_file_at_once(tmp_path, monkeypatch):
    with replacing(tmp_path / "a") as part:
        part.write_text("mine")
        monkeypatch.setattr(os, "getpid", lambda: 7)
        write_whole(tmp_path / "a", "the other's")
        assert (tmp_path / "a").read_text() == "the other's"
    assert (tmp_path / "a").read_text() == "mine"


def test_a_checkpoint_keeps_the_numbers_that_a_gpu_draws_next(tmp_path, monkeypatch):
    gpu = torch.Generator().manual_seed(5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", gpu.get_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", gpu.set_state)
    run = tmp_path / "a", torch.nn.Linear(2, 2), [], Stream()

    def drawn():
        return [*torch.rand(3).tolist(), *torch.rand(3, generator=gpu).tolist()]

    save_checkpoint(*run[:3], Progress(), run[3])
    expected = drawn()
    load_checkpoint(*run)
    assert drawn() == expected
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    load_checkpoint(*run)
    assert drawn()[:3] == expected[:3]


def test_a_drafter_on_a_full_disk_leaves_the_old_one(tmp_path):
    save_drafter(tmp_path, "kind", config={}, tensors={"a": torch.ones(4)}, target=FACTS)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with full_after(2000), pytest.raises(PacelineError, match=r"model\.safetensors cannot be written: "):
        save_drafter(tmp_path, "kind", config={"b": 1}, tensors={"a": torch.ones(4000)}, target=FACTS)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


class Stream:
    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...


def test_a_training_on_a_full_disk_keeps_its_checkpoint(tmp_path):
    path = tmp_path / "run" / "checkpoint.pt"
    save_checkpoint(path, torch.nn.Linear(2, 2), [], Progress(), Stream())
    before = path.read_bytes()
    with full_after(len(before)), pytest.raises(PacelineError, match=r"checkpoint\.pt cannot be written: "):
        save_checkpoint(path, torch.nn.Linear(50, 50), [], Progress(), Stream())
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_a_store_on_a_full_disk_leaves_nothing(tmp_path):
    def build():
        with writing(tmp_path / "store", kind="corpus", tokenizer="a") as store:
            store.add("text", np.zeros(4000))

    with full_after(2000), pytest.raises(PacelineError, match=r"store cannot be written: .*; nothing of it is left"):
        build()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [[1], {"model": 3}, {"model": {}}, "x"], ids=str)
def test_a_file_that_is_no_checkpoint_is_one_line(tmp_path, content):
    path = tmp_path / "checkpoint.pt"
    torch.save(content, path)
    with pytest.raises(PacelineError, match=r"checkpoint\.pt is not a whole checkpoint"):
        load_checkpoint(path, torch.nn.Linear(2, 2), [], Stream())
