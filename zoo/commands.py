"""The commands of the demo family's stages. Imports no torch: help must not wait for it."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import PacelineError, meant
from paceline.jsonl import check_folder, writes
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
    with_options,
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
    run: Annotated[
        Path,
        typer.Option(
            "--checkpoints",
            help="Folder of the checkpoint and log; run the same command again to resume.",
            callback=check_folder,
        ),
    ]
    minutes: Minutes = None
    tokens: Tokens = None
    generated: Annotated[
        int, typer.Option(help="Generated examples (sums, translation, reading) mixed in; 0: none.", min=0)
    ] = 150_000
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


def sources(sources: Sources) -> None:
    """Show what each source holds, and one document of it: a check before hours of training.

    python -m zoo sources gsm=train.jsonl.gz books=alice.txt
    """
    from paceline.train.data import parse_sources, read
    from zoo.text import held_out, plain

    for source in parse_sources(sources):
        documents = list(read(source))
        held = sum(held_out(d) for d in documents)
        size = sum(len(plain(d)) for d in documents)
        typer.echo(f"{source.name}: {len(documents):,} documents, {size:,} characters, {held:,} held out")
        if documents:
            typer.echo("    " + plain(documents[0])[:200].replace("\n", "\n    "))


def synth(count: Annotated[int, typer.Option(min=1)] = 12, seed: Seed = 0) -> None:
    """Print generated examples: translation, sums, reading, retrieval, copying."""
    from zoo.synth import generate

    for document in generate(count, seed):
        question, answer = (m["content"] for m in document.messages)
        typer.echo(f"[{document.fields['kind']}] {question}\n  -> {answer}\n")


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


@with_options
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


@with_options
def chat(stage: StageOptions, model: Model, lr: Rate = 1e-3) -> bool:
    """Tune a pretrained model on conversations; only what the assistant says is learnt.

    python -m zoo chat chat=dialogues.jsonl.gz --model build/base --out models/demo
    --checkpoints build/chat --minutes 20
    """
    from zoo import lm
    from zoo.text import CHAT

    return lm.chat(stage.job(model, CHAT, peak_lr=lr, warmup_steps=50, decay=0.6), model)


@with_options
def settle(stage: StageOptions, model: Model, lr: Rate = 2e-4) -> bool:
    """Unlearn loops: the model's own answers that repeat themselves become unlikely, beside ordinary conversations.

    python -m zoo settle chat=dialogues.jsonl.gz --model build/chat --out models/demo
    --checkpoints build/settle --tokens 2000000
    """
    from zoo.settle import settle
    from zoo.text import SETTLE

    return settle(stage.job(model, SETTLE, peak_lr=lr, warmup_steps=20, decay=0.5), model)


@with_options
def distil(stage: StageOptions, model: Model, lr: Rate = 2e-3) -> bool:
    """Train a small draft model to say what the target would say; it has the target's tokenizer.

    python -m zoo distil chat=dialogues.jsonl.gz --model models/demo --out models/demo-draft
    --checkpoints build/draft --tokens 40000000
    """
    from zoo import lm
    from zoo.text import DISTIL

    return lm.distil(stage.job(model, DISTIL, peak_lr=lr), model)


def family(
    config: Annotated[Path, typer.Argument(help="TOML file with [sources], [tokens] and [looping]; see zoo/zoo.toml.")],
    out: Annotated[Path, typer.Option(help="Folder of the finished models.", callback=check_folder)] = Path("models"),
    checkpoints: Annotated[
        Path, typer.Option(help="Folder of everything in between; resumed from.", callback=check_folder)
    ] = Path("checkpoints"),
    processes: Annotated[int, typer.Option(help="Processes a stage trains with; best one for each core.", min=1)] = 1,
    scale: Annotated[float, typer.Option(help="Multiply every budget, to try it all out.", min=0)] = 1.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands alone.")] = False,
) -> None:
    """Train the whole family; stages that are done are skipped, an interrupted one goes on.

    python -m zoo family zoo/zoo.toml --out models --checkpoints checkpoints --processes 2
    """
    from zoo.family import read_zoo, run, steps

    raise typer.Exit(run(steps(read_zoo(config, scale), out, checkpoints), processes, dry_run))


def held_out(
    sources: Sources,
    out: Annotated[Path, typer.Option(help="JSON Lines file to write, {messages} a line.", callback=writes(rb"\{"))],
    count: Annotated[int, typer.Option(help="Prompts, an equal share from every source.", min=1)] = 80,
) -> None:
    """Write prompts from the held-out part of the sources, to ask a trained model.

    python -m zoo held-out sgd=dialogues.jsonl.gz dolly=dolly.jsonl.gz --out build/held-out.jsonl
    """
    from paceline.train.data import parse_sources, read
    from zoo.clean import clean
    from zoo.evaluate import held_out_prompts
    from zoo.text import split

    valid: dict[str, list[Any]] = {}
    for source in parse_sources(sources):
        valid.setdefault(source.name, []).extend(split(clean(read(source)))[1])
    prompts = held_out_prompts(valid, count)
    out.write_text("".join(json.dumps({"messages": prompt}) + "\n" for prompt in prompts))
    typer.echo(f"{len(prompts)} prompts, written to {out}")


def evaluate(
    model: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of a trained model.")],
    sources: Sources,
    draft: Annotated[Path | None, typer.Option(help="Folder of its draft model, to measure agreement.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON file to write; printed if not given.", callback=writes(rb"\{"))
    ] = None,
    threads: Threads = 1,
) -> None:
    """Loss on held-out text by source against a 5-gram model, and how far the draft model agrees.

    python -m zoo evaluate models/demo sgd=dialogues.jsonl.gz --draft models/demo-draft
    """
    use_threads(threads)
    from paceline.train.data import parse_sources
    from zoo.evaluate import evaluate
    from zoo.text import PRETRAIN

    text = json.dumps(evaluate(model, parse_sources(sources), PRETRAIN, draft), indent=2)
    if out:
        out.write_text(text + "\n")
    typer.echo(text)


def card(
    model: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of the finished model.")],
    draft: Annotated[Path | None, typer.Option(help="Folder of its draft model.")] = None,
    drafter: Annotated[
        list[Path] | None, typer.Option(help="Folder of another drafter of it, kangaroo or sorted; may be repeated.")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON Lines that `held-out` wrote, for samples.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Markdown file to write, loss.png beside it.", callback=writes(rb"[#<]"))
    ] = None,
    show: Annotated[bool, typer.Option(help="Print all 24 prompts and answers.")] = False,
    threads: Threads = 1,
) -> None:
    """Answer fixed and held-out prompts; write the model card from the answers, the reports and the training logs.

    python -m zoo card models/demo --draft models/demo-draft --out models/README.md
    """
    use_threads(threads)
    from zoo import card
    from zoo.answers import answer_all, counts, drawn, practised
    from zoo.looping import read_prompts

    answers, practice = answer_all(model), practised(model)
    samples = answer_all(model, {"sample": drawn(read_prompts(prompts))}) if prompts else []
    text = card.card(model, draft, drafter or [], answers, samples, practice)
    if show:
        for answer in answers:
            typer.echo(f"[{answer.kind}, {answer.tokens} tokens, ended {answer.ended}, looping {answer.loops}]")
            typer.echo(f"{answer.prompt}\n  -> {answer.text}\n")
    if out:
        out.write_text(text)
        card.draw_loss(model, out.with_name("loss.png"))
        typer.echo(f"{counts(answers)}\n\n{practice}")
    elif not show:
        typer.echo(text)


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


def overlap(
    files: Annotated[list[Path], typer.Argument(help="JSON Lines of prompts, or of a target's answers.", exists=True)],
    without: Without = None,
    model: Annotated[str | None, typer.Option(help="The model whose tokens the answers are recorded in.")] = None,
) -> None:
    """Check that no prompt shares text with an evaluation: ten words in a row, or the whole of a shorter text.

    python -m zoo overlap build/answers.jsonl --model smollm2 --without question.jsonl --without HumanEval.jsonl.gz
    """
    from paceline.target.load import load_tokenizer
    from zoo.overlap import check

    lines, clean = check(files, without or [], load_tokenizer(model) if model else None)
    typer.echo("\n".join(lines))
    if not clean:
        raise typer.Exit(1)


def drafters(
    config: Annotated[Path, typer.Argument(help="TOML file of a model and budgets; see zoo/smollm2.toml.")],
    out: Annotated[Path, typer.Option(help="Folder of the drafters.", callback=check_folder)] = Path("models"),
    checkpoints: Annotated[
        Path, typer.Option(help="Folder of prompts, answers, states and checkpoints.", callback=check_folder)
    ] = Path("checkpoints"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands alone.")] = False,
) -> None:
    """Make every drafter for a real model, on the same answers of it; what is done is skipped.

    python -m zoo drafters zoo/smollm2.toml --out models --checkpoints build/smollm2
    """
    from zoo.drafters import card, drop_tokenizer, read_plan, steps
    from zoo.family import run

    plan = read_plan(config)
    status = run(steps(plan, out, checkpoints), dry_run=dry_run)
    if not status and not dry_run:
        drop_tokenizer(out / f"{plan.model}-draft")
        (out / f"{plan.model}.md").write_text(card(plan, out))
    raise typer.Exit(status)
