"""ngram-pool: the pool, the window's shape, its trajectories, and what they are worth."""

import numpy as np
import pytest

from paceline.core.sampling import SamplingParams
from paceline.core.tree import DraftTree, ancestors
from paceline.draft.methods.ngram_pool import NgramPool, NgramPoolConfig, Window
from paceline.engine.engine import Engine
from tests.asks import asked
from tests.draft.rows import letters, row, target, tokens
from tests.draft.tables import counting
from tests.fakes import TableTarget


def drafter(**options):
    made = NgramPool(NgramPoolConfig(**options))
    made.bind(target(eos="."))
    return made


def guesses(text, room=100, **options):
    """What is drafted behind `text` from its own n-grams: the words along every path to a leaf."""
    made, one = drafter(window=0, **options), row(text, room)
    made.start(one)
    return words(made.propose(asked(one))[0])


def words(tree):
    paths = []
    for token, above in zip(tree.tokens.tolist(), tree.parent.tolist(), strict=True):
        paths.append(paths[above] + chr(token) if above >= 0 else "")
    return {paths[i] for i in range(1, len(tree)) if i not in tree.parent}


# The pool ------------------------------------------------------------------------------------------------------------


def test_n_grams_that_begin_with_the_last_token_are_guessed():
    assert guesses("xabcdexpqrstx", level=5) == {"abcd", "pqrs"}
    assert guesses("xabcdexpqrstx", level=3) == {"ab", "pq"}
    assert guesses("xabcdexpqrstx", level=2) == {"a", "p"}
    assert guesses("abcdefgh") == set()


def test_guesses_share_their_beginnings():
    made, one = drafter(window=0, level=4), row("xabcxabdxaefx")
    made.start(one)
    (tree,) = made.propose(asked(one))
    assert words(tree) == {"abc", "abd", "aef"}
    assert tree.num_drafted == 6
    assert letters(tree.tokens[1:4]) == "aef"  # the latest comes first


def test_the_latest_guesses_stay():
    assert guesses("xaxbxcxdx", level=2, guesses=3) == {"b", "c", "d"}
    assert guesses("xaxbxcxax", level=2, guesses=2) == {"c", "a"}


def test_the_prompt_may_be_left_out():
    made, one = drafter(window=0, prompt=False, level=3), row("xabx")
    made.start(one)
    assert len(made.propose(asked(one))[0]) == 1
    one.extend(tokens("xcdx"))
    assert words(made.propose(asked(one))[0]) == {"cd"}


# The window ----------------------------------------------------------------------------------------------------------


def settled(width, level):
    """A full window: token 100 * r + i in row r, column i."""
    window = Window(range(width - 1), level)
    window.rows = [list(range(width - 1)), *([100 * r + i for i in range(width)] for r in range(1, level - 1))]
    return window


@pytest.mark.parametrize(("width", "level"), [(7, 5), (15, 5), (1, 5), (4, 3), (4, 2), (1, 2), (3, 8)])
def test_a_node_of_the_window_sees_the_oldest_row_to_its_left_and_its_column(width, level):
    """The published mask, written out."""
    window = settled(width, level)
    tree = window.hang(DraftTree.of(9, [5, 6], [0, 0]))
    assert len(tree) == 3 + (width - 1) + width * (level - 2)
    assert (np.flatnonzero(tree.probe) == np.arange(3, len(tree))).all() if len(tree) > 3 else not tree.probe.any()
    assert tree.children(0) == [1, 2]
    assert tree.max_depth == max(window.depth, 1)
    seen = ancestors(tree.parent)
    node = {int(token): i for i, token in enumerate(tree.tokens) if tree.probe[i]}
    for r in range(level - 1):
        for column in range(width - (r == 0)):
            left = [node[i] for i in range(column + (r == 0))]
            above = [node[100 * k + column] for k in range(1, r + 1)]
            assert set(np.flatnonzero(seen[node[100 * r + column]])) == {0, *left, *above}
            assert tree.depth[node[100 * r + column]] == column + r + (r == 0)
    deepest = [0, *range(width - 1)] if level == 2 else [100 * (level - 2) + i for i in range(width)]
    assert [int(tree.tokens[leaf]) for leaf in window.leaves[level == 2 :]] == deepest[level == 2 :]


