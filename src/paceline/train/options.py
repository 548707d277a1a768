"""Options that several training commands share. Imports no torch, so that the help of commands without it is quick.

A command takes a group of options as one argument, whose fields become options of the command line:

    @with_options
    def command(setup: DrafterOptions, lr: Rate = 1e-3) -> bool:
        run, answers = setup.prepare()
        loop = setup.loop(answers, passes=10, peak_lr=lr)
"""

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import PacelineError
from paceline.jsonl import check_folder, objects

if TYPE_CHECKING:
    from paceline.train.plan import LoopConfig

Out = Annotated[Path, typer.Option(help="Folder to write.", callback=check_folder)]
Minutes = Annotated[float | None, typer.Option(help="Budget in minutes of wall clock; the decay ends on time.", min=0)]
Tokens = Annotated[
    int | None, typer.Option(help="Budget in tokens; exactly repeatable. 0: measure without training.", min=0)
]
Threads = Annotated[int, typer.Option(help="torch threads.", min=1)]
Seed = Annotated[int, typer.Option(min=0)]
Rate = Annotated[float, typer.Option(help="Peak learning rate.", min=0)]
SaveEvery = Annotated[float, typer.Option(help="Minutes between two checkpoints.", min=0)]
Compiled = Annotated[bool, typer.Option(help="Compile the forward pass (a minute at the start; needs a C++ compiler).")]
BatchRows = Annotated[int, typer.Option(help="Rows of a batch.", min=1)]


def with_options(function: Callable[..., Any]) -> Callable[..., None]:
    """`function` as a Typer command: the fields of its arguments that are dataclasses become options of their own. It
    exits with status 130, as after Ctrl-C, if `function` returns False."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if not dataclasses.is_dataclass(parameter.annotation):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[name] = parameter.annotation
        parameters += [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
                annotation=field.type,
            )
            for field in dataclasses.fields(parameter.annotation)
        ]

    @functools.wraps(function)
    def command(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        if function(**values) is False:
            raise typer.Exit(130)

    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


@dataclass
class AnswerOptions:
    """Which answers a target writes, for its drafters to learn from."""

    prompts: Annotated[
        list[str] | None, typer.Option(help="NAME=PATH of prompts for the target to answer; may be repeated.")
    ] = None
    generate: Annotated[int, typer.Option(help="Answers for the target to write.", min=0)] = 0
    max_tokens: Annotated[int, typer.Option(help="Most tokens of such an answer.", min=1)] = 128
    temperature: Annotated[
        float | None, typer.Option(help="Of such answers; half greedy, half at 1 if left out.", min=0)
    ] = None
    seed: Seed = 0
    threads: Threads = 1

    def answer(self, target: Path, out: Path, recorded: list[Path] | None = None) -> Path:
        """Write the `recorded` answers and the generated ones to the file `out`; returns it."""
        from rich.console import Console

        from paceline.train.data import parse_sources
        from paceline.train.generated import generated_rows

        with Console(stderr=True).status("reading ...") as status:
            return generated_rows(
                target,
                prompts=parse_sources(self.prompts) if self.prompts else None,
                answers=recorded or (),
                count=self.generate,
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                seed=self.seed,
                out=out,
                progress=lambda done, total: status.update(f"{done:,} of {total:,} answers"),
            )


@dataclass(kw_only=True)
class DrafterOptions(AnswerOptions):
    """Options of every command that trains a drafter for a target on its own answers."""

    target: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of the target.")]
    out: Out
    # Not --run: torchrun would take it for its own --run-path.
    run: Annotated[
        Path | None,
        typer.Option(
            "--checkpoints",
            help="Folder of answers, checkpoint and log, for resuming; OUT-run beside OUT if left out.",
            callback=check_folder,
        ),
    ] = None
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="JSON Lines of the target's own answers, with their prompts; may be repeated.", dir_okay=False
        ),
    ] = None
    minutes: Minutes = None
    tokens: Tokens = None
    length: Annotated[int, typer.Option(help="Tokens of a training row.", min=8)] = 512
    save_every: SaveEvery = 5.0

    def prepare(self) -> tuple[Path, Path]:
        """(folder of checkpoint and log, file of the target's answers, made now if they are not there yet).

        PacelineError for two budgets at once, before the target has written an hour of answers."""
        use_threads(self.threads)
        if self.minutes is not None and self.tokens is not None:
            raise PacelineError("--minutes and --tokens are two budgets for one training: give one of them, or neither")
        run = self.run or self.out.with_name(f"{self.out.name}-run")
        return run, self.answer(self.target, run / "answers.jsonl", self.data)

    def loop(self, answers: Path, passes: int, **settings: Any) -> "LoopConfig":
        """The loop's configuration; without a budget, `passes` times the tokens in a file of answers."""
        from paceline.train.plan import LoopConfig

        tokens = self.tokens
        if self.minutes is None and tokens is None:
            rows = objects(answers, PacelineError, "an answer")
            tokens = passes * sum(len(row["prompt_tokens"] or ()) + len(row["tokens"]) for _, row in rows)
        return LoopConfig(minutes=self.minutes, tokens=tokens, seed=self.seed, save_every=self.save_every, **settings)


def use_threads(count: int) -> None:
    """Set how many threads torch and the tokenizers use, and keep freed memory in the process."""
    # accelerate's launcher for CPUs tells OpenMP to fill cores in order: each of its processes would take the first.
    os.environ.pop("KMP_AFFINITY", None)
    import torch

    from paceline.train.memory import keep_freed_memory

    keep_freed_memory()
    torch.set_num_threads(count)
    os.environ.setdefault("RAYON_NUM_THREADS", str(count))  # tokenizers


@dataclass
class HeadOptions:
    """Options of every command that trains draft heads which fill a tree of fixed shape."""

    heads: Annotated[int, typer.Option(help="Heads: the most tokens a draft is deep.", min=1)] = 4
    share: Annotated[
        float, typer.Option(help="Share of a batch's positions whose logits are computed.", min=0.001, max=1)
    ] = 0.25
    soft: Annotated[
        float,
        typer.Option(
            help="Share of soft labels, the target's distribution, in the loss; the rest is its tokens.", min=0, max=1
        ),
    ] = 1.0
    decay: Annotated[float, typer.Option(help="Weight of a depth in the loss beside the one above it.", min=0)] = 0.8
    optimiser: Annotated[str, typer.Option(help="muon (for matrices), or adamw for everything.")] = "muon"
    lr: Rate = 4e-3
    rows: BatchRows = 16
    begin: Annotated[
        Path | None, typer.Option(help="Heads of the same make to go on from, with more text.", file_okay=False)
    ] = None
    states: Annotated[
        Path | None,
        typer.Option(
            help="Folder in which the target's states are kept, for other trainings on the same answers.",
            file_okay=False,
            callback=check_folder,
        ),
    ] = None

    def settings(self) -> dict[str, Any]:
        """The loop's settings that heads share."""
        return {"optimiser": self.optimiser, "peak_lr": self.lr, "weight_decay": 0.0, "warmup_steps": 20}


def one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """PacelineError unless `value` is one of the choices of option `name`."""
    if value not in choices:
        raise PacelineError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")
