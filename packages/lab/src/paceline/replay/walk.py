"""Replay recorded answers: draft, accept the tokens that the recording confirms, go on after them.

A greedy target accepts a drafted token exactly if it is the next token of its answer. So a drafter that sees only
tokens has the same tokens accepted on a recording as with the model.

The first draft is made after the prompt, as in Spec-Bench's programs. Our engine has one more round an answer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from weakref import WeakKeyDictionary

import numpy as np
from numba import njit

from paceline.core.params import SamplingParams
from paceline.core.request import Row
from paceline.core.round import Accepted, Round
from paceline.core.segment import Needs, Segment
from paceline.core.tally import Tally, over
from paceline.core.tree import DraftTree, IntArray
from paceline.draft.base import UNLIMITED, Ask, Drafter, Unlimited
from paceline.draft.registry import create, names
from paceline.engine.budget import Budget
from paceline.errors import MethodError, PacelineError
from paceline.formats.facts import Facts
from paceline.logs.transcript import RecordedAnswer

SLACK = 1024
"""Tokens that a row may have after its recorded answer, so that no draft is cut where the answer happens to end."""
DEEPEST = SLACK  # Histograms count deeper and larger drafts as this.


def _histogram() -> IntArray:
    return np.zeros(DEEPEST + 1, np.int64)


@dataclass
class ReplayTally(Tally):
    """Counts over replayed answers.

    seconds          the drafter's time.
    accepted, depths int64 [DEEPEST + 1]: accepted[d] rounds accepted d drafted tokens,
                     depths[d] rounds had a draft of depth d.
    sizes            sizes[n] rounds had n nodes to verify, with the root."""

    answers: int = 0
    seconds: float = 0.0
    accepted: IntArray = field(default_factory=_histogram)
    depths: IntArray = field(default_factory=_histogram)
    sizes: IntArray = field(default_factory=_histogram)

    @property
    def draft_us_per_round(self) -> float:
        """Microseconds of the drafter for a round, over all its work from a row's start to its end."""
        return over(1e6 * self.seconds, self.rounds)

    def accepted_by_depth(self) -> list[float]:
        """Entry d-1: of the rounds whose draft reached depth d, the share that accepted at least d tokens."""
        reached = self.depths[::-1].cumsum()[::-1]
        survived = self.accepted[::-1].cumsum()[::-1]
        deepest = int(np.flatnonzero(reached).max(initial=0))
        return [float(survived[d] / reached[d]) for d in range(1, deepest + 1)]


def replayable(spec: str, target: Facts) -> Drafter:
    """Make and bind the drafter of `spec`. Raises MethodError if it needs more than tokens."""
    drafter = _bound(spec, target)
    needs = drafter.needs
    wants = {
        "hidden states": bool(needs.all_layers),
        "its best logits": needs.top_k > 0,
        "layers to run itself": needs.resume_layer is not None,
        "a call in the middle of its forward": needs.callback_layer is not None,
    }
    if any(wants.values()):
        asked = " and ".join(what for what, wanted in wants.items() if wanted)
        others = f"Without a checkpoint these can be replayed: {', '.join(judged(target)[0])}."
        raise MethodError(f"{spec} asks the target for {asked}, and a recording holds tokens only. {others}")
    if drafter.times_rounds:
        instead = "Replay the drafters that it chooses from, or give it a table of `paceline tune` (its option table)."
        raise MethodError(f"{spec} drafts by how long rounds take, and a recording has no rounds. {instead}")
    return drafter


def judged(target: Facts) -> tuple[list[str], dict[str, str]]:
    """Methods that can be replayed without a checkpoint. Returns those that a recording can judge, and by name why it
    cannot judge the others."""
    drafters = {name: _bound(name, target) for name in tokens_only(target)}
    reasons = {name: "the time that rounds take" if d.times_rounds else d.wants for name, d in drafters.items()}
    return [name for name, why in reasons.items() if not why], {name: why for name, why in reasons.items() if why}


def _bound(spec: str, target: Facts) -> Drafter:
    drafter = create(spec)
    drafter.bind(target)
    return drafter


_BUDGETS: WeakKeyDictionary[Drafter, Unlimited] = WeakKeyDictionary()


def _budget(drafter: Drafter) -> Unlimited:
    """A drafter's budget in all its replays. A recording has no prices, so only a given table limits drafts."""
    if drafter not in _BUDGETS:
        _BUDGETS[drafter] = UNLIMITED if drafter.price_table is None else Budget(drafter.price_table)
    return _BUDGETS[drafter]


def tokens_only(target: Facts) -> list[str]:
    """Methods that run on tokens alone, without a checkpoint."""
    short, through = RecordedAnswer(np.zeros(4, np.int64), np.zeros(4, np.int64)), []
    for name in names():
        with suppress(PacelineError):
            drafter = _bound(name, target)
            if drafter.needs == Needs():
                replay(drafter, short, 0, ReplayTally())
                through.append(name)
    return through


PARAMS = SamplingParams(max_tokens=1 << 30, seed=0)


