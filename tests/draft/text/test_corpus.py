"""Building a corpus: what is read, how it is joined, and one line for whatever is wrong."""

import gzip
import json

import numpy as np
import pytest

from paceline.draft.text.corpus import PARTS, CorpusPart, Plan
from paceline.draft.text.store import HEADER, open_store
from paceline.draft.text.suffix_array import SuffixArray
from paceline.errors import PacelineError, StoreError
from paceline.formats.tokenizer import Tokenizer
from paceline.replay import corpus as reading
from paceline.replay.corpus import build, texts


class Letters:
    """What Tokenizer wants of a transformers tokenizer: a letter a token, "." ends a text."""

    chat_template = None
    eos_token = "."
    added_tokens_decoder: dict = {}

    def __init__(self, eos=ord(".")):
        self.eos_token_id = eos

    def __len__(self):
        return 128

    def get_vocab(self):
        return {chr(i): i for i in range(128)}

    def encode(self, text, add_special_tokens=True):
        return [ord(letter) for letter in text]


LETTERS = Tokenizer(Letters(), "letters")
ONLY = Plan(parts=())


def written(folder, name, content):
    file = folder / name
    if name.endswith(".gz"):
        file.write_bytes(gzip.compress(content.encode()))
    else:
        file.write_text(content)
    return file


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


RECORDS = [
    ({"text": "a"}, ["a"]),
    ({"response": "b", "id": 3}, ["b"]),
    ({"prompt": "c", "response": "d"}, ["c", "d"]),
    ({"messages": [{"role": "user", "content": "e"}, {"role": "assistant", "content": "f"}]}, ["e", "f"]),
    ({"question_id": 81, "choices": [{"turns": ["g", "h"]}]}, ["g", "h"]),
    ({"text": " "}, []),
]


@pytest.mark.parametrize("name", ["file.jsonl", "file.jsonl.gz"])
def test_every_kind_of_line_is_read(tmp_path, name):
    file = written(tmp_path, name, "\n".join(lines(record) for record, _ in RECORDS))
    assert list(texts(file, LETTERS)) == [text for _, found in RECORDS for text in found]


@pytest.mark.parametrize("name", ["file.txt", "file.txt.gz"])
def test_a_text_file_is_one_document(tmp_path, name):
    assert list(texts(written(tmp_path, name, "one\n\ntwo\n"), LETTERS)) == ["one\n\ntwo\n"]


def test_documents_are_joined_with_the_end_token(tmp_path):
    files = [written(tmp_path, "a.jsonl", lines({"text": "abc"}, {"text": "de."})), written(tmp_path, "b.txt", "fg")]
    store = build(tmp_path / "out", files, LETTERS, ONLY)
    assert "".join(map(chr, store.array("text"))) == "abc.de.fg."
    assert store.array("ends").tolist() == [4, 7, 10]
    assert store.array("text").dtype == np.uint16
    facts = {"tokens": 10, "documents": 3, "vocab_size": 128, "eos": ord("."), "tokenizer_name": "letters", "parts": []}
    assert facts.items() <= store.header.items()
    assert store.header["tokenizer"] == LETTERS.fingerprint


def test_every_part_is_built(tmp_path):
    file = written(tmp_path, "a.jsonl", lines(*({"text": f"the sea is {i} miles wide"} for i in range(50))))
    told = []
    store = build(tmp_path / "out", [file], LETTERS, Plan(), lambda what, done: told.append((what, done)))
    assert store.header["parts"] == list(PARTS)
    assert {"ngrams_values", "suffix_positions"} <= set(store.header["arrays"])
    assert list(dict.fromkeys(what for what, _ in told)) == ["reading", *PARTS]
    assert all(0 <= done <= 1 for _, done in told)
    assert SuffixArray.of(store).longest([ord(letter) for letter in "the sea"])[0] == 7


def test_max_tokens(tmp_path):
    file = written(tmp_path, "a.jsonl", lines({"text": "abcdef"}, {"text": "ghijkl"}, {"text": "mn"}))
    for most, expected in [(100, "abcdef.ghijkl.mn."), (14, "abcdef.ghijkl."), (10, "abcdef.gh."), (3, "ab.")]:
        store = build(tmp_path / "out", [file], LETTERS, Plan((), max_tokens=most))
        assert "".join(map(chr, store.array("text"))) == expected


