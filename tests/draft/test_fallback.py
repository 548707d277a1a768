"""a+b: who is asked, who watches, who is credited."""

import pytest
import torch

from paceline.core.accept import Accepted
from paceline.core.tree import DraftTree
from paceline.draft.base import Drafter
from paceline.draft.fallback import Choice, Fallback
from paceline.draft.registry import create
from paceline.errors import MethodError
from paceline.target.base import Needs
from tests.asks import asked
from tests.draft.rows import letters, row, target
from tests.rounds import shown


class Recorder(Drafter):
    """Proposes `word` for rows whose text ends with `after`, and notes every call."""

    def __init__(self, name, after="", word="", **needs):
        self.name, self.after, self.word = name, after, word
        self.needs = Needs(**needs)
        self.calls = []

    def bind(self, target):
        self.calls.append(("bind",))

    def start(self, row):
        self.calls.append(("start", row.id))

    def propose(self, asks):
        rows = [row for row, _ in asks]
        self.calls.append(("propose", *(row.id for row in rows)))
        fits = [letters(row.tokens).endswith(self.after) for row in rows]
        words = [[ord(c) for c in self.word] if fit else [] for fit in fits]
        return [DraftTree.chain(row.last_token, word) for row, word in zip(rows, words, strict=True)]

    def observe(self, round):
        self.calls.append(("observe", *(tree.source for tree in round.trees)))

    def on_layer(self, layer, hidden, round):
        self.calls.append(("on_layer", layer))

    def drop(self, row):
        self.calls.append(("drop", row.id))


def test_each_row_s_draft_comes_from_the_first_who_has_one():
    first, second, third = Recorder("p", "a", "12"), Recorder("q", "b", "3"), Recorder("r", "", "")
    drafter = Fallback([first, second, third])
    rows = [row(text, id=i) for i, text in enumerate(["xa", "xb", "xc", "ya"])]
    trees = drafter.propose(asked(*rows))
    assert [letters(tree.tokens) for tree in trees] == ["a12", "b3", "c", "a12"]
    assert [tree.source for tree in trees] == ["p", "q", "r", "p"]
    assert first.calls == [("propose", 0, 1, 2, 3)]
    assert second.calls == [("propose", 1, 2)]
    assert third.calls == [("propose", 2)]


def test_every_part_watches_every_row():
    parts = [Recorder("p", "a", "1"), Recorder("q", "b", "2")]
    drafter = Fallback(parts)
    rows = [row("a", id=0), row("b", id=1)]
    drafter.bind(target())
    for one in rows:
        drafter.start(one)
    trees = drafter.propose(asked(*rows))
    drafter.observe(shown(rows, trees, [Accepted([0], [])] * 2))
    drafter.drop(rows[0])
    watched = [("bind",), ("start", 0), ("start", 1), ("observe", "p", "q"), ("drop", 0)]
    for part in parts:
        assert [call for call in part.calls if call[0] != "propose"] == watched


def test_each_request_has_the_drafter_that_it_names_or_else_the_first():
    first, second = Recorder("p", "", "1"), Recorder("q", "", "2")
    drafter = Choice({"p": first, "q,draft=4": second})
    drafter.bind(target())
    rows = [row("a", id=i, draft=draft) for i, draft in enumerate([None, "q,draft=4", "p"])]
    trees = drafter.propose(asked(*rows))
    assert [letters(tree.tokens) for tree in trees] == ["a1", "a2", "a1"]
    assert [drafter.of(one) for one in rows] == [first, second, first]
    assert (first.calls[-1], second.calls[-1]) == (("propose", 0, 2), ("propose", 1))


def test_needs_are_put_together_and_layers_handed_to_those_who_asked():
    asked, other = Recorder("p", callback_layer=2, top_k=4), Recorder("q", hidden_layers=(1,), top_k=8)
    drafter = Fallback([asked, other])
    assert drafter.needs == Needs(hidden_layers=(1,), top_k=8, callback_layer=2)
    drafter.on_layer(2, torch.zeros(1, 1), shown([], [], []))
    assert asked.calls == [("on_layer", 2)]
    assert other.calls == []


@pytest.mark.parametrize("need", ["resume_layer", "callback_layer"])
def test_parts_that_cut_the_forward_at_different_layers(need):
    with pytest.raises(MethodError, match=rf"p\+q: its parts want layers \[2, 5\] as {need}"):
        Fallback([Recorder("p", **{need: 2}), Recorder("q", **{need: 5})]).bind(target())
    Fallback([Recorder("p", **{need: 2}), Recorder("q", **{need: 2}), Recorder("r")]).bind(target())


def test_another_form_is_refused_in_one_line():
    for spec, words in {
        "sam>suffix": r"There is no drafter 'sam>suffix'\. a>b is not made any more: write a\+b",
        "sam+nothing": "There is no drafter 'nothing'",
        "model:./a+b": "A path with a \\+ in it is put in double quotes",
    }.items():
        with pytest.raises(MethodError, match=words) as error:
            create(spec)
        assert "\n" not in str(error.value)
    assert create('rest:"a+suffix"').name == "rest"
