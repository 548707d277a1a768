"""past-answer: propose the last answer to the same prompt, until the new answer differs.

For prompts that come again: repeated requests, and the epochs of reinforcement learning (Liu et al. 2025, "SPEC-RL",
arXiv 2509.23232). A few forwards verify a whole answer. After the first different token nothing is proposed, and in
`past-answer+sam` the next drafter is asked. In large batches, tokens after that point cost much; see `first`.

The old answer comes with the row (`Row.past`: in `paceline.rollout` every copy of a prompt has its own), else it is the
last finished answer to the same prompt that this drafter has seen."""

from dataclasses import dataclass

import numpy as np

from paceline.draft.base import Drafter, DraftTree, IntArray, Request
from paceline.draft.options import Options, option


@dataclass(frozen=True)
class PastAnswerConfig(Options):
    draft: int = option(128, "most tokens a draft holds; longer answers are proposed in pieces", least=1)
    first: int | None = option(
        None, "tokens of the first piece; each accepted piece doubles the next; none: `draft`", least=1
    )
    past: int = option(1 << 16, "tokens of answers to remember, the oldest forgotten first", least=0)


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
        self._old: dict[int, tuple[IntArray, int]] = {}  # by row: its old answer, and tokens of it that were compared

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
        return self.chain_after(row, old[done : done + min(piece, self.config.draft, row.max_draft)])

    def drop(self, row: Request) -> None:
        self._old.pop(row.id, None)
        if row.is_complete and row.num_new and getattr(row, "past", None) is None:
            self.remember(row.tokens[: row.prompt_length], row.tokens[row.prompt_length :].copy())

    def remember(self, prompt: IntArray, answer: IntArray) -> None:
        """Remember an answer in place of the last one to its prompt; forget the oldest above `past` tokens."""
        key = prompt.tobytes()
        self._remembered += len(answer) - len(self._answers.pop(key, ()))
        self._answers[key] = answer
        while self._remembered > self.config.past:
            self._remembered -= len(self._answers.pop(next(iter(self._answers))))
