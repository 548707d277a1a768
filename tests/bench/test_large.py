"""Enlarged models say what the small ones say, in our engine and in transformers."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks import large
from benchmarks.large import Enlargement, choose_shape, enlarge, num_parameters, parse_size
from safetensors.torch import load_file
from tests import models
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.errors import ModelError, PacelineError
from paceline.target.load import load_tokenizer

SMALL = {"hidden_size": 16, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}
PROMPTS = [[5, 17, 200, 33, 8], [300, 2, 9]]

# (family, changes, parameters, width factor that these lead to)
CASES = {
    "layers, GQA, untied": ("llama2", SMALL, 200_000, 1),
    "width 16, tied": ("smollm", SMALL | {"num_hidden_layers": 2}, 1_500_000, 16),
    "width 4, every bias": ("llama-bias", SMALL, 1_000_000, 4),
    "width 4, qwen3": ("qwen3", SMALL | {"head_dim": 8}, 600_000, 4),
    "width 4, sliding window": ("mistral-window", SMALL, 400_000, 4),
}


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Enlargement]:
    """A random model, an enlargement of it, and what was done."""
    family, changes, size, _ = CASES[request.param]
    folder = tmp_path_factory.mktemp("large")
    small = models.make(family, folder / "small", **changes)
    return small, folder / "large", enlarge(small, size, folder / "large")


def answers(folder: Path, params: SamplingParams) -> list[list[int]]:
    return [done.tokens for done in Engine(folder, dtype="float32").generate(PROMPTS, params)]


def transformers_model(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_the_engine_says_the_same(pair) -> None:
    small, big, _ = pair
    for params in (
        SamplingParams(max_tokens=32, ignore_eos=True),
        SamplingParams(max_tokens=32, ignore_eos=True, temperature=0.8, top_p=0.95, seed=7),
    ):
        assert answers(big, params) == answers(small, params)


@torch.no_grad()
def test_transformers_says_the_same(pair) -> None:
    small, big = transformers_model(pair[0]), transformers_model(pair[1])
    made = pair[2]
    options = {"max_new_tokens": 32, "min_new_tokens": 32, "do_sample": False}
    told = [model.generate(torch.tensor(PROMPTS[:1]), **options) for model in (big, small)]
    assert torch.equal(*told)
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        ours, theirs = (model(ids, output_hidden_states=True) for model in (big, small))
        assert torch.allclose(ours.logits, theirs.logits, atol=1e-4)
        # The input of small layer l is that of large layer l * layer_factor, zeros behind it.
        width, layers = made.small.hidden_size, made.small.num_layers
        for layer in range(layers):
            hidden = ours.hidden_states[layer * made.layer_factor]
            assert torch.allclose(hidden[..., :width], theirs.hidden_states[layer], atol=1e-4)
            assert not hidden[..., width:].any()
            within = ours.hidden_states[layer * made.layer_factor + made.layer_factor - 1]
            assert layer == 0 or made.layer_factor == 1 or not torch.equal(within, hidden)


def test_the_size_and_the_record(pair, request) -> None:
    small, big, made = pair
    _, _, size, width = CASES[request.node.callspec.params["pair"]]
    weights = load_file(big / "model.safetensors")
    assert sum(w.numel() for w in weights.values()) == made.large.parameters == pytest.approx(size, rel=0.05)
    assert sum(w.numel() for w in load_file(small / "model.safetensors").values()) == made.small.parameters
    assert made.bytes == sum(w.nbytes for w in weights.values())
    assert made.width_factor == width
    assert made.large.num_heads == width * made.small.num_heads
    assert made.large.num_heads * made.small.num_kv_heads == made.small.num_heads * made.large.num_kv_heads
    assert made.large.intermediate_size % 64 == 0 or made.large.intermediate_size == made.small.intermediate_size
    assert Enlargement.read(big) == made
    assert f"{made.large.parameters:,} parameters" in made.describe()
    assert ("nothing behind each of its own" in made.describe()) == (made.layer_factor > 1)
    assert load_tokenizer(big).encode("the cat") == load_tokenizer(small).encode("the cat")
    assert AutoTokenizer.from_pretrained(big).chat_template == AutoTokenizer.from_pretrained(small).chat_template


def test_added_weights_are_not_zeros_unless_they_must_be(pair) -> None:
    _, big, made = pair
    weights = load_file(big / "model.safetensors")
    for name, weight in weights.items():
        kind = name.split(".")[-2]
        if kind in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"):
            assert (weight != 0).float().mean() > 0.99, name
        if kind in ("o_proj", "down_proj") and int(name.split(".")[2]) % made.layer_factor:
            assert not weight.any(), name


def test_bfloat16_stays_exact(tmp_path: Path) -> None:
    small = models.make("smollm", tmp_path / "small", dtype=torch.bfloat16, **SMALL)
    assert enlarge(small, 200_000, tmp_path / "large").width_factor == 4
    before, after = load_file(small / "model.safetensors"), load_file(tmp_path / "large" / "model.safetensors")
    for name in ("model.norm.weight", "model.layers.0.input_layernorm.weight"):
        assert after[name].dtype == torch.bfloat16
        assert torch.equal(after[name][:16] * 2, before[name])


def test_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "SHARD_BYTES", 200_000)
    small = models.make("qwen2", tmp_path / "small", **SMALL)
    made = enlarge(small, 300_000, tmp_path / "large")
    files = sorted((tmp_path / "large").glob("*.safetensors"))
    assert len(files) > 2
    index = json.loads((tmp_path / "large" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == made.bytes
    assert set(index["weight_map"].values()) == {file.name for file in files}
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    assert answers(tmp_path / "large", params) == answers(small, params)
    assert transformers_model(tmp_path / "large").num_parameters() == made.large.parameters


def test_sizes() -> None:
    sizes = {"1B": 10**9, "500M": 5 * 10**8, "1.5b": 1_500_000_000, "300k": 300_000, "12345": 12345}
    assert {text: parse_size(text) for text in sizes} == sizes
    for wrong in ("", "big", "-1", "0", "1T", "1.5.2M", "1e9"):
        with pytest.raises(PacelineError, match="not a size; give a number of parameters such as 1B"):
            parse_size(wrong)


def test_what_cannot_be_enlarged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = models.make("smollm", tmp_path / "small", **SMALL)
    with pytest.raises(ModelError, match=r"has 13,296 parameters already.* the smallest enlargement has [\d,]+$"):
        enlarge(small, 10_000, tmp_path / "large")
    with pytest.raises(ModelError, match=r"within 5% of 14,000 parameters; the nearest sizes are [\d,]+ and [\d,]+$"):
        enlarge(small, 14_000, tmp_path / "large")
    foreign = models.make("gpt2", tmp_path / "gpt2")
    with pytest.raises(ModelError, match="cannot be enlarged: model type 'gpt2' is not one of llama, mistral"):
        enlarge(foreign, 10**6, tmp_path / "large")
    with pytest.raises(ModelError, match="there is no folder"):
        enlarge(tmp_path / "nothing", 10**6, tmp_path / "large")
    with pytest.raises(PacelineError, match="exists already; name a new folder"):
        enlarge(small, 300_000, small)
    with pytest.raises(ModelError, match="not an enlarged model"):
        Enlargement.read(small)
    with pytest.raises(PacelineError, match=r"GB free, and the enlarged model takes 400000\.\d GB"):
        enlarge(small, 10**14, tmp_path / "large")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpt2", "small"]


def test_nothing_is_left_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = models.make("smollm", tmp_path / "small", **SMALL)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(large, "save_file", full)
    with pytest.raises(PacelineError, match=r"large cannot be written: .*No space left"):
        enlarge(small, 300_000, tmp_path / "large")
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_proportions_are_ordinary_where_they_can_be(demo: Path) -> None:
    small = large.Source(demo).shape
    for size in (10**8, 3 * 10**8, 10**9):
        chosen = choose_shape(small, size, "demo")
        assert num_parameters(chosen) == pytest.approx(size, rel=0.05)
        assert 1.5 < chosen.intermediate_size / chosen.hidden_size < 8.5  # 100M: neither this width nor four times it
        assert 15 < chosen.hidden_size / chosen.num_layers < 260


@pytest.mark.slow
def test_the_demo_model_at_ten_times_its_size(demo: Path, tmp_path: Path) -> None:
    """In bfloat16 the kernels may add in another order: nearly all answers stay what they were."""
    made = enlarge(demo, 10**8, tmp_path / "large")
    assert made.large.parameters == pytest.approx(10**8, rel=0.05)
    topics = ["a cat", "rain", "the sea", "a train", "bread", "winter", "a garden", "music", "the moon", "a letter"]
    asked = [ask + topic for topic in topics for ask in ("Tell me about ", "Describe ")]
    prompts = [[{"role": "user", "content": text}] for text in asked]
    params = SamplingParams(max_tokens=48)
    told = [[d.tokens for d in Engine(folder).generate(prompts, params)] for folder in (demo, tmp_path / "large")]
    same = sum(a == b for a, b in zip(*told, strict=True))
    print(json.dumps({"identical": same, "of": len(prompts), "model": made.describe()}))
    assert same >= 0.9 * len(prompts)
