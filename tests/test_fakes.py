"""The fakes keep their own promises: the table is a target, and it catches callers that break the contract."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.sampling import SamplingParams
from paceline.core.segment import Segment
from paceline.core.tree import DraftTree
from paceline.target.base import Needs
from tests.fakes import Spelling, TableTarget


def begun(target, tokens):
    """A row that holds `tokens`."""
    slot = target.add_row(len(tokens))
    target.verify([Segment.chunk(slot, np.array(tokens), last=False)])
    target.commit(slot, range(len(tokens)))
    return slot


def test_a_forward_over_trees_and_chunks():
    target = TableTarget(6, order=None, seed=3)
    slot, other = begun(target, [1, 2]), target.add_row(10)
    tree = DraftTree.of(3, [4, 5, 0], [0, 1, 0])
    chunk = Segment.chunk(other, np.array([5, 4]), last=True)
    verdict = target.verify([Segment.tree(slot, tree), chunk], Needs(top_k=2))
    expected = [[1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 0], [5, 4]]
    assert torch.equal(verdict.logits, torch.stack([target.logits_after(prefix) for prefix in expected]))
    assert torch.equal(verdict.of(1), target.logits_after([5, 4])[None])
    assert verdict.top_k is not None
    assert verdict.top_k[1].tolist() == verdict.logits.argsort(descending=True)[:, :2].tolist()
    target.commit(slot, [0, 1, 2])
    target.commit(other, [0, 1])
    assert (target.rows(slot), target.length(other)) == ([1, 2, 3, 4, 5], 2)
    assert (target.forwards, target.nodes, target.num_rows) == (2, 2 + 4 + 2, 2)
    target.drop_row(slot)
    assert target.num_rows == 1


@given(st.lists(st.integers(0, 5), min_size=3), st.lists(st.integers(0, 5), min_size=3), st.integers(0, 3))
def test_the_order_says_how_much_of_the_prefix_matters(one, other, order):
    target, again = TableTarget(6, order=order, seed=1), TableTarget(6, order=order, seed=1)
    same = one[len(one) - order :] == other[len(other) - order :]
    assert torch.equal(target.logits_after(one), target.logits_after(other)) == same
    assert torch.equal(target.logits_after(one), again.logits_after(one))
    assert not torch.equal(target.logits_after(one), TableTarget(6, order=order, seed=2).logits_after(one))


def test_zeros_leave_a_token():
    target = TableTarget(5, zeros=0.9, seed=1)
    logits = torch.stack([target.logits_after([a, b]) for a in range(5) for b in range(5)])
    assert torch.isfinite(logits).any(-1).all()
    assert not torch.isfinite(logits).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slot": 9}, "no row"),
        ({"tokens": np.array([1, 6])}, "tokens"),
        ({"tokens": np.array([1, -1])}, "tokens"),
        ({"tokens": np.array([1, 2], np.int32)}, "int32"),
        ({"tokens": np.array([1])}, "1 tokens, 2 parents"),
        ({"parent": np.array([0, 0])}, "node 0"),
        ({"parent": np.array([-1, -1])}, "more than one root"),
        ({"parent": np.array([-1, 1])}, "before its parent"),
        ({"num_logits": 3}, "3 logits"),
        ({"start": 1}, "behind the row"),
        ({"hidden": torch.zeros(2, 1)}, "hidden"),
    ],
    ids=str,
)
def test_segments_that_break_the_contract(change, message):
    target = TableTarget(6)
    good = {"slot": begun(target, [1]), "tokens": np.array([1, 2]), "parent": np.array([-1, 0])}
    segment = Segment(**good)
    target.verify([segment])
    for name, value in change.items():
        setattr(segment, name, value)
    with pytest.raises(AssertionError, match=message):
        target.verify([segment])


def test_forwards_and_commits_that_break_the_contract():
    target = TableTarget(6, max_context=5)
    slot = begun(target, [1, 2])
    tree = Segment.tree(slot, DraftTree.of(3, [4, 5], [0, 0]))
    for segments, message in (
        ([], "nothing"),
        ([tree, tree], "twice"),
        ([Segment.tree(slot, DraftTree.chain(3, [4, 5, 0]))], "hold 6"),
    ):
        with pytest.raises(AssertionError, match=message):
            target.verify(segments)
    for path, message in (([0, 1, 2], "no path"), ([1], "begins"), ([], "root")):
        target.verify([tree])
        with pytest.raises(AssertionError, match=message):
            target.commit(slot, path)
    target.verify([tree])
    target.commit(slot, [0, 2])
    with pytest.raises(AssertionError, match="committed already"):
        target.commit(slot, [0])
    with pytest.raises(NotImplementedError):
        target.verify([tree], Needs(hidden_layers=(1,)))


def test_plain_decoding():
    """Greedy follows the best logits; sampling is reproducible; both end where they must."""
    target = TableTarget(6, order=1, seed=4, eos=[0])
    row = target.plain([1], SamplingParams(max_tokens=9, ignore_eos=True))
    for i, token in enumerate(row.new_tokens.tolist()):
        assert token == int(target.logits_after(row.tokens[: i + 1]).argmax())
    sampled = SamplingParams(temperature=1.0, seed=3, max_tokens=200)
    once, again = target.plain([1], sampled), target.plain([1], sampled)
    assert once.tokens.tolist() == again.tokens.tolist()
    assert (once.last_token, once.finish_reason) == (0, "stop")


def test_spelling():
    decoder = Spelling([b"a", b"\xc3", b"\xa9"])
    assert [decoder.push(token) for token in (0, 1, 2, 1)] == ["a", "", "é", ""]
    assert decoder.flush() == "\ufffd"
