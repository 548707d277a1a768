"""suffix: the most frequent continuation, its sources, and what it remembers of finished requests."""

from types import SimpleNamespace

from paceline.draft.methods.suffix import Suffix, SuffixConfig
from tests.asks import asked
from tests.draft.rows import draft_of, letters, row, target
from tests.draft.stores import corpus


def drafts(text, **options):
    return draft_of(Suffix(SuffixConfig(**options)), text)


def finish(drafter, text, reason="stop", id=7):
    """A request of `text` comes and ends."""
    one = row(text, id=id)
    drafter.start(one)
    drafter.propose(asked(one))
    one.finish_reason = reason
    drafter.drop(one)


def offered(drafter, text):
    """`draft_of` for a row that nothing is learned from."""
    one = row(text, id=8)
    drafter.start(one)
    (tree,) = drafter.propose(asked(one))
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
    (tree,) = drafter.propose(asked(one))
    assert letters(tree.tokens[1:]) == "xaya", "x after two b in three, y after one, and each has been followed by a"
    assert tree.parent.tolist() == [-1, 0, 1, 0, 3]
    assert tree.source == "suffix"


def test_finished_requests_are_remembered_and_the_oldest_are_forgotten():
    drafter = Suffix(SuffixConfig(past=12))
    for text in ["abcdef", "mnop", "uvwxyz"]:
        finish(drafter, text)
        assert sum(map(len, drafter._past.of("").halves)) <= 12
    assert [offered(drafter, text) for text in ["9ab", "9mn", "9uv"]] == ["", "op", "wx"]


def test_a_corpus_is_a_source_too(tmp_path):
    drafter = bound(corpus=corpus(tmp_path / "s", ["abcd", "abcd", "abxx"]), past=100)
    assert offered(drafter, "9ab") == "cd"
    assert offered(drafter, "abzabzabzab") == "zabza", "the request's own, which is surer"
