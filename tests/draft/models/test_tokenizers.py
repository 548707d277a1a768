"""Drafting across tokenizers: what is translated says the same, and the target's text stays the target's."""

from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pytest
from tests.asks import asked
from tests.draft.drafting import DraftTable, Replaying, like
from tests.draft.tongues import STORY, Knowing, letters, spelled, telling, tongues
from tests.fakes import TableTarget
from tests.lossless_enumeration import largest_difference, plain, speculative
from tests.pairs import paired
from tests.rounds import shown

from paceline.core.accept import Accepted
from paceline.core.request import Row
from paceline.core.sampling import SamplingParams
from paceline.core.tree import DraftTree
from paceline.draft.methods import model
from paceline.draft.methods.model import Model, OwnTokenizerConfig
from paceline.draft.models.draft_model import Draft, TextModel
from paceline.draft.models.proposers import Proposal
from paceline.draft.models.tokenizers import OwnText, Retokenized, Translator, VocabBridge, intersection
from paceline.draft.registry import create
from paceline.engine.engine import Engine
from paceline.errors import MethodError

TONGUES = tongues()
PAIRS = [*permutations(TONGUES, 2)]
pairs = pytest.mark.parametrize(("own", "other"), PAIRS, ids="-".join)


@pytest.fixture(autouse=True)
def tables(monkeypatch):
    """Draft models by name, in the place of folders: a table and a tokenizer."""
    known = {}
    monkeypatch.setattr(model, "load", lambda path, **_: known[path][0])
    monkeypatch.setattr(model, "load_tokenizer", lambda path: known[path][1])
    return known


# Translating ---------------------------------------------------------------------------------------------------------


@pairs
def test_wherever_a_text_is_cut_both_parts_say_what_it_says(own, other):
    source, goal = TONGUES[own], TONGUES[other]
    translate, ids = Translator(source, goal), source.encode_text(STORY)
    for cut in range(1, len(ids)):
        first, left = translate(ids[:cut])
        at = cut - len(left)
        second, rest = translate(ids[at:], ids[max(0, at - 3) : at])
        assert goal.decode([*first, *second]) == STORY
        assert len(left) < 4
        assert not rest


def test_special_tokens_keep_their_names_or_are_left_out():
    few, many = TONGUES["bytes"], TONGUES["more bytes"]
    text = [*many.encode_text("the cat"), 1, 0, 2, *many.encode_text("the mat")]
    said, _ = Translator(many, few)(text)
    assert said == [*few.encode_text("the cat"), 1, 0, *few.encode_text("the mat")], "</s>, nothing for <pad>, <s>"


@pairs
def test_the_intersection_is_one_to_one_and_says_the_same(own, other):
    source, goal = TONGUES[own], TONGUES[other]
    both = intersection(source, goal)
    assert len(set(both.values())) == len(both) > 200
    for one, same in both.items():
        assert spelled(source, [one]) == spelled(goal, [same])
    assert both[source.inner.convert_tokens_to_ids("</s>")] == goal.inner.convert_tokens_to_ids("</s>")
    assert both == {b: a for a, b in intersection(goal, source).items()}


@pairs
@pytest.mark.parametrize("way", ["tli", "slem"])
def test_a_growing_row_is_read_as_if_it_had_come_at_once(own, other, way):
    """And says what the row says, with the draft's own beginning in front and up to the last whole character."""
    mine, target = TONGUES[own], TONGUES[other]
    facts = telling(target)
    bridges = [VocabBridge(mine, facts, way, len(mine.inner)) for _ in range(2)]
    ids = target.encode_text(STORY * 3)
    growing = Row(0, ids[:1], SamplingParams(max_tokens=len(ids)), max_context=4096)
    begin = mine.encode("")
    for n in range(1, len(ids)):
        read = bridges[0].text(growing).tolist()
        at_once = bridges[1].text(Row(n, ids[:n], SamplingParams(), max_context=4096)).tolist()
        assert read == at_once
        assert read[: len(begin)] == begin
        said, whole = (spelled(of, it).decode(errors="ignore") for of, it in ((mine, read), (target, ids[:n])))
        assert whole.lstrip(" ").startswith(said.lstrip(" "))
        assert len(said) > len(whole) - 3, "a token can be one character and a part of the next one"
        growing.extend([ids[n]])
    canonical = mine.encode_text(STORY * 3)
    assert len(read) < 1.1 * len(canonical), "read as the draft model would write it, nearly"


# Lossless, and worth it ----------------------------------------------------------------------------------------------


@pairs
@pytest.mark.parametrize("way", ["tli", "slem"])
def test_who_knows_the_text_saves_forwards_in_any_batch(tables, own, other, way):
    target = telling(TONGUES[other])
    ids = target.tokenizer.encode_text(STORY)
    prompts = [ids[:n] for n in (1, 4, 9, 15)]
    for temperature, batch, context in ((0.0, 3, ",context=9"), (0.7, 2, "")):
        tables["known"] = Knowing(TONGUES[own]), TONGUES[own]
        params = SamplingParams(max_tokens=len(ids) - 16, temperature=temperature, seed=3)
        made = create(f"model:known,tokenizer={way},stop=fixed,draft=4{context}")
        out = Engine(target, made, max_batch=batch).generate(prompts, params)
        alone = [target.plain(prompt, params).new_tokens.tolist() for prompt in prompts]
        if temperature == 0.0 or way == "slem":
            assert [done.tokens for done in out] == alone
        assert sum(done.rounds for done in out) < 0.7 * sum(map(len, alone))
        assert tables["known"][0].num_rows == 0
        assert f"({way})" in made.notes[0]