def test_the_estimate_is_about_right(tmp_path):
    random = np.random.default_rng(0)
    words = ["".join(map(chr, random.integers(97, 123, 5))) for _ in range(300)]
    file = written(tmp_path, "a.txt", " ".join(words[i] for i in random.zipf(1.4, 20_000) % 300))
    seen = []
    plan = Plan(["suffix-array"], estimated=lambda *facts: seen.append(facts))
    store = build(tmp_path / "out", [file], LETTERS, plan)
    ((tokens, documents, disk, _),) = seen
    assert (tokens, documents) == (store.header["tokens"], 1)
    assert disk == pytest.approx(sum(store.header["arrays"].values()), rel=0.3)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "x"}\n{"text": "x"\n', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", '{"prompt": "x"}\n', "a.jsonl, line 1 has no text: neither an answer"),
        ("a.jsonl", '{"text": "x"}\n[1]\n', "line 2: a JSON object is wanted"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}\n', 'line 1: "messages" must be a list'),
        ("a.jsonl", '{"choices": []}\n', "line 1: an answer without a response"),
        ("a.jsonl", '{"response": 3}\n', 'line 1: "response" must be a text'),
        ("a.jsonl", "\n", "there is no text in"),
        ("a.txt", "", "there is no text in"),
        ("a.pdf", "x", "made of .txt and .jsonl files"),
        ("a.csv.gz", "x", "made of .txt and .jsonl files"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path, name, content, message):
    with pytest.raises(PacelineError, match=message):
        build(tmp_path / "out", [written(tmp_path, name, content)], LETTERS, ONLY)
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_files_that_cannot_be_read(tmp_path):
    written(tmp_path, "answers.jsonl", "")
    with pytest.raises(StoreError, match=r"there is no file .*answer.jsonl. Did you mean 'answers.jsonl'"):
        build(tmp_path / "out", [tmp_path / "answer.jsonl"], LETTERS, ONLY)
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(StoreError, match="not UTF-8"):
        build(tmp_path / "out", [tmp_path / "a.txt"], LETTERS, ONLY)
    for cut in (b"no gzip", gzip.compress(b"x" * 100)[:-9]):
        (tmp_path / "a.txt.gz").write_bytes(cut)
        with pytest.raises(StoreError, match=r"a\.txt\.gz is cut off or damaged"):
            build(tmp_path / "out", [tmp_path / "a.txt.gz"], LETTERS, ONLY)


def test_the_end_token_may_be_chosen(tmp_path):
    nameless = Tokenizer(Letters(None), "letters")
    file = written(tmp_path, "a.txt", "abc")
    with pytest.raises(StoreError, match=r"letters names no end token; .* --eos"):
        build(tmp_path / "out", [file], nameless, ONLY)
    for eos in ("!", "33"):
        store = build(tmp_path / "out", [file], nameless, Plan((), eos=eos))
        assert store.header["eos"] == store.array("text")[-1] == 33
    for eos in ("<end>", "128"):
        with pytest.raises(StoreError, match=f"no token '{eos}'"):
            build(tmp_path / "out", [file], nameless, Plan((), eos=eos))


def test_impossible_plans():
    with pytest.raises(StoreError, match=r"no part 'suffix-tree'. Did you mean 'suffix-array'\?"):
        Plan(["suffix-tree"])
    with pytest.raises(StoreError, match="max_tokens is 1"):
        Plan(max_tokens=1)


def test_an_interrupted_build_leaves_what_was_there(tmp_path, monkeypatch):
    file = written(tmp_path, "a.txt", "abc")
    build(tmp_path / "out", [file], LETTERS, ONLY)
    before = (tmp_path / "out" / HEADER).read_text()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setitem(PARTS, "suffix-array", CorpusPart(interrupted, 0, 0))
    for out in ("out", "new"):
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path / out, [file], LETTERS, Plan(["suffix-array"]))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.txt", "out"]
    assert (tmp_path / "out" / HEADER).read_text() == before


def test_a_store_without_a_part_says_so(tmp_path):
    build(tmp_path / "out", [written(tmp_path, "a.txt", "abc")], LETTERS, ONLY)
    with pytest.raises(StoreError, match=r"has no suffix_positions .*build it again with that part"):
        SuffixArray.of(open_store(tmp_path / "out", kind="corpus"))


@pytest.mark.parametrize("most", [None, 200, 14, 11, 10, 3])
def test_shards_make_the_same_corpus(tmp_path, monkeypatch, most):
    """Tokenised piece by piece, each by a worker of its own; the cluster itself is tried in tests/cli."""
    worked = []

    def serially(make, options, items, address, workers):
        for item in items:
            worked.append(item)
            yield make(*options)(item)

    monkeypatch.setattr("paceline.textfiles.PIECE_BYTES", 100)
    monkeypatch.setattr(reading, "spread", serially)
    monkeypatch.setattr(reading, "load_tokenizer", lambda name: LETTERS)
    records = [{"text": "abcdef"}, {"text": "gh."}, *({"text": "ijk" * i} for i in range(1, 30))]
    files = [written(tmp_path, "a.jsonl", lines(*records)), written(tmp_path, "b.txt", "one text\nin two lines")]
    for out, read in (("here", reading.read_here), ("there", reading.Sharded("letters"))):
        build(tmp_path / out, files, LETTERS, Plan((), max_tokens=most), read=read)
    here, there = ({f.name: f.read_bytes() for f in (tmp_path / out).iterdir()} for out in ("here", "there"))
    assert here == there
    assert (len(worked) > 5) if most is None else worked
