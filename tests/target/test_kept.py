"""Compiled kernels that are kept: made once, and anew when the file is not whole or the sources are others."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paceline.target.kernels import kept as keeping
from paceline.target.kernels import vectors as v
from paceline.target.kernels.kept import UNUSED_DAYS, kept


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "paceline" / "kernels"


def multiplied(factor: float, written: list[float]) -> Callable[[np.ndarray], np.ndarray]:
    """A compiled function that multiplies 16 numbers, and notes that it was written."""

    def body(y: v.Value, x: v.Value) -> None:
        v.store(y, v.load(x, v.F32) * factor)

    def write(module: v.Module) -> None:
        written.append(factor)
        module.add("multiplied", body)

    address = v.compiled(f"times {factor}", write)

    def run(x: np.ndarray) -> np.ndarray:
        y = np.zeros_like(x)
        ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(address("multiplied"))(y.ctypes.data, x.ctypes.data)
        return y

    return run


def test_code_is_written_once_and_computes_the_same(folder: Path) -> None:
    x, written = np.arange(16, dtype=np.float32), list[float]()
    for _ in range(2):
        assert (multiplied(2.0, written)(x) == 2 * x).all()
        assert (multiplied(3.0, written)(x) == 3 * x).all()
    assert written == [2.0, 3.0]
    assert len(list(folder.iterdir())) == 2
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "damage", [lambda code: code[:-1], lambda code: b"", lambda code: code[:40] + b"?" + code[41:]]
)
def test_a_damaged_file_is_made_anew(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    x, written = np.arange(16, dtype=np.float32), list[float]()
    multiplied(2.0, written)
    [file] = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert (multiplied(2.0, written)(x) == 2 * x).all()
    assert written == [2.0, 2.0]
    assert file.read_bytes() == whole


def test_other_sources_have_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept("key", lambda: b"old") == b"old"
    assert kept("key", lambda: b"new") == b"old"
    monkeypatch.setattr(keeping, "_sources", lambda: "changed")
    assert kept("key", lambda: b"new") == b"new"


def test_what_is_not_used_goes(folder: Path) -> None:
    kept("often", lambda: b"often")
    kept("seldom", lambda: b"seldom")
    long_ago = time.time() - (UNUSED_DAYS + 1) * 86_400
    for file in folder.iterdir():
        os.utime(file, (long_ago, long_ago))
    kept("often", lambda: b"not asked for")
    kept("another", lambda: b"another")
    assert sorted(file.read_bytes()[32:] for file in folder.iterdir()) == [b"another", b"often"]


def test_without_a_folder_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert kept("key", lambda: b"first") == b"first"
    assert kept("key", lambda: b"second") == b"second"
