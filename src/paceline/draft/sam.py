"""sam: copy what followed the longest suffix of the text that occurred before.

Hu et al. 2025, "SAM Decoding: Speculative Decoding via Suffix Automaton" (ACL 2025, arXiv 2411.10666): its
dynamic automaton, over prompt and answer. Prompt lookup asks for the last 3 tokens and takes the first place
it finds; a suffix automaton knows, at O(1) a token, the longest match there is, and its length says how far
the copy can be trusted: a short match proposes little, or nothing, and behind a `+` the next drafter is asked.

Lossless: the drafts are point masses, so acceptance keeps the target's distribution exactly.

Where we differ from the paper and its code (github.com/hyx1999/SAM-Decoding), and why:
* the match is copied from its most recent occurrence, not the earliest: more is accepted (`source`);
* the code swaps a good match for a worse one that has more text behind it, and pads a short draft with token
  0; here a copy that runs into the end of the text goes on from itself;
* the draft grows with the match, `grow` tokens for each matched one, as in the code without an auxiliary
  drafter (the paper's draft size is fixed);
* the code's 40 counts the root of the draft, `draft` only what is drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from paceline.automaton import Match, SuffixAutomaton, warm_up
from paceline.copying import continuation, end_tokens, up_to_end
from paceline.draft.base import Drafter
from paceline.errors import MethodError
from paceline.row import Row
from paceline.target.base import Target
from paceline.tree import DraftTree


@dataclass(frozen=True)
class SamConfig:
    """Options of sam."""

    draft: int = field(
        default=40, metadata={"help": "most tokens a draft holds; paper: 40, and 16 for code"}
    )
    min_match: int = field(
        default=1,
        metadata={
            "help": "tokens a match must have to be copied; paper: any alone, 5 in front of another drafter",
            "in_front": 5,
        },
    )
    source: Literal["recent", "earliest"] = field(
        default="recent", metadata={"help": "which occurrence is copied; paper: earliest"}
    )
    grow: float = field(
        default=4.0,
        metadata={"help": "tokens drafted for each token matched, up to `draft`; 0 (paper): always `draft`"},
    )

    def __post_init__(self) -> None:
        if self.draft < 1 or self.min_match < 1 or not self.grow >= 0:
            raise MethodError(
                f"sam: draft is {self.draft}, min_match {self.min_match}, grow {self.grow}; "
                "draft and min_match must be 1 or more, grow 0 or more."
            )


class Sam(Drafter):
    """Copies what followed the longest suffix of the text that occurred before (suffix automaton)."""

    name = "sam"
    lossless = "yes"
    paper = "Hu et al. 2025, SAM Decoding, arXiv 2411.10666"
    Config = SamConfig

    def __init__(self, config: SamConfig = SamConfig()):
        self.config = config
        self._automata: dict[int, SuffixAutomaton] = {}
        self._eos: Sequence[int] = ()

    def bind(self, target: Target) -> None:
        """Compile; take the end tokens."""
        self._eos = target.eos_token_ids
        warm_up()

    def start(self, row: Row) -> None:
        # Room for as much answer as prompt before the arrays double; no more, for most answers end early.
        self._automata[row.id] = SuffixAutomaton(2 * len(row))

    def propose(self, rows: Sequence[Row]) -> list[DraftTree]:
        return [self._draft(row) for row in rows]

    def drop(self, row: Row) -> None:
        self._automata.pop(row.id, None)

    def _match(self, row: Row) -> Match:
        """The match at the row's end, after appending what it has gained: at first its prompt, then what each
        round committed. Drafts never go in, so nothing is ever taken back."""
        automaton = self._automata[row.id]
        automaton.extend(row.tokens[len(automaton) :])
        return automaton.match()

    def _draft(self, row: Row) -> DraftTree:
        match = self._match(row)
        size = min(self._size(match.length), row.max_draft)
        if size < 1:
            return DraftTree.root(row.last_token)
        start = match.recent if self.config.source == "recent" else match.first
        drafted = up_to_end(continuation(row.tokens, start, size), end_tokens(row, self._eos), keep=True)
        return DraftTree.chain(row.last_token, drafted, source=self.name)

    def _size(self, length: int) -> int:
        """Tokens to draft behind a match of `length` tokens."""
        if length < self.config.min_match:
            return 0
        return min(self.config.draft, int(self.config.grow * length)) if self.config.grow else self.config.draft
