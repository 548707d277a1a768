"""Drafters for tests: none of them is clever, and each one strains a different part of the loop.

    Random          random trees, often deeper than the row has room for
    Oracle          knows the answers, and gets tokens wrong at a given rate; chains, or trees full of distractors
    Right           an oracle that is never wrong: chains
    Idle            an oracle that drafts only in some rounds
    Coupled         takes the tokens of the row's noise from a q of its own; chains or trees
    Bigrams         the same from what the target says after one token alone
    Probing         hangs probe nodes on another drafter's trees, some of them with the right token
    EarlyExit       drafts with the target's own first layers and hands their states back
    Listening       asks for hidden states, top-k logits and the callback, and checks what it is given
    Failing         raises when told to

What they draft for a row depends on the row alone, never on the rows beside it.
"""

import numpy as np
import torch

from paceline.core.sampling import probabilities
from paceline.core.segment import Segment
from paceline.core.tree import DraftTree
from paceline.draft import registry
from paceline.draft.base import Drafter, stamp
from paceline.errors import PacelineError
from paceline.target.base import Needs
from paceline.target.decoder import Decoder

TOKENS_ONLY = (
    "none", "prompt-lookup", "sam", "suffix", "hierarchy", "past-answer", "prediction", "grammar", "auto",
)  # fmt: skip
"""Registered drafters that read tokens alone and need no checkpoint. A test holds this to what trying them shows, which
compiles all they have, and so is not done to collect tests."""


def dice(seed, row):
    """Randomness that is the row's own, whatever its id and its neighbours."""
    return np.random.default_rng([seed, *row.tokens[-3:].tolist(), len(row)])


class Random(Drafter):
    """Random tokens in a random tree; `deep` nodes at most, whatever the row has room for."""

    name = "random"

    def __init__(self, seed=0, deep=9, tree=True):
        self.seed, self.deep, self.tree = seed, deep, tree

    def bind(self, target):
        self.vocab_size = target.vocab_size

    def propose(self, asks):
        return [self._draft(row) for row, _ in asks]

    def _draft(self, row):
        rng = dice(self.seed, row)
        n = int(rng.integers(self.deep + 1))
        tokens = rng.integers(self.vocab_size, size=n)
        if not self.tree:
            return DraftTree.chain(row.last_token, tokens, source=self.name)
        return DraftTree.of(row.last_token, tokens, [int(rng.integers(i + 1)) for i in range(n)], source=self.name)


class Oracle(Drafter):
    """Drafts `deep` tokens of the known answer, each wrong at rate `error`; beyond row.max_draft too.

    answers  the whole text by prompt. branches: distractors that hang on every node of a tree, the right child
             somewhere among them."""

    name = "oracle"

    def __init__(self, answers, error=0.1, branches=0, deep=7):
        self.answers, self.error, self.branches, self.deep = answers, error, branches, deep

    def bind(self, target):
        self.vocab_size = target.vocab_size

    def propose(self, asks):
        return [self._draft(row) for row, _ in asks]

    def _draft(self, row):
        rng = dice(1, row)
        known = self.answers[tuple(row.tokens[: row.prompt_length].tolist())]
        truth = np.array(known[len(row) : len(row) + int(rng.integers(self.deep + 1))], np.int64)
        wrong = rng.random(len(truth)) < self.error
        truth = np.where(wrong, rng.integers(self.vocab_size, size=len(truth)), truth)
        if not self.branches:
            return DraftTree.chain(row.last_token, truth, source=self.name)
        tokens = []
        parent = []
        node = 0
        for token in truth.tolist():
            at = int(rng.integers(self.branches + 1))
            children = rng.integers(self.vocab_size, size=self.branches + 1).tolist()
            children[at] = token
            parent += [node] * len(children)
            tokens += children
            node = len(tokens) - len(children) + 1 + at
            parent.append(node - 1 if at else node)  # a grandchild or a nephew
            tokens.append(int(rng.integers(self.vocab_size)))
        return DraftTree.of(row.last_token, tokens, parent, source=self.name)


class Right(Oracle):
    """Drafts `deep` tokens of the answer: every draft stands whole."""

    def _draft(self, row):
        text = self.answers[tuple(row.tokens[: row.prompt_length].tolist())]
        return self.chain_after(row, np.array(text[len(row) : len(row) + min(self.deep, row.max_draft)]))


class Idle(Oracle):
    """Drafts only in some rounds, and several tokens then."""

    def _draft(self, row):
        return super()._draft(row) if dice(5, row).random() < 0.4 else DraftTree.root(row.last_token)


