"""Models with weights of eight and four bits: what they compute, folders of them, and what they refuse."""

import json
from statistics import median

import pytest
import torch
from tests import models
from tests.native import logits, off
from tests.pairs import paired

from paceline import kernels, processor
from paceline.errors import ModelError, PacelineError
from paceline.formats.experts import as_checkpoint
from paceline.formats.precision import exact_dtype, quantised, usual
from paceline.formats.shape import weight_shapes
from paceline.kernels.blocks import Blocks
from paceline.kernels.linear import BlockLinear, Linear
from paceline.target.decoder import Decoder
from paceline.target.load import MEASURED, load, load_tokenizer, quantise_folder


def decoders(family, word, dtype=torch.float32):
    """The model itself, the model in blocks, and what the blocks say as ordinary float32 weights."""
    model = models.model(family)
    state = as_checkpoint(model.state_dict())
    weights = {name: state[name] for name in weight_shapes(model.config)}
    blocks = quantised(weights, word)
    dense = {name: w.dense() if isinstance(w, Blocks) else w for name, w in blocks.items()}
    return tuple(Decoder(model.config, w, dtype=dtype) for w in (weights, blocks, dense))


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize(("family", "word"), paired(models.NATIVE, ("int8", "int4")))
def test_logits_are_those_of_the_dequantised_weights(family, word, monkeypatch):
    """But for the rounding of inputs to eight bits, which these random models magnify. So every product is compared
    with an ordinary one of the same inputs, rounded the same way; then what is left is the order of sums."""
    make = BlockLinear.__init__
    monkeypatch.setattr(BlockLinear, "__init__", lambda *args, keep, **how: make(*args, **how))  # all keep their blocks
    own, blocks, dense = decoders(family, word)
    assert isinstance(blocks.layers[0].attention.out, BlockLinear)
    product, products = Linear.__call__, []

    def compared(linear, x):
        out = product(linear, x)
        if isinstance(linear, BlockLinear):
            right, least = rounded_product(linear, x)
            assert ((out - right).abs() <= least).all()
            products.append(linear)
        return out

    blocks._programs = None  # recorded forwards do not call products one by one
    monkeypatch.setattr(Linear, "__call__", compared)
    said = logits(blocks)
    monkeypatch.undo()
    most = 0.2 if own.recurrent else 0.08  # gates and states magnify it further
    if own.shape.experts is None:
        assert {*products} == {one for one in blocks.products if isinstance(one, BlockLinear)}
        assert off(said, logits(dense)) < most
    else:  # where two experts are nearly as good, rounding decides, and that token's logits are quite others
        assert median(off(one, other) for one, other in zip(said, logits(dense), strict=True)) < most
    assert off(logits(dense), logits(own)) > 0.001


def rounded_product(linear, x):
    """(x @ weight.T + bias of rows that are rounded as for blocks, [N, outputs]; how far another right result may lie).

    Sums have another order; and a number nearly halfway between two steps may go to either."""
    weight, parts = linear.dense(), x.double().unflatten(-1, (-1, 32))
    scale = parts.abs().amax(-1, keepdim=True) / 127
    steps = torch.where(scale > 0, parts / scale, 0)
    open_ = scale * ((steps - steps.floor() - 0.5).abs() < 1e-4)
    rounded = (steps.round() * scale).flatten(-2)
    right = (rounded @ weight.double().T + (0 if linear.bias is None else linear.bias.double())) / linear.divisor
    apart = (open_.flatten(-2) + 1e-6 * rounded.abs()) @ weight.double().abs().T / abs(linear.divisor)
    if linear.cap is not None:
        right, apart = linear.cap * (right / linear.cap).tanh(), apart + 1e-6 * linear.cap
    return right, apart + 1e-6 * right.abs()


@pytest.mark.parametrize("word", ["int8", "int4"])
@pytest.mark.parametrize("family", ["smollm", "qwen2"])
def test_with_inputs_of_16_bits_a_model_says_what_its_weights_say(tmp_path, family, word):
    folder = models.make(family, tmp_path / "own", dtype=torch.bfloat16)
    quantise_folder(folder, tmp_path / "made", word)
    dense = logits(load(tmp_path / "made", dtype="float32"))
    eight, sixteen = (load(tmp_path / "made", dtype="auto-float32", activations=bits) for bits in (8, 16))
    assert (eight.activations, sixteen.activations) == (8, 16)
    assert "rounded to 16 bits" in sixteen.notes[0]
    assert eight.prefix_key != sixteen.prefix_key
    assert off(logits(sixteen), dense) < off(logits(eight), dense) / 50
    for bits, model, words in ((12, "made", "there are 8 and 16"), (16, "own", "and it has none")):
        with pytest.raises(ModelError, match=words):
            load(tmp_path / model, activations=bits)


