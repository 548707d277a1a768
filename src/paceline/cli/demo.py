"""`paceline demo`: stream answers to six prompts of six kinds, plain and with drafts, and print a table."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.resources import as_file, files
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from paceline.cli import options
from paceline.cli.options import open_engine
from paceline.cli.show import Screen, plain_table
from paceline.draft.spec import parse, split
from paceline.errors import ModelError, PacelineError, PromptError, shortened

if TYPE_CHECKING:
    from paceline.cli.compare import Compared, Driven
    from paceline.cli.drive import Watch
    from paceline.cli.prompts import Job
    from paceline.engine.engine import Engine
    from paceline.engine.request import Delta

DEMO, PROMPTS = "models/demo", "demo-prompts.jsonl"

ALSO = (
    "recycling,tree=16",
    f"model:{DEMO}-draft",
    f"kangaroo:{DEMO}-kangaroo",
    f"s2d:{DEMO}-sorted",
    f"medusa:{DEMO}-medusa",
    f"hydra:{DEMO}-hydra",
    f"amphista:{DEMO}-amphista",
    f"eagle:{DEMO}-eagle",
    f"eagle3:{DEMO}-eagle3",
)
"""Also compared on the demo model: a drafter that learns from its logits, and drafters trained for it."""


def demo(
    model: Annotated[str, typer.Argument(help="A folder, or a Hugging Face id.")] = DEMO,
    prompts: Annotated[
        str | None, typer.Option("--prompts", "-p", help="JSON Lines, as for generate. [default: six of our own]")
    ] = None,
    draft: options.Draft = "sam",
    also: Annotated[
        list[str] | None,
        typer.Option(help="Compare this drafter as well; may be repeated. [default: those of the demo model]"),
    ] = None,
    max_tokens: options.MaxTokens = 192,
    repeats: Annotated[int, typer.Option(min=1, help="Time every answer this often; the table has the median.")] = 7,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
) -> int:
    """Answer a few prompts of different kinds plainly and with drafts, and show the gain.

    \b
    paceline demo                     in the repository, where models/demo is
    paceline demo path/to/model --prompts mine.jsonl --draft sam --also sam+prompt-lookup
    """
    if model == DEMO and not Path(DEMO).is_dir():
        raise ModelError(
            f"there is no folder {DEMO} here: the demo model comes with paceline's repository, so run this in a "
            "checkout of it, or name a model of your own, a folder or a Hugging Face id: paceline demo MODEL"
        )

    from paceline.bench.metrics import BASELINE
    from paceline.cli.compare import Driven, doubts, runner
    from paceline.cli.drive import Interrupt, ignore
    from paceline.cli.prompts import from_file
    from paceline.engine.sampling import SamplingParams
    from paceline.workbench.contestant import Ask

    with as_file(files("paceline.cli") / PROMPTS) as shipped:
        jobs, broken = from_file(prompts or str(shipped), SamplingParams(max_tokens=max_tokens))
    if broken:
        raise broken[0]
    engine = open_engine(model, draft, dtype=dtype, device=device, threads=threads, reuse=False)
    specs = also if also is not None else [spec for spec in ALSO if _is_there(spec)] if model == DEMO else []
    screen = Screen(color=sys.stdout.isatty())
    with Interrupt() as interrupt:
        how = (engine, None, interrupt, _refuse)
        plain = Driven(BASELINE, *how)
        # Names differ even where a drafter is given twice, or is plain decoding.
        drafted = [Driven(spec, *how, name=f"{i} {spec}") for i, spec in enumerate((draft, *specs))]
        for contestant in (plain, *drafted):
            contestant.forget()
        show = _Show(screen)
        for job, contestant in product(jobs, (plain, drafted[0])):
            if not interrupt.pressed:
                contestant.watch = show.by(engine.drafter.name if contestant is drafted[0] else "plain")
                contestant.answer([job], Ask(max_tokens))
        plain.watch = drafted[0].watch = ignore
        screen.end_line()
        turns = runner([plain, *drafted], jobs, 1, interrupt)
        for number in range(1, repeats + 1):
            if not interrupt.pressed:
                turns.repeat(number)
    done, *also_done = [_complete(jobs, contestant, plain) for contestant in drafted]
    screen.legend()
    if done:
        screen.out.print()
        screen.out.print(_table(done, engine.drafter.name))
        if specs:
            screen.out.print()
            screen.out.print(_overview(dict(zip((draft, *specs), (done, *also_done), strict=True))))
        new, ratio = sum(both.pair[0].row.num_new for both in done), float(_totals(done)[-1])
        rounds = sum(both.pair[0].row.stats.rounds for both in done)
        for line in ("", *doubts(ratio, new / rounds), *_closing(done, model == DEMO)):
            screen.out.print(line, markup=False, soft_wrap=True)
    if interrupt.pressed:
        screen.note("interrupted; the figures above are of the answers so far")
        return 130
    return 0


def _complete(jobs: Sequence[Job], drafted: Driven, plain: Driven) -> list[Compared]:
    """The comparisons that are complete."""
    from paceline.cli.compare import Compared

    return [both for job in jobs if (both := Compared.of(job, drafted, plain))]


def _refuse(job: Job, error: PacelineError) -> None:
    raise PromptError(f"{job.where}: {error}")


class _Show:
    """Streams every answer under a heading: the prompt, then who answers it."""

    def __init__(self, screen: Screen):
        self.screen = screen
        self._shown: Job | None = None

    def by(self, who: str) -> Watch:
        """Shows the answers of `who`."""

        def watch(engine: Engine, job: Job, delta: Delta) -> None:
            if len(delta.tokens) == delta.row.num_new:
                self._heading(who, job)
            self.screen.write(delta.pieces)

        return watch

    def _heading(self, who: str, job: Job) -> None:
        self.screen.end_line()
        if self._shown is not job:
            text = job.prompt if isinstance(job.prompt, str) else job.prompt[-1]["content"]
            self.screen.out.print()
            self.screen.out.rule(job.name, align="left")
            self.screen.out.print(shortened(text, 300), style="dim", markup=False, soft_wrap=True)
            self._shown = job
        self.screen.out.print(f"[{who}]", style="bold", markup=False)


def _table(done: list[Compared], name: str) -> Table:
    """A line a prompt, and one for all of them together: all tokens over all seconds, all tokens over all rounds."""
    figures = ("new\ntokens", "mean\naccepted", "plain\ntok/s", f"{name}\ntok/s", "\nratio")
    text = ("\nprompt", "\nidentical", "\nlooping")
    table = plain_table(text[0], *figures, *text[1:], text=text)
    for both in done:
        drafted, plain = both.pair
        table.add_row(
            both.job.name,
            str(drafted.row.num_new),
            f"{drafted.row.mean_accepted_tokens:.2f}",
            f"{plain.tokens_per_second:.0f}",
            f"{drafted.tokens_per_second:.0f}",
            f"{both.speedup:.2f}",
            "yes" if both.first_difference is None else f"no, at {both.first_difference}",
            "yes" if both.loops else "no",
        )
    table.add_section()
    table.add_row("all", *_totals(done), style="bold")
    return table


def _overview(runs: Mapping[str, list[Compared]]) -> Table:
    """A line a drafter: all prompts together."""
    figures = ("mean\naccepted", "plain\ntok/s", "drafted\ntok/s", "\nratio", "\nidentical")
    table = plain_table("\nall prompts", *figures, text=("\nall prompts",))
    for spec, done in runs.items():
        if done:
            same = sum(both.first_difference is None for both in done)
            table.add_row(escape(spec), *_totals(done)[1:], f"{same} of {len(done)}")
    return table


def _is_there(spec: str) -> bool:
    """Whether every checkpoint that a spec names exists."""
    parts = [parse(part) for part in split(spec)]
    return all(part.checkpoint is None or Path(part.checkpoint).is_dir() for part in parts)


def _totals(done: list[Compared]) -> list[str]:
    pairs = [both.pair for both in done]
    new = sum(drafted.row.num_new for drafted, _ in pairs)
    rounds = sum(drafted.row.stats.rounds for drafted, _ in pairs)
    fast = new / sum(drafted.seconds for drafted, _ in pairs)
    slow = sum(plain.row.num_new for _, plain in pairs) / sum(plain.seconds for _, plain in pairs)
    return [str(new), f"{new / rounds:.2f}", f"{slow:.0f}", f"{fast:.0f}", f"{fast / slow:.2f}"]


def _closing(done: list[Compared], is_demo_model: bool) -> list[str]:
    """What the figures say, and what they do not say."""
    same = sum(both.first_difference is None for both in done)
    loops = sum(both.loops for both in done)
    lines = [
        f"{same} of {len(done)} outputs are identical to plain decoding, token for token. "
        f"{loops} of {len(done)} run into a loop, and a loop is the easiest text to draft."
    ]
    if is_demo_model:
        lines.append(
            "This model is tiny: its answers are often wrong, and text this regular is easy to draft. Drafts whose "
            "ratio is above 1 pay on this machine; a large model's gain may be different."
        )
    lines.append('Measure yours: paceline generate PATH_OR_ID "your prompt" --compare')
    return lines
