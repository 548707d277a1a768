"""tpo: test-time preference optimisation. A critique of the best against the worst answer steers the next ones.

Li et al. 2025 (arXiv 2501.12895); with samples = 5 and rounds = 2 it makes the 15 answers of the paper on Align3. The
official code was never released: this is the paper's prose and the known algorithm.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from paceline.evals.align import prompts
from paceline.evals.align.methods.base import Task
from paceline.evals.align.methods.best_of_n import rewards
from paceline.evals.align.thoughts import Said
from paceline.evals.align.types import Generation


@dataclass(frozen=True)
class TpoConfig:
    """samples answers a round; rounds after the first answers."""

    samples: int = field(default=5, metadata={"help": "answers a round; paper 5"})
    rounds: int = field(
        default=2, metadata={"help": "rounds of critique and revision after the first answers; paper 2"}
    )


async def tpo(task: Task, config: TpoConfig) -> Generation:
    """The best of all answers, samples * (1 + rounds) of them."""
    turn, n = task.turn, config.samples
    answers = list(await asyncio.gather(*(task.answer(prompts.chat(turn), sample=i) for i in range(n))))
    scores = await rewards(task, answers)
    for number in range(1, config.rounds + 1):
        best, worst = answers[_best(scores)], answers[_best([-score for score in scores])]
        critique = await task.answer(prompts.critique_turns(turn, best.response, worst.response), "critique")
        gradient = await task.answer(prompts.gradient_turns(turn, critique.response), "gradient")
        revised = prompts.revision_turns(turn, best.response, gradient.response)
        samples = range(number * n, (number + 1) * n)
        new: list[Said] = list(await asyncio.gather(*(task.answer(revised, "revise", sample=i) for i in samples)))
        answers += new
        scores += await rewards(task, new)
    return task.done(answers[_best(scores)], scores=scores, chosen=_best(scores))


def _best(scores: list[float]) -> int:
    return max(range(len(scores)), key=lambda i: scores[i])