def test_the_cache_is_cut_back_to_what_still_holds(tables):
    """A row goes on inside a word: the draft model runs the word again, and nothing before it."""
    target, mine = telling(TONGUES["bytes"]), TONGUES["more bytes"]
    table = Knowing(mine)
    tables["known"] = table, mine
    made = create("model:known,tokenizer=slem,stop=fixed,draft=1")
    made.bind(target)
    start = target.tokenizer.encode_text("the cat sat on the m")
    row = Row(0, start, SamplingParams(max_tokens=30), max_context=4096)
    made.start(row)
    trees = made.propose(asked(row))
    before = made.model.bridge.text(row).tolist()
    made.observe(shown([row], trees, [Accepted([0], [0])]))
    row.extend(target.tokenizer.encode_text("ats"))
    made.propose(asked(row))
    after = made.model.bridge.text(row).tolist()
    same = next(i for i, (one, other) in enumerate(zip(before, after, strict=False)) if one != other)
    assert (same, len(after)) == (len(before) - 2, len(before) - 1), "a space and m, then one token for mats"
    assert table.ran == [[len(before)], [1]]


SMALL = {"vocab_size": 3, "order": 1, "scale": 1.5}
ABC = letters("a", "b", "c")
OWN = letters("b", "d", "a", "ab", merges=[("a", "b")])
"""It lacks c, has others, and joins a and b."""


class Cut(DraftTable):
    """A table whose head can be cut."""

    def trim_head(self, keep):
        whole = self._logits
        self._logits = lambda prefix: np.asarray(whole(prefix))[keep.numpy()]


def small(tables, spec):
    target = TableTarget(seed=3, **SMALL)
    target.tokenizer = ABC
    tables["small"] = Cut(4, order=2, seed=5, scale=1.5), OWN
    return target, create(f"model:small,{spec}")


@pytest.mark.parametrize(
    ("spec", "params"),
    paired(
        [
            "tokenizer=tli,stop=fixed,draft=3",
            "tokenizer=tli,stop=svip,threshold=0.3",
            "tokenizer=tli,tree=4,width=2,draft=2",
            "tokenizer=slem,stop=fixed,draft=3",
        ],
        [SamplingParams(temperature=1.0), SamplingParams(temperature=1.3, top_k=2, repetition_penalty=1.4)],
    ),
)
def test_every_answer_has_the_targets_probability(tables, spec, params):
    """By enumeration of all noise."""
    target, made = small(tables, spec)
    law = speculative(target, [1], params, Replaying(made, target, params), 3)
    assert largest_difference(law, plain(target, [1], params, 3)) < 1e-9


# Options -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("", "model:small,tokenizer=own drafts with it"),
        (",tokenizer=slem,tree=4", "tokenizer=slem takes no vocab, and drafts no tree"),
        (",tokenizer=tli,vocab=5", "tokenizer=tli takes no vocab"),
    ],
)
def test_what_is_refused(tables, spec, says):
    target, _ = small(tables, "tokenizer=tli")
    with pytest.raises(MethodError, match=says):
        create(f"model:small{spec}").bind(target)


def test_tokenizers_without_a_token_in_common(tables):
    target, _ = small(tables, "tokenizer=tli")
    tables["small"] = Cut(2), letters("x", "y")
    with pytest.raises(MethodError, match="no token in common"):
        create("model:small,tokenizer=tli").bind(target)
    made = create("model:small,tokenizer=own")
    made.bind(target)
    assert "(slem)" in made.notes[0]


def test_the_same_tokenizer_needs_no_bridge_and_none_cannot_have_one(tables):
    target = TableTarget(**SMALL)
    made = Model(OwnTokenizerConfig(checkpoint="small", tokenizer="own"))
    with pytest.raises(MethodError, match="needs the target's tokenizer"):
        made.bind(target)
    tables["small"] = like(target), ABC
    target.tokenizer = ABC
    made.bind(target)
    assert isinstance(made.model, TextModel)


def test_of_text_that_is_tokenized_again_nothing_after_an_end_is_drafted():
    row = Row(0, [1, 2], SamplingParams(stop_token_ids=(5,)), max_context=99)
    chain = Proposal(DraftTree.chain(2, [7, 8]), [0, None, None])
    bridge = SimpleNamespace(retokenize=lambda row, drafted: [4, 5, 6])
    made = Retokenized(SimpleNamespace(propose=lambda drafts: [chain]), SimpleNamespace(bridge=bridge))
    [(tree, nodes)] = made.propose([Draft.chain(OwnText(row, row.tokens, row.params, row.ends), [2])])
    assert (tree.tokens.tolist(), nodes) == ([2, 4, 5], [None] * 3)
