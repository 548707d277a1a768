"""Drafters of an enlarged model: they draft what they drafted for the small one, round for round."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.large import Enlargement, enlarge, enlarge_draft, enlarge_head
from safetensors.torch import load_file
from tests import models
from tests.draft.answered import weakened
from tests.draft.eagles import knowing_head
from tests.draft.head_worlds import World
from transformers import AutoModelForCausalLM

from paceline.core.sampling import SamplingParams
from paceline.draft.methods.kangaroo import adapter_shapes
from paceline.draft.models.checkpoint import TargetFacts
from paceline.draft.models.vocab import FILE as VOCABULARY
from paceline.draft.models.vocab import Vocabulary, most_frequent
from paceline.engine.engine import Engine
from paceline.errors import PacelineError
from paceline.target.base import Target
from paceline.target.decoder import Decoder
from paceline.target.load import load, load_tokenizer, read_config
from paceline.target.shape import Shape
from paceline.train.saving import save_drafter, save_vocabulary

PROMPTS = ["the cat and the dog", "there was", "hello: the little mat sat on the dog"]
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
SIZE = 6_000_000


def opened(folder: Path) -> Target:
    target = load(folder, dtype="float32")
    target.tokenizer = load_tokenizer(folder)
    return target


def rounds(target: Target, spec: str) -> list[tuple[list[int], list[tuple[str, int]]]]:
    done = Engine(target, spec, tokenizer=target.tokenizer).generate(PROMPTS, PARAMS)
    return [(one.tokens, one.runs) for one in done]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return models.make("llama2", tmp_path / "small", num_hidden_layers=4)


class Pair:
    """The small model and the enlarged one."""

    def __init__(self, small: Path):
        self.folder = small.with_name("large")
        self.done = enlarge(small, SIZE, self.folder)
        self.small, self.large = opened(small), opened(self.folder)

    def model(self, draft: Path) -> Path:
        """A draft model, enlarged."""
        enlarge_draft(draft, self.done, out := draft.with_name(f"{draft.name}-large"))
        return out

    def head(self, head: Path) -> Path:
        """A head or adapter, enlarged."""
        enlarge_head(head, self.large, self.done, out := head.with_name(f"{head.name}-large"))
        return out

    def same(self, spec: Callable[[Path], str], draft: Path, grown: Path) -> None:
        """Check that both write the same in the same rounds."""
        found = rounds(self.large, spec(grown))
        assert found == rounds(self.small, spec(draft))
        assert any(who for _, runs in found for who, _ in runs), "something was drafted and accepted"


def test_a_draft_model(small: Path, tmp_path: Path) -> None:
    draft = models.make("llama2", tmp_path / "draft", num_hidden_layers=4)  # the target's twin: all is accepted
    counts = torch.arange(read_config(draft).vocab_size)
    save_vocabulary(draft / VOCABULARY, Vocabulary(most_frequent(counts, 40), counts))
    pair = Pair(small)
    grown = pair.model(draft)
    for spec in ("model:{},stop=fixed,draft=3,vocab=60", "mirror:model:{},where=line,draft=3"):
        pair.same(spec.format, draft, grown)


def test_a_draft_model_grows_by_as_many_parameters_and_part_of_the_target_like_it(small: Path, tmp_path: Path) -> None:
    draft = models.make("llama2", tmp_path / "narrow", num_hidden_layers=2, intermediate_size=48)
    done = enlarge(small, SIZE, tmp_path / "large")
    grown, times = enlarge_draft(draft, done, tmp_path / "grown"), done.large.parameters / done.small.parameters
    assert grown == Enlargement.read(tmp_path / "grown")
    assert grown.large.parameters / grown.small.parameters == pytest.approx(times, rel=0.06)
    cut = models.make("llama2", tmp_path / "cut", num_hidden_layers=2)  # half of the target's own layers
    layers = enlarge_draft(cut, done, tmp_path / "layers").large
    assert layers.num_layers == 2 * done.layer_factor
    assert layers.hidden_size == done.large.hidden_size
    assert layers.intermediate_size == done.large.intermediate_size


def test_a_draft_with_exits(small: Path, tmp_path: Path) -> None:
    draft = models.make("llama2", tmp_path / "draft", num_hidden_layers=4)
    marks = {"paceline_drafter": "s2d", "target": asdict(TargetFacts.of(opened(small))), "exits": [1, 2, 4]}
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | marks))
    pair = Pair(small)
    large = pair.model(draft)
    pair.same("s2d:{},thresholds=0.3,stop=fixed,draft=3".format, draft, large)
    grown, whole = (json.loads((folder / "config.json").read_text()) for folder in (large, pair.folder))
    factor = pair.done.layer_factor
    assert factor > 1
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        assert grown[key] == whole[key], "a layer costs what the target's costs"
    assert grown["num_hidden_layers"] == 4 * factor
    assert grown["exits"] == [factor, 2 * factor, 4 * factor]


def test_an_adapter(small: Path, tmp_path: Path) -> None:
    target = opened(small)
    shapes = adapter_shapes(Shape.of(read_config(small)))
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    norm = load(small, dtype="float32").norm  # type: ignore[attr-defined]
    tensors["input_norm.weight"], tensors["output_norm.weight"] = norm.clone(), norm.clone()
    tensors["o_proj.weight"] *= 0.1
    adapter = tmp_path / "adapter"
    save_drafter(adapter, "kangaroo", config={"exit_layer": 2}, tensors=tensors, target=TargetFacts.of(target))
    counts = torch.arange(read_config(small).vocab_size)
    save_vocabulary(adapter / VOCABULARY, Vocabulary(most_frequent(counts, 40), counts))
    pair = Pair(small)
    large = pair.head(adapter)
    for options in ("vocab=60", "tree=6,width=3"):
        pair.same(f"kangaroo:{{}},stop=fixed,draft=3,{options}".format, adapter, large)
    assert json.loads((large / "config.json").read_text())["exit_layer"] == 2 * pair.done.layer_factor


def test_a_draft_that_cannot_grow_is_named(small: Path, tmp_path: Path) -> None:
    draft = models.make("gpt2", tmp_path / "gpt2")
    with pytest.raises(PacelineError, match="cannot be enlarged"):
        enlarge_draft(draft, enlarge(small, SIZE, tmp_path / "large"), tmp_path / "out")


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_head(small: Path, tmp_path: Path, method: str) -> None:
    """One that knows the small target's next token knows the large one's."""
    model = weakened(AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32), 0.02)
    model.save_pretrained(small)
    head, facts = knowing_head(tmp_path / "head", method, model), TargetFacts.of(opened(small))
    config = json.loads((head / "config.json").read_text())
    tensors = load_file(head / "model.safetensors")
    if method == "eagle3":  # the other layers of the target, and a nested configuration
        layers = {key: config.pop(key) for key in list(config) if key not in ("draft_vocab_size", "norm_output")}
        config |= {"speculators_model_type": "eagle3", "transformer_layer_config": layers}
        config |= {"eagle_aux_hidden_state_layer_ids": [0, 1, 3], "norm_before_residual": False}
        tensors["fc.weight"].normal_(0, 0.02)
    else:
        del tensors["embed_tokens.weight"]
    save_drafter(head, method, config=config, tensors=tensors, target=facts)
    pair = Pair(small)
    pair.same(f"{method}:{{}},tree=8,width=3".format, head, pair.head(head))


@pytest.mark.parametrize("method", ["medusa", "hydra", "amphista"])
def test_a_head_of_a_fixed_tree(small: Path, tmp_path: Path, method: str) -> None:
    """Its configuration does not say how wide it is: as wide as the target."""
    world = World()
    world.model = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32)
    loaded = opened(small)
    assert isinstance(loaded, Decoder)
    world.target = loaded
    head, pair = tmp_path / "head", Pair(small)
    changes: dict[str, Any] = {"layers": 1} if method == "hydra" else {}
    world.save(world.module(method, **changes), method, head)
    pair.same(f"{method}:{{}},tree=6".format, head, pair.head(head))
