"""Compiled kernels that are kept: made once, and anew when the file is not whole or the sources are others."""

import ctypes
import hashlib
import os
import time
from pathlib import Path

import numpy as np
import pytest

from paceline.kernels import vectors as v
from paceline.kernels.vectors import UNUSED_DAYS, load_or_compile


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "paceline" / "kernels"


def multiplied(factor, written):
    """A compiled function that multiplies 16 numbers, and notes that it was written."""

    def body(y, x):
        v.store(y, v.load(x, v.F32) * factor)

    def write(module):
        written.append(factor)
        module.add("multiplied", body)

    address = v.compiled(f"times {factor}", write)

    def run(x):
        y = np.zeros_like(x)
        ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(address("multiplied"))(y.ctypes.data, x.ctypes.data)
        return y

    return run


def test_code_is_written_once_and_computes_the_same(folder):
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
def test_a_damaged_file_is_made_anew(folder, damage):
    x, written = np.arange(16, dtype=np.float32), list[float]()
    multiplied(2.0, written)
    [file] = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert (multiplied(2.0, written)(x) == 2 * x).all()
    assert written == [2.0, 2.0]
    assert file.read_bytes() == whole


def test_other_sources_have_other_code(monkeypatch):
    assert load_or_compile("key", lambda: b"old") == b"old"
    assert load_or_compile("key", lambda: b"new") == b"old"
    monkeypatch.setattr(v, "_sources", lambda: "changed")
    assert load_or_compile("key", lambda: b"new") == b"new"


def test_what_is_not_used_goes(folder):
    load_or_compile("often", lambda: b"often")
    load_or_compile("seldom", lambda: b"seldom")
    long_ago = time.time() - (UNUSED_DAYS + 1) * 86_400
    for file in folder.iterdir():
        os.utime(file, (long_ago, long_ago))
    load_or_compile("often", lambda: b"not asked for")
    load_or_compile("another", lambda: b"another")
    assert sorted(file.read_bytes()[32:] for file in folder.iterdir()) == [b"another", b"often"]


@pytest.mark.parametrize("place", ["folder", "file"])
@pytest.mark.parametrize("doing", ["others may write", "of another user", "a link"])
def test_code_that_others_could_have_written_is_not_run(folder, monkeypatch, place, doing):
    assert load_or_compile("key", lambda: b"ours") == b"ours"
    [file] = folder.iterdir()
    file.write_bytes(hashlib.sha256(b"theirs").digest() + b"theirs")
    assert load_or_compile("key", lambda: b"ours") == b"theirs", "a digest keeps out damage, not people"
    path = folder if place == "folder" else file
    if doing == "others may write":
        path.chmod(path.stat().st_mode | 0o002)
    elif doing == "of another user":
        before = Path.lstat

        def lstat(self):
            about = before(self)
            if self != path:
                return about
            return os.stat_result([*about[:4], about.st_uid + 1, *about[5:10]])

        monkeypatch.setattr(Path, "lstat", lstat)
    else:
        path.rename(path.with_name("elsewhere"))
        path.symlink_to(path.with_name("elsewhere"))
    assert load_or_compile("key", lambda: b"ours") == b"ours"
    if place == "folder":
        assert file.read_bytes()[32:] == b"theirs", "nothing is written there either"
    elif doing != "of another user":
        assert load_or_compile("key", lambda: b"not asked for") == b"ours", "the file is ours again"


def test_without_a_folder_nothing_is_kept(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert load_or_compile("key", lambda: b"first") == b"first"
    assert load_or_compile("key", lambda: b"second") == b"second"


def test_an_edit_outside_of_the_kernels_compiles_none_of_them_anew(monkeypatch):
    """Kept code is found by a digest of these files, which are all that code for kernels is written by."""
    read = []
    contents = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path) or contents(path))
    v._sources.__wrapped__()
    folder = Path(v.__file__).parent
    assert {path.name for path in read} >= {"vectors.py", "integer.py", "products.py", "attention.py", "blocks.py"}
    assert {path.parent for path in read} == {folder}
    inner = [line for path in read for line in path.read_text().splitlines() if line.lstrip().startswith("from pacel")]
    outside = [line for line in inner if " paceline.kernels" not in line and " paceline import kernels" not in line]
    known = ("paceline.compiled", "paceline.errors", "paceline.folders", "paceline import processor")
    assert [line for line in outside if not any(name in line for name in known)] == []
