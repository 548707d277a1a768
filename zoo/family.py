"""The whole family by one command: tokenizer, pretraining, chat, settling, drafters, evaluation, model card.

A TOML file says which text to use and how long to train; the shipped models were made with zoo.toml, from files in
other places. Every stage is a command of its own, printed before it runs; one that is
done is not run again, an interrupted one resumes from its checkpoint.

    python -m zoo family zoo/zoo.toml --out models --checkpoints checkpoints --dry-run

Doesn't know: what the stages do.
"""

import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.draft.models.vocab import FILE as VOCABULARY
from paceline.errors import PacelineError, meant

TOKENS = {
    "pretrain": 90_000_000,
    "chat": 8_000_000,
    "settle": 2_000_000,
    "distil": 40_000_000,
    "kangaroo": 6_000_000,
    "sorted": 6_000_000,
    "medusa": 4_000_000,
    "hydra": 4_000_000,
    "amphista": 4_000_000,
    "eagle": 6_000_000,
    "eagle3": 6_000_000,
}

RECIPES = "paceline.train"
"""The drafters are trained as anybody's are; all other stages are commands of `zoo`."""

HEADS = ("medusa", "hydra", "amphista", "eagle", "eagle3")

ANSWERS = 12_000
"""Answers of the target for those from kangaroo on, and for the trimmed vocabulary."""


@dataclass(frozen=True)
class Step:
    """One command.

    done: the file that it writes last; parallel: it can use several processes; threaded: it gets threads instead."""

    name: str
    arguments: tuple[str, ...]
    done: Path
    parallel: bool = False
    threaded: bool = False
    module: str = "zoo"

    def command(self, processes: int) -> list[str]:
        if processes > 1 and self.parallel:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
            return [sys.executable, *launcher, self.module, *self.arguments]
        threads = ["--threads", str(processes)] if processes > 1 and self.threaded else []
        return [sys.executable, "-m", self.module, *self.arguments, *threads]


@dataclass(frozen=True)
class Zoo:
    """Sources by name, tokens by stage, answers for the drafters, and chat prompts for the table of loops."""

    sources: tuple[str, ...]
    tokens: Mapping[str, int]
    answers: int
    prompts: tuple[str, ...]
    categories: str


def read_zoo(path: Path, scale: float = 1.0) -> Zoo:
    """The TOML file; relative paths in it are relative to its folder. `scale` multiplies every budget."""
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PacelineError(f"{path} cannot be read: {error}") from None
    known = {"sources", "tokens", "looping"}
    for key in table:
        if key not in known:
            raise PacelineError(f"{path}: no section [{key}].{meant(key, known)} There are {', '.join(sorted(known))}.")
    sources = [f"{name}={place(path, p)}" for name, paths in _lists(path, table.get("sources", {})) for p in paths]
    if not sources:
        raise PacelineError(f'{path} has no [sources]; write NAME = ["FILE", ...] below that line')
    budgets = TOKENS | table.get("tokens", {})
    for stage, budget in budgets.items():
        if stage not in TOKENS or not isinstance(budget, int) or budget < 1:
            raise PacelineError(f"{path}: tokens.{stage} = {budget!r}; stages are {', '.join(TOKENS)}, in whole tokens")
    looping = table.get("looping", {})
    prompts = tuple(str(place(path, p)) for p in looping.get("prompts", []))
    tokens = {stage: max(int(budget * scale), 1) for stage, budget in budgets.items()}
    answers = max(int(ANSWERS * scale), 1)
    return Zoo(tuple(sources), tokens, answers, prompts, str(looping.get("categories", "")))


