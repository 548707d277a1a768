"""Heads over a fixed tree: they write what the target alone writes, and they guess what their networks say.

Targets and heads are random. What a drafter guesses is compared with the network that is trained, over whole texts:
no cache, no engine.
"""

from functools import cache

import pytest
import torch

from paceline.core.request import Row
from paceline.core.sampling import SamplingParams, probabilities
from paceline.draft import registry
from paceline.draft.models.fixed_tree import HeadsDrafter
from paceline.draft.shapes import compile_template, published
from paceline.engine.engine import Engine
from paceline.errors import MethodError
from paceline.formats.heads.networks import JointHeads, concat_scaled
from tests import models
from tests.draft.head_worlds import HEADS, World, stir

GREEDY = SamplingParams(max_tokens=6)

NETWORKS = {
    "medusa": ("medusa", {}),
    "medusa, two blocks and heads of its own": ("medusa", {"layers": 2, "own_heads": True}),
    "hydra": ("hydra", {"layers": 1, "prefix": False}),
    "hydra++": ("hydra", {"layers": 3, "prefix": True}),
    "amphista": ("amphista", {}),
    "amphista, heads of its own": ("amphista", {"encoder_ffn": False, "own_heads": True}),
}


@cache
def world():
    return World()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Spec and module of a network by its name here; made once."""

    @cache
    def make(name):
        kind, changes = NETWORKS[name]
        module = world().module(kind, **changes)
        return world().save(module, kind, tmp_path_factory.mktemp("heads")), module

    return make


# What is trained is what drafts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_trained_is_what_drafts(made, name):
    """After rounds of any length the drafter guesses the best tokens of the trained network over the whole text; the
    answer is the target's own."""
    spec, module = made(name)
    drafter = registry.create(f"{spec},tree=5")
    assert isinstance(drafter, HeadsDrafter)
    seen = []
    propose = drafter.propose

    def watched(asks):
        trees = propose(asks)
        seen.extend((row.tokens.tolist(), most, tree) for (row, most), tree in zip(asks, trees, strict=True))
        return trees

    drafter.propose = watched
    made_with, plain = (
        Engine(world().target, draft, max_batch=3, prefill_chunk=16).generate(world().prompts[:4], GREEDY)
        for draft in (drafter, "none")
    )
    assert [done.tokens for done in made_with] == [done.tokens for done in plain]
    checked = 0
    template = drafter.proposer.template
    for text, most, tree in seen[::2]:
        if models.EOS not in tree.tokens:  # below which nothing is drafted
            assert tree.parent.tolist() == template.parent[: template.within(most)].tolist()
        for node in range(1, len(tree)):
            way = path(tree, node)
            candidates = best(module, [*text, *way[:-1]], len(text) - 2, len(way) - 1)
            assert way[-1] in candidates[: drafter.model.ranks]
            checked += 1
    assert checked > 20


def test_at_a_temperature_every_depth_has_the_noise_of_its_place(made):
    drafter = registry.create(made("medusa")[0])
    assert isinstance(drafter, HeadsDrafter)
    drafter.bind(world().target)
    row = Row(0, world().prompts[0], SamplingParams(temperature=1.0, seed=3), max_context=99)
    read = 0.01 * torch.randn(1, world().target.hidden_size, generator=torch.Generator().manual_seed(0))
    for k, output in enumerate(drafter.model.outputs):
        tokens, _ = row.noise.guess(probabilities(output(read), row.params, [])[0], row.num_new + k)
        assert drafter.model.candidates(read, k, [row])[0, 0] == tokens[0]


def path(tree, node):
    way = []
    while node:
        way.insert(0, int(tree.tokens[node]))
        node = int(tree.parent[node])
    return way


@torch.no_grad()
def best(module, text, at, k):
    """The candidates of depth k after position `at` of a text that ends with the tokens drafted so far."""
    ids = torch.tensor([[*text, 0]])  # the last one is looked at by no position that counts
    states, _ = module.read(ids)
    logits = module.drafted(ids, states, torch.tensor([at]))[:, k] @ module.table(k).T
    order = logits[0].argsort(descending=True).tolist()
    return order


