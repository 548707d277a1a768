"""ngram-pool: the pool, the window's shape, its trajectories, and what they are worth."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft.ngram_pool import NgramPool, NgramPoolConfig, Pool, Window
from paceline.draft.registry import create
from paceline.engine.engine import Engine
from paceline.engine.sampling import SamplingParams
from paceline.engine.tree import DraftTree, ancestors
from tests.draft.rows import letters, row, target, tokens
from tests.fakes import TableTarget


def drafter(**options: object) -> NgramPool:
    made = NgramPool(NgramPoolConfig(**options))  # type: ignore[arg-type]
    made.bind(target(eos="."))
    return made


def guesses(text: str, room: int = 100, **options: object) -> set[str]:
    """What is drafted behind `text` from its own n-grams: the words along every path to a leaf."""
    made, one = drafter(window=0, **options), row(text, room)
    made.start(one)
    return words(made.propose([one])[0])


def words(tree: DraftTree) -> set[str]:
    paths: list[str] = []
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
    (tree,) = made.propose([one])
    assert words(tree) == {"abc", "abd", "aef"}
    assert tree.num_drafted == 6
    assert letters(tree.tokens[1:4]) == "aef"  # the latest comes first


def test_the_latest_guesses_stay():
    assert guesses("xaxbxcxdx", level=2, guesses=3) == {"b", "c", "d"}
    assert guesses("xaxbxcxax", level=2, guesses=2) == {"c", "a"}


def test_guesses_end_where_the_answer_does():
    assert guesses("xa.cdexpqrstx") == {"a.", "pqrs"}
    assert guesses("xabcdexpqrstx", room=3) == {"ab", "pq"}
    assert guesses("xabcdexpqrstx", room=1) == set()


def test_the_prompt_may_be_left_out():
    made, one = drafter(window=0, prompt=False, level=3), row("xabx")
    made.start(one)
    assert len(made.propose([one])[0]) == 1
    one.extend(tokens("xcdx"))
    assert words(made.propose([one])[0]) == {"cd"}


def naive_pool(grams: list[tuple[int, ...]], most_of_each: int, most: int) -> dict[int, list[tuple[int, ...]]]:
    """By first token, the latest first."""
    kept: list[tuple[int, ...]] = []
    for gram in grams:
        kept = [other for other in kept if other != gram] + [gram]
        same = [other for other in kept if other[0] == gram[0]]
        if len(same) > most_of_each:
            kept.remove(same[0])
        kept = kept[-most:]
    return {token: [gram[1:] for gram in reversed(kept) if gram[0] == token] for token in range(4)}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 3)] * 3), max_size=60), st.integers(1, 4), st.integers(1, 12))
def test_a_pool_forgets_what_was_not_seen_for_longest(grams, most_of_each, most):
    pool = Pool(most_of_each, most)
    for gram in grams:
        pool.add(gram)
    assert {token: pool.after(token) for token in range(4)} == naive_pool(grams, most_of_each, most)
    assert len(pool) <= most


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.lists(st.integers(1, 7), max_size=5), st.integers(2, 5))
def test_every_n_gram_of_the_text_is_added_once_and_in_order(text, rounds, level):
    made, one = drafter(window=0, level=level, guesses=1000), row("".join(map(chr, text)), room=1000)
    made.start(one)
    random = np.random.default_rng(len(text))
    for gained in [0, *rounds]:
        one.extend(random.integers(0, 4, gained).tolist())
        made.propose([one])
    whole = Pool(1000)
    whole.add_text(one.tokens, level)
    assert [made._pools[0].after(token) for token in range(4)] == [whole.after(token) for token in range(4)]


def test_finished_requests_are_remembered_if_asked():
    made = drafter(window=0, level=3, past=6)
    first, given_up, second = row("xabx", id=0), row("xefx", id=1), row("yx", id=2)
    for one in (first, given_up):
        made.start(one)
    first.finish_reason, given_up.finish_reason = "stop", "abort"
    made.drop(first)
    made.drop(given_up)
    made.drop(given_up)
    made.start(second)
    assert words(made.propose([second])[0]) == {"ab"}
    for id in range(3, 9):
        other = row(f"012{id}3{id}", id=id)
        made.start(other)
        other.finish_reason = "length"
        made.drop(other)
    assert len(made._past) <= 6
    assert len(made.propose([second])[0]) == 1
    assert set(made._pools) == {2}


# The window ----------------------------------------------------------------------------------------------------------


def settled(width: int, level: int) -> Window:
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


def test_positions_of_a_full_forward_are_the_paper_s():
    seven = ["abcd", "efgh", "ijkl", "mnop", "qrst", "uvwy", "ABCD"]
    made, one = drafter(), row("".join(f"x{word}" for word in seven) + "x")
    made.start(one)
    made._windows[0] = settled(7, 5)
    assert len(made.propose([one])[0]) == (5 - 1) * (7 + 7)


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
    grams: list[tuple[list[int], list[int], tuple[int, ...]]] = []

    class Watched(NgramPool):
        def observe(self, round):
            row, tree = round.rows[0], round.trees[0]
            window = self._windows[row.id]
            if tree.probe is not None:
                spine = list(window.rows[0])
                context = row.tokens[: len(row) - len(round.accepted[0].tokens)].tolist()
                step = window.step
                window.step = (
                    lambda root, predicted: [  # type: ignore[method-assign]
                        grams.append((context, spine[:i], gram)) or gram for i, gram in enumerate(step(root, predicted))
                    ]
                )
                super().observe(round)
                assert int(tree.tokens[0]) == context[-1]
                window.step = step  # type: ignore[method-assign]

    Engine(toy, Watched(NgramPoolConfig(level=4, window=5))).generate([[1, 2, 3]], SamplingParams(max_tokens=30))
    assert len(grams) > 30
    for context, left, gram in grams:
        assert gram[0] == [*context, *left][-1]
        assert gram[-1] == int(toy.logits_after([*context, *left, *gram[1:-1]]).argmax())


def counting(vocab_size: int) -> TableTarget:
    """A target that counts in a circle from whatever token is last."""

    def logits(prefix: tuple[int, ...]) -> np.ndarray:
        return -((np.arange(vocab_size) - prefix[-1] - 1) % vocab_size).astype(float)

    return TableTarget(vocab_size, order=1, logits=logits)


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
    (tree,) = made.propose([one])
    assert tree.probe is None
    assert len(tree) == 1


def test_in_front_of_another_drafter_there_is_no_window():
    parts = create("ngram-pool+ngram-pool").parts  # type: ignore[attr-defined]
    assert [part.config.window for part in parts] == [0, 7]


def test_two_runs_are_one():
    toy = TableTarget(vocab_size=40, order=2, seed=9)
    prompts, params = [[1], [2, 3]], SamplingParams(max_tokens=60)
    first, second = (Engine(toy, "ngram-pool").generate(prompts, params) for _ in range(2))
    assert [(one.tokens, one.rounds) for one in first] == [(one.tokens, one.rounds) for one in second]
