"""Kangaroo: it writes what the target alone would have written, runs nothing twice, and drafts just as the paper says.

The models are random; in some the late layers are made weak, so that the early ones foresee much of what comes. The
drafts themselves are predicted from `AdapterModule` over whole texts: no cache, no engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.draft.methods.kangaroo import Kangaroo, KangarooConfig, adapter_shapes
from paceline.engine.engine import Engine
from paceline.errors import MethodError
from paceline.formats.heads.checkpoint import TargetFacts
from paceline.formats.rotary import rotary_tables
from paceline.formats.shape import Shape
from paceline.target.hf import HFTarget
from paceline.train.kangaroo import AdapterModule
from paceline.train.saving import save_drafter
from tests import models
from tests.draft.answered import NEW, Answered, weakened
from tests.fakes import TableTarget
from tests.plain import generate


@dataclass
class World(Answered):
    """With adapters in folders that leave the target after layer `exit`."""

    exit: int = 0

    def drafter(self, weights="trained", **options):
        return Kangaroo(KangarooConfig(checkpoint=str(self.folder / weights), **options))


def adapters(model, seed=0):
    """Random weights, zeros, and weights as good as trained ones: where late layers are weak, the early state is
    nearly the last one."""
    generator = torch.Generator().manual_seed(seed)
    shapes = adapter_shapes(Shape.of(model.config))
    random = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    trained = dict(AdapterModule(model).state_dict())
    trained |= {name: random[name] for name in ("q_proj.weight", "k_proj.weight", "v_proj.weight")}
    trained["o_proj.weight"] = random["o_proj.weight"] * 0.2
    return {"random": random, "zero": {name: torch.zeros(s) for name, s in shapes.items()}, "trained": trained}


def save(folder, target, exit, tensors):
    save_drafter(folder, "kangaroo", config={"exit_layer": exit}, tensors=tensors, target=TargetFacts.of(target))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Worlds by family, exit layer and strength of the late layers; made once."""

    @cache
    def make(family="llama2", exit=2, share=0.3):
        model = models.model(family, num_hidden_layers=4, tie_word_embeddings=False)
        here = World.of(weakened(model, share, exit, sureness=4), tmp_path_factory.mktemp("adapters"))
        here.exit = exit
        for name, tensors in {**adapters(model)}.items():
            save(here.folder / name, here.target, exit, tensors)
        return here

    return make


# The trained module -------------------------------------------------------------------------------------------------


def reference(world, weights):
    module = AdapterModule(world.model)
    module.load_state_dict(adapters(world.model)[weights])
    return module


@torch.no_grad()
def drafted_logits(world, weights, text):
    """What the draft says behind every token of `text`, [len(text), V], by transformers and the trained module."""
    early = world.model.model(torch.tensor([text]), output_hidden_states=True).hidden_states[world.exit]
    cos, sin = rotary_tables(world.model.config, world.target.shape)
    y = reference(world, weights)(early, cos[: len(text)], sin[: len(text)])
    return world.model.lm_head(y)[0]


# Losslessness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "exit", "weights", "options"),
    [
        *((family, 2, "trained", {"threshold": 0.3}) for family in ("qwen2", "qwen3", "mistral-window")),
        ("llama2", 0, "random", {"threshold": 0.1}),
        ("llama2", 3, "random", {"threshold": 0.1, "tree": 9, "width": 3}),
        ("llama2", 2, "zero", {"threshold": 0.0}),
    ],
)
def test_greedy_text_is_transformers_in_every_family_at_every_exit(world, family, exit, weights, options):
    """Rows give way, and prompts come in pieces."""
    here = world(family, exit)
    out = here.check(here.drafter(weights, **options), batch=3, chunk=24)
    assert sum(done.stats.draft_tokens for done in out) > 0


# What is run, and what is cached ------------------------------------------------------------------------------------


class Counting(Kangaroo):
    """Counts nodes and calls, and looks at the caches at the top of every round."""

    def bind(self, target):
        super().bind(target)
        self.nodes = [0] * target.num_layers
        self.calls = [0] * target.num_layers
        self.adapted = 0
        self.lags = []
        self.whole = {}
        extend = self.model.extend

        def counted(drafts, num_logits):
            self.adapted += 1
            return extend(drafts, num_logits)

        self.model.extend = counted

    def propose(self, asks):
        rows = [row for row, _ in asks]
        for row in rows:
            done = self.model.length(row)
            assert self.model.target.length(row.slot) == len(row) - 1 == done + self.model.pending.count(row)
            if row.id in self.whole:
                self.lags.append((self.whole[row.id], len(row) - 1 - done))
        return super().propose(asks)

    def observe(self, round):
        super().observe(round)
        for row, tree, done in zip(round.rows, round.trees, round.accepted, strict=True):
            if tree.num_drafted:
                self.whole[row.id] = len(done.path) == len(tree)


