"""`paceline corpus`: build, info, and the store in use."""

import json

import pytest

from paceline.draft.text.store import open_store


@pytest.fixture
def answers(tmp_path):
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps({"prompt": "the cat", "response": f"the dog {i}"}) + "\n" for i in range(20)))
    return file


def test_build_and_info(command, tiny, answers, tmp_path):
    built = command("corpus", "build", tmp_path / "out", "--text", answers, "--tokenizer", tiny)
    assert built.code == 0
    assert "tokens in 40 documents: about" in built.err
    assert "of memory" in built.err
    assert "built in" in built.out
    shown = command("corpus", "info", tmp_path / "out")
    assert shown.code == 0
    assert built.out.startswith(shown.out)
    for words in ("tokens in 40 documents", "tokenizer: tiny", "parts: ngrams, suffix-array", "a token"):
        assert words in shown.out


def test_several_files_and_parts(command, tiny, answers, tmp_path):
    (tmp_path / "more.txt").write_text("hello there")
    files = ("--text", answers, tmp_path / "more.txt")
    options = ("--tokenizer", tiny, "--parts", "suffix-array", "--max-tokens", 5000, "--json")
    built = command("corpus", "build", tmp_path / "out", *files, *options)
    facts = json.loads(built.out)
    assert (facts["documents"], facts["parts"]) == (41, ["suffix-array"])
    assert facts["seconds"] >= 0
    header = open_store(tmp_path / "out", kind="corpus").header
    assert facts["bytes"] == sum(header["arrays"].values())
    shown = json.loads(command("corpus", "info", tmp_path / "out", "--json").out)
    assert shown == {key: value for key, value in facts.items() if key != "seconds"}


@pytest.mark.usefixtures("_few_turns")
def test_answers_copy_from_it(command, tiny, answers, tmp_path):
    command("corpus", "build", tmp_path / "out", "--text", answers, "--tokenizer", tiny, "--parts", "suffix-array")
    draft = f"sam,corpus={tmp_path / 'out'}"
    options = ("--draft", draft, "--compare", "--dtype", "float32")
    compared = command("generate", tiny, "the cat the dog", "-n", 20, *options)
    assert compared.code == 0
    assert "identical" in compared.err
