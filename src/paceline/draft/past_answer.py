"""past-answer: propose the last answer to the same prompt, for as long as the new answer is the same.

For prompts that come again: the epochs of reinforcement learning, whose policy moves slowly (Liu et al. 2025,
"SPEC-RL", arXiv 2509.23232), and requests that are made again. A whole answer is verified in a few forwards; after the
first token that differs there is nothing to propose, and in `past-answer+sam` the next drafter is asked.

Where many rows run together a verified token costs much of what a decoded one does, and those after the first other
token are verified in vain: with `first=8` a row's pieces begin small, and each that stands doubles the next.

A row may bring the answer along (`Row.past`, as in `Engine.rollout`, where every copy of a prompt has its own); else it
is the last finished answer to the same prompt that this drafter has seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.draft.base import Drafter
from paceline.draft.spec import Options, option
from paceline.engine.request import Request
from paceline.engine.tree import DraftTree, IntArray


@dataclass(frozen=True)
class PastAnswerConfig(Options):
    """Options of past-answer."""

    draft: int = option(128, "most tokens a draft holds: an answer is proposed in pieces of this size", least=1)
    first: int | None = option(
        None, "tokens of a row's first piece, and about twice as many after each that stood; none: `draft`", least=1
    )
    past: int = option(1 << 16, "tokens of answers to remember by their prompts, the oldest forgotten first", least=0)


class PastAnswer(Drafter):
    """Proposes the last answer to the same prompt, until the new one differs."""

    name = "past-answer"
    wants = "an earlier answer to the same prompt"
    lossless = "yes"
    paper = "Liu et al. 2025, SPEC-RL, arXiv 2509.23232 (its proposals, not its rule)"
    Config = PastAnswerConfig

    def __init__(self, config: PastAnswerConfig = PastAnswerConfig()):
        self.config = config
        self._answers: dict[bytes, IntArray] = {}
        self._remembered = 0
        self._old: dict[int, tuple[IntArray, int]] = {}  # by row: its old answer, and how much of it was compared

    def start(self, row: Request) -> None:
        past = getattr(row, "past", None)
        old = self._answers.get(row.tokens[: row.prompt_length].tobytes()) if past is None else past
        if old is not None:
            self._old[row.id] = old, 0

    def draft(self, row: Request) -> DraftTree:
        if row.id not in self._old:
            return DraftTree.root(row.last_token)
        old, compared = self._old[row.id]
        done = row.num_new
        gained = row.tokens[row.prompt_length + compared : row.prompt_length + done]
        if not np.array_equal(gained, old[compared:done]):
            del self._old[row.id]
            return DraftTree.root(row.last_token)
        self._old[row.id] = old, done
        piece = self.config.draft if self.config.first is None else max(self.config.first, done)
        return self.chain_after(row, old[done : done + max(0, min(piece, self.config.draft, row.max_draft))])

    def drop(self, row: Request) -> None:
        self._old.pop(row.id, None)
        if row.is_complete and row.num_new and getattr(row, "past", None) is None:
            self.remember(row.tokens[: row.prompt_length], row.tokens[row.prompt_length :].copy())

    def remember(self, prompt: IntArray, answer: IntArray) -> None:
        """Put an answer in place of the last one to its prompt, and of the oldest where there is no room."""
        key = prompt.tobytes()
        self._remembered += len(answer) - len(self._answers.pop(key, ()))
        self._answers[key] = answer
        while self._remembered > self.config.past:
            self._remembered -= len(self._answers.pop(next(iter(self._answers))))
