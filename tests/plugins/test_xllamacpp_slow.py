"""Heads of ours in llama.cpp's server. Set PACELINE_XLLAMACPP_PYTHON to the interpreter of an environment with
xllamacpp, then

    pytest -m slow tests/plugins/test_xllamacpp_slow.py
"""

import json
import os

import numpy as np
import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.draft.text.store import writing
from paceline.engine.engine import Engine
from paceline.plugins.to_gguf import write as to_gguf
from paceline.plugins.to_gguf import write_head, write_lookup
from tests import models
from tests.bench.peers import opened
from tests.draft import blocks
from tests.draft.answered import weakened
from tests.draft.eagles import d2t_of, eagle3, knowing_head, speculators, write

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
HIDDEN, NEW = 64, 24
PROMPTS = [[5, 17, 200, 31, 9], [40, 41, 40, 41, 40, 41, 40], [7] * 3]


@pytest.fixture(scope="module")
def model():
    """Its next token hangs on the last one alone."""
    made = models.model("llama2", num_hidden_layers=4, tie_word_embeddings=False, hidden_size=HIDDEN)
    return weakened(made, 0.01)


@pytest.fixture(scope="module")
def target(model, tmp_path_factory):
    if not os.environ.get("PACELINE_XLLAMACPP_PYTHON"):
        pytest.skip("set PACELINE_XLLAMACPP_PYTHON to the interpreter of an environment with xllamacpp")
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    models.tokenizer().save_pretrained(folder)
    to_gguf(folder, folder / "model.gguf", "f32")
    return folder


Answer = tuple[list[int], int, int]
"""Tokens (without those that the server holds back, half letters), and how many were drafted and accepted."""


def answers(target, options=""):
    asked = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0, "seed": 0, "limit": NEW}
    python = os.environ["PACELINE_XLLAMACPP_PYTHON"]
    with opened(f"xllamacpp:{target / 'model.gguf'}{options}", target, python=python, threads=1) as one:
        rows = [one.ask(asked | {"prompt": prompt}) for prompt in PROMPTS]
    return [(row["tokens"], *row["events"][-1][2:]) for row in rows]


@pytest.fixture(scope="module")
def plain(target):
    return answers(target)


def check(served, plain):
    """The text is the plain one. Returns how many drafted tokens were accepted."""
    assert [tokens for tokens, *_ in served] == [tokens for tokens, *_ in plain]
    assert all(drafted for _, drafted, _ in served)
    return [accepted for *_, accepted in served]


def ours(target, draft):
    """What our engine says."""
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    return Engine(target, draft=draft, dtype="float32").generate(PROMPTS, params)


def knowing_eagle3(model, folder):
    """A head that knows the next token and feeds back its output unnormed."""
    head = knowing_head(folder, "eagle3", model)
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | {"norm_output": False, "norm_before_residual": True}))
    return head


def test_heads_that_know_are_accepted_as_in_our_engine(model, target, plain, tmp_path):
    heads = {"eagle3": knowing_eagle3(model, tmp_path / "eagle3"), "dflash": blocks.save(tmp_path / "dspark", model)}
    for method, head in heads.items():
        kind = write_head(f"{method}:{head}", target, tmp_path / f"{method}.gguf", "f32")
        served = answers(target, f",spec={kind},file={tmp_path / method}.gguf,k=4")
        expected = [one.stats.accepted_tokens for one in ours(target, f"{method}:{head},tree=0,draft=4,stop=fixed")]
        assert check(served, plain) == expected, method
        assert min(expected) > NEW // 2


def test_heads_that_know_nothing_change_no_text(model, target, plain, tmp_path):
    """Of every form that is written, with all tensors that are optional."""
    norms = {"norm_before_fc": True, "norm_before_residual": True}
    own = {"input_norm.weight": torch.rand(3 * HIDDEN), "embed_tokens.weight": torch.rand(models.VOCAB_SIZE, HIDDEN)}
    offsets, members = d2t_of(model)
    few = {"mask_embedding": torch.rand(HIDDEN), "d2t": offsets, "t2d": members}
    anchored = blocks.config(
        model, sample_from_anchor=True, draft_vocab_size=len(offsets), is_causal=True,
        dflash_config={"target_layer_ids": list(blocks.IDS)},
    )  # fmt: skip
    cases = {
        "eagle3-few": (speculators(model), eagle3(model)),
        "eagle3-norms": (speculators(model, **norms), eagle3(model) | own),
        "dflash-mask": (blocks.config(model), blocks.random_tensors(model)),
        "dflash-few": (anchored, blocks.random_tensors(model) | few),
    }
    for name, (config, tensors) in cases.items():
        method = name.partition("-")[0]
        kind = write_head(f"{method}:{write(tmp_path / name, config, tensors)}", target, tmp_path / f"{name}.gguf")
        served = answers(target, f",spec={kind},file={tmp_path / name}.gguf")
        check(served, plain)


def test_a_static_lookup_cache(target, plain, tmp_path):
    """A corpus of the answers: a server that has seen nothing drafts them."""
    without = answers(target, ",spec=ngram-cache")
    said = ours(target, "none")
    texts = [[*prompt, *one.tokens] for prompt, one in zip(PROMPTS, said, strict=True)] * 2
    with writing(tmp_path / "corpus", kind="corpus", tokenizer="x") as store:
        store.add("text", np.concatenate(texts).astype(np.uint16))
        store.add("ends", np.cumsum([len(one) for one in texts], dtype=np.int64))
    write_lookup(tmp_path / "corpus", tmp_path / "cache")
    accepted = check(answers(target, f",spec=ngram-cache,file={tmp_path / 'cache'}"), plain)
    assert sum(accepted) > sum(one[2] for one in without) + NEW
