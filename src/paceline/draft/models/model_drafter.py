"""ModelDrafter: a drafter made of a `DraftModel` and a `Proposer`. Knows no particular model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.options import Options, option
from paceline.core.request import Request
from paceline.core.round import Round
from paceline.core.tree import DraftTree
from paceline.draft.base import Ask, Drafter
from paceline.draft.models import stop
from paceline.draft.models.draft_model import Draft, DraftModel
from paceline.draft.models.proposers import BestTree, Chain, Proposal, Proposer
from paceline.draft.models.stop import Outcome, StopRule
from paceline.formats.facts import Facts

TREE = "nodes of a tree of the most probable tokens; 0: a chain"
VOCAB = "draft only these tokens: the K the target writes most, or a file of `paceline train tools vocab`"


@dataclass(frozen=True, kw_only=True)
class ModelDrafterConfig(Options):
    """Options of every drafter that has a model."""

    stop: stop.Name = option("svip", "when to stop: at a fixed length, or where the draft is no longer sure")
    draft: int | None = option(None, "most tokens drafted a round; none: the stop rule's own", least=1)
    threshold: float | None = option(None, "threshold of the stop rule; none: the rule's default")
    tree: int = option(0, TREE, least=0)
    width: int = option(10, "nodes of a tree that are expanded together, and children of each", least=1)
    vocab: str | None = option(None, VOCAB)


class ModelDrafter(Drafter):
    """Base of drafters with a model. A method implements `open`, and overrides `proposer_of` for another proposer."""

    lossless = "yes"
    model: DraftModel
    proposer: Proposer

    def __init__(self, config: Any, rule: StopRule | None = None):
        self.config = config
        self.rule = rule or stop.RULES[config.stop](config.draft, config.threshold)
        self._drafts: dict[int, tuple[Draft, Proposal]] = {}
        self._sizes: dict[int, int] = {}

    def open(self, target: Facts) -> DraftModel:
        """Load the model for this target. MethodError if there is none."""
        raise NotImplementedError

    def proposer_of(self, model: DraftModel) -> Proposer:
        """Make the proposer that the options ask for: `BestTree` or `Chain`."""
        if self.config.tree:
            return BestTree(model, self.rule, self.config.width, self.config.tree)
        return Chain(model, self.rule)

    def bind(self, target: Facts) -> None:
        super().bind(target)
        model = self.model = self.open(target)
        self.needs, self.weight_bytes, self.notes = model.needs, model.weight_bytes, model.notes
        self.proposer = self.proposer_of(model)

    def start(self, row: Request) -> None:
        self.model.start(row)

    def restart(self, row: Request) -> None:
        """Let a model that reads the target's states read the row again. The stop rule keeps what it has learnt."""
        if self.needs.whole_prompt:
            self.model.drop(row)
            self.model.start(row)

    def drop(self, row: Request) -> None:
        self._drafts.pop(row.id, None)
        self.rule.drop(row.id)
        self.model.drop(row)

    def begin(self, asks: Sequence[Ask]) -> list[Draft]:
        """Begin an empty draft for every row that has room for one. The model first reads the row's unread text."""
        depths = [min(most, self.rule.most(row.id), self.model.room(row)) for row, most in asks]
        able = [Ask(row, depth) for (row, _), depth in zip(asks, depths, strict=True) if depth > 0]
        for row, _ in able:
            self.model.catch_up(row)
        return [self.model.begin(row, most) for row, most in able]

    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        drafts = self.begin(asks)
        proposals = zip(drafts, self.proposer.propose(drafts), strict=True)
        self._drafts = {draft.row.id: (draft, proposal) for draft, proposal in proposals}
        made = {id: tree for id, (_, (tree, _)) in self._drafts.items()}
        trees = [(made.get(row.id) or DraftTree.root(row.last_token)).clipped(most) for row, most in asks]
        self._sizes = {row.id: tree.num_drafted for (row, _), tree in zip(asks, trees, strict=True)}
        return trees

    def observe(self, round: Round) -> None:
        outcomes: list[Outcome] = []
        for i, (row, tree) in enumerate(zip(round.rows, round.trees, strict=True)):
            path, is_own = round.accepted[i].path, round.is_from(i, self)
            if row.id in self._drafts:
                draft, (_, nodes) = self._drafts.pop(row.id)
                self.model.commit(draft, kept(draft, nodes, tree.proposed(path) if is_own else ()))
            if is_own:
                if isinstance(self.proposer, BestTree):
                    self.proposer.note(row, self._sizes.get(row.id, 0), tree.num_drafted)
                outcomes.append(Outcome(row.id, tree.max_depth, len(path) - 1))
        self.model.feed(round)
        self.rule.learn(outcomes)


def kept(draft: Draft, nodes: Sequence[int | None], path: Sequence[int]) -> list[int]:
    """The nodes of a draft to commit when `path` of its tree was accepted: the committed ones, and those of the path
    that were run.

    nodes  as in `Proposal`."""
    kept = list(range(draft.num_committed))
    for node in path[1:]:
        if (number := nodes[node]) is None:
            break
        kept.append(number)
    return kept
