"""What holds for every drafter that copies, whatever its rule: bounds, end tokens, memory, exactness."""

from types import SimpleNamespace

import pytest

from paceline.core.request import Row
from paceline.core.sampling import SamplingParams
from paceline.draft.registry import create, describe, names
from paceline.engine.engine import Engine
from paceline.errors import MethodError, StoreError
from tests.asks import asked
from tests.draft.rows import row, tokens
from tests.draft.stores import ALL, corpus_of
from tests.draft.stores import corpus as corpus_at
from tests.fakes import TableTarget
from tests.pairs import paired

LOOKUP = "prompt-lookup,variant=transformers,past={past}"
POOL = "ngram-pool,window=0,level=3,past={past}"
ALONE = ("sam", "sam+suffix", "suffix", "suffix,shape=tree", "hierarchy")
TEXTS = [*(f"{spec},past={{past}}" for spec in ALONE), LOOKUP, POOL]
"""{past}: tokens of finished requests."""
BRING = ("none", "prediction", "grammar", "past-answer")
"""They have nothing to draft unless the request brings it."""
WITH_CORPUS = [
    "sam,corpus={corpus}", "suffix,corpus={corpus}", "hierarchy,corpus={corpus}",
    "rest:{corpus}",
]  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return corpus_at(tmp_path_factory.mktemp("corpus") / "c", ["the cat sat", "the cat ran", "a dog"], parts=ALL)


def bound(spec, corpus="", eos="", past=0, fingerprint=None):
    drafter = create(spec.format(corpus=corpus, past=past))
    tokenizer = SimpleNamespace(fingerprint=fingerprint) if fingerprint else None
    drafter.bind(SimpleNamespace(eos_token_ids=tuple(tokens(eos)), tokenizer=tokenizer, vocab_size=256))
    return drafter


def offered(drafter, one, reason="abort"):
    """What a fresh row is offered, which then ends for this reason."""
    drafter.start(one)
    (tree,) = drafter.propose(asked(one))
    assert tree.tokens[0] == one.last_token
    one.finish_reason = reason
    drafter.drop(one)
    return tree


def paths(tree):
    """Every path from the root, as letters."""
    found = [""]
    for token, above in zip(tree.tokens[1:].tolist(), tree.parent[1:].tolist(), strict=True):
        found.append(found[above] + chr(token))
    return set(found[1:])


@pytest.mark.parametrize("spec", TEXTS)
def test_nothing_occurred_before(spec):
    for text in ("a", "ab", "abcde"):
        assert offered(bound(spec), row(text)).num_drafted == 0


@pytest.mark.parametrize("spec", [*TEXTS, *WITH_CORPUS])
def test_no_deeper_than_the_row_has_room_for(spec, corpus):
    drafter = bound(spec, corpus)
    depths = [offered(drafter, row("the catx the catx the c", room)).max_depth for room in (100, 3, 2, 1)]
    assert depths[0] >= 2
    assert depths[1:] == [2, 1, 0]


@pytest.mark.parametrize("spec", [spec for spec in TEXTS if "lookup" not in spec] + WITH_CORPUS)
def test_nothing_is_drafted_after_an_end_token(spec, corpus):
    text = "the cat sat the cat sat the c"
    assert any(path.startswith("at") for path in paths(offered(bound(spec, corpus), row(text))))
    for params in ({"eos": "a"}, {"stop_token_ids": tokens("a")}):
        found = paths(offered(bound(spec, corpus), row(text, **params)))
        assert "a" in found
        assert not any("a" in path[:-1] for path in found)


@pytest.mark.parametrize("spec", [*TEXTS, *WITH_CORPUS])
def test_rows_do_not_see_each_other_and_a_late_one_catches_up(spec, corpus):
    together, late = bound(spec, corpus), bound(spec, corpus)
    rows = [row(text, id=i) for i, text in enumerate(("abcabc", "xxyxxyxx", "hello, hello", "no such: sec"))]
    for one in rows:
        together.start(one)
        late.start(one)
    for gained in ("", "a", "bc", "lo the c"):
        for one in rows:
            one.extend(tokens(gained))
        trees = together.propose(asked(*rows))
        for one, tree in zip(rows, trees, strict=True):
            fresh = Row(9, one.tokens, one.params, max_context=1 << 20)
            fresh.params = SamplingParams(max_tokens=one.max_draft + 1)
            assert paths(tree) == paths(offered(bound(spec, corpus), fresh))
    for tree, other in zip(trees, late.propose(asked(*rows)), strict=True):
        assert (tree.tokens.tolist(), tree.parent.tolist()) == (other.tokens.tolist(), other.parent.tolist())
    for one in rows:
        together.drop(one)
        together.drop(one)
    kept = {name: value for name, value in vars(together).items() if isinstance(value, dict) and set(value) & {0, 1, 2}}
    assert not kept, "what ended is forgotten"


