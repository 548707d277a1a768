"""sam: what it copies, how much, and that rows do not disturb one another."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft.methods.sam import Sam, SamConfig
from paceline.draft.registry import create
from paceline.draft.text import suffix_array
from paceline.errors import StoreError
from tests.asks import asked
from tests.draft.rows import draft_of, letters, row, target, tokens
from tests.draft.stores import corpus


def drafts(text, **options):
    return draft_of(Sam(SamConfig(**options)), text)


def by_hand(text, config):
    """The draft behind `text`, from nothing but the definition."""
    for length in range(len(text) - 1, config.min_match - 1, -1):
        suffix = text[len(text) - length :]
        ends = [end for end in range(length, len(text)) if text[end - length : end] == suffix]
        if ends:
            size = min(config.draft, int(config.grow * length)) if config.grow else config.draft
            longer = list(text)
            for i in range(size):
                longer.append(longer[ends[-1] + i])
            return longer[len(text) :]
    return []


CONFIGS = st.builds(
    SamConfig, draft=st.integers(1, 12), min_match=st.integers(1, 4), grow=st.sampled_from([0, 0.5, 1, 4])
)


@settings(max_examples=150)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.integers(1, 9), max_size=6), CONFIGS)
def test_every_round_s_draft_is_the_definition_s(text, rounds, config):
    drafter = Sam(config)
    one = row("".join(map(chr, text)), room=1000)
    drafter.start(one)
    random = np.random.default_rng(len(text))
    for gained in [0, *rounds]:
        one.extend(random.integers(0, 4, gained).tolist())
        (tree,) = drafter.propose(asked(one))
        assert tree.tokens[1:].tolist() == by_hand(one.tokens.tolist(), config)
        assert tree.source == ("sam" if tree.num_drafted else "")


def test_a_copy_reads_on_from_itself():
    assert drafts("xyzxyz", draft=10, grow=0) == "xyzxyzxyzx"
    assert drafts("abcabc", draft=5, grow=0) == "abcab"
    assert drafts("baaa", draft=4, grow=0) == "aaaa"


def test_the_latest_occurrence():
    assert drafts("uvwxyAuvwxyBuvwxy", draft=1) == "B"


def test_the_draft_grows_with_the_match():
    text = "0123456789abcdefghijklmnopqrstuvwxyz"
    assert len(drafts(text + "0")) == 6
    assert len(drafts(text + "0123")) == 24
    assert len(drafts(text + "0123", draft=7)) == 7
    assert len(drafts(text + "0", grow=0)) == 40
    assert len(drafts(text + "01", grow=0.5)) == 1
    assert drafts(text + "0", grow=0.5) == ""


def bound(spec, eos=""):
    drafter, met = create(spec), target(eos)
    met.tokenizer = None
    drafter.bind(met)
    return drafter


def test_the_corpus_is_copied_where_it_matches_longer(tmp_path):
    folder = corpus(tmp_path / "c", ["hello world", "the sea is blue"])
    assert draft_of(bound(f"sam,corpus={folder}"), "wxthe s") == "ea is blue."
    assert draft_of(bound(f"sam,corpus={folder}"), "the sky, the s") == "ky, the sky, the sky, the sky,"  # 5 each
    assert draft_of(bound(f"sam,corpus={folder}"), "the sky; is bl") == "ue."
    assert draft_of(bound(f"sam,corpus={folder}"), "xx hell") == "o world."


def test_in_front_of_another_drafter_a_match_in_the_corpus_has_to_be_long(tmp_path):
    folder = corpus(tmp_path / "c", ["0123456789abcdef"])
    both = bound(f"sam,corpus={folder}+none")
    assert draft_of(both, "xx0123") == ""
    assert draft_of(both, "xx01234") == "56789abcdef."


def test_a_tree_of_the_corpus(tmp_path):
    drafter = bound(f"sam,corpus={corpus(tmp_path / 'c', ['abcx', 'abcy', 'abd'])},draft=5")
    one = row("#ab")
    drafter.start(one)
    (tree,) = drafter.propose(asked(one))
    assert letters(tree.tokens[1:]) == "cdxy."
    assert tree.parent.tolist() == [-1, 0, 0, 1, 1, 2]
    assert tree.source == "sam"
    short = row("#ab", room=2)
    drafter.start(short)
    assert drafter.propose(asked(short))[0].max_depth == 1


def test_a_long_match_in_the_corpus_counts_as_one_of_64_tokens(tmp_path):
    long = "".join(map(chr, range(200, 300)))
    drafter = bound(f"sam,corpus={corpus(tmp_path / 'c', [long + 'x'])},draft=1")
    assert draft_of(drafter, f"#{long[-63:]}y{long}") == "x"
    assert draft_of(drafter, f"#{long[-64:]}y{long}") == "y", "its own text matches as far"


def test_the_corpus_is_not_read_behind_a_document(tmp_path):
    drafter = bound(f"sam,corpus={corpus(tmp_path / 'c', ['abc', 'de'])}")
    assert draft_of(drafter, "#abc.") == ""


def test_a_corpus_with_the_part_of_an_older_version(tmp_path):
    older = SimpleNamespace(build_part=lambda *_: {"automaton_states": np.zeros((3, 3), np.int32)})
    both = corpus(tmp_path / "both", ["the sea is blue"], parts=(older, suffix_array))
    assert draft_of(bound(f"sam,corpus={both}"), "the s") == "ea is blue."
    with pytest.raises(StoreError, match=r"has no suffix_positions \(.*automaton_states\); build it again"):
        bound(f"sam,corpus={corpus(tmp_path / 'only', ['the sea is blue'], parts=(older,))}")


def test_the_corpus_is_looked_up_anew_in_every_round(tmp_path):
    folder = corpus(tmp_path / "c", ["the sea is blue", "the sky is high"])
    steps, one = bound(f"sam,corpus={folder}"), row("#", room=100)
    steps.start(one)
    for gained in ["t", "he s", "ky is ", "blue", "!", "the se"]:
        one.extend(tokens(gained))
        (tree,) = steps.propose(asked(one))
        assert letters(tree.tokens[1:]) == draft_of(bound(f"sam,corpus={folder}"), letters(one.tokens))


def test_the_last_token_is_looked_up(tmp_path):
    folder = corpus(tmp_path / "c", ["qz", "pqy"])
    steps, one = bound(f"sam,corpus={folder},grow=1"), row("#q", room=100)
    steps.start(one)
    (tree,) = steps.propose(asked(one))
    assert letters(tree.tokens[1:])[:1] in ("z", "y"), "one token is enough, if it is the last one"
    one.extend(tokens("#p"))
    assert letters(steps.propose(asked(one))[0].tokens[1:]) == "q"
    one.extend(tokens("q"))
    assert letters(steps.propose(asked(one))[0].tokens[1:])[:1] == "y", "two tokens tell y from z"


def test_the_row_s_own_text_comes_first_and_the_newest_next():
    drafter = bound("sam,past=100")
    for text in ["uvwA", "uvwB"]:
        draft_of(drafter, text)
    assert draft_of(drafter, "#uvw")[0] == "B"
    assert draft_of(drafter, "uvwC_uvw")[0] == "C"
