"""sam: what it copies, how much, and that rows do not disturb one another."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft.sam import Sam, SamConfig
from paceline.errors import MethodError
from tests.draft.rows import draft_of, letters, row, target, tokens


def drafts(text: str, **options: object) -> str:
    return draft_of(Sam(SamConfig(**options)), text)  # type: ignore[arg-type]


def by_hand(text: list[int], config: SamConfig) -> list[int]:
    """The draft behind `text`, from nothing but the definition."""
    for length in range(len(text) - 1, config.min_match - 1, -1):
        suffix = text[len(text) - length :]
        ends = [end for end in range(length, len(text)) if text[end - length : end] == suffix]
        if ends:
            size = min(config.draft, int(config.grow * length)) if config.grow else config.draft
            longer = list(text)
            for i in range(size):
                longer.append(longer[(ends[-1] if config.source == "recent" else ends[0]) + i])
            return longer[len(text) :]
    return []


CONFIGS = st.builds(
    SamConfig,
    draft=st.integers(1, 12),
    min_match=st.integers(1, 4),
    source=st.sampled_from(["recent", "earliest"]),
    grow=st.sampled_from([0, 0.5, 1, 4]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.integers(1, 9), max_size=6), CONFIGS)
def test_every_round_s_draft_is_the_definition_s(text, rounds, config):
    drafter = Sam(config)
    one = row("".join(map(chr, text)), room=1000)
    drafter.start(one)
    random = np.random.default_rng(len(text))
    for gained in [0, *rounds]:
        one.extend(random.integers(0, 4, gained).tolist())
        (tree,) = drafter.propose([one])
        assert tree.tokens[1:].tolist() == by_hand(one.tokens.tolist(), config)
        assert tree.source == ("sam" if tree.num_drafted else "")


def test_a_copy_reads_on_from_itself():
    assert drafts("xyzxyz", draft=10, grow=0) == "xyzxyzxyzx"
    assert drafts("abcabc", draft=5, grow=0) == "abcab"
    assert drafts("baaa", draft=4, grow=0) == "aaaa"


def test_the_latest_occurrence_or_the_earliest():
    text = "uvwxyAuvwxyBuvwxy"
    assert drafts(text, draft=1) == "B"
    assert drafts(text, draft=1, source="earliest") == "A"


def test_the_draft_grows_with_the_match():
    text = "0123456789abcdefghijklmnopqrstuvwxyz"
    assert len(drafts(text + "0")) == 4
    assert len(drafts(text + "0123")) == 16
    assert len(drafts(text + "0123", draft=7)) == 7
    assert len(drafts(text + "0", grow=0)) == 40
    assert len(drafts(text + "01", grow=0.5)) == 1
    assert drafts(text + "0", grow=0.5) == ""


def test_a_short_match_is_left_to_others():
    assert drafts("abcdxabc", min_match=4) == ""
    assert drafts("abcdxabc", min_match=3, draft=2) == "dx"


@pytest.mark.parametrize("text", ["a", "abcde"])
def test_nothing_occurred_before(text):
    assert drafts(text) == ""


def test_nothing_is_drafted_behind_an_end_token():
    drafter = Sam(SamConfig(grow=0, draft=6))
    drafter.bind(target(eos="."))
    assert draft_of(drafter, "ab.cdefab") == "."
    assert draft_of(drafter, "ab.cdefab", ignore_eos=True) == ".cdefa"
    assert draft_of(drafter, "ab.cdefab", ignore_eos=True, stop_token_ids=tokens("d")) == ".cd"


def test_no_more_than_the_row_has_room_for():
    drafter = Sam()
    assert [draft_of(drafter, "abcdefabc", room) for room in (9, 3, 1)] == ["defabcde", "de", ""]


def test_rows_together_and_alone_get_the_same():
    texts = ["abcabc", "xxyxxyxx", "hello, hello"]
    together = Sam()
    rows = [row(text, id=i) for i, text in enumerate(texts)]
    for one in rows:
        together.start(one)
    for gained in ["", "a", "bc", "lo"]:
        for one in rows:
            one.extend(tokens(gained))
        for one, tree in zip(rows, together.propose(rows), strict=True):
            assert letters(tree.tokens[1:]) == draft_of(Sam(), letters(one.tokens), one.max_draft + 1)


def test_a_row_that_was_not_asked_for_a_while_is_caught_up():
    asked, late = Sam(), Sam()
    one = row("abcdab")
    for drafter in (asked, late):
        drafter.start(one)
    for gained in ["cd", "abx", "cdab"]:
        asked.propose([one])
        one.extend(tokens(gained))
    assert letters(asked.propose([one])[0].tokens) == letters(late.propose([one])[0].tokens) == "bxcdabxcdabxcdabx"


def test_an_ended_row_is_forgotten():
    drafter = Sam()
    first = row("abab", id=3)
    drafter.start(first)
    drafter.propose([first])
    drafter.drop(first)
    drafter.drop(first)
    assert not drafter._automata


@pytest.mark.parametrize("options", [{"draft": 0}, {"min_match": 0}, {"grow": -1}, {"grow": float("nan")}])
def test_impossible_options(options):
    with pytest.raises(MethodError, match="sam: draft is"):
        SamConfig(**options)
