"""A corpus as a file of llama.cpp's lookup cache, read back record by record."""

import struct
from collections import Counter, defaultdict

import numpy as np

from paceline.draft.text.store import writing
from paceline.outputs import GGUF, check_file
from paceline.plugins import to_gguf


def records(file):
    found = {}
    data, at = file.read_bytes(), 0
    while at < len(data):
        a, b, *none, count = struct.unpack_from("<5i", data, at)
        assert none == [-1, -1]
        pairs = struct.unpack_from(f"<{2 * count}i", data, at + 20)
        found[a, b] = dict(zip(pairs[::2], pairs[1::2], strict=True))
        at += 20 + 8 * count
    return found


def test_every_triple_within_a_document_is_counted(tmp_path):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 5, size).tolist() for size in (1, 2, 40, 3, 60)]
    expected = defaultdict(Counter)
    for one in documents:
        for a, b, c in zip(one, one[1:], one[2:], strict=False):
            expected[a, b][c] += 1
    with writing(tmp_path / "corpus", kind="corpus", tokenizer="x") as store:
        store.add("text", np.concatenate(documents).astype(np.uint16))
        store.add("ends", np.cumsum([len(one) for one in documents], dtype=np.int64))
    to_gguf.write_lookup(tmp_path / "corpus", tmp_path / "cache")
    assert records(tmp_path / "cache") == expected
    check_file(tmp_path / "cache", GGUF)  # it may be written anew
