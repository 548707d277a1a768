"""Replay one answer: draft, keep what the recording confirms, go on after it. Knows a drafter only by its interface.

A greedy target accepts a drafted token exactly if it is the next token of its answer. So whoever has the answer can
decide every draft, and a drafter that sees tokens alone has the same accepted as beside the model.

    tally = Tally()
    replay(create("sam"), turn, 0, tally)
    tally.mean_accepted_tokens

The first draft is made after the prompt, as in Spec-Bench's programs; our engine runs the prompt in a round of its
own, so its figures hold one more round an answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from paceline.draft.base import Drafter, stamp
from paceline.draft.registry import create, describe, names
from paceline.engine.accept import Accepted
from paceline.engine.request import Row
from paceline.engine.round import Round, Segment
from paceline.engine.sampling import SamplingParams
from paceline.engine.tree import DraftTree, IntArray
from paceline.errors import MethodError, PacelineError
from paceline.target.base import Facts, Needs

if TYPE_CHECKING:
    from paceline.replay.tokens import RecordedAnswer

ROOM = 1024
"""Tokens a row has room for after its recorded answer, so that no draft is cut where the answer happens to end."""

DEEPEST = ROOM
"""Histograms count deeper drafts, and larger ones, as this."""


def _histogram() -> IntArray:
    return np.zeros(DEEPEST + 1, np.int64)


@dataclass
class Tally:
    """Counts over answers.

    draft_rounds  rounds with a draft; drafted: nodes drafted; seconds: the drafter's.
    accepted      int64 [DEEPEST + 1]: accepted[d] rounds accepted exactly d drafted tokens.
    depths        depths[d] rounds had a draft exactly d deep.
    sizes         sizes[n] rounds had n nodes to verify, the root included."""

    answers: int = 0
    new_tokens: int = 0
    rounds: int = 0
    draft_rounds: int = 0
    drafted: int = 0
    seconds: float = 0.0
    accepted: IntArray = field(default_factory=_histogram)
    depths: IntArray = field(default_factory=_histogram)
    sizes: IntArray = field(default_factory=_histogram)

    def __iadd__(self, other: Tally) -> Tally:
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)
        return self

    @property
    def mean_accepted_tokens(self) -> float:
        """New tokens a round, the target's own included (Spec-Bench's definition, pooled over all rounds)."""
        return self.new_tokens / self.rounds if self.rounds else 0.0

    @property
    def draft_rate(self) -> float:
        """Share of rounds with a draft."""
        return self.draft_rounds / self.rounds if self.rounds else 0.0

    @property
    def verified_per_round(self) -> float:
        """Nodes that the target verifies in a round, roots included."""
        return (self.drafted + self.rounds) / self.rounds if self.rounds else 0.0

    @property
    def verified_per_token(self) -> float:
        """Nodes that the target verifies for each new token, roots included; plain decoding is 1."""
        return (self.drafted + self.rounds) / self.new_tokens if self.new_tokens else 0.0

    @property
    def draft_us_per_round(self) -> float:
        """Microseconds that the drafter spends on a round, all of its work from a row's start to its end."""
        return 1e6 * self.seconds / self.rounds if self.rounds else 0.0

    def accepted_by_depth(self) -> list[float]:
        """Entry d-1: of the rounds whose draft reached depth d, the share that accepted at least d tokens."""
        reached = self.depths[::-1].cumsum()[::-1]
        kept = self.accepted[::-1].cumsum()[::-1]
        deepest = int(np.flatnonzero(reached).max(initial=0))
        return [float(kept[d] / reached[d]) for d in range(1, deepest + 1)]


def replayable(spec: str, target: Facts) -> Drafter:
    """The drafter that `spec` names, bound; MethodError if it needs more than tokens."""
    drafter = create(spec)
    drafter.bind(target)
    wants = [what for what, wanted in _wants(drafter.needs) if wanted]
    if wants:
        raise MethodError(
            f"{spec} asks the target for {' and '.join(wants)}, and a recording holds tokens only. "
            f"Without a checkpoint these can be replayed: {', '.join(judged(target)[0])}."
        )
    if drafter.times_rounds:
        raise MethodError(
            f"{spec} drafts by how long rounds take, and a recording has no rounds. Replay the drafters that it "
            "chooses from, or give it a table of `paceline tune` (its option table)."
        )
    return drafter


def _wants(needs: Needs) -> list[tuple[str, bool]]:
    return [
        ("hidden states", bool(needs.hidden_layers)),
        ("its best logits", needs.top_k > 0),
        ("layers to run itself", needs.resume_layer is not None),
        ("a call in the middle of its forward", needs.callback_layer is not None),
    ]


