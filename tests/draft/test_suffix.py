"""suffix: the most frequent continuation, its sources, and what it remembers of finished requests."""

from types import SimpleNamespace

import numpy as np
import pytest

from paceline.draft.suffix import Suffix, SuffixConfig
from paceline.draft.text.copying import tree_up_to_ends
from paceline.engine.engine import Engine
from paceline.engine.sampling import SamplingParams
from paceline.errors import MethodError, StoreError
from tests.draft.rows import draft_of, letters, row, target, tokens
from tests.draft.stores import corpus
from tests.fakes import TableTarget


def drafts(text, **options):
    return draft_of(Suffix(SuffixConfig(**options)), text)


def finish(drafter, text, reason="stop", id=7):
    """A request of `text` comes and ends."""
    one = row(text, id=id)
    drafter.start(one)
    drafter.propose([one])
    one.finish_reason = reason
    drafter.drop(one)


def offered(drafter, text):
    """`draft_of` for a row that nothing is learned from."""
    one = row(text, id=8)
    drafter.start(one)
    (tree,) = drafter.propose([one])
    one.finish_reason = "abort"
    drafter.drop(one)
    return letters(tree.tokens[1:])


def bound(eos="", fingerprint=None, **options):
    drafter = Suffix(SuffixConfig(**options))
    one = target(eos)
    one.tokenizer = SimpleNamespace(fingerprint=fingerprint) if fingerprint else None
    drafter.bind(one)
    return drafter


def test_of_two_continuations_the_more_frequent():
    assert drafts("1uvwA2uvwA3uvwB4uvw", draft=1) == "A"
    assert drafts("1uvwB2uvwA3uvwB4uvw", draft=1) == "B"
    assert drafts("1uvwA2uvwB3uvw", draft=1) == "B", "of equals the latest"


def test_a_longer_match_is_followed_further():
    text = "0123456789abcdefghijklmnopqrstuvwxyz"
    assert drafts(text + "0") == "1"
    assert drafts(text + "012") == "345"
    assert drafts(text + "012", factor=2) == "345678"
    assert drafts(text + "012", offset=2) == "34567"
    assert drafts(text + "012", factor=0.5) == "3"
    assert drafts(text + "012", draft=2) == "34"


def test_match_and_draft_share_the_depth():
    text = "0123456789abcdefghijklmnopqrstuvwxyz"
    assert len(drafts(text + "0123456", depth=8)) == 4
    assert len(drafts(text + "0123456", depth=64)) == 7


def test_what_is_unlikely_is_left_out():
    text = "ab" * 8 + "ac" * 2 + "ab" * 8 + "a"
    assert drafts(text, min_prob=0.1, offset=1, factor=0, depth=2) == "b"
    many = "".join("a" + chr(1000 + i) for i in range(11)) + "a"
    assert drafts(many, min_prob=0.1) == ""
    assert drafts(many, min_prob=0.09) == chr(1010)


def test_a_tree_holds_the_likeliest_nodes():
    drafter = Suffix(SuffixConfig(shape="tree", offset=3, depth=3))
    one = row("abxabyabxacab")
    drafter.start(one)
    (tree,) = drafter.propose([one])
    assert letters(tree.tokens[1:]) == "xaya", "x after two b in three, y after one, and each has been followed by a"
    assert tree.parent.tolist() == [-1, 0, 1, 0, 3]
    assert tree.source == "suffix"


@pytest.mark.parametrize("text", ["a", "abcde"])
def test_nothing_occurred_before(text):
    assert drafts(text) == ""


def test_nothing_is_drafted_behind_an_end_token():
    drafter = bound(eos=".")
    assert draft_of(drafter, "ab.cdefab") == "."
    assert draft_of(drafter, "ab.cdefab", ignore_eos=True) == ".c"
    assert draft_of(drafter, "ab.cdefab", ignore_eos=True, stop_token_ids=tokens(".")) == "."


def test_a_tree_is_cut_behind_an_end_token():
    # 1 -> (2 -> (4 -> 6, 5), 3 -> 4)
    drafted, parent = np.array([2, 3, 4, 5, 4, 6]), np.array([0, 0, 1, 1, 2, 3])
    for ends, kept, above in [
        ({9}, [2, 3, 4, 5, 4, 6], [0, 0, 1, 1, 2, 3]),
        ({2}, [2, 3, 4], [0, 0, 2]),
        ({4}, [2, 3, 4, 5, 4], [0, 0, 1, 1, 2]),
        ({2, 3}, [2, 3], [0, 0]),
    ]:
        found = tree_up_to_ends(drafted, parent, frozenset(ends))
        assert [one.tolist() for one in found] == [kept, above]


