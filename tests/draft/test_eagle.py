"""eagle and eagle3: they write what the target alone would have written, read their own cache as if it were fresh, and
grow the trees of EAGLE-2. What files they read is in test_eagle_files.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.core.request import Row
from paceline.core.sampling import SamplingParams
from paceline.core.segment import Segment
from paceline.draft import registry
from paceline.draft.base import Drafter
from paceline.draft.models import pending
from paceline.draft.models.draft_model import Draft
from paceline.draft.models.model_drafter import ModelDrafter
from paceline.draft.models.proposers import Growth
from paceline.engine.engine import Engine
from paceline.target.hf import HFTarget
from tests import models, native
from tests.draft.answered import NEW, weakened
from tests.draft.eagles import METHODS, World, d2t_of, described, eagle3, knowing_head, write
from tests.enumerated import law, plainly
from tests.lossless_enumeration import largest_difference
from tests.pairs import paired
from tests.plain import texts


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., World]:
    """Worlds by family and by what a target's layers add; made once."""

    @cache
    def make(family: str = "llama2", share: float = 0.02) -> World:
        return World.make(tmp_path_factory.mktemp("heads"), family, share)

    return make


def accepted(out: Sequence) -> int:  # type: ignore[type-arg]
    return sum(sum(done.stats.accepted[1:]) for done in out)


# Losslessness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_model_that_transformers_runs(world: Callable[..., World], method: str) -> None:
    here = world()
    target = HFTarget(here.model, eos_token_ids=here.target.eos_token_ids)
    out = Engine(target, here.drafter(method)).generate(here.prompts[:3], SamplingParams(max_tokens=NEW))
    assert texts(here.prompts[:3], out) == list(here.answers.values())[:3]
    assert accepted(out) > 0


@pytest.mark.parametrize(("method", "tree"), paired(METHODS, [0, 3]))
def test_sampled_text_has_the_targets_distribution(tmp_path: pytest.TempPathFactory, method: str, tree: int) -> None:
    """Exactly: every outcome on a target of few tokens is walked."""
    model = models.model("llama1", num_hidden_layers=3, vocab_size=5, seed=3, tie_word_embeddings=False, **native.TINY)
    target = native.of(weakened(model, 0.7), eos=())
    folder = knowing_head(tmp_path / "head", method, model)  # type: ignore[operator]
    drafter = registry.create(f"{method}:{folder},draft=2,tree={tree},width=2")
    prompt, new = [1, 3, 2], 3
    assert largest_difference(law(target, drafter, prompt, new), plainly(target, prompt, new)) < 1e-5


# The cache ----------------------------------------------------------------------------------------------------------