@pytest.mark.parametrize("spec", TEXTS)
def test_finished_requests_are_remembered_if_asked_and_given_up_ones_are_not(spec):
    cases = ((200, "stop", True), (200, "length", True), (200, "abort", False), (0, "stop", False))
    for past, reason, is_known in cases:
        drafter = bound(spec, past=past)
        offered(drafter, row("abcdefghij", id=1), reason)
        found = paths(offered(drafter, row("xyzbcd", id=2)))
        assert (any(path.startswith("ef"[: 1 + (spec != POOL)]) for path in found)) == is_known, (past, reason)
    drafter = bound(spec, past=40)
    offered(drafter, row("abcdefghij", id=1), "stop")
    for i in range(8):
        offered(drafter, row("".join(map(chr, range(1000 + 20 * i, 1018 + 20 * i))), id=3 + i), "stop")
    assert not paths(offered(drafter, row("xyzbcd", id=2))), "the oldest is forgotten"


@pytest.mark.parametrize(
    "spec",
    [
        *("sam,grow=-1", "sam,grow=nan", "sam,draft=0", "suffix,factor=0", "suffix,min_prob=0", "suffix,min_prob=1.5"),
        *("prompt-lookup,min_ngram=4", "ngram-pool,level=1"),
        *("hierarchy,order=", "hierarchy,order=WX", "hierarchy,order=WW", "hierarchy,n=1", "rest:x,longest=1"),
    ],
)
def test_impossible_options_are_one_line(spec):
    name = spec.partition(",")[0].partition(":")[0]
    with pytest.raises(MethodError, match=rf"^{name}: \w+ is .*must be") as error:
        create(spec)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("spec", WITH_CORPUS)
def test_a_corpus_that_does_not_fit_is_refused(spec, corpus, tmp_path):
    bound(spec, corpus, fingerprint="letters")
    with pytest.raises(StoreError, match=r"was built with another tokenizer \(letters\)"):
        bound(spec, corpus, fingerprint="words")
    with pytest.raises(StoreError, match="there is no store"):
        bound(spec, str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("spec", "eos", "temperature", "batch"),
    paired(
        [
            *("sam,corpus={corpus}", "sam,corpus={corpus},past=64", "sam,corpus={corpus}+prompt-lookup"),
            *("suffix,past=150", "suffix,past=1000,shape=tree,factor=3", "suffix,corpus={corpus}"),
            *("hierarchy,model={corpus},corpus={corpus}", "hierarchy,corpus={corpus},order=LSW,k=2"),
            *("hierarchy,corpus={corpus},past=100,nodes=3",),
            *("rest:{corpus},shortest=1", "prompt-lookup,past=100", "ngram-pool,past=100"),
        ],
        [((), 0.8, 8), ((3,), 0.0, 3)],
    ),
)
def test_answers_are_plain_decodings(spec, eos, temperature, batch, tmp_path):
    """With a corpus of the model's own text, and twice, so that there are finished requests to copy from."""
    model = TableTarget(vocab_size=8, order=2, seed=4, eos=eos)
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=3)
    prompts = [[1], [3, 3], [1, 2, 3, 1, 2], [0, 0, 0, 0, 0, 0, 0], [5, 4, 0, 7] * 9, [2], [6, 5], [7, 1, 7]]
    plain = [model.plain(prompt, params).new_tokens.tolist() for prompt in prompts]
    own = corpus_of(tmp_path / "own", plain, 3)
    engine = Engine(model, draft=spec.format(corpus=own), max_batch=batch)
    for _ in range(2):
        done = engine.generate(prompts, params)
        assert [one.tokens for one in done] == plain
    assert sum(one.new_tokens for one in done) > 1.15 * sum(one.rounds for one in done)


@pytest.mark.parametrize("spec", [spec for spec in names() if describe(spec).checkpoint == "no" and spec not in BRING])
def test_a_text_that_repeats_itself_is_drafted(spec):
    target = TableTarget(vocab_size=8, order=2, seed=4)
    done = Engine(target, draft=spec).generate([[1], [3, 3], [5, 4, 0, 7] * 9], SamplingParams(max_tokens=120))
    assert sum(one.new_tokens for one in done) / sum(one.rounds for one in done) > 2
    assert any(who == spec for one in done for who, _ in one.runs)
