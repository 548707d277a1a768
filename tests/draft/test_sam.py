"""sam: what it copies, how much, and that rows do not disturb one another."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft.registry import create
from paceline.draft.sam import Sam, SamConfig
from paceline.draft.text import automaton, frozen
from paceline.draft.text.frozen import build_part
from paceline.draft.text.store import writing
from paceline.engine.engine import Engine
from paceline.engine.sampling import SamplingParams
from paceline.errors import MethodError, StoreError
from tests.draft.rows import draft_of, letters, row, target, tokens
from tests.fakes import TableTarget


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
    assert len(drafts(text + "0")) == 6
    assert len(drafts(text + "0123")) == 24
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
    both = [letters(drafter.propose([one])[0].tokens) for drafter in (asked, late)]
    assert both == ["bxcdabxcdabxcdabxcdabxcda"] * 2


def test_an_ended_row_is_forgotten():
    drafter = Sam()
    first = row("abab", id=3)
    drafter.start(first)
    drafter.propose([first])
    drafter.drop(first)
    drafter.drop(first)
    assert not drafter._automata


@pytest.mark.parametrize(
    "options",
    [
        {"draft": 0},
        {"min_match": 0},
        {"grow": -1},
        {"grow": float("nan")},
        {"bias": -1},
        {"past": -1},
        {"width": 0},
        {"width": 9},
    ],
)
def test_impossible_options(options):
    ((name, value),) = options.items()
    with pytest.raises(MethodError, match=rf"^SamConfig: {name} is {value}; it must be \d (or more|to 8)\.$"):
        SamConfig(**options)


def corpus(folder: Path, *documents: str, tokenizer: str = "letters") -> str:
    """A store of these documents, a letter a token, each ending with a full stop."""
    text = np.array(tokens("".join(f"{document}." for document in documents)), np.int32)
    ends = np.cumsum([len(document) + 1 for document in documents])
    with writing(folder / "corpus", kind="corpus", tokenizer=tokenizer, eos=ord(".")) as store:
        store.add("text", text)
        for name, array in build_part(text, ends, 128).items():
            store.add(name, array)
    return str(folder / "corpus")


def bound(spec: str, eos: str = "") -> Sam:
    drafter, met = create(spec), target(eos)
    met.tokenizer = None
    drafter.bind(met)  # type: ignore[arg-type]
    return drafter  # type: ignore[return-value]


def chain(folder: str, **options: object) -> Sam:
    return bound(f"sam,corpus={folder},shape=chain" + "".join(f",{key}={value}" for key, value in options.items()))


def test_the_corpus_is_copied_where_it_matches_longer(tmp_path):
    folder = corpus(tmp_path, "hello world", "the sea is blue")
    assert draft_of(chain(folder), "wxthe s") == "ea is blue."
    assert draft_of(chain(folder), "the sky, the s") == "ky, the sky, the sky, the sky,"  # 5 letters each
    assert draft_of(chain(folder), "the sky; is bl") == "ue."
    assert draft_of(chain(folder), "xx hell") == "o world."


def test_bias_is_what_a_match_in_the_corpus_counts_less(tmp_path):
    folder = corpus(tmp_path, "the sea is blue")
    text = "sky. the s"  # 1 letter in the text, 5 in the corpus
    assert draft_of(chain(folder, bias=3), text) == "ea is blue."
    assert draft_of(chain(folder, bias=4), text) == "ky. th"
    assert draft_of(chain(folder, bias=1, min_match=5), text) == ""
    assert draft_of(chain(folder, bias=1, min_match=4), text) == "ea is blue."


def test_in_front_of_another_drafter_a_match_in_the_corpus_has_to_be_long(tmp_path):
    folder = corpus(tmp_path, "0123456789abcdef")
    both = bound(f"sam,corpus={folder}+none")
    assert draft_of(both, "xx012345678") == ""
    assert draft_of(both, "xx0123456789") == "abcdef."


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_no_draft_crosses_into_the_next_document(tmp_path, shape):
    folder = corpus(tmp_path, "one two", "three four")
    drafter = bound(f"sam,corpus={folder},shape={shape}")
    for params in ({}, {"ignore_eos": True}):
        assert draft_of(drafter, "xxone t", **params) == "wo."
    assert draft_of(drafter, "xxone t", stop_token_ids=tokens("w")) == "w"


def test_recent_or_earliest_in_the_corpus(tmp_path):
    folder = corpus(tmp_path, "uvwxyA", "uvwxyB")
    assert draft_of(chain(folder), "uvwxy") == "B."
    assert draft_of(chain(folder, source="earliest"), "uvwxy") == "A."
    assert draft_of(chain(folder), "uvw") == "xyB."


def test_a_tree_of_the_corpus(tmp_path):
    drafter = bound(f"sam,corpus={corpus(tmp_path, 'abcx', 'abcy', 'abd')},draft=5,width=2")
    one = row("#ab")
    drafter.start(one)
    (tree,) = drafter.propose([one])
    assert letters(tree.tokens[1:]) == "cdxy."
    assert tree.parent.tolist() == [-1, 0, 0, 1, 1, 3]
    assert tree.source == "sam"
    short = row("#ab", room=2)
    drafter.start(short)
    assert drafter.propose([short])[0].max_depth == 1


def test_a_token_the_corpus_does_not_know(tmp_path):
    folder = corpus(tmp_path, "abcabc")
    assert draft_of(chain(folder), "ab~") == ""
    assert draft_of(chain(folder), "ab~a") == "b~ab~a"


def test_the_cursor_follows_the_row(tmp_path):
    folder = corpus(tmp_path, "the sea is blue", "the sky is high")
    steps, one = bound(f"sam,corpus={folder}"), row("#", room=100)
    steps.start(one)
    for gained in ["t", "he s", "ky is ", "blue", "!", "the se"]:
        one.extend(tokens(gained))
        (tree,) = steps.propose([one])
        assert letters(tree.tokens[1:]) == draft_of(bound(f"sam,corpus={folder}"), letters(one.tokens))


def test_the_cursor_has_read_the_last_token(tmp_path):
    folder = corpus(tmp_path, "qz", "pqy")
    steps, one = bound(f"sam,corpus={folder},bias=0,grow=1"), row("#q", room=100)
    steps.start(one)
    assert letters(steps.propose([one])[0].tokens[1:])[:1] in ("z", "y"), "one token is enough, if it is the last one"
    one.extend(tokens("#p"))
    assert letters(steps.propose([one])[0].tokens[1:]) == "q"
    one.extend(tokens("q"))
    assert letters(steps.propose([one])[0].tokens[1:])[:1] == "y", "two tokens tell y from z"


def test_finished_requests_are_remembered(tmp_path):
    drafter = bound("sam,past=100", eos=".")
    draft_of(drafter, "the sea is blue")
    assert draft_of(drafter, "#sea i") == "s blue."
    assert draft_of(drafter, "#sea i") != "s blue."  # by then "#sea i" itself has been remembered
    assert draft_of(bound("sam"), "#sea i") == ""


def test_what_is_remembered_is_bounded_and_the_oldest_goes_first():
    drafter = bound("sam,past=40")
    for text in ["0123456789", "abcdefghij", "klmnopqrst", "ABCDEFGHIJ"]:
        draft_of(drafter, text)
    assert draft_of(drafter, "_klm") == "nopqrstABCDEFGHIJ"
    draft_of(drafter, "KLMNOPQRST")
    assert draft_of(drafter, "_012") == ""
    assert draft_of(drafter, "_ABC") != ""
    draft_of(drafter, "x" * 50 + "abcdefghijklmnopqrst")
    assert draft_of(drafter, "_ghi") == "jklmnopqrst"
    assert all(len(past.automaton) <= 20 for past in drafter._past.halves)


def test_an_aborted_request_is_not_remembered():
    drafter, one = bound("sam,past=100"), row("the sea is blue")
    drafter.start(one)
    one.finish_reason = "abort"
    drafter.drop(one)
    assert draft_of(drafter, "#sea i") == ""


def test_the_row_s_own_text_comes_first_and_the_newest_next():
    drafter = bound("sam,past=100")
    for text in ["uvwA", "uvwB"]:
        draft_of(drafter, text)
    assert draft_of(drafter, "#uvw")[0] == "B"
    assert draft_of(drafter, "uvwC_uvw")[0] == "C"


@pytest.mark.parametrize("spec", ["sam,corpus={}", "sam,corpus={},shape=chain,past=64", "sam,corpus={}+prompt-lookup"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_lossless_with_a_corpus_and_a_past(tmp_path, spec, temperature):
    fake = TableTarget(vocab_size=8, order=2, seed=4)
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=3)
    prompts = [[1], [3, 3], [1, 2, 3, 1, 2], [5, 4, 0, 7] * 9]
    rows = [fake.plain(prompt, params) for prompt in prompts]
    text = np.concatenate([row.tokens for row in rows] + [[0]]).astype(np.uint16)
    with writing(tmp_path / "store", kind="corpus", tokenizer="", eos=0) as store:
        store.add("text", text)
        for name, array in build_part(text, np.array([len(text)]), 8).items():
            store.add(name, array)
    for batch in (1, 8):
        engine = Engine(fake, draft=spec.format(tmp_path / "store"), max_batch=batch)
        for _ in range(2):
            done = engine.generate(prompts, params)
            assert [one.tokens for one in done] == [row.new_tokens.tolist() for row in rows]
            assert [one.finish_reason for one in done] == [row.finish_reason for row in rows]
    assert sum(one.new_tokens for one in done) > 1.2 * sum(one.rounds for one in done)


def test_a_corpus_of_another_tokenizer_is_refused(tmp_path):
    met = target()
    met.tokenizer = type("", (), {"fingerprint": "other"})
    with pytest.raises(StoreError, match="another tokenizer"):
        create(f"sam,corpus={corpus(tmp_path, 'abc')}").bind(met)  # type: ignore[arg-type]


def test_a_corpus_that_is_not_there(tmp_path):
    with pytest.raises(StoreError, match="there is no store"):
        bound(f"sam,corpus={tmp_path}/nothing")


def test_bind_compiles_what_a_corpus_needs(tmp_path):
    folder = corpus(tmp_path, "the sea is blue")
    drafters = [bound(f"sam,corpus={folder},past=100,shape={shape}") for shape in ("chain", "tree")]
    kernels = [frozen.transfer, frozen._chain, frozen._tree, automaton._transfer, automaton._extend]
    before = [len(kernel.signatures) for kernel in kernels]
    for drafter in drafters:
        for text in ("#the s", "ab", "abab", "#the sea"):
            draft_of(drafter, text)
    assert [len(kernel.signatures) for kernel in kernels] == before
