"""align3: one thought in which the model is made to deliberate on the rules, in three steps.

Zhang et al. 2025 (arXiv 2509.14760, section 4). The thought begins with the behavioural rules (step 1), is interrupted
where it would end by the safety rules (step 2), then by all rules (step 3), and only then ends. Over an API that is one
request a step, each with the whole thought so far as its prefix: the forced text is prefilled, never decoded.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from paceline.errors import MethodError
from paceline.evals.align import prompts
from paceline.evals.align.methods.base import Task
from paceline.evals.align.types import Generation


@dataclass(frozen=True)
class Align3Config:
    """steps: which, in which order, each at most once. step_tokens: budget of all steps but the last, 0: the run's.
    close: whether a thought that does not end in its budget is ended, and the answer asked for in one more request."""

    steps: str = field(
        default="123", metadata={"help": "1 behaviour, 2 safety, 3 audit of all rules: any subset in any order"}
    )
    step_tokens: int = field(default=0, metadata={"help": "most tokens of each step but the last; 0: as --max-tokens"})
    close: bool = field(
        default=False, metadata={"help": "end a thought that runs out of its budget, and ask for the answer"}
    )

    def __post_init__(self) -> None:
        if not self.steps or set(self.steps) - set("123") or len(set(self.steps)) < len(self.steps):
            raise MethodError(f"align3: steps is {self.steps!r}; write 1, 2 and 3 in any order, each at most once.")


async def align3(task: Task, config: Align3Config) -> Generation:
    """One growing assistant turn; all requests but the last stop where the thought would end."""
    markers, turn = task.setting.markers, prompts.chat(task.turn)
    prefix, glue = "", f"{markers.open}\n"
    *first, last = list(config.steps)
    for step in first:
        forced = glue + prompts.step_text(step, task.scenario)
        prefix += forced
        reply = await task.ask(
            turn, f"step {step}", prefix=prefix, forced=forced, stop=[markers.close], max_tokens=config.step_tokens
        )
        prefix, glue = prefix + reply.text.rstrip(), "\n\n"
    forced = glue + prompts.step_text(last, task.scenario)
    prefix += forced
    reply = await task.ask(turn, f"step {last}", prefix=prefix, forced=forced)
    answer = task.read(reply, prefix.removeprefix(markers.open))
    if answer.open and config.close:
        forced = f"\n{markers.close}\n\n"
        prefix += reply.text.rstrip() + forced
        reply = await task.ask(turn, "answer", prefix=prefix, forced=forced)
        answer = task.read(replace(reply, text=forced + reply.text), answer.thought)
    return task.done(answer)