@pytest.mark.parametrize("family", ["llama2", "qwen3"])
def test_an_untrained_network_says_what_the_targets_own_head_says(family):
    """Every residual output at zero and the identity before stage 2: the base head's logits at every depth."""
    here = World(family)
    torch.manual_seed(0)
    from paceline.train.heads import AmphistaConfig, AmphistaLoss

    module = AmphistaLoss(here.model, AmphistaConfig(depth=HEADS)).eval()
    ids = torch.tensor([here.prompts[0]])
    states, _ = module.read(ids)
    at = torch.arange(ids.shape[1] - 1)
    drafted = module.drafted(ids, states, at)
    with torch.no_grad():
        expected = here.model(ids).logits[0, :-1]
        for k in range(HEADS):
            torch.testing.assert_close(drafted[:, k] @ module.table(k).T, expected, atol=1e-4, rtol=1e-4)


def test_later_tokens_of_the_text_are_not_seen():
    """The encoder looks both ways over the depths, never over the text: other tokens later change nothing."""
    module = world().module("amphista")
    ids = torch.tensor([world().prompts[2]])
    other = ids.clone()
    other[0, 12:] = 9
    at = torch.tensor([3, 10])  # position 10 reads the token after it, number 11
    one, two = (module.drafted(text, module.read(text)[0], at) for text in (ids, other))
    torch.testing.assert_close(one, two)


def test_an_embedding_weighs_as_much_as_its_state():
    states, embedded = 30 * torch.randn(4, 9), 0.1 * torch.randn(4, 9)
    both = concat_scaled(states, embedded)
    assert torch.equal(both[:, :9], states)
    torch.testing.assert_close(both[:, 9:].square().mean(-1), states.square().mean(-1))


def test_every_depth_sees_the_others():
    z, heads = torch.randn(2, 32), JointHeads(HEADS, 32, 4, 48, 1e-6)
    stir(heads, 1.0)
    before = heads(z)
    with torch.no_grad():
        heads.mlps[-1].linear.bias += 1
    assert ((heads(z) - before).abs().amax((0, 2)) > 1e-6).all()


# The tree ------------------------------------------------------------------------------------------------------------


def test_a_tree_is_built_from_the_measured_accuracies(made, tmp_path):
    spec, _ = made("medusa")
    drafter = bound(f"{spec},tree=4")
    template = drafter.proposer.template
    paths = sorted(zip(template.parent.tolist(), template.rank.tolist(), strict=True))[1:]
    assert paths == [(0, 0), (0, 1), (0, 2), (1, 0)]  # 0.5, 0.2, 0.1 and 0.5 * 0.4: slots.json of the world
    whole = bound(f"{spec},tree=63")
    assert len(whole.proposer.template.parent) == 3 * 3 * 3 + 3 * 3 + 3 + 1  # no more ranks were measured


def test_without_accuracies_it_is_the_published_tree(made, tmp_path):
    _, module = made("medusa")
    world().save(module, "medusa", tmp_path)
    (tmp_path / "slots.json").unlink()
    drafter = bound(f"medusa:{tmp_path},tree=63")
    kept = [path for path in published() if len(path) <= HEADS]
    assert drafter.proposer.template.parent.tolist() == compile_template(kept, 10).parent.tolist()


def bound(spec):
    drafter = registry.create(spec)
    drafter.bind(world().target)
    assert isinstance(drafter, HeadsDrafter)
    return drafter


# Heads for another target --------------------------------------------------------------------------------------------


WRONG = [
    ({"own_heads": False}, "heads is None; a whole number from 1 to 64 is wanted"),
    ({"heads": HEADS + 1}, r"has no mlps.3.linear.bias, mlps.3.linear.weight"),
    ({"heads": HEADS, "encoder_ffn": False}, r"has encoder.0.ffn.down_proj.weight, .*which nothing here reads"),
]


@pytest.mark.parametrize(("network", "says"), WRONG)
def test_another_network_of_amphista_is_refused(tmp_path, network, says):
    spec = world().save(world().module("amphista"), "amphista", tmp_path, {"network": network})
    with pytest.raises(MethodError, match=says) as error:
        bound(spec)
    assert "\n" not in str(error.value)
