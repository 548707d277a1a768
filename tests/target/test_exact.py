"""Exact: a token's logits are the same, bit for bit, alone, in any draft, in batches, in pieces of prompts."""

import numpy as np
import pytest
import torch
from tests import exact, models, native

from paceline import kernels, processor
from paceline.core.segment import Segment
from paceline.engine.engine import Engine
from paceline.errors import ModelError
from paceline.kernels.linear import Linear, TorchProduct
from paceline.kernels.products import Panels
from paceline.target.decoder import Decoder
from paceline.target.hf import HFTarget

DTYPES = [torch.float32, torch.bfloat16]
LONG = 100
"""Tokens of a text: more than a block of keys holds."""


def made(family, dtype):
    target = native.of(models.model(family), dtype)
    target.make_exact()
    return target


def text(seed, length=LONG):
    return np.random.default_rng(seed).integers(4, models.VOCAB_SIZE, length).tolist()


def trees_agree(target, tokens, alone, seed):
    """Whether paths inside random trees have plain decoding's logits, after texts that end inside and at the end of a
    block of keys."""
    rng = np.random.default_rng(seed)
    agree = True
    for begin in (5, 63, 64, 90):
        [slot] = exact.prepared(target, [tokens[:begin]])
        drafted, parents, nodes = exact.hidden_in_tree(rng, tokens[begin : begin + 6], 14, models.VOCAB_SIZE)
        logits = target.verify([exact.tree(slot, drafted, parents)]).logits
        agree &= torch.equal(logits[nodes], alone[begin : begin + 6])
        target.drop_row(slot)
    return agree