def test_a_step_of_the_window():
    window = Window([1, 2, 3, 4], 4)  # 3 columns: 3 + 4 - 3 tokens
    assert window.step(0, [11, 12, 13, 14, 15]) == []
    assert window.rows == [[2, 3, 4], [12, 13, 14, 15]]
    assert window.step(11, [21, 22, 23, 24]) == []
    assert window.rows == [[3, 4], [13, 14, 15], [22, 23, 24]]
    assert window.step(21, [31, 32, 33]) == [(21, 13, 22, 31), (3, 14, 23, 32), (4, 15, 24, 33)]
    assert window.rows == [[14, 15], [22, 23, 24], [31, 32, 33]]


def test_the_window_s_predictions_are_the_target_s_behind_each_column():
    """Whatever was guessed and accepted meanwhile, an n-gram's last token is the best behind the others in context."""
    toy = TableTarget(vocab_size=12, order=6, seed=1)
    grams = []

    class Watched(NgramPool):
        def observe(self, round):
            row, tree = round.rows[0], round.trees[0]
            window = self._windows[row.id]
            if tree.probe is not None:
                spine = list(window.rows[0])
                context = row.tokens[: len(row) - len(round.accepted[0].tokens)].tolist()
                step = window.step
                window.step = lambda root, predicted: [
                    grams.append((context, spine[:i], gram)) or gram for i, gram in enumerate(step(root, predicted))
                ]
                super().observe(round)
                assert int(tree.tokens[0]) == context[-1]
                window.step = step

    Engine(toy, Watched(NgramPoolConfig(level=4, window=5))).generate([[1, 2, 3]], SamplingParams(max_tokens=30))
    assert len(grams) > 30
    for context, left, gram in grams:
        assert gram[0] == [*context, *left][-1]
        assert gram[-1] == int(toy.logits_after([*context, *left, *gram[1:-1]]).argmax())


def test_trajectories_fill_the_pool_and_are_accepted():
    """The answer never repeats a token within this budget: only the window can know what comes next."""
    toy, prompt, params = counting(100), [*range(97, 0, -4), 0], SamplingParams(max_tokens=100)
    (alone,) = Engine(toy, "ngram-pool,window=0").generate([prompt], params)
    assert alone.rounds == 100
    (done,) = Engine(toy, "ngram-pool,prompt=false").generate([prompt], params)
    assert done.tokens == alone.tokens == [*range(1, 100), 0]
    assert done.rounds < 80
    assert {who for who, _ in done.runs} == {"", "ngram-pool"}


@pytest.mark.parametrize(
    "options", ["", ",level=2", ",level=3,window=1", ",window=1,level=2", ",level=8,window=15", ",guesses=1"]
)
def test_every_shape_is_lossless_and_worth_it(options):
    toy = TableTarget(vocab_size=8, order=2, seed=4)
    prompts = [[1], [3, 3], [5, 4, 0, 7] * 9]
    for params in (SamplingParams(max_tokens=80), SamplingParams(max_tokens=60, temperature=0.8, top_p=0.9, seed=1)):
        done = Engine(toy, "ngram-pool" + options, max_batch=2).generate(prompts, params)
        assert [one.tokens for one in done] == [toy.plain(prompt, params).new_tokens.tolist() for prompt in prompts]
        assert sum(one.new_tokens for one in done) / sum(one.rounds for one in done) > 1.2


def test_the_window_rests_where_the_row_has_no_room_for_it():
    made, one = drafter(), row("abc", room=5)
    made.start(one)
    (tree,) = made.propose(asked(one))
    assert tree.probe is None
    assert len(tree) == 1