@pytest.mark.parametrize(
    ("megabytes", "features", "dtype", "bits"),
    [
        (90, (), None, 16),
        (90, (), torch.float32, 16),
        (90, (), torch.bfloat16, 8),
        (900, (), None, 8),
        (900, ("avx512vnni",), torch.float32, 16),
        (900, ("avx512vnni", "amx-bf16"), None, 8),
    ],
)
def test_inputs_have_16_bits_by_default_where_that_takes_little_time(megabytes, features, dtype, bits, monkeypatch):
    monkeypatch.setattr(processor, "has", lambda *names: {*names} <= {*features})
    assert usual(megabytes << 20, dtype)[0] == bits


def test_blocks_in_float32_are_exact_by_default_on_every_processor(monkeypatch):
    """Theirs are our own products anyhow, also where a library's are faster for other weights."""
    own, blocks, _ = decoders("smollm", "int8")
    if not kernels.supported(torch.float32):
        pytest.skip("products are not our own on this CPU")
    monkeypatch.setattr(kernels, "preferred", lambda dtype: False)
    assert (own.exact_is_free, blocks.exact_is_free) == (False, True)


def test_what_is_read_is_what_blocks_hold():
    own, blocks, _ = decoders("qwen2", "int8")
    matrices = [size for name, size in weight_shapes(models.config("qwen2")).items() if len(size) == 2]
    read = sum(a * b for a, b in matrices) - own.vocab_size * own.hidden_size  # the embedding is not read
    assert own.weight_bytes - blocks.weight_bytes == read * 4 - read * 34 // 32
    assert own.weights_fingerprint != blocks.weights_fingerprint, "unless it is told which weights these were made of"
    assert blocks.layers[0].nbytes < own.layers[0].nbytes / 3
    before, few = logits(blocks), torch.tensor([3, 300, 7])
    read = blocks.weight_bytes
    blocks.trim_head(few)
    assert torch.equal(logits(blocks), before[:, few])
    assert read - blocks.weight_bytes == (own.vocab_size - 3) * own.hidden_size * 34 // 32


@pytest.mark.parametrize("family", ["smollm", "llama2"])
def test_an_embedding_that_is_the_head_too_has_its_blocks(family):
    own, blocks, dense = decoders(family, "int8")
    assert own.shape.tied == (family == "smollm")
    assert isinstance(blocks.head, BlockLinear)
    assert (blocks.head.product.blocks[0] is blocks._table.weight) == own.shape.tied
    tokens = torch.arange(own.vocab_size).flip(0)
    blocks.trim_head(torch.tensor([3, 300, 7]))  # which takes nothing from the embedding
    assert torch.equal(blocks.embedded(tokens), dense.embedded(tokens))
    assert torch.equal(blocks.embedding, dense.embedding)


@pytest.mark.parametrize(("word", "family"), paired(["int8", "int4"], ["smollm", "qwen2"]))
def test_a_folder_says_what_its_model_says_when_it_is_loaded_so(tmp_path, family, word):
    models.make(family, tmp_path / "own", dtype=torch.bfloat16)
    size = quantise_folder(tmp_path / "own", tmp_path / "made", word)
    own, loaded = load(tmp_path / "own"), load(tmp_path / "own", dtype=word)
    made = load(tmp_path / "made")
    assert all(isinstance(target, Decoder) for target in (loaded, made))
    assert torch.equal(logits(made), logits(loaded))
    assert made.dtype == loaded.dtype == torch.float32
    assert made.activations == loaded.activations == 16  # it is small
    eight = load(tmp_path / "made", activations=8)
    assert (eight.dtype, eight.activations) == (own.dtype, 8)
    assert {made.weights_fingerprint, loaded.weights_fingerprint} == {own.weights_fingerprint}
    assert made.weight_bytes == loaded.weight_bytes < own.weight_bytes
    assert size < own.weight_bytes
    if own.dtype == torch.bfloat16:  # where the CPU has units for it
        assert eight.weight_bytes <= size
    assert made.quantised == loaded.quantised
    assert "bits a weight" in made.notes[0]
    assert own.notes == []
    assert load_tokenizer(tmp_path / "made").fingerprint == load_tokenizer(tmp_path / "own").fingerprint