def tokens_only(target: Facts) -> list[str]:
    """Methods that can be replayed as they are, without a checkpoint: they get through a short trial."""
    return [name for name in names() if describe(name).checkpoint != "required" and _gets_through(name, target)]


def judged(target: Facts) -> tuple[list[str], dict[str, str]]:
    """`tokens_only` in two parts: those that a recording can judge, and why it cannot judge the others."""
    reasons = {}
    for name in tokens_only(target):
        drafter = create(name)
        drafter.bind(target)
        reasons[name] = "the time that rounds take" if drafter.times_rounds else drafter.wants
    return [name for name, why in reasons.items() if not why], {name: why for name, why in reasons.items() if why}


def _gets_through(name: str, target: Facts) -> bool:
    from paceline.replay.tokens import RecordedAnswer

    drafter = create(name)
    try:
        drafter.bind(target)
        if drafter.needs == Needs():
            replay(drafter, RecordedAnswer(np.zeros(4, np.int64), np.zeros(4, np.int64)), 0, Tally())
            return True
    except PacelineError:
        pass
    return False


def replay(drafter: Drafter, turn: RecordedAnswer, id: int, tally: Tally) -> None:
    """Replay one answer and add to `tally` what became of the drafts. `id` is a row's: no two rows share one.

    The row is dropped at its end as an engine does it, so that a drafter that learns from finished requests does."""
    text = np.concatenate([turn.prompt, turn.answer])
    end = len(text)
    room = SamplingParams(max_tokens=len(turn.answer) + ROOM, seed=0)
    row = Row(id, turn.prompt, room, max_context=end + 2 * ROOM)
    rows, watches = [row], type(drafter).observe is not Drafter.observe
    began = perf_counter()
    drafter.start(row)
    seconds = perf_counter() - began
    while (at := len(row)) < end:
        began = perf_counter()
        tree = stamp(drafter.propose(rows), drafter)[0]
        seconds += perf_counter() - began
        tree = tree.clipped(row.max_draft)
        probe = _NO_PROBES if tree.probe is None else tree.probe
        kept, node = _walk(tree.tokens, tree.parent, probe, text, at, tally.accepted, tally.depths, tally.sizes)
        if kept < 0:
            raise ValueError(f"{drafter.name} proposed a tree whose root is not the row's last token")
        size = len(tree.tokens)
        tally.rounds += 1
        tally.drafted += size - 1
        tally.draft_rounds += size > 1
        row.extend(text[at : at + kept + 1].tolist())
        if watches:
            # No verdict: there is no target, and a drafter that asks for more than tokens hears so.
            round = Round(rows, [tree], [Segment.tree(0, tree)], accepted=[_accepted(tree, node, text, at)])
            began = perf_counter()
            drafter.observe(round)
            seconds += perf_counter() - began
    row.finish_reason = "stop"
    began = perf_counter()
    drafter.drop(row)
    tally.seconds += seconds + perf_counter() - began
    tally.new_tokens += len(turn.answer)
    tally.answers += 1


_NO_PROBES = np.empty(0, np.bool_)


def _accepted(tree: DraftTree, node: int, text: IntArray, at: int) -> Accepted:
    """The path that ends at `node`, as the engine tells a drafter."""
    path = [node]
    while path[-1] > 0:
        path.append(int(tree.parent[path[-1]]))
    return Accepted(path[::-1], text[at : at + len(path)].tolist())


@njit(cache=True)
def _walk(tokens, parent, probe, text, at, accepted, depths, sizes):  # type: ignore[no-untyped-def]
    """(tokens accepted, node reached), walking the tree along `text[at:]`; (-1, 0) if the root is not text[at - 1].

    Parents come before their children, so one pass over the nodes is the whole walk; of two children with the right
    token the first is taken, as in `accept`. Adds the round to the three histograms."""
    n = len(tokens)
    if tokens[0] != text[at - 1]:
        return -1, 0
    depth = np.zeros(n, np.int64)
    node, kept, deepest = 0, 0, 0
    for child in range(1, n):
        above = parent[child]
        depth[child] = depth[above] + 1
        deepest = max(deepest, depth[child])
        if above == node and at + kept < len(text) and tokens[child] == text[at + kept]:
            if len(probe) > 0 and probe[child]:
                continue
            node = child
            kept += 1
    last = len(accepted) - 1
    accepted[min(kept, last)] += 1
    depths[min(deepest, last)] += 1
    sizes[min(n, last)] += 1
    return kept, node


def warm_up() -> None:
    """Compile the walk, or load it from the cache of earlier runs."""
    one = DraftTree.chain(0, [0])
    counts = _histogram()
    _walk(one.tokens, one.parent, _NO_PROBES, one.tokens, 1, counts, counts, counts)
