"""The commands of the demo family's stages. Imports no torch: help must not wait for it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.draft.spec import option
from paceline.errors import PacelineError, meant
from paceline.outputs import check_folder
from paceline.train.options import (
    Compiled,
    Minutes,
    Out,
    Rate,
    SaveEvery,
    Seed,
    Threads,
    Tokens,
    use_threads,
)

if TYPE_CHECKING:
    from zoo.lm import Job
    from zoo.text import DataConfig

Sources = Annotated[
    list[str],
    typer.Argument(help="Text files as NAME=PATH or PATH: .txt, .jsonl, and both with .gz. A name may repeat."),
]
Model = Annotated[Path, typer.Option(exists=True, file_okay=False, help="Folder of the model to begin with.")]


@dataclass
class StageOptions:
    """Options of every stage that trains."""

    sources: Sources
    out: Out
    run: Path = option(
        help="Folder of the checkpoint and log; run the same command again to resume.",
        names=("--checkpoints",), callback=check_folder,
    )  # fmt: skip
    minutes: Minutes = None
    tokens: Tokens = None
    generated: int = option(150_000, "Generated examples (sums, translation, reading) mixed in; 0: none.", least=0)
    save_every: SaveEvery = 5.0
    compiled: Compiled = True
    threads: Threads = 1

    def job(self, tokenizer: Path, data: "DataConfig", **loop: Any) -> "Job":
        """The stage with the tokenizer in that folder, the mixture `data`, and settings of the loop."""
        use_threads(self.threads)
        from paceline.train.data import parse_sources
        from paceline.train.loop import LoopConfig
        from zoo.lm import Job
        from zoo.tokenizer import load_tokenizer

        plan = LoopConfig(minutes=self.minutes, tokens=self.tokens, save_every=self.save_every, **loop)
        data = replace(data, generated=self.generated)
        read = parse_sources(self.sources)
        return Job(read, load_tokenizer(tokenizer), self.out, self.run, plan, data, self.compiled)


def tokenizer(
    sources: Sources,
    out: Out,
    vocabulary: Annotated[int, typer.Option(help="Tokens, the 256 bytes and 5 special ones included.", min=261)] = 8192,
    characters: Annotated[int, typer.Option(help="Most characters read of one source.", min=1)] = 3_000_000,
    generated: Annotated[int, typer.Option(help="Generated examples to learn from as well.", min=0)] = 10_000,
    threads: Threads = 1,
) -> None:
    """Learn a byte-level BPE vocabulary from the sources (and generated examples), with the chat template.

    python -m zoo tokenizer books=alice.txt chat=dialogues.jsonl.gz --out build/tokenizer
    """
    use_threads(threads)
    from paceline.train.data import parse_sources
    from zoo.text import PRETRAIN, load_documents, plain
    from zoo.tokenizer import save_tokenizer, train_tokenizer

    config = replace(PRETRAIN, characters=characters, generated=generated)
    training, _ = load_documents(parse_sources(sources), config)
    learnt = train_tokenizer((plain(d) for group in training.values() for d in group), vocabulary)
    save_tokenizer(learnt, out)
    typer.echo(f"{len(learnt):,} tokens, written to {out}")


def pretrain(
    stage: StageOptions,
    tokenizer: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Folder that `tokenizer` wrote.")],
    lr: Rate = 2e-3,
    size: Annotated[str, typer.Option(help="tiny, demo (13 million parameters) or large (90 million).")] = "demo",
) -> bool:
    """Train the demo model from random weights on packed text. Ctrl-C saves; the same command goes on.

    python -m zoo pretrain books=alice.txt chat=dialogues.jsonl.gz --tokenizer build/tokenizer
    --out build/base --checkpoints build/pretrain --minutes 50
    """
    from zoo import lm
    from zoo.text import PRETRAIN

    if size not in lm.SIZES:
        raise PacelineError(f"no size {size!r}.{meant(size, lm.SIZES)} Sizes: {', '.join(lm.SIZES)}.")
    return lm.pretrain(stage.job(tokenizer, PRETRAIN, peak_lr=lr), lm.SIZES[size])


def chat(stage: StageOptions, model: Model, lr: Rate = 1e-3) -> bool:
    """Tune a pretrained model on conversations; only what the assistant says is learnt.

    python -m zoo chat chat=dialogues.jsonl.gz --model build/base --out models/demo
    --checkpoints build/chat --minutes 20
    """
    from zoo import lm
    from zoo.text import CHAT

    return lm.chat(stage.job(model, CHAT, peak_lr=lr, warmup_steps=50, decay=0.6), model)


def settle(stage: StageOptions, model: Model, lr: Rate = 2e-4) -> bool:
    """Unlearn loops: the model's own answers that repeat themselves become unlikely, beside ordinary conversations.

    python -m zoo settle chat=dialogues.jsonl.gz --model build/chat --out models/demo
    --checkpoints build/settle --tokens 2000000
    """
    from zoo.settle import settle
    from zoo.text import SETTLE

    return settle(stage.job(model, SETTLE, peak_lr=lr, warmup_steps=20, decay=0.5), model)


def distil(stage: StageOptions, model: Model, lr: Rate = 2e-3) -> bool:
    """Train a small draft model to say what the target would say; it has the target's tokenizer.

    python -m zoo distil chat=dialogues.jsonl.gz --model models/demo --out models/demo-draft
    --checkpoints build/draft --tokens 40000000
    """
    from zoo import lm
    from zoo.text import DISTIL

    return lm.distil(stage.job(model, DISTIL, peak_lr=lr), model)


Without = Annotated[
    list[str] | None,
    typer.Option(help="An evaluation, as a suite of `paceline bench` or a file of conversations; may be repeated."),
]


def prompts(
    sources: Annotated[list[str], typer.Argument(help="Some of dolly=FILE, gsm8k=FILE (train) and mbpp=FILE.")],
    out: Out,
    without: Without = None,
    count: Annotated[int, typer.Option(help="Most prompts of a kind.", min=1)] = 1000,
    seed: Seed = 0,
) -> None:
    """Write prompts of nine kinds for a real model to answer, without any that share text with an evaluation.

    python -m zoo prompts dolly=dolly.jsonl.gz gsm8k=train.jsonl.gz mbpp=mbpp.jsonl.gz --without question.jsonl
    --without HumanEval.jsonl.gz --out build/prompts
    """
    from paceline.train.data import parse_sources
    from zoo.overlap import Overlap, texts_of
    from zoo.prompts import make, write

    evaluation = Overlap(text for suite in without or () for text in texts_of(suite))
    made, dropped = make({source.name: source for source in parse_sources(sources)}, evaluation, count, seed)
    write(made, out)
    for kind, some in made.items():
        typer.echo(f"{kind}: {len(some):,} prompts")
    typer.echo(f"{dropped:,} left out, which share text with an evaluation; written to {out}")


def make(
    plan: Annotated[Path, typer.Argument(help="TOML file of steps; see zoo/zoo.toml.")],
    out: Annotated[Path, typer.Option(help="Folder of what is made.", callback=check_folder)] = Path("models"),
    work: Annotated[
        Path, typer.Option(help="Folder of everything in between; resumed from.", callback=check_folder)
    ] = Path("checkpoints"),
    processes: Annotated[int, typer.Option(help="Processes a step trains with; best one for each core.", min=1)] = 1,
    scale: Annotated[float, typer.Option(help="Multiply budgets and answers, to try it all out.", min=0)] = 1.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands alone.")] = False,
) -> None:
    """Run the steps of a file; what is done is skipped, an interrupted step goes on.

    python -m zoo make zoo/zoo.toml --out models --work checkpoints --processes 2
    """
    from zoo.family import read_steps, run

    raise typer.Exit(run(read_steps(plan, out, work, scale), processes, dry_run))


def page(
    model: Annotated[str, typer.Argument(help="The model's name in its drafters' folders, MODEL-NAME.")],
    out: Annotated[Path, typer.Option(help="Folder of those that ship.", callback=check_folder)] = Path("models"),
    work: Annotated[
        Path, typer.Option(help="Folder of the others; the page keeps the lines of those that are not there.")
    ] = Path("build/smollm2"),
) -> None:
    """Write the page of a model's drafters, OUT/MODEL.md.

    python -m zoo page smollm2 --out models --work build/smollm2
    """
    from zoo.page import write

    write(model, out, work)