def test_a_folder_in_blocks_is_expanded_by_a_16_or_32_bit_dtype(tmp_path):
    folder = models.make("smollm", tmp_path / "own", dtype=torch.bfloat16)
    quantise_folder(folder, tmp_path / "made", "int4")
    (tmp_path / "made" / MEASURED).write_text('{"sentence": "measured in blocks"}')
    model, blocks = models.model("smollm"), load(tmp_path / "made", dtype="auto-float32")
    assert isinstance(blocks, Decoder)
    assert isinstance(blocks.layers[0].attention.qkv, BlockLinear)
    assert blocks.notes[1] == "made: measured in blocks"
    weights = {name: model.state_dict()[name].bfloat16() for name in weight_shapes(model.config)}
    made = quantised(weights, "int4")
    dense = {name: w.dense() if isinstance(w, Blocks) else w for name, w in made.items()}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        expanded = load(tmp_path / "made", dtype=dtype, exact=False)
        assert isinstance(expanded, Decoder)
        assert torch.equal(logits(expanded), logits(Decoder(model.config, dense, dtype=dtype)))
        assert expanded.weights_fingerprint == blocks.weights_fingerprint
    eight = load(tmp_path / "made", dtype="int8-float32")
    assert eight.notes[0].startswith("made has its weights in Q8_0, 8.5 bits a weight, made of Q4_0 and Q8_0, ")
    assert "measured" not in " ".join(eight.notes)  # that was of the four bits
    assert off(logits(eight), logits(load(tmp_path / "made", dtype="float32"))) < 0.1
    (note,) = load(tmp_path / "made", dtype="float32").notes
    assert note.startswith("made has its weights in float32, expanded from Q4_0 and Q8_0, ")
    assert "measured" not in note  # in blocks, which is another model


def test_a_matrix_that_blocks_do_not_fit_stays_as_it_is(tmp_path):
    models.make("llama2", tmp_path / "own", intermediate_size=100)
    made = load(tmp_path / "own", dtype="int8")
    assert isinstance(made, Decoder)
    assert isinstance(made.layers[0].mlp.gate_up, BlockLinear)
    assert not isinstance(made.layers[0].mlp.down, BlockLinear)
    assert str(made.quantised).startswith("Q8_0 and F32, ")


def test_what_cannot_be_done_is_said_in_one_line(tmp_path, monkeypatch):
    models.make("llama2", tmp_path / "own")
    models.make("gpt2", tmp_path / "foreign")
    quantise_folder(tmp_path / "own", tmp_path / "made", "int8")

    def refused(**how):
        with pytest.raises(ModelError) as error:
            load(**how)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "there are auto, float32, bfloat16, float16, int8, int4. Did you mean 'int4'?" in refused(
        model=tmp_path / "own", dtype="int-4"
    )
    assert "model type 'gpt2' is not one of" in refused(model=tmp_path / "foreign", dtype="int8")
    for dtype in ("int4", "int8-float32"):
        message = refused(model=tmp_path / "made", dtype=dtype)
        assert f"in Q8_0, 8.5 bits a weight already, so {dtype[:4]} cannot be made of it" in message
    # As if this machine had another device.
    monkeypatch.setattr("paceline.target.load.device_named", lambda _: torch.device("meta"))
    assert "--device cpu" in refused(model=tmp_path / "own", dtype="int8", device="meta")
    with pytest.raises(PacelineError, match="exists already"):
        quantise_folder(tmp_path / "own", tmp_path / "made", "int8")
    with pytest.raises(PacelineError, match="there are int8, int4"):
        quantise_folder(tmp_path / "own", tmp_path / "new", "int3")
    with pytest.raises(ModelError, match="in blocks already"):
        quantise_folder(tmp_path / "made", tmp_path / "new", "int8")
    assert not (tmp_path / "new").exists()

    file = tmp_path / "made" / "config.json"
    values = json.loads(file.read_text())
    values["quantization_config"]["kinds"]["lm_head.weight"] = "Q9_9"
    file.write_text(json.dumps(values))
    assert "'Q9_9'; there are Q8_0, Q4_0" in refused(model=tmp_path / "made")
    values["quantization_config"]["kinds"]["lm_head.weight"] = "Q4_0"
    file.write_text(json.dumps(values))
    assert "lm_head.weight has shape" in refused(model=tmp_path / "made")


def test_a_cpu_that_is_slow_or_cannot_says_so(monkeypatch):
    _, blocks, dense = decoders("llama2", "int8")
    monkeypatch.setattr("paceline.kernels.integer.instruction_set", lambda: "plain")
    assert "slowly" in blocks._notes([])[1]
    monkeypatch.setattr("paceline.kernels.integer.supported", lambda: False)
    assert "expanded" in blocks._notes([])[1]
    assert dense.notes == []
    expanded = decoders("llama2", "int8")[1]
    assert off(logits(expanded), logits(dense)) < 1e-5


def test_all_else_may_be_in_float32(tmp_path):
    folder = models.make("llama2", tmp_path / "own", dtype=torch.bfloat16)
    wide, own = load(folder, dtype="int8-float32"), load(folder, dtype="int8")
    assert wide.dtype == torch.float32
    assert wide.quantised == own.quantised
    assert off(logits(own), logits(wide)) < 0.2  # bfloat16, which this random model magnifies
    assert exact_dtype("int8", "Q8_0") == exact_dtype("int8-bfloat16", "Q8_0") == "int8-float32"
    assert exact_dtype("bfloat16", None) == exact_dtype("auto", None) == "float32"
    assert exact_dtype("auto", "Q4_K") == "auto-float32"  # blocks stay
    assert load(folder, dtype="auto-float32").dtype == torch.float32
