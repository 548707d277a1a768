"""self-refine: answer, then again and again feedback on every rule and a rewritten answer (1 + 2 n requests).

Madaan et al. 2023 (arXiv 2303.17651), as the paper on Align3 runs it: feedback sees the query and the rules; the
rewriting sees the query, the last answers and their feedback, and no rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from paceline.evals.align import prompts
from paceline.evals.align.methods.base import Task
from paceline.evals.align.types import Generation


@dataclass(frozen=True)
class SelfRefineConfig:
    """iterations: rounds of feedback and rewriting; history: last answers that a rewriting sees."""

    iterations: int = field(default=3, metadata={"help": "rounds of feedback and rewriting; paper 15, official code 3"})
    history: int = field(default=1, metadata={"help": "answers, each with its feedback, that a rewriting sees"})


async def self_refine(task: Task, config: SelfRefineConfig) -> Generation:
    """The last answer that is one; a rewriting that fails leaves the answer before it standing."""
    best = await task.answer(prompts.chat(task.turn))
    if best.unanswered:
        return task.done(best)
    history: list[tuple[str, str]] = []
    for _ in range(config.iterations):
        feedback = await task.answer(prompts.feedback_turns(task.query, task.scenario, best.response), "feedback")
        history = [*history, (best.response, feedback.response)][-config.history :]
        better = await task.answer(prompts.refine_turns(task.query, history), "refine")
        best = best if better.unanswered else better
    return task.done(replace(best, thought=""))
