"""more-think: at the end of a thought "Wait" is appended and the model thinks again; the last pass answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.evals.align import prompts
from paceline.evals.align.methods.base import Task
from paceline.evals.align.types import Generation


@dataclass(frozen=True)
class MoreThinkConfig:
    """passes: requests in all, the one that answers included."""

    passes: int = field(default=3, metadata={"help": "requests, the one that answers included; the paper's at most 3"})


async def more_think(task: Task, config: MoreThinkConfig) -> Generation:
    """One growing thought. With one pass nothing is forced but the opening marker."""
    markers, turn = task.setting.markers, prompts.chat(task.turn)
    prefix = forced = f"{markers.open}\n"
    for number in range(1, config.passes):
        reply = await task.ask(turn, f"pass {number}", prefix=prefix, forced=forced, stop=[markers.close])
        forced = f"\n\n{prompts.WAIT}"
        prefix = prefix + reply.text.rstrip() + forced
    reply = await task.ask(turn, f"pass {config.passes}", prefix=prefix, forced=forced)
    return task.done(task.read(reply, prefix.removeprefix(markers.open)))
