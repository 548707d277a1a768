"""Methods of one request: raw (no rules), vanilla (rules in the turn), zero-think (rules, and an empty thought)."""

from __future__ import annotations

from paceline.evals.align import prompts
from paceline.evals.align.methods.base import Task
from paceline.evals.align.types import Generation


async def raw(task: Task, config: None) -> Generation:
    """The query alone."""
    return task.done(await task.answer(prompts.chat(task.query)))


async def vanilla(task: Task, config: None) -> Generation:
    """The query with all rules."""
    return task.done(await task.answer(prompts.chat(task.turn)))


async def zero_think(task: Task, config: None) -> Generation:
    """Vanilla with an empty thought in front of the answer: no thought tokens at all."""
    markers = task.setting.markers
    forced = f"{markers.open}\n\n{markers.close}\n\n"
    reply = await task.ask(prompts.chat(task.turn), "answer", prefix=forced, forced=forced)
    response = reply.text.rpartition(markers.close)[2].strip()
    empty = None if response else "the answer is empty"
    return Generation(response, "", reply.finish_reason, empty, task.calls)
