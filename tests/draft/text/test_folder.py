"""A folder as a corpus: which files are read, when they are read again, and that drafters copy from them."""

import os
import subprocess
from time import sleep

import numpy as np
import pytest
from tests import models, native

from paceline.core.sampling import SamplingParams
from paceline.draft.text import folder as module
from paceline.draft.text.folder import FolderCorpus, files
from paceline.engine.engine import Engine
from paceline.errors import StoreError
from paceline.formats.tokenizer import Tokenizer

TREE = {
    ".gitignore": "*.log\nbuild/\n/only-here.txt\n!kept.log\n",
    "a.py": "def first():\n    return 1\n", "kept.log": "kept", "left.log": "left", "only-here.txt": "no",
    "build/made.py": "made", "sub/only-here.txt": "yes", "sub/.gitignore": "*.tmp\n!again.log\n", "sub/x.tmp": "x",
    "sub/again.log": "again", "sub/deep/y.tmp": "y", "sub/deep/z.py": "z = 3\n", ".hidden/h.py": "h", ".env": "KEY=1",
}  # fmt: skip
READ = {"a.py", "kept.log", "sub/again.log", "sub/deep/z.py", "sub/only-here.txt"}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(models.tokenizer(), "tiny")


@pytest.fixture
def tree(tmp_path):
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def said(corpus):
    """The texts that a corpus has."""
    array = corpus._array
    return [] if array is None else [part[:-1].tolist() for part in np.split(array.text, array.ends[:-1])]


def test_the_files_that_git_would_take_are_read(tree):
    assert {path.relative_to(tree).as_posix() for path, _ in files(tree)} == READ
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=tree, check=True, capture_output=True, text=True).stdout.split()
    assert {name for name in listed if not any(part.startswith(".") for part in name.split("/"))} == READ


def test_what_is_no_text_or_leads_elsewhere_is_left_out(tree, tokenizer, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 1000)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "secret.txt").write_text("secret")
    (tree / "link.txt").symlink_to(elsewhere / "secret.txt")
    (tree / "links").symlink_to(elsewhere)
    (tree / "image.png").write_bytes(b"\x89PNG\0\0")
    (tree / "latin.txt").write_bytes(b"caf\xe9")
    (tree / "empty.txt").write_text("")
    (tree / "blank.txt").write_text(" \n")
    (tree / "long.txt").write_text("long " * 300)
    corpus = FolderCorpus(tree, tokenizer)
    assert corpus.renew()
    texts = said(corpus)
    assert len(texts) == len(READ)
    assert sorted(map(tuple, texts)) == sorted(tuple(tokenizer.encode_text((tree / name).read_text())) for name in READ)


def test_what_has_changed_is_read_again_and_what_was_changed_last_comes_first(tree, tokenizer, monkeypatch):
    corpus, read = FolderCorpus(tree, tokenizer), []
    own = FolderCorpus._read
    monkeypatch.setattr(FolderCorpus, "_read", lambda self, path: (read.append(path.name), own(self, path))[1])
    assert corpus.renew()
    assert not corpus.renew()
    read.clear()
    (tree / "a.py").write_text("def second():\n    return 2\n")
    os.utime(tree / "a.py", ns=(1 << 61, 1 << 61))
    (tree / "kept.log").unlink()
    assert corpus.renew()
    assert read == ["a.py"]
    assert len(said(corpus)) == len(READ) - 1
    monkeypatch.setattr(module, "MOST_TOKENS", 40)
    (tree / "new.txt").write_text("word " * 200)
    os.utime(tree / "new.txt", ns=(1, 1))
    corpus.renew()
    assert said(corpus)[0] == tokenizer.encode_text((tree / "a.py").read_text())
    assert len(corpus._array.text) <= 40
    for path, _ in files(tree):
        path.unlink()
    assert corpus.renew()
    assert said(corpus) == []


def test_a_thread_makes_it_and_nobody_waits(tree, tokenizer, monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 0.01)
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    corpus = FolderCorpus(tree, tokenizer)

    def until(what):
        for _ in range(1000):
            if what():
                return True
            sleep(0.01)
        return False

    assert until(lambda: corpus.latest() is not None)
    before = corpus.latest()
    (tree / "more.py").write_text("more = 1\n")
    assert until(lambda: corpus.latest() is not before)
    assert len(said(corpus)) == len(READ) + 1


@pytest.mark.parametrize("draft", ["suffix", "suffix,shape=tree", "sam", "sam,draft=4", "suffix+recycling"])
def test_drafters_copy_from_it_and_answers_are_the_same(draft, tree, tokenizer, monkeypatch):
    target = native.of(models.model("llama2", max_position_embeddings=512, **native.TINY), eos=())
    prompt, wish = [5, 6, 7, 8], SamplingParams(max_tokens=40)
    (plain,) = Engine(target).generate([prompt], wish)
    corpus = FolderCorpus(tree, tokenizer)
    monkeypatch.setattr(corpus, "_read", lambda path: np.array([*prompt, *plain.tokens, 2], np.int32))
    corpus.renew()
    engine = Engine(target, draft, budget=False)
    before, after = (
        engine.generate([prompt], SamplingParams(max_tokens=40, corpus=given))[0] for given in (None, corpus._array)
    )
    assert before.tokens == after.tokens == plain.tokens
    assert after.rounds < before.rounds
    assert after.rounds < 20


def test_a_folder_inside_keeps_the_rules_of_the_one_around(tree, tokenizer):
    """What is hidden or ignored there stays so, whoever names it."""
    assert {path.name for path, _ in files(tree, tree / "sub")} == {"again.log", "z.py", "only-here.txt"}
    for name in (".hidden", "build"):
        corpus = FolderCorpus(tree / name, tokenizer, tree)
        corpus.renew()
        assert said(corpus) == []


def test_what_cannot_be(tmp_path, tokenizer):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(StoreError, match="there is no such folder"):
            FolderCorpus(path, tokenizer)
    inner = models.tokenizer()
    inner.eos_token = None
    with pytest.raises(StoreError, match="names no end token"):
        FolderCorpus(tmp_path, Tokenizer(inner, "tiny"))
