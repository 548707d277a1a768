"""eagle and eagle3: the trees of EAGLE-2, and vocabularies of their own. Files that they read: test_eagle_files.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.core.request import Row
from paceline.core.sampling import SamplingParams
from paceline.draft import registry
from paceline.draft.models.draft_model import Draft
from paceline.draft.models.model_drafter import ModelDrafter
from paceline.draft.models.proposers import Growth
from paceline.engine.engine import Engine
from tests.draft.answered import NEW
from tests.draft.eagles import METHODS, World, d2t_of, described, eagle3, write


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., World]:
    """Worlds by family and by what a target's layers add; made once."""

    @cache
    def make(family: str = "llama2", share: float = 0.02) -> World:
        return World.make(tmp_path_factory.mktemp("heads"), family, share)

    return make


def test_tapped_states_come_in_the_order_that_the_head_names(world: Callable[..., World], tmp_path: Path) -> None:
    here = world(share=0.1)
    own = {"draft_vocab_size": len(d2t_of(here.model)[0]), "eagle_aux_hidden_state_layer_ids": [3, 1, 2]}
    drafter = registry.create(f"eagle3:{write(tmp_path, described(here.model, **own), eagle3(here.model))}")
    drafter.bind(here.target)
    assert isinstance(drafter, ModelDrafter)
    assert drafter.model.pending.layers == drafter.model.network.taps == (3, 1, 2)


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
