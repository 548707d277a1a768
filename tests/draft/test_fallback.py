"""a+b: who is asked, who watches, who is credited."""

from collections import Counter

import numpy as np
import pytest
import torch

from paceline.core.accept import Accepted
from paceline.core.sampling import SamplingParams
from paceline.core.tree import DraftTree
from paceline.draft.base import Drafter, View
from paceline.draft.fallback import Choice, Extended, Fallback
from paceline.draft.registry import create
from paceline.engine.engine import Engine
from paceline.errors import MethodError
from paceline.target.base import Needs
from tests.draft.drafting import drafter as with_model
from tests.draft.drafting import like
from tests.draft.rows import letters, row, target
from tests.fakes import TableTarget
from tests.rounds import shown


class Recorder(Drafter):
    """Proposes `word` for rows whose text ends with `after`, and notes every call."""

    def __init__(self, name: str, after: str = "", word: str = "", **needs: object):
        self.name, self.after, self.word = name, after, word
        self.needs = Needs(**needs)  # type: ignore[arg-type]
        self.calls: list[tuple[object, ...]] = []

    def bind(self, target):
        self.calls.append(("bind",))

    def start(self, row):
        self.calls.append(("start", row.id))

    def propose(self, rows):
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
    trees = drafter.propose(rows)
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
    trees = drafter.propose(rows)
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
    trees = drafter.propose(rows)
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


# a>b -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("tree", [0, 6])
def test_a_second_drafter_goes_on_where_the_first_ends(tree: int, temperature: float) -> None:
    """Both are accepted, each is credited with its own tokens, and a round brings more than with the first alone."""
    target = TableTarget(8, order=1, seed=3, scale=9.0)  # a loop
    params = SamplingParams(temperature=temperature, max_tokens=80, seed=5)
    done = []
    for spec in ("", "sam", "suffix"):
        first = with_model(like(target, noise=0.2), stop="fixed", draft=2, tree=tree, width=2)
        drafter = Extended(first, create(spec)) if spec else first
        done += Engine(target, drafter, budget=False).generate([[1, 2, 3, 4]], params)
        credited = Counter[str]()
        for name, count in done[-1].runs:
            credited[name] += count
        assert credited["model"] + credited[spec] * bool(spec) == done[-1].stats.accepted_tokens
        assert credited[spec] > 20 or not spec
    alone, *extended = done
    assert all(one.rounds < 0.6 * alone.rounds for one in extended)
    assert temperature or {tuple(one.tokens) for one in done} == {tuple(alone.tokens)}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_where_nothing_can_be_copied_a_b_is_a(temperature: float) -> None:
    target, params = TableTarget(64, order=2, seed=3), SamplingParams(temperature=temperature, max_tokens=40, seed=5)
    done = []
    for second in (None, "sam"):
        first = with_model(like(target, noise=0.2), stop="fixed", draft=3)
        drafter = first if second is None else Extended(first, create(second + ",min_match=30"))
        done += Engine(target, drafter, budget=False).generate([[1, 2, 3, 4]], params)
    assert (done[0].tokens, done[0].runs) == (done[1].tokens, done[1].runs)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_where_the_first_has_nothing_a_b_is_b(temperature: float) -> None:
    target = TableTarget(8, order=1, seed=3, scale=9.0)
    params = SamplingParams(temperature=temperature, max_tokens=80, seed=5)
    done = []
    for spec in ("past-answer>sam", "sam,min_match=5"):  # of a first request there is no past answer
        done += Engine(target, create(spec), budget=False).generate([[1, 2, 3, 4]], params)
    assert (done[0].tokens, done[0].runs, done[0].rounds) == (done[1].tokens, done[1].runs, done[1].rounds)
    assert done[0].stats.accepted_tokens > 20


@pytest.mark.parametrize("name", ["sam", "suffix"])
@pytest.mark.parametrize(
    ("text", "ahead", "copies"),
    [
        ("abcdefghij_abcde", "fg", True),
        ("abcdefghij_e", "fg", False),
        ("abcdefghij_", "efghi", False),
        ("xy", "z", False),
    ],
)
def test_a_copy_needs_a_match_that_reaches_into_the_text_before(name: str, text: str, ahead: str, copies: bool) -> None:
    """And nothing of what another drafter guessed is kept."""
    drafter, plain = create(f"none>{name}").parts[1], create(name)  # type: ignore[attr-defined]
    for one in (drafter, plain):
        one.bind(target())
        one.start(row(text))
    tokens = np.array([ord(letter) for letter in text + ahead])
    view = View(row(text), tokens=tokens, last_token=int(tokens[-1]), ahead=len(ahead), max_draft=9)
    drafted = letters(drafter.draft(view).tokens[1:])
    assert drafted.startswith("h") if copies else not drafted
    longer = row(text + "zz" + text)
    assert letters(drafter.draft(longer).tokens) == letters(plain.draft(longer).tokens) or name == "sam"


def test_what_cannot_go_together_is_refused_in_one_line() -> None:
    for spec, words in {
        "sam>prompt-lookup": "sam>prompt-lookup: prompt-lookup cannot go on after tokens that are not verified yet",
        "ngram-pool>sam": "ngram-pool>sam: nothing can go on after ngram-pool, whose drafts are more than tokens",
        "none>sam": "none>sam: nothing can go on after none",
        "sam>sam>suffix": "only one drafter can go on after another; write a>b",
        "sam>nothing": "There is no drafter 'nothing'",
        "model:./a>b": "A path with a \\+ or > in it is put in double quotes",
    }.items():
        with pytest.raises(MethodError, match=words) as error:
            create(spec).bind(target())
        assert "\n" not in str(error.value)
    assert create("suffix+sam>suffix").name == "suffix+sam>suffix"
    assert create('rest:"a>suffix"').name == "rest"


def test_a_drawn_draft_and_a_copy_after_it_are_one_tree() -> None:
    probs = torch.tensor([[0.5, 0.5], [0.25, 0.75], [0.0, 0.0]])
    first, second = Recorder("p"), Recorder("q")
    head = DraftTree.chain(7, [0, 1], draft_probs=probs, owner=first, source="p")
    whole = head.then(DraftTree.of(1, [0, 1, 1], [0, 0, 1], owner=second))
    assert whole.parent.tolist() == [-1, 0, 1, 2, 2, 3]
    assert whole.draft_probs.tolist() == [*probs.tolist(), *[[0.0, 0.0]] * 3]
    assert whole.sources([0, 1, 2, 3]) == ["p", "p", "q"]
    (own, path), (tail, rest) = whole.divided([0, 1, 2, 4])
    assert (own.tokens.tolist(), path, own.owner) == ([7, 0, 1], [0, 1, 2], first)
    assert (tail.tokens.tolist(), tail.parent.tolist(), rest) == ([1, 0, 1, 1], [-1, 0, 0, 1], [0, 2])
    assert tail.owner is second
    assert whole.divided([0, 1])[1][1] == []
    assert whole.clipped(2).tail is None
    assert whole.clipped(3).tail == (3, second)
