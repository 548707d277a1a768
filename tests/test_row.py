"""A row ends exactly where plain decoding ends, however its tokens are cut into rounds."""

import codecs
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.request import Row, RowStats
from paceline.core.sampling import SamplingParams
from paceline.core.tally import Tally
from tests.fakes import Spelling

END = 0
PIECES = [b"", b"a", b"b", b"ab", b"ba", b" ", b"\xc3", b"\xa9", b"aab", "é€".encode(), b"\xe2\x82"]
"""What tokens say; 6 and 7 make é together, 10 is a character that never ends."""


def row(params, prompt=(1, 2), max_context=1000, text=True):
    detokenizer = Spelling(PIECES) if text else None
    return Row(0, prompt, params, max_context=max_context, eos_token_ids=[END], detokenizer=detokenizer)


def text_of(of):
    """Text that is new and can no longer change."""
    return "".join(text for _, text in of.take_pieces())


def result(of):
    return of.new_tokens.tolist(), of.text, of.finish_reason


def token_by_token(made, tokens):
    for token in tokens:
        if made.finish_reason is None:
            assert made.extend([token]) == 1
    return made


def said(tokens, final):
    """All of the tokens' text; without an unfinished character at the end unless this is `final`."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(PIECES[t] for t in tokens), final)


def naive_end(tokens, params, max_context):
    """Tokens, text and reason of plain decoding, said as directly as can be: every answer from its beginning."""
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else (END,))}
    for n in range(1, len(tokens) + 1):
        answer = list(tokens[:n])
        text = said(answer, final=False)
        found = [text.index(stop) for stop in params.stop if stop in text]
        if answer[-1] in ends:
            return answer, said(answer[:-1], final=True), "stop"
        if found:
            return answer, text[: min(found)], "stop"
        if n == params.max_tokens:
            return answer, said(answer, final=True), "length"
        if n + 2 == max_context:
            return answer, said(answer, final=True), "context"
    return list(tokens), said(tokens, final=False), None


tokens_of = st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=25)
wishes = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 30),
    stop=st.lists(st.sampled_from(["a", "ab", "aab", "b a", "é", "baab", "abab", "€", "aa"]), max_size=3),
    stop_token_ids=st.lists(st.integers(1, len(PIECES) - 1), max_size=1),
    ignore_eos=st.booleans(),
)
cuts = st.lists(st.integers(1, 7), min_size=25, max_size=25)


def rounds_of(tokens, sizes):
    """`tokens` cut into rounds of the given sizes."""
    rounds, at = [], 0
    for size in sizes:
        if at < len(tokens):
            rounds.append(list(tokens[at : at + size]))
        at += size
    return rounds


# Where it ends --------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(tokens_of, wishes, cuts, st.integers(3, 30))
def test_any_rounds_end_where_single_tokens_end(tokens, params, sizes, max_context):
    plain = token_by_token(row(params, max_context=max_context), tokens)
    drafted = row(params, max_context=max_context)
    taken, streamed = 0, ""
    for of_round in rounds_of(tokens, sizes):
        took = drafted.extend(of_round, "drafter")
        taken += took
        streamed += text_of(drafted)
        assert drafted.text.startswith(streamed)
        if drafted.finish_reason is not None:
            break
        assert took == len(of_round)
    assert result(drafted) == result(plain)
    assert taken == drafted.num_new == sum(n for _, n in drafted.runs)
    assert all(n > 0 for _, n in drafted.runs)
    assert result(plain) == naive_end(tokens, params, max_context)
    if drafted.finish_reason is not None:
        assert streamed == drafted.text


def test_the_context_ends_before_max_tokens():
    made = row(SamplingParams(max_tokens=50), max_context=5)
    assert made.max_draft == 2
    assert made.extend([1, 1, 1, 1], "drafter") == 3
    assert (made.finish_reason, len(made)) == ("context", 5)
    exactly = row(SamplingParams(max_tokens=3), max_context=5)
    exactly.extend([1, 1, 1])
    assert exactly.finish_reason == "length"


def test_a_draft_never_reaches_behind_the_end():
    """max_draft drafted tokens and the target's own fill the row to its last place."""
    made = row(SamplingParams(max_tokens=6))
    for already in range(6):
        assert made.num_new + made.max_draft + 1 == 6
        assert made.num_new == already
        made.extend([1])
    assert made.finish_reason == "length"


def test_rows_without_text():
    made = row(SamplingParams(max_tokens=4), text=False)
    assert made.extend([1, 2, END, 4], "drafter") == 3
    assert result(made) == ([1, 2, END], "", "stop")
    assert made.take_pieces() == []


def test_nothing_to_take():
    """A row still in its prompt."""
    made = row(SamplingParams())
    assert made.extend([], "drafter") == 0
    assert (made.runs, made.num_new, made.finish_reason, made.take_pieces()) == ([], 0, None, [])


def test_bookkeeping():
    made = row(SamplingParams(max_tokens=400), prompt=(3, 4, 5))
    assert made.pending.tolist() == [3, 4, 5]
    assert (made.last_token, len(made), made.num_new, made.expected_length) == (5, 3, 0, 3 + 256)
    made.cached = 3
    made.extend([1, 2], "drafter")
    assert made.pending.tolist() == [1]  # the last token is the root of the next draft
    assert made.tokens.tolist() == [3, 4, 5, 1, 2]
    assert made.new_tokens.tolist() == [1, 2]


