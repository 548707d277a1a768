"""past-answer: propose the last answer to the same prompt, until the new answer differs.

For prompts that come again: repeated requests, and the epochs of reinforcement learning (Liu et al. 2025, "SPEC-RL",
arXiv 2509.23232). A few forwards verify a whole answer. After the first different token nothing is proposed, and in
`past-answer+sam` the next drafter is asked. In large batches, drafted tokens after that one cost much; see `first`.

The old answer comes with the row (`Row.past`: in `paceline.rollout` each copy of a prompt has its own). Otherwise it is
the last finished answer to the same prompt among the requests of the same `cache_salt`."""

from dataclasses import dataclass

import numpy as np

from paceline.core.options import Options, option
from paceline.draft.base import Drafter, DraftTree, IntArray, Request
from paceline.draft.text.copying import BySalt


@dataclass(frozen=True)
class PastAnswerConfig(Options):
    draft: int = option(128, "most tokens a draft holds; longer answers are proposed in pieces", least=1)
    first: int | None = option(
        None, "tokens of the first piece; each accepted piece doubles the next; none: `draft`", least=1
    )
    past: int = option(1 << 16, "tokens of answers to remember, the oldest forgotten first", least=0)


class Answers:
    """The last answer to each prompt. Beyond `most` tokens of answers, the oldest are forgotten."""

    def __init__(self, most: int):
        self._most, self._held, self._answers = most, 0, dict[bytes, IntArray]()

    def to(self, prompt: IntArray) -> IntArray | None:
        """Return the last answer to a prompt, or None."""
        return self._answers.get(prompt.tobytes())

    def remember(self, prompt: IntArray, answer: IntArray) -> None:
        """Remember an answer, in place of an earlier answer to the prompt."""
        key = prompt.tobytes()
        self._held += len(answer) - len(self._answers.pop(key, ()))
        self._answers[key] = answer
        while self._held > self._most:
            self._held -= len(self._answers.pop(next(iter(self._answers))))


class PastAnswer(Drafter):
    """Proposes the last answer to the same prompt, until the new one differs."""

    name = "past-answer"
    wants = "an earlier answer to the same prompt"
    lossless = "yes"
    paper = "Liu et al. 2025, SPEC-RL, arXiv 2509.23232 (its proposals, not its rule)"
    Config = PastAnswerConfig

    def __init__(self, config: PastAnswerConfig = PastAnswerConfig()):
        self.config = config
        self.answers = BySalt(lambda: Answers(config.past))
        self._old: dict[int, tuple[IntArray, int]] = {}  # by row id: old answer, tokens compared

    def start(self, row: Request) -> None:
        old = self._known(row).to(row.tokens[: row.prompt_length]) if row.past is None else row.past
        if old is not None:
            self._old[row.id] = old, 0

    def draft(self, row: Request, most: int) -> DraftTree:
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
        return self.chain_after(row, old[done : done + min(piece, self.config.draft, most)])

    def drop(self, row: Request) -> None:
        self._old.pop(row.id, None)
        if row.is_complete and row.num_new and row.past is None:
            self._known(row).remember(row.tokens[: row.prompt_length], row.tokens[row.prompt_length :].copy())

    def _known(self, row: Request) -> Answers:
        return self.answers.of(row.params.cache_salt)