def _lists(path: Path, table: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    for name, files in table.items():
        files = [files] if isinstance(files, str) else files
        if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
            raise PacelineError(f"{path}: sources.{name} must be a path or a list of paths")
        yield name, files


def place(config: Path, file: str) -> str | Path:
    """A file relative to the TOML file; data sets of the hub stay as they are."""
    return file if file.startswith("hf:") else config.parent / Path(file).expanduser()


def steps(zoo: Zoo, out: Path, checkpoints: Path) -> list[Step]:
    """The commands, in order."""
    demo, draft, adapter, nested = (out / name for name in ("demo", "demo-draft", "demo-kangaroo", "demo-sorted"))
    heads = {name: out / f"demo-{name}" for name in HEADS}
    tokenizer, base, chat = (checkpoints / name for name in ("tokenizer", "base", "chat"))
    held = checkpoints / "held-out.jsonl"

    def sources(*names: str) -> list[str]:
        return [s for s in zoo.sources if s.split("=")[0] in names] or list(zoo.sources)

    def train(stage: str, into: Path, *extra: str) -> Step:
        folder = str(checkpoints / f"run-{stage}")
        budget = ("--out", str(into), "--checkpoints", folder, "--tokens", str(zoo.tokens[stage]))
        arguments = (stage, *zoo.sources, *extra, *budget)
        single = stage == "settle"  # one process makes its answers
        return Step(stage, arguments, into / f"training-{stage}.json", parallel=not single, threaded=single)

    def drafter(stage: str, into: Path, *extra: str) -> Step:
        folder = str(checkpoints / f"run-{stage}")
        budget = ("--out", str(into), "--checkpoints", folder, "--tokens", str(zoo.tokens[stage]))
        arguments = (stage, str(demo), *extra, *budget)
        return Step(stage, arguments, into / "config.json", threaded=True, module=RECIPES)

    own = str(checkpoints / "run-kangaroo" / "answers.jsonl")
    questions = [part for source in sources("sgd", "dolly", "gsm8k") for part in ("--prompts", source)]
    vocabulary = ("vocab", str(demo), "--text", own, "--out", str(draft))
    prompts = [part for file in (*zoo.prompts, str(held)) for part in ("--prompts", file)]
    loops = (str(demo), *prompts, "--categories", zoo.categories, "--out", str(demo / "looping.json"))
    others = [part for folder in (adapter, nested, *heads.values()) for part in ("--drafter", str(folder))]
    card = ("card", str(demo), "--draft", str(draft), *others, "--prompts", str(held), "--out", str(out / "README.md"))
    return [
        Step("tokenizer", ("tokenizer", *zoo.sources, "--out", str(tokenizer)), tokenizer / "tokenizer.json"),
        train("pretrain", base, "--tokenizer", str(tokenizer)),
        train("chat", chat, "--model", str(base)),
        train("settle", demo, "--model", str(chat)),
        train("distil", draft, "--model", str(demo)),
        drafter("kangaroo", adapter, *questions, "--generate", str(zoo.answers)),
        drafter("sorted", nested, "--data", own, "--layers", "3", "--exits", "1,2,3", "--lr", "1e-3"),
        *(drafter(name, folder, "--data", own) for name, folder in heads.items()),
        Step("vocab", vocabulary, draft / VOCABULARY, threaded=True, module=RECIPES),
        Step(
            "evaluate",
            ("evaluate", str(demo), *zoo.sources, "--draft", str(draft), "--out", str(demo / "evaluation.json")),
            demo / "evaluation.json",
            threaded=True,
        ),
        Step("held-out", ("held-out", *sources("sgd", "dolly"), "--out", str(held)), held),
        Step("looping", loops, demo / "looping.json", module="zoo.looping"),
        Step("card", card, out / "README.md", threaded=True),
    ]


def run(steps: Sequence[Step], processes: int = 1, dry_run: bool = False) -> int:
    """Run what is not done yet; the exit status of the first step that fails, or 0."""
    console = Console(stderr=True)
    for step in steps:
        if step.done.exists() and step.name != "card":
            console.print(f"[dim]{step.name}: done ({step.done})", highlight=False)
            continue
        command = step.command(processes)
        console.print(f"[bold]{step.name}[/bold]: {shlex.join(command)}", highlight=False, soft_wrap=True)
        if dry_run:
            continue
        status = subprocess.call(command)
        if status:
            console.print(f"{step.name} ended with status {status}; the same command goes on from there")
            return status
    return 0
