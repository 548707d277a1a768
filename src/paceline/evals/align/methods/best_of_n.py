"""best-of-n: N answers, and the one a scorer likes best (never released; from the paper's prose)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from paceline.evals.align import prompts
from paceline.evals.align.methods.base import Task
from paceline.evals.align.thoughts import Said
from paceline.evals.align.types import Generation


@dataclass(frozen=True)
class BestOfNConfig:
    """n: answers to choose from."""

    n: int = field(default=15, metadata={"help": "answers to choose from; paper 15"})


async def best_of_n(task: Task, config: BestOfNConfig) -> Generation:
    """Sampled side by side. Of one answer there is nothing to choose, and no scorer is asked."""
    turn = prompts.chat(task.turn)
    answers = await asyncio.gather(*(task.answer(turn, sample=i) for i in range(config.n)))
    scores = [0.0] if config.n == 1 else await rewards(task, answers)
    best = max(range(config.n), key=lambda i: scores[i])
    return task.done(answers[best], scores=scores, chosen=best)


async def rewards(task: Task, answers: list[Said]) -> list[float]:
    """A score for each answer; the lowest for what is no answer."""
    assert task.scorer is not None
    scorer = task.scorer

    async def one(answer: Said) -> float:
        if answer.unanswered:
            return -1e9
        score, calls = await scorer.score(task.item, task.scenario, answer.response)
        task.calls += calls
        return score

    return list(await asyncio.gather(*map(one, answers)))
