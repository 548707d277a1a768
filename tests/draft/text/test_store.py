"""Stores on disk: whole or not there, and refused with one clear line when they are not what was asked for."""

import numpy as np
import pytest

from paceline.draft.text.store import open_store, writing
from paceline.errors import StoreError
from paceline.formats.tokenizer import fingerprint


def made(path, **facts):
    with writing(path, kind="corpus", tokenizer="abc", **facts) as store:
        store.add("text", np.arange(100, dtype=np.int32))
    return path


def test_what_is_written_is_read_back(tmp_path):
    store = open_store(made(tmp_path / "s", tokenizer_name="demo"), kind="corpus", tokenizer="abc")
    assert isinstance(store.array("text"), np.memmap)
    assert store.array("text").tolist() == list(range(100))
    assert store.header["tokenizer_name"] == "demo"
    with pytest.raises(StoreError, match=r"has no ngrams \(it has text\)"):
        store.array("ngrams")


def test_a_store_is_replaced_whole_or_not_at_all(tmp_path):
    path = made(tmp_path / "s")

    def fail():
        with writing(path, kind="corpus", tokenizer="new") as store:
            store.add("text", np.zeros(3))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert open_store(path, kind="corpus").header["tokenizer"] == "abc"
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
    made(path, again=True)
    assert open_store(path, kind="corpus").header["again"]


def test_nothing_else_is_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for _ in range(2):  # a text beside a store is not the store's
        with pytest.raises(StoreError, match="is not a store"), writing(tmp_path, kind="corpus", tokenizer="abc"):
            pass
        assert (tmp_path / "notes.txt").read_text() == "mine"
        (tmp_path / "store.json").write_text("{}")


def test_what_cannot_be_used_is_refused(tmp_path):
    path = made(tmp_path / "s", tokenizer_name="vicuna")
    with pytest.raises(StoreError, match="there is no store"):
        open_store(tmp_path / "t", kind="corpus")
    with pytest.raises(StoreError, match="is a corpus, not a model"):
        open_store(path, kind="model")
    with pytest.raises(StoreError, match=r"another tokenizer \(vicuna\)"):
        open_store(path, kind="corpus", tokenizer="other")
    array = path / "text.npy"
    array.write_bytes(array.read_bytes()[:200])
    with pytest.raises(StoreError, match=r"truncated: text.npy has 200 of"):
        open_store(path, kind="corpus")
    (path / "store.json").write_text('{"version": 1')
    with pytest.raises(StoreError, match="cannot be read"):
        open_store(path, kind="corpus")


def test_fingerprints_tell_vocabularies_apart():
    assert fingerprint({"a": 0, "b": 1}) == fingerprint({"b": 1, "a": 0})
    assert len({fingerprint(v) for v in ({"a": 0, "b": 1}, {"a": 1, "b": 0}, {"a": 0, "b": 1, "c": 2})}) == 3