class _Recorded(Row):
    """A row that has all its tokens from the beginning, and shows them round by round."""

    def record(self, text: IntArray) -> None:
        self._tokens = text

    def tell(self, length: int) -> None:
        self._length = length


class Walk:
    """A row with a recorded answer, which judges drafts as a greedy target would.

    id    different for each row of a drafter. ends: the target's end tokens."""

    def __init__(self, id: int, recorded: RecordedAnswer, ends: Sequence[int] = ()):
        self.text, prompt = np.concatenate([recorded.prompt, recorded.answer]), recorded.prompt
        self.row = _Recorded(id, prompt, PARAMS, max_context=len(self.text) + SLACK, eos_token_ids=ends)
        self.row.record(self.text)

    @property
    def is_over(self) -> bool:
        """Whether the row has the whole answer."""
        return len(self.row) >= len(self.text)

    def advance(self, tree: DraftTree, tally: ReplayTally) -> int:
        """Extend the row by the confirmed tokens of `tree` and one token more. Returns the last confirmed node. Raises
        ValueError if the tree's root is not the row's last token."""
        at, size = len(self.row), len(tree.tokens)
        probe = _NO_PROBES if tree.probe is None else tree.probe
        count, node = _walk(tree.tokens, tree.parent, probe, self.text, at, tally.accepted, tally.depths, tally.sizes)
        if count < 0:
            raise ValueError(f"{tree.source} proposed a tree whose root is not the row's last token")
        tally.rounds += 1
        tally.accepted_tokens += count
        tally.draft_tokens += size - 1
        tally.draft_rounds += size > 1
        self.row.tell(min(at + count + 1, len(self.text)))
        return int(node)

    def accept(self, tree: DraftTree, tally: ReplayTally) -> Accepted:
        """As `advance`, but returns the accepted path and tokens, for drafters that learn from them."""
        at, path = len(self.row), [self.advance(tree, tally)]
        while path[-1] > 0:
            path.append(int(tree.parent[path[-1]]))
        return Accepted(path[::-1], self.text[at : at + len(path)].tolist())


def replay(drafter: Drafter, recorded: RecordedAnswer, id: int, tally: ReplayTally) -> None:
    """Replay an answer, and count the results of its drafts in `tally`.

    The row is dropped at its end, as by an engine, so that drafters learn from finished requests."""
    walk = Walk(id, recorded, drafter.eos_token_ids)
    began = perf_counter()
    drafter.start(walk.row)
    tally.seconds += perf_counter() - began
    while not walk.is_over:
        _step(drafter, walk, tally)
    walk.row.finish_reason = "stop"
    began = perf_counter()
    _budget(drafter).drop(walk.row)
    drafter.drop(walk.row)
    tally.seconds += perf_counter() - began
    tally.new_tokens += len(recorded.answer)
    tally.answers += 1


def _step(drafter: Drafter, walk: Walk, tally: ReplayTally) -> None:
    """Run a round of a row."""
    row, budget, learns = walk.row, _budget(drafter), type(drafter).observe is not Drafter.observe
    began = perf_counter()
    allowance = budget.open([row])
    drafter.begin_round(allowance)
    (tree,) = allowance.cut(allowance.ask(drafter, [Ask(row, row.max_draft)]))
    tally.seconds += perf_counter() - began
    tree = tree.clipped(row.max_draft)
    if not learns and budget is UNLIMITED:
        walk.advance(tree, tally)
        return
    accepted = [walk.accept(tree, tally)]
    allowance.close([row], [tree], accepted, 0.0)
    if learns:
        # No verdict: there is no target, and a drafter that asks for more than tokens gets an error.
        round = Round([row], [tree], [Segment.tree(0, tree)], accepted=accepted)
        began = perf_counter()
        drafter.observe(round)
        tally.seconds += perf_counter() - began


_NO_PROBES = np.empty(0, np.bool_)


@njit(cache=True)
def _walk(tokens, parent, probe, text, at, accepted, depths, sizes):  # type: ignore[no-untyped-def]
    """Follow the tree along `text[at:]`. Returns (accepted tokens, node reached), or (-1, 0) if the root is not
    text[at - 1].

    Parents come before their children, so one pass over the nodes is enough. Of two children with the right token the
    first is taken, as in `accept`. Adds the round to the three histograms."""
    n = len(tokens)
    if tokens[0] != text[at - 1]:
        return -1, 0
    depth = np.zeros(n, np.int64)
    node, count, deepest = 0, 0, 0
    for child in range(1, n):
        above = parent[child]
        depth[child] = depth[above] + 1
        deepest = max(deepest, depth[child])
        if above == node and at + count < len(text) and tokens[child] == text[at + count]:
            if len(probe) > 0 and probe[child]:
                continue
            node = child
            count += 1
    last = len(accepted) - 1
    accepted[min(count, last)] += 1
    depths[min(deepest, last)] += 1
    sizes[min(n, last)] += 1
    return count, node


def warm_up() -> None:
    """Compile the walk, or load it from the cache of earlier runs."""
    one = DraftTree.chain(0, [0])
    counts = _histogram()
    _walk(one.tokens, one.parent, _NO_PROBES, one.tokens, 1, counts, counts, counts)
