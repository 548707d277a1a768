"""How large trees are drafted where the budget cuts them, and where it does not."""

import numpy as np
import pytest
import torch

from paceline.core.request import Row
from paceline.core.sampling import SamplingParams
from paceline.draft.models.draft_model import Draft
from paceline.draft.models.proposers import BestTree
from paceline.draft.models.stop import Fixed


class Model:
    """Random logits over 50 tokens."""

    vocab_size, columns = 50, None

    def __init__(self):
        self.ran = {}

    def extend(self, drafts, counts):
        return torch.randn(sum(counts), 50, generator=torch.manual_seed(0))


def row(id, salt=""):
    return Row(id, np.arange(5), SamplingParams(cache_salt=salt), max_context=100, eos_token_ids=())


def proposed(trees, of):
    """Nodes of the next tree."""
    ((tree, _),) = trees.propose([Draft.chain(of, [int(of.last_token)], most=6)])
    return tree.num_drafted


@pytest.fixture
def trees():
    return BestTree(Model(), Fixed(6, None), 10, 60)


def test_a_tree_that_is_cut_is_drafted_smaller(trees):
    assert proposed(trees, row(0)) == 60
    for _ in range(40):
        trees.note(row(0), proposed(trees, row(0)), 3)
    assert proposed(trees, row(0)) == 2 * 3 + trees.FEW
    assert proposed(trees, row(1, "another's")) == 60, "what one client's trees were cut to says nothing to another"
    for _ in range(40):  # now it pays to verify all of it
        size = proposed(trees, row(0))
        trees.note(row(0), size, size)
    assert proposed(trees, row(0)) == 60


def test_a_tree_that_is_not_cut_stays_as_large_as_it_may_be(trees):
    for _ in range(40):  # the end of a row clips it
        trees.note(row(0), 7, 7)
    assert proposed(trees, row(0)) == 60