@pytest.fixture
def counted(world, monkeypatch):
    """A world whose layers count what they run."""
    here = world()
    drafter = Counting(KangarooConfig(checkpoint=str(here.folder / "trained"), threshold=0.3))

    class Block:
        def __init__(self, layer, inner):
            self.layer, self.inner = layer, inner
            self.nbytes = inner.nbytes

        def __call__(self, x, *rest):
            drafter.nodes[self.layer] += len(x)
            drafter.calls[self.layer] += 1
            return self.inner(x, *rest)

    monkeypatch.setattr(here.target, "layers", [Block(i, layer) for i, layer in enumerate(here.target.layers)])
    return here, drafter


def test_no_layer_runs_twice_on_a_token(counted):
    here, drafter = counted
    for prompt in here.prompts:
        engine = Engine(here.target, drafter)
        [done] = engine.generate([prompt], SamplingParams(max_tokens=NEW))
        rounds, drafted = done.rounds - 1, done.stats.draft_tokens
        assert drafter.nodes == [len(prompt) + rounds + drafted] * 4  # root and draft of every round, in every layer
        assert drafter.calls == [1 + drafted + rounds] * 2 + [1 + rounds] * 2
        assert drafter.adapted == drafted  # one token for each call
        assert sum(n * count for n, count in enumerate(done.stats.accepted)) + done.rounds >= done.new_tokens


def test_the_adapter_lags_by_one_token_only_after_a_whole_draft(counted):
    here, drafter = counted
    here.check(drafter)
    assert set(drafter.lags) == {(True, 1), (False, 0)}


# The draft itself ---------------------------------------------------------------------------------------------------


def predicted(world, weights, prompt, text, most, eta):
    """Tokens of every round behind the prompt's, from the target's whole text alone: a draft depends on the tokens
    before it and on nothing else."""
    logits = drafted_logits(world, weights, text)
    best, sure = logits.argmax(-1).tolist(), logits.softmax(-1).max(-1).values.tolist()
    at, rounds = len(prompt) + 1, []
    while at < len(text):
        right = 0
        for _ in range(min(most, len(text) - at - 1)):
            if best[at + right - 1] != text[at + right]:
                break
            right += 1
            if sure[at + right - 2] < eta or right == most:
                break
        rounds.append(right + 1)
        at += right + 1
    return rounds


def lengths(world, drafter, prompt, new):
    engine = Engine(world.target, drafter)
    engine.add(prompt, SamplingParams(max_tokens=new, ignore_eos=True))
    found = []
    while engine.has_work:
        found += [len(delta.tokens) for delta in engine.step()]
    return found[1:]


@pytest.mark.parametrize(("most", "eta"), [(1, 0.0), (2, 0.3), (6, 0.0), (6, 0.6), (6, 1.0)])
def test_every_round_is_as_the_whole_text_predicts(world, most, eta):
    here = world(share=0.5)
    for prompt in here.prompts[:2]:
        text = generate(here.model, prompt, 30, ())
        wanted = predicted(here, "trained", prompt, text, most, eta)
        assert lengths(here, here.drafter(draft=most, threshold=eta), prompt, 30) == wanted
        assert sum(wanted) == 29


# Bad input ----------------------------------------------------------------------------------------------------------


def refusal(target, path, **options):
    with pytest.raises(MethodError) as caught:
        Kangaroo(KangarooConfig(checkpoint=str(path), **options)).bind(target)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_does_not_fit_is_refused_in_one_line(world, tmp_path):
    here = world()
    good = adapters(here.model)["trained"]
    assert "needs a model of a family that the native decoder runs" in refusal(TableTarget(), here.folder / "trained")
    other = HFTarget(models.model("gpt2"), name="gpt2")
    assert "gpt2 runs in transformers" in refusal(other, here.folder / "trained")
    for layer in (4, -1, None, "2"):
        save(tmp_path / "exit", here.target, layer, good)
        assert "an exit layer is 0 to 3" in refusal(here.target, tmp_path / "exit")
