"""Lines that are written whole or not at all, and what a full disk leaves behind."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.disk import full_after

from paceline.draft.models.checkpoint import TargetFacts
from paceline.draft.text.store import writing
from paceline.errors import PacelineError
from paceline.jsonl import Appender, replacing, write_whole
from paceline.train.loop import Progress, load_checkpoint, save_checkpoint
from paceline.train.saving import save_drafter

FACTS = TargetFacts("a", "b", "c", 1, 1, 1)


def test_lines_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for line in ({"a": "ü"}, '{"b": 1}'):
        with Appender.open(path) as lines:
            lines.append([line])
            assert path.read_bytes().endswith(b"}\n")
    assert path.read_text("utf-8") == '{"a": "ü"}\n{"b": 1}\n'
    with pytest.raises(PacelineError, match="exists already; give another name"):
        Appender.open(path, new=True)
    with pytest.raises(PacelineError, match="cannot be written: Not a directory"):
        Appender.open(path / "b")


def test_a_full_disk_leaves_no_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with Appender.open(path, then="; the rest is safe") as lines:
        lines.append([{"a": 1}])
        with full_after(1000), pytest.raises(PacelineError, match=r"a\.jsonl cannot be written: .*; the rest is safe"):
            lines.append([{"b": "x" * 2000}])
        assert path.read_text() == '{"a": 1}\n'
        lines.append([{"c": 2}])
    assert path.read_text() == '{"a": 1}\n{"c": 2}\n'


def test_a_file_is_replaced_whole_or_stays(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"
    write_whole(path, "old")
    with full_after(1000), pytest.raises(PacelineError, match=r"a\.json cannot be written: "):
        write_whole(path, "x" * 2000)
    assert [p.name for p in path.parent.iterdir()] == ["a.json"]
    assert path.read_text() == "old"


def test_two_processes_may_replace_a_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with replacing(tmp_path / "a") as part:
        part.write_text("mine")
        monkeypatch.setattr(os, "getpid", lambda: 7)
        write_whole(tmp_path / "a", "the other's")
        assert (tmp_path / "a").read_text() == "the other's"
    assert (tmp_path / "a").read_text() == "mine"


def test_a_checkpoint_keeps_the_numbers_that_a_gpu_draws_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.Generator().manual_seed(5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", gpu.get_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", gpu.set_state)
    run = tmp_path / "a", torch.nn.Linear(2, 2), [], Stream()

    def drawn() -> list[float]:
        return [*torch.rand(3).tolist(), *torch.rand(3, generator=gpu).tolist()]

    save_checkpoint(*run[:3], Progress(), run[3])  # type: ignore[arg-type]
    expected = drawn()
    load_checkpoint(*run)  # type: ignore[arg-type]
    assert drawn() == expected
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    load_checkpoint(*run)  # type: ignore[arg-type]
    assert drawn()[:3] == expected[:3]


def test_a_drafter_on_a_full_disk_leaves_the_old_one(tmp_path: Path) -> None:
    save_drafter(tmp_path, "kind", config={}, tensors={"a": torch.ones(4)}, target=FACTS)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with full_after(2000), pytest.raises(PacelineError, match=r"model\.safetensors cannot be written: "):
        save_drafter(tmp_path, "kind", config={"b": 1}, tensors={"a": torch.ones(4000)}, target=FACTS)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


class Stream:
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def test_a_training_on_a_full_disk_keeps_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run" / "checkpoint.safetensors"
    save_checkpoint(path, torch.nn.Linear(2, 2), [], Progress(), Stream())  # type: ignore[arg-type]
    before = path.read_bytes()
    with full_after(len(before)), pytest.raises(PacelineError, match=r"checkpoint\.safetensors cannot be written: "):
        save_checkpoint(path, torch.nn.Linear(50, 50), [], Progress(), Stream())  # type: ignore[arg-type]
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_a_store_on_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    def build() -> None:
        with writing(tmp_path / "store", kind="corpus", tokenizer="a") as store:
            store.add("text", np.zeros(4000))

    with full_after(2000), pytest.raises(PacelineError, match=r"store cannot be written: .*; nothing of it is left"):
        build()
    assert not list(tmp_path.iterdir())
