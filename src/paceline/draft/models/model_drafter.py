"""ModelDrafter: a drafter out of a `DraftModel` and a `Proposer`. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.core.request import Request
from paceline.core.round import Round
from paceline.core.tree import DraftTree
from paceline.draft.base import Drafter
from paceline.draft.models import stop
from paceline.draft.models.draft_model import Draft, DraftModel
from paceline.draft.models.proposers import BestTree, Chain, Fitting, Proposer
from paceline.draft.models.stop import Outcome
from paceline.draft.options import Options, option
from paceline.target.base import Facts

TREE = "nodes of a tree of the most probable tokens; auto: as many as pay; 0: a chain"
VOCAB = "draft only these tokens: the K the target writes most, or a file of `paceline train tools vocab`"


@dataclass(frozen=True, kw_only=True)
class ModelDrafterConfig(Options):
    """Options of every drafter that has a model."""

    stop: stop.Name = option("svip", "when to stop: at a fixed length, or where the draft is no longer sure")
    draft: int | None = option(None, "most tokens drafted a round; none: the stop rule's own", least=1)
    threshold: float | None = option(None, "threshold of the stop rule; none: the rule's default")
    tree: int | Literal["auto"] = option(0, TREE, least=0)
    width: int = option(10, "nodes of a tree that are expanded together, and children of each", least=1)
    vocab: str | None = option(None, VOCAB)


class ModelDrafter(Drafter):
    """Base of drafters with a model. A method fills in `open`, and `proposer_of` if it is not the usual one."""

    lossless = "yes"
    model: DraftModel
    proposer: Proposer

    def __init__(self, config: ModelDrafterConfig):
        self.config = config
        self.rule = stop.RULES[config.stop](config.draft, config.threshold)
        self.tree_size: int | Fitting = 0
        self._asked: set[int] = set()
        self._drafts: dict[int, Draft] = {}

    def open(self, target: Facts) -> DraftModel:
        """The model for this target. MethodError if there is none."""
        raise NotImplementedError

    def proposer_of(self, model: DraftModel) -> Proposer:
        """A chain, or a tree of the most probable tokens, as the options say."""
        if self.config.tree:
            return BestTree(model, self.rule, self.config.width, self.tree_size)
        return Chain(model, self.rule)

    def bind(self, target: Facts) -> None:
        super().bind(target)
        self.tree_size = fitting(target) if self.config.tree == "auto" else int(self.config.tree)
        model = self.model = self.open(target)
        self.needs, self.weight_bytes, self.notes = model.needs, model.weight_bytes, model.notes
        self.proposer = model.wrap(self.proposer_of(model))

    def start(self, row: Request) -> None:
        self.model.start(row)

    def restart(self, row: Request) -> None:
        """A model that reads the target's states reads the row again. What the stop rule has learned of it stays."""
        if self.needs.whole_prompt:
            self.model.drop(row)
            self.model.start(row)

    def drop(self, row: Request) -> None:
        self._drafts.pop(row.id, None)
        self.rule.drop(row.id)
        self.model.drop(row)

    def begin(self, rows: Sequence[Request]) -> list[Draft]:
        """An empty draft for every row that may have one; its model has read what waited of the row's text."""
        most = {row.id: min(self.rule.most(row.id), self.model.room(row)) for row in rows}
        able = [row for row in rows if most[row.id] > 0]
        for row in able:
            self.model.catch_up(row)
        drafts = [self.model.begin(row, self.end_tokens(row)) for row in able]
        for draft in drafts:
            draft.most = most[draft.row.id]
        return drafts

    def propose(self, rows: Sequence[Request]) -> list[DraftTree]:
        self._asked = {row.id for row in rows}
        drafts = self.begin(rows)
        self._drafts = {draft.row.id: draft for draft in drafts}
        trees = self.proposer.propose(drafts, self.prefill_tokens + len(rows) - len(drafts))
        made = dict(zip(self._drafts, trees, strict=True))
        for tree in trees:
            tree.source = self.name
        return [made.get(row.id) or DraftTree.root(row.last_token) for row in rows]

    def observe(self, round: Round) -> None:
        outcomes: list[Outcome] = []
        for i, (row, tree) in enumerate(zip(round.rows, round.trees, strict=True)):
            path, is_own = round.accepted[i].path, round.is_from(i, self)
            draft = self._drafts.pop(row.id, None)
            if draft is not None:
                self.model.commit(draft, draft.accepted(tree.proposed(path) if is_own else ()))
            if is_own or (row.id in self._asked and not tree.num_drafted):
                outcomes.append(Outcome(row.id, tree.max_depth, len(path) - 1))
        self.model.feed(round)
        self.rule.learn(outcomes)
        self._asked = set()


def fitting(target: Facts) -> Fitting:
    """Sizes of trees by what forwards of the target take here."""
    from paceline.draft.cost import best_sizes, time_forwards

    times = time_forwards(target)
    return lambda chances, beside: best_sizes(chances, times, beside)