class Coupled(Drafter):
    """Drafts by the row's noise from q(next | last token), a table of logits [V, V] warped as the row wants it.

    widths  children of every node, by depth: (1, 1, 1) is a chain, (3, 2) a tree."""

    name = "coupled"

    def __init__(self, table, widths=(1, 1, 1)):
        self.table, self.widths = table, widths
        self._known = {}

    def propose(self, asks):
        return [self._draft(row) for row, _ in asks]

    def _q(self, drafted, row):
        """What may follow the row and what was drafted after it; empty where a grammar allows nothing."""
        token, p = [row.last_token, *drafted][-1], row.params
        key = (token, p.temperature, p.top_k, p.top_p, p.min_p)
        if p.shifts_logits or key not in self._known:
            context = np.append(row.tokens, np.array(drafted, np.int64))
            try:
                self._known[key] = probabilities(self.table[token].unsqueeze(0), p, [context])[0]
            except PacelineError:
                return torch.zeros(self.table.shape[1])
        return self._known[key]

    def _draft(self, row):
        tokens, parent = [row.last_token], [-1]
        ways = [[]]
        level = [0]
        for depth, width in enumerate(self.widths[: max(row.max_draft, 0)]):
            above, level = level, []
            for node in above:
                for token in row.noise.guess(self._q(ways[node], row), row.num_new + depth, width)[0].tolist():
                    level.append(len(tokens))
                    ways.append([*ways[node], token])
                    tokens.append(token)
                    parent.append(node)
        return DraftTree(np.array(tokens), np.array(parent), source=self.name)


class Bigrams(Coupled):
    """Drafts what the target says after one token alone: close enough to be accepted, far enough to be wrong."""

    def __init__(self, widths):
        super().__init__(torch.empty(0), widths)

    def bind(self, target):
        slot = target.add_row(4)
        tokens = np.array([1, *range(target.vocab_size)])
        star = np.array([-1] + [0] * target.vocab_size)
        self.table = target.verify([Segment(slot, tokens, star, num_logits=target.vocab_size)]).logits.float()
        target.drop_row(slot)


class Probing(Drafter):
    """Another drafter's trees with probe nodes put in front of the real children, and probes behind those.

    seen  how often the token the target decided at a node was carried by a probe there."""

    def __init__(self, inner, answers):
        self.inner, self.answers = inner, answers
        self.name = inner.name + " with probes"
        self.seen = 0

    def bind(self, target):
        self.inner.bind(target)

    def propose(self, asks):
        rows = [row for row, _ in asks]
        drafts = stamp(self.inner.propose(asks), self.inner)
        return [self._probe(row, tree) for row, tree in zip(rows, drafts, strict=True)]

    def _probe(self, row, tree):
        known = self.answers[tuple(row.tokens[: row.prompt_length].tolist())]
        tokens, parent, probe = [row.last_token], [-1], [False]

        def add(token, above, is_probe):
            tokens.append(int(token))
            parent.append(above)
            probe.append(is_probe)
            return len(tokens) - 1

        where = {}
        for node in range(len(tree)):
            where[node] = 0 if node == 0 else add(int(tree.tokens[node]), where[int(tree.parent[node])], False)
            next_one = len(row) + int(tree.depth[node])
            right = known[next_one] if next_one < len(known) else 0
            add(int(right), add(int(right), where[node], True), True)
        return DraftTree(np.array(tokens), np.array(parent), probe=np.array(probe), source=tree.source)

    def observe(self, round):
        for tree, done in zip(round.trees, round.accepted, strict=True):
            if tree.probe is not None:
                assert not tree.probe[done.path].any()
                self.seen += any(
                    tree.tokens[child] == token
                    for node, token in zip(done.path, done.tokens, strict=True)
                    for child in np.flatnonzero((tree.parent == node) & tree.probe)
                )


class EarlyExit(Drafter):
    """Drafts with the target's first `exit` layers and its head, node after node, and hands the states back.

    branch  a second child of the root, the runner-up, is drafted as well.
    idle    share of rows that draft nothing in a round."""

    name = "early-exit"

    def __init__(self, exit, deep=4, branch=True, idle=0.2):
        self.exit, self.deep, self.branch, self.idle = exit, deep, branch, idle
        self.needs = Needs(resume_layer=exit)

    def bind(self, target):
        assert isinstance(target, Decoder)
        self.target = target

    def propose(self, asks):
        rows = [row for row, _ in asks]
        deep = [0 if dice(2, row).random() < self.idle else min(self.deep, row.max_draft) for row in rows]
        trees = [DraftTree.root(row.last_token) for row in rows]
        states = [[] for _ in rows]
        leaf = [0] * len(rows)
        for depth in range(self.deep + 1):
            active = [i for i in range(len(rows)) if deep[i] >= max(depth, 1)]
            if not active:
                break
            done = [sum(map(len, states[i])) for i in active]
            segments = [
                Segment(rows[i].slot, trees[i].tokens, trees[i].parent, start=start)
                for i, start in zip(active, done, strict=True)
            ]
            hidden = self.target.run_layers(segments, self.exit)
            new = hidden.split([len(trees[i]) - start for i, start in zip(active, done, strict=True)])
            for i, start, state in zip(active, done, new, strict=True):
                states[i].append(state)
                if depth < deep[i]:
                    (logits,) = self.target.logits(state[leaf[i] - start : leaf[i] - start + 1])
                    trees[i], leaf[i] = self._grow(trees[i], leaf[i], logits)
        for i, state in enumerate(states):
            if state:
                trees[i].hidden = torch.cat(state)
        return trees

    def _grow(self, tree, leaf, logits):
        best, second = logits.topk(2).indices.tolist()
        drafted = [second, best] if self.branch and leaf == 0 else [best]
        tokens = [*tree.tokens[1:].tolist(), *drafted]
        parent = [*tree.parent[1:].tolist(), *([leaf] * len(drafted))]
        return DraftTree.of(int(tree.tokens[0]), tokens, parent, source=self.name), len(tokens)