def test_no_more_than_the_row_has_room_for():
    drafter = Suffix(SuffixConfig(offset=9))
    assert [len(draft_of(drafter, "abcdefghijklmabc", room)) for room in (20, 3, 2, 1)] == [12, 2, 1, 0]


def test_rows_together_and_alone_get_the_same():
    texts = ["abcabc", "xxyxxyxx", "hello, hello"]
    together = Suffix()
    rows = [row(text, id=i) for i, text in enumerate(texts)]
    for one in rows:
        together.start(one)
    for gained in ["", "a", "bc", "lo"]:
        for one in rows:
            one.extend(tokens(gained))
        for one, tree in zip(rows, together.propose(rows), strict=True):
            assert letters(tree.tokens[1:]) == draft_of(Suffix(), letters(one.tokens), one.max_draft + 1)


def test_finished_requests_are_learned_from():
    drafter = Suffix(SuffixConfig(past=100))
    assert offered(drafter, "xyab") == ""
    finish(drafter, "abcdef")
    assert offered(drafter, "xyab") == "cd"
    finish(drafter, "abzzz")
    finish(drafter, "abzzz")
    assert offered(drafter, "xyab") == "zz"


def test_what_is_remembered_is_bounded_and_the_oldest_goes_first():
    drafter = Suffix(SuffixConfig(past=10))
    for text in ["abcdef", "mnop", "uvwxyz"]:
        finish(drafter, text)
        assert len(drafter._past) <= 10
    assert [offered(drafter, text) for text in ["9ab", "9mn", "9uv"]] == ["", "op", "wx"]
    finish(drafter, "0123456789ABCDEF")
    assert len(drafter._past) == 10
    assert [offered(drafter, text) for text in ["9mn", "x12", "xAB"]] == ["", "", "CD"]


def test_nothing_is_learned_from_aborted_requests_or_without_being_asked():
    drafter, forgetful = Suffix(SuffixConfig(past=100)), Suffix()
    finish(drafter, "abcdef", reason="abort")
    finish(forgetful, "abcdef")
    assert offered(drafter, "xyab") == offered(forgetful, "xyab") == ""
    assert not drafter._trees
    assert not forgetful._trees


def test_a_corpus_is_a_source_too(tmp_path):
    drafter = bound(corpus=corpus(tmp_path / "s", ["abcd", "abcd", "abxx"]), past=100)
    assert offered(drafter, "9ab") == "cd"
    assert offered(drafter, "abzabzabzab") == "zabza", "the request's own, which is surer"
    with pytest.raises(StoreError, match="was built with another tokenizer"):
        bound(corpus=str(tmp_path / "s"), fingerprint="words")
    with pytest.raises(StoreError, match="there is no store nowhere"):
        bound(corpus="nowhere")


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 1},
        {"draft": 0},
        {"past": -1},
        {"factor": -1},
        {"factor": 0},
        {"offset": -1},
        {"min_prob": 0},
        {"min_prob": 1.5},
        {"factor": float("nan")},
    ],
)
def test_impossible_options(options):
    with pytest.raises(MethodError, match=r"(SuffixConfig: [a-z_]+|suffix: factor) is"):
        SuffixConfig(**options)


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("spec", ["suffix,past=150", "suffix,past=1000,shape=tree,factor=3"])
def test_with_a_past_answers_are_plain_decoding_s(spec, batch, temperature):
    model = TableTarget(vocab_size=8, order=2, seed=4, eos=(0,))
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=3)
    prompts = [[1], [3, 3], [1, 2, 3, 1, 2], [0, 0, 0, 0, 0, 0, 0], [5, 4, 0, 7] * 9, [2], [6, 5], [7, 1, 7]]
    plain = [model.plain(prompt, params).new_tokens.tolist() for prompt in prompts]
    engine = Engine(model, draft=spec, max_batch=batch)
    rounds = []
    for _ in range(2):
        done = engine.generate(prompts, params)
        assert [one.tokens for one in done] == plain
        rounds.append(sum(one.rounds for one in done))
    assert rounds[1] < rounds[0], "the same questions again are answered faster"
