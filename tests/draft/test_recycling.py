"""recycling: its shapes, its matrix, and what it makes of them, each against a naive version."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.accept import Accepted
from paceline.core.sampling import SamplingParams
from paceline.core.segment import Verdict
from paceline.core.tree import DraftTree
from paceline.draft.methods.recycling import TREES, Recycling, RecyclingConfig
from paceline.draft.registry import create
from paceline.draft.shapes import read_paths
from paceline.engine.engine import Engine
from paceline.errors import MethodError
from tests.asks import asked
from tests.draft.rows import row
from tests.draft.tables import counting
from tests.fakes import TableTarget
from tests.rounds import shown

SIZES = list(TREES)


def paths_of(size):
    return [tuple(map(int, word)) for word in TREES[size].split()]


def bound(target=None, **options):
    drafter = Recycling(RecyclingConfig(**options))
    drafter.bind(target or TableTarget(vocab_size=200))
    return drafter


def mean_accepted(done):
    return sum(one.new_tokens for one in done) / sum(one.rounds for one in done)


# The shape -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        ("0 00 10", "path 1-0 needs path 1, which is missing"),
        ("0 1 000", "path 0-0-0 needs path 0-0, which is missing"),
        ("0 1 8", "path 8 takes rank 8, and ranks are 0 to 7"),
        ("0 1 0", "path 0 is there twice"),
        ("0 one", "invalid literal"),
        ("", "it has no path"),
        ("[[0], [-1]]", "path -1 takes rank -1, and ranks are 0 to 7"),
        ("[[0], 1]", "in JSON a path is a list of whole numbers"),
        ("[[0], [0.5]]", "in JSON a path is a list of whole numbers"),
        ("[[0]", "Expecting"),
        ("[[]]", "is there twice"),
    ],
)
def test_malformed_shapes_are_refused(tmp_path, paths, says):
    (tmp_path / "tree").write_text(paths)
    with pytest.raises(MethodError, match=says) as error:
        create(f"recycling,tree={tmp_path}/tree")
    assert "\n" not in str(error.value)


def test_a_shape_that_is_no_file():
    with pytest.raises(MethodError, match=r"tree is '81'; it must be 80, 60, .*or a file of paths"):
        create("recycling,tree=81")


def test_shapes_from_files(tmp_path):
    (tmp_path / "words").write_text("10 0 1\n00 01\n")
    (tmp_path / "lists.json").write_text(json.dumps([[1, 0], [0], [1], [0, 0], [0, 1]]))
    for name in ("words", "lists.json"):
        template = create(f"recycling,tree={tmp_path / name}").template
        assert template.parent.tolist() == [-1, 0, 0, 1, 1, 2]
        assert template.rank.tolist() == [-1, 0, 1, 0, 1, 0]
        assert template.levels == (1, 3, 6)
    (tmp_path / "wide.json").write_text("[[11]]")
    assert read_paths(tmp_path / "wide.json") == [(11,)]
    assert create(f"recycling,k=12,tree={tmp_path}/wide.json").template.rank[1] == 11


# The draft -----------------------------------------------------------------------------------------------------------


def naive(matrix, paths, root, room, ends):
    """The token paths of a draft, path by path from the definition."""
    drafted = set()
    for path in paths:
        tokens = [root]
        for step, rank in enumerate(path):
            if tokens[-1] < 0 or (step and tokens[-1] in ends):
                break
            tokens.append(int(matrix[tokens[-1], rank]))
        if len(tokens) == len(path) + 1 <= room + 1 and min(tokens) >= 0:
            drafted.add(tuple(tokens[1:]))
    return drafted


def token_paths(tree):
    paths = []
    for token, above in zip(tree.tokens.tolist(), tree.parent.tolist(), strict=True):
        paths.append((*paths[above], token) if above >= 0 else ())
    return paths[1:]


@settings(max_examples=150)
@given(st.integers(0, 10**6), st.sampled_from(SIZES), st.sampled_from([1, 3, 8, 11]), st.integers(1, 9), st.booleans())
def test_a_draft_is_the_naive_expansion(seed, size, k, room, sparse):
    random = np.random.default_rng(seed)
    drafter = bound(tree=size, k=k)
    for token in range(200):
        if not sparse or random.random() < 0.7:
            drafter.matrix(row("a"))[token] = random.permutation(200)[:k]
    ends = set(random.integers(0, 200, 20).tolist())
    one = row(chr(random.integers(200)), room, stop_token_ids=sorted(ends))
    drafter.start(one)
    (tree,) = drafter.propose(asked(one))
    paths = [path for path in paths_of(size) if max(path) < k]
    assert tree.tokens[0] == one.last_token
    drafted = token_paths(tree)
    assert len(set(drafted)) == len(drafted)
    assert set(drafted) == naive(drafter.matrix(one), paths, one.last_token, room - 1, ends)


# The update ----------------------------------------------------------------------------------------------------------


def observe(drafter, one, tree, path, best):
    values = torch.zeros(best.shape)
    verdict = Verdict(torch.empty(len(tree), 0), [0, len(tree)], top_k=(values, best))
    drafter.observe(shown([one], [tree], [Accepted(path, [0] * len(path))], verdict))


@settings(max_examples=150)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(2, 12))
def test_the_matrix_is_written_by_the_rule(seed, n, alphabet):
    """Nodes of the accepted path first, then shallow ones, then those that come first; whoever drafted the tree."""
    random = np.random.default_rng(seed)
    drafter, one = bound(), row("a")
    drafter.start(one)
    before = drafter.matrix(one).copy()
    parent = [-1, *(int(random.integers(i + 1)) for i in range(n - 1))]
    tree = DraftTree(random.integers(0, alphabet, n), np.array(parent))
    path = [0]
    while (children := [i for i in range(n) if parent[i] == path[-1]]) and random.random() < 0.8:
        path.append(int(random.choice(children)))
    best = torch.from_numpy(random.integers(0, 200, (n, 8)))
    observe(drafter, one, tree, path, best)
    for token in range(200):
        nodes = [i for i in range(n) if tree.tokens[i] == token]
        if nodes:
            wins = min(nodes, key=lambda i: (i not in path, tree.depth[i], i))
            assert drafter.matrix(row("a"))[token].tolist() == best[wins].tolist()
        else:
            assert (drafter.matrix(row("a"))[token] == before[token]).all()


def test_scope_row_keeps_requests_apart():
    drafter = bound(scope="row")
    one, other = row("a", id=1), row("a", id=2)
    drafter.start(one)
    drafter.start(other)
    observe(drafter, one, DraftTree.root(ord("a")), [0], torch.arange(8).reshape(1, 8))
    assert [len(tree) for tree in drafter.propose(asked(one, other))] == [9, 1]
    drafter.drop(one)
    drafter.drop(one)
    assert (drafter.matrix(one) == -1).all()
    drafter.start(row("a", id=3))
    assert set(drafter._matrices) == {2, 3}


# In the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [80, 8])
def test_in_a_language_it_knows_every_round_is_as_long_as_the_shape_is_deep(size):
    target = counting(16)
    drafter = Recycling(RecyclingConfig(tree=size))
    engine = Engine(target, drafter)
    drafter.matrix(row("a"))[:] = (np.arange(16)[:, None] + 1 + np.arange(8)) % 16
    depth = len(drafter.template.levels) - 1
    (done,) = engine.generate([[2, 3]], SamplingParams(max_tokens=1 + 5 * (depth + 1)))
    assert done.tokens == [(4 + i) % 16 for i in range(1 + 5 * (depth + 1))]
    assert done.rounds == 1 + 5
    assert done.stats.accepted[depth] == 5


def test_an_end_inside_a_path_ends_the_answer_and_the_round_is_learnt_from():
    target = counting(16, eos=(9,))
    drafter = Recycling()
    engine = Engine(target, drafter)
    drafter.matrix(row("a"))[:] = (np.arange(16)[:, None] + 1 + np.arange(8)) % 16
    drafter.matrix(row("a"))[9] = -1
    (done,) = engine.generate([[4, 5]], SamplingParams(max_tokens=50))
    assert done.tokens == [6, 7, 8, 9]
    assert done.finish_reason == "stop"
    assert done.rounds == 2
    assert drafter.matrix(row("a"))[9, 0] == 10


def test_it_learns_from_the_rounds_of_a_drafter_in_front():
    target = TableTarget(vocab_size=30, order=1, seed=5)
    engine = Engine(target, "sam,min_match=1+recycling")
    done = engine.generate([[1, 2, 3] * 4], SamplingParams(max_tokens=80))
    assert {who for who, _ in done[0].runs} == {"", "sam", "recycling"} or mean_accepted(done) > 3
    matrix = engine.drafter.parts[1].matrix(row("a"))
    for token in set(done[0].tokens[:-1]):
        best = target.logits_after([token]).topk(8).indices
        assert matrix[token].tolist() == best.tolist()
