"""How many answers of a model run into a loop, as `paceline.bench.record` defines it, greedy and sampled.

    python -m zoo.looping models/demo --prompts questions.jsonl --temperature 0 --temperature 0.7
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.bench.record import is_looping
from paceline.errors import PacelineError, PromptError
from paceline.workbench.conversations import MT_BENCH, read

if TYPE_CHECKING:
    from paceline.engine.engine import Engine


@dataclass(frozen=True)
class LoopCount:
    """Answers to one set of prompts at one temperature."""

    prompts: str
    temperature: float
    answers: int
    looping: int
    ended: int  # by themselves, within the tokens they had
    mean_tokens: float
    too_long: int = 0  # prompts left out because the model's context cannot hold them

    @property
    def share(self) -> float:
        return self.looping / max(self.answers, 1)


def count_loops(
    engine: Engine, prompts: Sequence[Sequence[dict[str, str]]], name: str, temperature: float, tokens: int
) -> LoopCount:
    """Answer every prompt (chat messages) with at most `tokens` tokens; sampling is seeded by the prompt's number."""
    from paceline.core.sampling import SamplingParams

    rows, too_long = [], 0
    for seed, prompt in enumerate(prompts):
        try:
            rows.append(engine.add(prompt, SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed)))
        except PromptError:
            too_long += 1
    engine.finish(rows)
    answers = [row.new_tokens.tolist() for row in rows]
    return LoopCount(
        name,
        temperature,
        len(rows),
        sum(is_looping(answer) for answer in answers),
        sum(row.finish_reason == "stop" for row in rows),
        sum(map(len, answers)) / max(len(answers), 1),
        too_long,
    )


def read_prompts(path: Path, categories: Sequence[str] = ()) -> list[list[dict[str, str]]]:
    """Chat messages of every line, up to where the model first answers: {"messages"}, {"prompt"} or {"turns": [texts]}.

    categories: only lines of these; a line without a "category" counts as one of them."""
    prompts = []
    for asked in read(path):
        if not asked.prompt:
            raise PromptError(f'{asked.where}: a line is an object with "messages", "prompt" or "turns"')
        if not categories or not asked.category or asked.category in categories:
            prompts.append([dict(message) for message in asked.first_prompt])
    return prompts


def table(counts: Sequence[LoopCount]) -> str:
    """Markdown."""
    lines = ["| prompts | temperature | answers | looping | ended by themselves | mean tokens |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    lines += [
        f"| {c.prompts} | {c.temperature:g} | {c.answers} | {c.looping} ({c.share:.1%}) | {c.ended} "
        f"| {c.mean_tokens:.0f} |"
        for c in counts
    ]
    return "\n".join(lines)


def main(
    model: Annotated[str, typer.Argument(help="Folder or hub id of a chat model.")],
    prompts: Annotated[list[Path], typer.Option(help="JSON Lines: {messages}, {prompt} or {turns}. May be repeated.")],
    temperature: Annotated[list[float], typer.Option(help="May be repeated; each is measured.")] = [0.0, 0.7],  # noqa: B006
    tokens: Annotated[int, typer.Option(help="Most tokens an answer may have.")] = 128,
    categories: Annotated[str, typer.Option(help='Only these, by comma; "mt-bench" stands for its eight.')] = "",
    batch: Annotated[int, typer.Option(help="Answers at once.")] = 16,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="JSON file to write as well.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Count how many answers run into a loop, greedy and sampled."""
    from paceline.engine.engine import Engine

    wanted = [c for name in categories.split(",") if name for c in (MT_BENCH if name == "mt-bench" else (name,))]
    engine = Engine(model, max_batch=batch, dtype=dtype)
    counts = []
    for path in prompts:
        asked = read_prompts(path, wanted)
        if not asked:
            raise PromptError(f"{path} holds no prompts{' of these categories' if wanted else ''}.")
        counts += [count_loops(engine, asked, path.stem, t, tokens) for t in temperature]
    rows = json.dumps([asdict(c) | {"share": c.share} for c in counts], indent=2)
    if out:
        out.write_text(rows + "\n")
    typer.echo(rows if as_json else table(counts))


def run(arguments: list[str] | None = None) -> Any:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    try:
        return app(arguments)
    except PacelineError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    run()