def fresh_reading(
    here: World, drafter: ModelDrafter, text: list[int], pairs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the head, and the tapped states, of a text that others of their own read whole."""
    target = native.of(here.model)
    slot = target.add_row(len(text))
    said = target.verify([Segment.chunk(slot, np.array(text), last=False)], drafter.needs)
    states = torch.cat([said.hidden[layer] for layer in drafter.model.network.taps], -1)
    other = type(drafter)(drafter.config)
    other.bind(target)
    network = other.model.network
    own = network.cache.add_row(pairs)
    tokens = np.array(text[1 : pairs + 1])
    with torch.inference_mode():
        embedded = network.table[torch.from_numpy(tokens)]
        network.forward(embedded, network.first(states[:pairs]), [Segment.chunk(own, tokens, last=False)])
    return network.cache.kv[:, :, own, :, :pairs], states


@pytest.mark.parametrize(
    ("method", "tree", "chunk"),
    paired(
        METHODS,
        [(0, pending.CHUNK), (12, pending.CHUNK), (0, 3)],
    ),
)
def test_after_every_round_the_cache_is_a_fresh_prefill(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, method: str, tree: int, chunk: int
) -> None:
    """And it holds pairs with the target's own states alone: what was drafted is read again."""
    monkeypatch.setattr(pending, "CHUNK", chunk)
    here = world()
    assert check_cache(here, here.drafter(method, tree=tree)) > 0


def test_tapped_states_come_in_the_order_that_the_head_names(world: Callable[..., World], tmp_path: Path) -> None:
    here = world(share=0.1)
    own = {"draft_vocab_size": len(d2t_of(here.model)[0]), "eagle_aux_hidden_state_layer_ids": [3, 1, 2]}
    check_cache(here, registry.create(f"eagle3:{write(tmp_path, described(here.model, **own), eagle3(here.model))}"))


def check_cache(here: World, drafter: Drafter) -> int:
    """After every round, against a fresh reading. Returns how many drafted tokens were accepted."""
    assert isinstance(drafter, ModelDrafter)
    checked, rounds, stood = 0, Counter[int](), dict[int, int]()
    for row in here.rows_of_two(drafter):
        text, pairs = row.tokens.tolist(), drafter.model.length(row) - 1
        assert pairs + drafter.model.pending.count(row) == len(text) - 1
        if not pairs:
            continue
        keys_values, states = fresh_reading(here, drafter, text, pairs)
        own = drafter.model.pending.cache.kv[:, :, drafter.model.pending.slot(row), :, :pairs]
        torch.testing.assert_close(own, keys_values, atol=1e-5, rtol=1e-5)
        waiting = drafter.model.pending.of(row)
        torch.testing.assert_close(waiting, states[pairs : len(text) - 1], atol=1e-4, rtol=1e-4)
        in_memory = waiting.untyped_storage().nbytes() // (waiting.shape[1] * waiting.itemsize)
        rounds[row.id] += 1
        assert in_memory < len(text) - 1 or rounds[row.id] < 3, "states that were read are freed"
        stood[row.id] = sum(count for source, count in row.runs if source == drafter.name)
        checked += 1
    assert checked >= 6
    return sum(stood.values())


# The draft itself ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("options", "deep"), [({"tree": 0, "draft": 3}, 3), ({"tree": 6, "width": 2, "draft": 2}, 2)])
def test_a_head_that_knows_everything_is_accepted_whole(
    world: Callable[..., World], method: str, options: dict[str, int], deep: int
) -> None:
    here = world(share=0.0)
    engine = Engine(here.target, here.drafter(method, **options))
    engine.add(here.prompts[0], SamplingParams(max_tokens=1 + 3 * (deep + 1), ignore_eos=True))
    rounds = []
    while engine.has_work:
        rounds += [len(delta.tokens) for delta in engine.step()]
    assert rounds == [1] + [deep + 1] * 3


@pytest.mark.parametrize("method", METHODS)
def test_only_tokens_of_the_vocabulary_are_drafted(world: Callable[..., World], method: str) -> None:
    """eagle3's own, and of either what `vocab` leaves of it."""
    here = world()
    drafter = here.drafter(method, "random")
    assert isinstance(drafter, ModelDrafter)
    drafter.bind(here.target)
    own = None if drafter.model.columns is None else set(drafter.model.columns.tolist())
    assert (own is None) == (method == "eagle")
    drafted = set()
    engine = Engine(here.target, drafter)
    engine.add(here.prompts[0], SamplingParams(max_tokens=NEW, ignore_eos=True))
    while engine.has_work:
        engine.step()
        drafted |= {token for draft in drafter._drafts.values() for token in draft.drafted}
    assert own is None or drafted <= own


def test_the_kept_nodes_hang_together_whatever_ties() -> None:
    """Where every probability is 1 or the same, a child scores as its parent does: no node is kept without it."""
    rng = np.random.default_rng(0)
    for trial in range(200):
        row = Row(0, [1, 2, 3], SamplingParams(max_tokens=40), max_context=100)
        growth = Growth(Draft.chain(row, row.tokens[2:].tolist()), width=3, size=int(rng.integers(1, 12)))
        for _ in range(4):
            logits = torch.full((len(growth.level), 6), -30.0)
            for node in range(len(growth.level)):
                if rng.random() < 0.6:
                    logits[node, int(rng.integers(6))] = 30.0  # saturated: the logarithm is exactly 0
                else:
                    logits[node] = 0.0
            growth.expand(logits, None)
            if not growth.descend():
                break
        tree = growth.tree()
        assert len(tree) - 1 == min(growth.size, len(growth.found)), trial
        assert (tree.parent[1:] < np.arange(1, len(tree))).all()
        assert all(tree.depth[node] == tree.depth[tree.parent[node]] + 1 for node in range(1, len(tree)))