class Listening(Drafter):
    """Wraps a drafter, asks for everything, and checks the shapes and the order of what it is given."""

    def __init__(self, inner, needs):
        self.inner, self.needs = inner, needs | inner.needs
        self.name = inner.name
        self.events = []
        self.rows = {}

    def bind(self, target):
        self.target = target
        self.inner.bind(target)

    def start(self, row):
        assert row.id not in self.rows, "ids are unique"
        assert row.num_new == 0
        self.rows[row.id] = "started"
        self.events.append("start")
        self.inner.start(row)

    def propose(self, asks):
        rows = [row for row, _ in asks]
        self.events.append("propose")
        for row in rows:
            assert self.rows[row.id] == "started"
            assert row.finish_reason is None
            assert self.target.length(row.slot) == row.cached == len(row) - 1
        return stamp(self.inner.propose(asks), self.inner)

    def on_layer(self, layer, hidden, round):
        self.events.append("on_layer")
        assert round.spans()[-1].stop == len(hidden)
        assert [span.stop - span.start for span in round.spans()] == [segment.num_run for segment in round.segments]
        assert layer == self.needs.callback_layer
        self.width = hidden.shape

    def observe(self, round):
        rows, trees, verdict, accepted = round.rows, round.trees, round.verdict, round.accepted
        assert verdict is not None
        self.events.append("observe")
        assert len({row.id for row in rows}) == len(rows) == len(trees) == len(accepted)
        assert len(verdict.logits_at) == len(rows) + 1
        for s, (row, tree, done) in enumerate(zip(rows, trees, accepted, strict=True)):
            assert self.rows[row.id] == "started"
            assert len(done.tokens) in (0, len(done.path)) or len(tree) == 1
            if done.tokens:
                assert len(verdict.of(s)) == len(tree)
                ends = [row.tokens[-n:].tolist() == done.tokens[:n] for n in range(1, len(done.tokens) + 1)]
                assert ends[-1] if row.finish_reason is None else any(ends)
            if self.needs.hidden_layers:
                nodes = verdict.hidden_at[s + 1] - verdict.hidden_at[s]
                assert nodes == len(tree) or len(tree) == 1
        for layer in self.needs.hidden_layers:
            assert verdict.hidden[layer].shape == (verdict.hidden_at[-1], self.target.hidden_size)
        if self.needs.top_k:
            assert verdict.top_k is not None
            assert verdict.top_k[1].shape == (len(verdict.logits), self.needs.top_k)
        self.inner.observe(round)

    def drop(self, row):
        assert self.rows[row.id] == "started"
        self.rows[row.id] = "dropped"
        self.events.append("drop")
        self.inner.drop(row)


class Failing(Drafter):
    """Proposes the last token again, and raises in `method` the `time`th time it is called."""

    name = "failing"

    def __init__(self, method, time=1):
        self.method, self.left = method, time

    def _maybe_fail(self, method):
        if method == self.method:
            self.left -= 1
            if self.left == 0:
                raise RuntimeError(f"{method} failed")

    def start(self, row):
        self._maybe_fail("start")

    def propose(self, asks):
        self._maybe_fail("propose")
        return [DraftTree.chain(row.last_token, [row.last_token] * min(2, most)) for row, most in asks]

    def observe(self, *_):
        self._maybe_fail("observe")

    def drop(self, row):
        self._maybe_fail("drop")


BY_NAME = {
    "random chain": lambda answers: Random(tree=False),
    "random tree": lambda answers: Random(),
    "oracle chain": lambda answers: Oracle(answers, error=0.2),
    "oracle tree": lambda answers: Oracle(answers, error=0.2, branches=2),
    "probes": lambda answers: Probing(Oracle(answers, error=0.3, branches=1), answers),
    "early exit": lambda answers: EarlyExit(exit=2),
    "early exit, chain": lambda answers: EarlyExit(exit=1, branch=False),
}


def by_name(name, answers):
    """One of those, which know whole texts by prompt, or a registered drafter."""
    return BY_NAME[name](answers) if name in BY_NAME else registry.create(name)
