"""Options that several training commands share, and what they mean. Imports no torch: help must not wait for it.

    def command(target: Target, out: Out, run: DrafterRun = None, data: Data = None, tokens: Tokens = None, ...):
        run = run_folder(out, run, minutes, tokens)
        answers = own_answers(target, data, prompts, generate, run / "answers.jsonl")
        loop = LoopConfig(minutes=minutes, tokens=budget(answers, minutes, tokens, passes=10))
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import PacelineError
from paceline.records import objects

Out = Annotated[Path, typer.Option(help="Folder to write.")]
# Not --run: torchrun would take it for its own --run-path.
Run = Annotated[
    Path,
    typer.Option("--checkpoints", help="Folder of the checkpoint and log; run the same command again to resume."),
]
Minutes = Annotated[
    float | None, typer.Option(help="Budget in minutes of wall clock; the decay ends on time.", min=0)
]
Tokens = Annotated[
    int | None, typer.Option(help="Budget in tokens; exactly repeatable. 0: measure what would be trained.", min=0)
]
Threads = Annotated[int, typer.Option(help="torch threads.")]
Rate = Annotated[float, typer.Option(help="Peak learning rate.")]
Generated = Annotated[int, typer.Option(help="Generated examples (sums, translation, reading) mixed in; 0: none.")]
SaveEvery = Annotated[float, typer.Option(help="Minutes between two checkpoints.")]
Compiled = Annotated[bool, typer.Option(help="Compile the forward pass (a minute at the start; needs a C++ compiler).")]

# Of the commands that train a drafter for a target.
Target = Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of the target.")]
DrafterRun = Annotated[
    Path | None,
    typer.Option(
        "--checkpoints", help="Folder of answers, checkpoint and log, for resuming; OUT-run beside OUT if left out."
    ),
]
Data = Annotated[
    list[Path] | None,
    typer.Option(help="JSON Lines of the target's own answers, with their prompts; may be repeated.", dir_okay=False),
]
Prompts = Annotated[
    list[str] | None, typer.Option(help="NAME=PATH of prompts for the target to answer; may be repeated.")
]
Generate = Annotated[int, typer.Option(help="Answers for the target to write.", min=0)]
AnswerTokens = Annotated[int, typer.Option("--max-tokens", help="Most tokens of such an answer.", min=1)]
AnswerHeat = Annotated[
    float | None, typer.Option("--temperature", help="Of such answers; half greedy, half at 1 if left out.", min=0)
]


def run_folder(out: Path, run: Path | None, minutes: float | None, tokens: int | None) -> Path:
    """Where a drafter's training keeps its answers, checkpoint and log. PacelineError for two budgets at once: before
    the target has written an hour of answers."""
    if minutes is not None and tokens is not None:
        raise PacelineError("--minutes and --tokens are two budgets for one training: give one of them, or neither")
    return run or out.with_name(f"{out.name}-run")


def budget(answers: Path, minutes: float | None, tokens: int | None, passes: int) -> int | None:
    """Tokens to train on: as asked, or `passes` times what a file of answers holds. None with a budget in minutes."""
    if minutes is not None or tokens is not None:
        return tokens
    rows = objects(answers, PacelineError, "an answer")
    return passes * sum(len(row["prompt_tokens"] or ()) + len(row["tokens"]) for _, row in rows)


def own_answers(
    target: Path,
    data: list[Path] | None,
    prompts: list[str] | None,
    generate: int,
    out: Path,
    max_tokens: int = 128,
    temperature: float | None = None,
    seed: int = 0,
) -> Path:
    """What a drafter of `target` learns from, as the options say it: the file `out`, in which every recorded and every
    generated answer stands."""
    from rich.console import Console

    from paceline.train.generated import generated_rows
    from paceline.train.sources import parse_sources

    console = Console(stderr=True)
    with console.status("reading ...") as status:
        return generated_rows(
            target,
            prompts=parse_sources(prompts) if prompts else None,
            answers=data or (),
            count=generate,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            out=out,
            progress=lambda done, total: status.update(f"{done:,} of {total:,} answers"),
        )


def use_threads(count: int) -> None:
    """Settle how many threads torch and the tokenizers use, and that freed memory is kept."""
    # accelerate's launcher for CPUs tells OpenMP to fill cores in order: each of its processes would take the first.
    os.environ.pop("KMP_AFFINITY", None)
    import torch

    from paceline.train.memory import keep_freed_memory

    keep_freed_memory()
    torch.set_num_threads(count)
    os.environ.setdefault("RAYON_NUM_THREADS", str(count))  # tokenizers