FEW = ("llama2", "qwen3")
"""Families for every run; the others when slow tests are."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "family", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in models.NATIVE]
)
def test_chains_pieces_and_trees_of_every_family(family, dtype):
    target, tokens = made(family, dtype), text(1)
    alone = exact.one_by_one(target, tokens)
    for sizes in ([LONG], [37, 1, 2, 60], [64, 36]):
        assert torch.equal(exact.in_pieces(target, tokens, sizes), alone)
    assert trees_agree(target, tokens, alone, 2)


def test_trees_in_a_window_whose_beginning_is_among_their_nodes():
    target, tokens = made("mistral-window", torch.float32), text(1)
    assert trees_agree(target, tokens, exact.one_by_one(target, tokens), 2)


def test_otherwise_trees_round_differently():
    """So that the tests here cannot pass without what they test."""
    target, tokens = native.of(models.model("llama2")), text(1)
    assert not trees_agree(target, tokens, exact.one_by_one(target, tokens), 2)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("kind", ["float32", "int8-float32", "int8-bfloat16", "int4-float32"])
def test_logits_are_the_same_bits_at_every_level(kind):
    """Of single tokens and trees. A processor with more instructions takes others, and adds in the same order."""
    precision, dtype = kind.split("-")[0], torch.bfloat16 if "bfloat16" in kind else torch.float32
    said = []
    for level in processor.levels():
        with processor.forced(level):
            wide = models.model("qwen2", hidden_size=128, intermediate_size=256, head_dim=32)
            target = native.of(wide, dtype, precision=None if precision == "float32" else precision)
            target.make_exact()
            tokens = text(3)
            alone = exact.one_by_one(target, tokens)
            assert trees_agree(target, tokens, alone, 7)
            said.append(alone)
    assert all(torch.equal(said[0], other) for other in said[1:])


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", DTYPES)
def test_batches_of_1_to_32_rows_beside_a_piece_of_a_prompt(dtype):
    target, rng = made("qwen3-bias", dtype), np.random.default_rng(3)
    texts = [text(10 + i, int(length)) for i, length in enumerate(rng.integers(2, LONG, 32))]
    alone = [exact.in_pieces(target, tokens, [len(tokens)])[-1:] for tokens in texts]
    prompt = text(9, 90)
    for rows in (2, 32):
        slots = exact.prepared(target, [tokens[:-1] for tokens in texts[:rows]])
        slots.append(target.add_row(len(prompt)))
        segments = [
            exact.tree(slot, tokens[-1:], [-1]) for slot, tokens in zip(slots[:rows], texts[:rows], strict=True)
        ]
        logits = target.verify([*segments, Segment.chunk(slots[-1], np.array(prompt), last=False)]).logits
        assert torch.equal(logits, torch.cat(alone[:rows]))
        for slot in slots:
            target.drop_row(slot)


@pytest.mark.parametrize("dtype", DTYPES)
def test_is_what_the_model_says_otherwise_up_to_rounding(dtype):
    """Of families, and of heads of keys that are not as many as those that share one."""
    families = [(family, {}) for family in ("llama3", "mistral", "qwen2-window", "qwen3")]
    for family, more in [*families, ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 2})]:
        target, tokens = native.of(models.model(family, **more), dtype), text(4)
        usual = exact.in_pieces(target, tokens, [LONG])
        target.make_exact()
        gap = (exact.in_pieces(target, tokens, [LONG]) - usual).abs().max()
        assert gap <= (1e-4 if dtype == torch.float32 else 0.06) * usual.abs().max()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ours", [True, False])
def test_a_product_is_the_same_for_any_number_of_rows(dtype, ours, monkeypatch):
    if not ours:  # as on a processor without our products
        monkeypatch.setattr(kernels, "supported", lambda dtype: False)
        monkeypatch.setattr(kernels, "preferred", lambda dtype: False)
    random = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(size, generator=random).to(dtype) for size in ((130, 384), (200, 384), (200,)))
    try:
        linear = Linear(weight, bias)
        linear.make_exact()
    except ModelError as error:
        pytest.skip(str(error))
    assert isinstance(linear.product, Panels) == (ours and kernels.supported(dtype))
    whole = linear(x)
    assert torch.allclose(whole.double(), x.double() @ weight.double().T + bias.double(), rtol=0.01, atol=1e-2)
    for rows in [*range(1, 18), 31, 64, 69, 129]:
        assert torch.equal(linear(x[:rows]), whole[:rows])
        assert torch.equal(linear(x[-rows:]), whole[-rows:])
    assert torch.equal(linear.dense(), weight)
    assert torch.equal(linear.rows(torch.arange(3, 40))(x), whole[:, 3:40])


def test_a_library_that_depends_on_the_place_of_a_row_is_refused(monkeypatch):
    monkeypatch.setattr(kernels, "supported", lambda dtype: False)
    monkeypatch.setattr(kernels, "preferred", lambda dtype: False)
    noise = torch.linspace(0, 1, 16)[:, None]
    usual = TorchProduct.__call__
    monkeypatch.setattr(TorchProduct, "__call__", lambda self, x: usual(self, x) + noise)
    with pytest.raises(ModelError, match="adds in an order that depends on the row"):
        Linear(torch.ones(8, 8)).make_exact()


@pytest.mark.parametrize("free", [True, False])
def test_it_is_the_default_where_it_costs_nothing(free, tmp_path, monkeypatch):
    folder = models.make("llama2", tmp_path / "model", **native.TINY)
    monkeypatch.setattr(Decoder, "exact_is_free", free)
    assert Engine(folder).target.exact == free
    assert not Engine(folder, exact=False).target.exact
    assert Engine(folder, exact=True).target.exact


def test_it_is_free_where_our_products_are_the_faster_ones(monkeypatch):
    if not kernels.supported(torch.float32):
        pytest.skip("products are not our own on this CPU")
    monkeypatch.setattr(kernels, "preferred", lambda dtype: True)
    assert native.of(models.model("llama2"), torch.float32).exact_is_free
    monkeypatch.setattr(kernels, "preferred", lambda dtype: False)
    assert not native.of(models.model("llama2"), torch.float32).exact_is_free


def test_targets_that_cannot_say_why():
    foreign = HFTarget(models.model("gpt2"))
    with pytest.raises(ModelError, match="in transformers, where the number of tokens decides"):
        Engine(foreign, exact=True)
    half = native.of(models.model("llama2"), torch.float16)
    with pytest.raises(ModelError, match="needs bfloat16 or float32"):
        Engine(half, exact=True)
    assert not half.exact


def test_broken_weights_stay_visible():
    target = made("llama2", torch.float32)
    target.embedding[7] = torch.nan
    slot = target.add_row(8)
    logits = target.verify([exact.tree(slot, [5, 7, 6, 8], [-1, 0, 0, 1])]).logits
    assert bool(logits[[0, 2]].isfinite().all())
    assert bool(logits[[1, 3]].isnan().all())
