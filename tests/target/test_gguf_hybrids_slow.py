"""Files of hybrids in llama.cpp: what it reads of them is what we read. Set PACELINE_XLLAMACPP_PYTHON to the
interpreter of an environment with xllamacpp, then

    pytest -m slow tests/target/test_gguf_hybrids_slow.py
"""

import os

import numpy as np
import pytest
import torch
from tests import gguf_files, llama_cpp, models
from tests.bench.peers import asked, opened
from tests.draft import mtps

from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.target.load import load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
FAMILIES = ("qwen3.5", "qwen3.5-moe", "qwen3-next")
SIZES = {
    "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "mlp_only_layers": [],
    "hidden_size": 128, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
}  # fmt: skip
NEW, DRAFTED = 24, 3
PROMPTS = [np.random.default_rng(seed).integers(4, 288, 9 + 5 * seed).tolist() for seed in range(4)]

def theirs(file, drafted=0):
    """The tokens after each prompt, and how many were drafted and accepted."""
    how = {"n_predict": NEW, "temperature": 0, "return_tokens": True, "cache_prompt": False}
    said = llama_cpp.answers(file, "/completion", [how | {"prompt": prompt} for prompt in PROMPTS], drafted)
    counts = ("draft_n", "draft_n_accepted")
    return [[one["tokens"], *(one["timings"].get(name, 0) for name in counts)] for one in said]


def ours(file, draft="none"):
    engine = Engine(load(file, dtype="float32", device="cpu"), draft, budget=False)
    answers = engine.generate(PROMPTS, SamplingParams(max_tokens=NEW))
    return [[one.tokens, one.stats.draft_tokens, one.stats.accepted_tokens] for one in answers]


def written(family, folder, seed=0, **how):
    models.make(family, folder / "model", seed=seed, **SIZES)
    return gguf_files.write(folder / "model", folder / "model.gguf", **how)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_writes_the_same_text(family, seed, tmp_path):
    """Several value heads share a key head, and heads turn in part."""
    file = written(family, tmp_path, seed, fused=seed % 2 == 1)
    assert theirs(file) == ours(file)


def test_a_list_says_which_layers_have_states(tmp_path):
    def more(writer):
        writer.add_full_attention_interval(3)
        writer.add_array("qwen35.attention.recurrent_layers", [True, False, True, False])

    file = written("qwen3.5", tmp_path, more=more)
    assert theirs(file) == ours(file)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_in_a_file_drafts_the_same(family, tmp_path):
    """It knows the next token of layers that add little. With a Qwen 3 Next, llama.cpp drafts in every second round."""
    model = models.model(family, **SIZES, tie_word_embeddings=False)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in ("o_proj", "out_proj", "down_proj")):
                weight *= 0.05
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    models.tokenizer().save_pretrained(folder)
    head = mtps.in_layout(mtps.knowing_head(model, 0.05), "deepseek", 4)
    mtps.add(folder, {name: one for name, one in head.items() if not name.endswith(mtps.COPIES)})

    def more(writer):
        writer.add_block_count(5)
        writer.add_nextn_predict_layers(1)

    file = gguf_files.write(folder, tmp_path / "model.gguf", more=more)
    right, found = ours(file, f"mtp,tree=0,draft={DRAFTED},stop=fixed"), theirs(file, DRAFTED)
    assert [tokens for tokens, *_ in found] == [tokens for tokens, *_ in right]
    accepted = [[last for *_, last in one] for one in (found, right)]
    assert all(map(sum, accepted))
    assert accepted[0] == accepted[1] or family == "qwen3-next"
    spec, python = f"xllamacpp:{file},spec=draft-mtp,k={DRAFTED}", os.environ["PACELINE_XLLAMACPP_PYTHON"]
    with opened(spec, folder, python=python, threads=1) as peer:
        assert sum(asked(peer, PROMPTS[:1], max_tokens=NEW)[0].nodes) > 0
