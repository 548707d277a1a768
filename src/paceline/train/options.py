"""Options that several training commands share, and what they mean. Imports no torch: help must not wait for it.

    def command(target: Target, out: Out, run: Run, data: Data = None, prompts: Prompts = None, generate: Generate = 0):
        answers = own_answers(target, data, prompts, generate, run / "answers.jsonl")
"""

import os
from pathlib import Path
from typing import Annotated

import typer

Out = Annotated[Path, typer.Option(help="Folder to write.")]
# Not --run: torchrun would take it for its own --run-path.
Run = Annotated[
    Path,
    typer.Option("--checkpoints", help="Folder of the checkpoint and log; run the same command again to resume."),
]
Minutes = Annotated[float | None, typer.Option(help="Budget in minutes of wall clock; the decay ends on time.")]
Tokens = Annotated[int | None, typer.Option(help="Budget in tokens; exactly repeatable.")]
Threads = Annotated[int, typer.Option(help="torch threads.")]
Rate = Annotated[float, typer.Option(help="Peak learning rate.")]
Generated = Annotated[int, typer.Option(help="Generated examples (sums, translation, reading) mixed in; 0: none.")]
SaveEvery = Annotated[float, typer.Option(help="Minutes between two checkpoints.")]
Compiled = Annotated[bool, typer.Option(help="Compile the forward pass (a minute at the start; needs a C++ compiler).")]

# Of the commands that train a drafter for a target.
Target = Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of the target.")]
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
