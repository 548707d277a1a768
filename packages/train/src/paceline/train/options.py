"""Options that several training commands share. Imports no torch at the top, so that --help is quick.

    @drafter_command
    def command(setup: DrafterOptions, config: MyConfig) -> bool:
        return train_mine(setup.training(config), config)
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

from paceline.draft.spec import option
from paceline.errors import PacelineError
from paceline.formats.place import check_place
from paceline.given import checked
from paceline.jsonl import as_object
from paceline.outputs import check_folder, output, write_json
from paceline.textfiles import objects, readable_or_folders

if TYPE_CHECKING:
    from paceline.train.trainer import TrainerConfig, Training

ANSWERING = 1 / 3  # Largest share of --hours for answers.
_OURS = re.compile(rb'"(paceline\w*|medusa|tuned_from)"')
"""In config.json, or `folder.TUNED_FILE`, of a model that a training has written."""


@output
def check_trained(out: Path | None) -> Path | None:
    """Return `out`, or raise PacelineError unless it passes `check_folder` and has no model from elsewhere."""
    if (checked := check_folder(out)) is not None and (config := checked / "config.json").is_file():
        from paceline.formats.folder import TUNED_FILE

        notes = [file for file in (config, checked / TUNED_FILE) if file.is_file()]
        if not any(_OURS.search(file.read_bytes()) for file in notes):
            raise PacelineError(f"{out} holds a model that no training has written; name another folder to write")
    return out


Out = Annotated[Path, option(help="Folder to write.", callback=check_trained)]
Minutes = Annotated[
    float | None, option(help="How many minutes to train, including the decay of the learning rate.", least=0)
]
Hours = Annotated[
    float | None,
    option(
        help="How many hours to take in all, answers included (at most a third of them), at the lowest priority: a "
        "night on a machine that others use, too.",
        least=0.01,
        most=10_000,
    ),
]
Tokens = Annotated[
    int | None, option(
        help="How many tokens to train on; such a training can be repeated exactly. 0 measures without training.",
        least=0,
    )
]  # fmt: skip
Threads = Annotated[int, option(help="Number of torch threads.", least=1, most=1024)]
Seed = Annotated[int, option(help="Seed of everything that is drawn at random.", least=0)]
Rate = Annotated[float, option(help="Peak learning rate.", least=0)]
TargetName = Annotated[
    str,
    option(
        help="Target to train for: a folder, a GGUF file, smollm2, or a name on the hub.", argument=True,
        callback=checked(check_place),
    ),
]  # fmt: skip
SaveEvery = Annotated[float, option(help="Minutes between two checkpoints.", least=0)]
Compiled = Annotated[bool, option(help="Compile the forward pass (a minute at the start; needs a C++ compiler).")]


class Layers(tuple[int, ...]):
    """Layer numbers; on the command line separated by commas."""


def layers_of(name: str) -> Callable[[Any], Layers]:
    """The parser of an option `name` that takes layers, for `option(..., parser=...)`."""

    def parse(text: Any) -> Layers:
        try:
            return Layers(map(int, text.split(",") if isinstance(text, str) else text))
        except ValueError:
            raise PacelineError(f"{name} is {text!r}; it must be layers with commas between, as in 2,3,4") from None

    return parse


@dataclass(kw_only=True)
class AnswerOptions:
    """Which answers the target generates, for its drafters to learn from."""

    prompts: list[str] | None = option(None, "Prompts for the target to answer, NAME=PATH; may be repeated.")
    generate: int = option(0, "Number of answers that the target writes.", least=0)
    max_tokens: int = option(128, "Largest number of tokens of an answer that the target writes.", least=1)
    temperature: float | None = option(
        None, "Temperature of answers that the target writes. [default: half of them greedy, half at 1]", least=0
    )
    seed: Seed = 0
    threads: Threads = 1

    def answer(self, target: str, out: Path, recorded: list[Path] | None = None, seconds: float = inf) -> Path:
        """Write the `recorded` answers and the generated ones to the file `out`, and return it.

        seconds  after which no more are generated."""
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
                seconds=seconds,
                progress=lambda done, total: status.update(f"{done:,} of {total:,} answers"),
            )


@dataclass(kw_only=True)
class DrafterOptions(AnswerOptions):
    """Options of every command that trains a drafter for a target on its own answers."""

    target: TargetName
    out: Out
    run: Path | None = option(  # not --run: torchrun would read it as its own --run-path
        None, "Folder of answers, checkpoint and log, for resuming. [default: OUT-run next to OUT]",
        names=("--checkpoints",), callback=check_folder,
    )  # fmt: skip
    data: list[Path] | None = option(
        None,
        "Recorded answers with their prompts, in any format that `paceline replay` reads: the target's own, or the log "
        "of a service; may be repeated.",
        names=("--data", "--log"),
        callback=readable_or_folders,
    )
    hours: Hours = None
    minutes: Minutes = None
    tokens: Tokens = None
    save_every: SaveEvery = 5.0

    def __post_init__(self) -> None:
        """Raises PacelineError for two budgets, and for a night of several processes."""
        budgets = {"--hours": self.hours, "--minutes": self.minutes, "--tokens": self.tokens}
        given = [name for name, budget in budgets.items() if budget is not None]
        if len(given) > 1:
            raise PacelineError(f"{' and '.join(given)} are budgets for one training: give one of them, or none")
        if self.hours is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise PacelineError(
                "--hours is a budget of one process: make the answers with one, then give --minutes to several"
            )

    def training(self, config: TrainerConfig) -> Training:
        """The training to run. Generates the target's answers first, if they are not there yet.

        PacelineError for a target that the recipe cannot work with, before answers are generated."""
        from paceline.train.loop import LoopConfig
        from paceline.train.trainer import Training, training_folder

        use_threads(self.threads)
        config.check(training_folder(self.target))
        run, minutes, tokens = self.run or self.out.with_name(f"{self.out.name}-run"), self.minutes, self.tokens
        if self.hours is None:
            answers = self.answer(self.target, run / "answers.jsonl", self.data)
        else:
            answers, minutes = self._answers_of_a_night(run, 3600 * self.hours)
        if minutes is None and tokens is None:
            rows = objects(answers, PacelineError, "an answer")
            tokens = config.passes * sum(len(row["prompt_tokens"] or ()) + len(row["tokens"]) for _, row in rows)
        settings = {"seed": self.seed, "save_every": self.save_every, **config.loop}
        loop = LoopConfig(minutes=minutes, tokens=tokens, **settings)
        return Training(self.target, answers, self.out, run, loop)

    def _answers_of_a_night(self, run: Path, seconds: float) -> tuple[Path, float]:
        """(the answers, minutes that are left for training) of `seconds` in all, from now on at the lowest priority.

        The file answers.seconds.json has what answers took in earlier calls. PacelineError if there are none in their
        time, or if they took all of it before the training began."""
        from paceline.train.loop import CHECKPOINT

        if hasattr(os, "nice"):
            os.nice(19)
        note, began = run / "answers.seconds.json", monotonic()
        try:
            before = float(as_object(note.read_bytes(), "a time")["seconds"]) if note.exists() else 0.0
        except (PacelineError, KeyError, TypeError, ValueError):
            raise PacelineError(f"{note} does not say how long answers took: delete it, to count from now on") from None
        try:
            answers = self.answer(self.target, run / "answers.jsonl", self.data, seconds * ANSWERING - before)
        finally:
            spent = before + monotonic() - began
            run.mkdir(parents=True, exist_ok=True)
            write_json(note, {"seconds": round(spent, 1)})
        if not answers.stat().st_size:
            raise PacelineError("no answer was ready in a third of --hours: give more hours, or recorded answers")
        if spent >= seconds and not (run / CHECKPOINT).exists():
            raise PacelineError("the answers took all of --hours, and nothing is trained yet: give more hours")
        if spent >= seconds * ANSWERING:
            print("the time for answers is over; training goes on with those that are there", file=sys.stderr)
        return answers, max(seconds - spent, 0.0) / 60


def use_threads(count: int) -> None:
    """Set the number of threads of torch and the tokenizers, and keep freed memory in the process."""
    # accelerate's launcher for CPUs makes OpenMP fill cores in order: all of its processes would use the first ones.
    os.environ.pop("KMP_AFFINITY", None)
    import torch

    keep_freed_memory()
    torch.set_num_threads(count)
    os.environ.setdefault("RAYON_NUM_THREADS", str(count))  # This is for the tokenizers.


def keep_freed_memory() -> bool:
    """Keep freed memory in the process instead of returning it to the system. Call it before the first large
    allocation. False, without effect, where the C library is not glibc.

    A training step on a CPU allocates and frees the same hundreds of megabytes again and again. glibc returns large
    blocks to the kernel, which then fills each page with zeros again. Keeping them made large matrix products up to
    twelve times and whole steps a quarter faster (docs/train.md)."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    trim_threshold, top_pad, mmap_max, arena_max = -1, -2, -4, -8  # Constants of malloc.h.
    settings = {arena_max: 1, mmap_max: 0, trim_threshold: 2**31 - 1, top_pad: 64 << 20}
    done = [mallopt(name, value) == 1 for name, value in settings.items()]
    return all(done)