# Its text -------------------------------------------------------------------------------------------------------


def test_the_beginning_of_a_stop_string_is_held_back():
    made = row(SamplingParams(stop=["ab ab"]))
    seen = []
    for token in (2, 1, 2, 5, 1, 1):  # b, a, b, space, a, a
        made.extend([token])
        seen.append(text_of(made))
    assert seen == ["b", "", "", "", "", "ab a"]
    made.extend([2, 5, 1, 2], "drafter")
    assert (text_of(made), made.text, made.finish_reason) == ("", "bab a", "stop")


def test_what_was_held_back_comes_when_the_answer_ends():
    for ending, reason in (([END], "stop"), ([1], "length")):
        made = row(SamplingParams(stop=["bbb"], max_tokens=4))
        made.extend([1, 2, 2])
        assert text_of(made) == "a"
        made.extend(ending)
        assert text_of(made) == ("bb" if reason == "stop" else "bba")
        assert made.finish_reason == reason


def test_an_aborted_row_gives_what_it_has():
    made = row(SamplingParams(stop=["bb"]))
    made.extend([1, 2, 6], "drafter")
    assert text_of(made) == "a"
    made.finish_reason = "abort"
    made.finish_text()
    assert made.take_pieces() == [("drafter", "b"), ("", "\ufffd")]
    made.finish_text()
    assert made.take_pieces() == []


@pytest.mark.parametrize(
    ("stop", "rounds"),
    [
        ((), [([1, 2, 1], "sam", [("sam", "ab"), ("", "a")])]),
        ((), [([2], "", None), ([1, 2], "other", None), ([2, 1], "", [("", "b"), ("other", "a"), ("", "bba")])]),
        # a character belongs to the token that completes it
        ((), [([6, 7], "sam", [("", "é")]), ([1, 6, 2], "sam", [("sam", "a"), ("", "\ufffdb")])]),
        # text that was held back keeps its source; a stop string takes it away
        (("abb",), [([2, 1, 2], "sam", [("sam", "b")]), ([1], "", [("sam", "a"), ("", "b")]), ([2, 2, 1], "sam", [])]),
    ],
)
def test_pieces_say_who_wrote_them(stop, rounds):
    made = row(SamplingParams(stop=stop))
    for tokens, source, pieces in rounds:
        made.extend(tokens, source)
        assert pieces is None or made.take_pieces() == pieces
    who = [one for tokens, source, _ in rounds for one in ((source, len(tokens) - 1), ("", 1)) if one[1]]
    assert made.runs == who or made.finish_reason == "stop"


@settings(max_examples=150)
@given(tokens_of, wishes, cuts, st.lists(st.sampled_from(["x", "y"]), min_size=25, max_size=25))
def test_pieces_are_each_tokens_own_text(tokens, params, sizes, sources):
    """Whenever they are taken: the same colours as one token at a time, and neighbours joined."""
    made, alone = row(params), Spelling(PIECES)
    colours = []  # (source, character)
    pieces = []
    for of_round, source in zip(rounds_of(tokens, sizes), sources, strict=False):
        took = made.extend(of_round, source)
        for i, token in enumerate(of_round[:took]):
            who = source if i < len(of_round) - 1 else ""
            if token not in (END, *params.stop_token_ids):  # an end has no text, not even that of a character's rest
                colours += [(who, character) for character in alone.push(token)]
            last = who
        taken = made.take_pieces()
        assert all(text for _, text in taken)
        assert all(one[0] != other[0] for one, other in pairwise(taken))
        pieces += taken
        if made.finish_reason is not None:
            colours += [(last, character) for character in alone.flush()]
            assert "".join(text for _, text in pieces) == made.text
            break
    assert [(who, character) for who, text in pieces for character in text] == colours[: sum(len(t) for _, t in pieces)]


# Its statistics -------------------------------------------------------------------------------------------------


def test_statistics():
    stats = RowStats()
    for depth, nodes, accepted in ((0, 0, 0), (3, 3, 3), (3, 7, 1), (1, 1, 0)):
        stats.record(depth, nodes, accepted)
    assert (stats.rounds, stats.draft_rounds, stats.draft_tokens) == (4, 3, 11)
    assert stats.accepted == [2, 1, 0, 1]
    assert stats.drafted == [0, 3, 2, 2]
    assert stats.acceptance_by_depth() == [2 / 3, 1 / 2, 1 / 2]
    assert RowStats().acceptance_by_depth() == []
    assert (stats.accepted_tokens, stats.acceptance_rate, stats.draft_rate) == (4, 4 / 11, 3 / 4)
    assert (stats.mean_draft_round, stats.verified_per_round) == (7 / 3, 15 / 4)
    stats.new_tokens = 8
    total = Tally.of([stats, Tally(2, 1), Tally()])
    assert (total.mean_accepted_tokens, total.verified_per_token, Tally().acceptance_rate) == (2, 16 / 10, 0)


def test_mean_accepted_tokens():
    made = row(SamplingParams())
    assert made.stats.mean_accepted_tokens == 0
    for tokens in ([1, 1, 1], [1]):
        made.stats.record(len(tokens) - 1, len(tokens) - 1, len(tokens) - 1)
        made.extend(tokens, "x")
    assert made.stats.mean_accepted_tokens == 2
