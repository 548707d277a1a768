"""Command line of the training recipes. Sources are files of yours, given as NAME=PATH or PATH.

python -m paceline.train --help
"""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.errors import PacelineError

app = typer.Typer(
    help="Train the demo family: tokenizer, pretrain, chat, settle, distil, evaluate, card; or all of it: zoo.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

Sources = Annotated[
    list[str],
    typer.Argument(help="Text files as NAME=PATH or PATH: .txt, .jsonl, and both with .gz. A name may repeat."),
]
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


def _threads(count: int) -> None:
    # accelerate's launcher for CPUs tells OpenMP to fill cores in order: each of its processes would take the first.
    os.environ.pop("KMP_AFFINITY", None)
    import torch

    from paceline.train.memory import keep_freed_memory

    keep_freed_memory()
    torch.set_num_threads(count)
    os.environ.setdefault("RAYON_NUM_THREADS", str(count))  # tokenizers


@app.command("sources")
def sources_command(sources: Sources) -> None:
    """Show what each source holds, and one document of it: a check before hours of training.

    python -m paceline.train sources gsm=train.jsonl.gz books=alice.txt
    """
    from paceline.train.sources import held_out, parse_sources, read

    for source in parse_sources(sources):
        documents = list(read(source))
        held = sum(held_out(d) for d in documents)
        size = sum(len(d.plain()) for d in documents)
        typer.echo(f"{source.name}: {len(documents):,} documents, {size:,} characters, {held:,} held out")
        if documents:
            typer.echo("    " + documents[0].plain()[:200].replace("\n", "\n    "))


@app.command("synth")
def synth_command(count: int = 12, seed: int = 0) -> None:
    """Print generated examples: translation, sums, reading, retrieval, copying."""
    from paceline.train.synth import generate

    for document in generate(count, seed):
        question, answer = (m["content"] for m in document.messages)
        typer.echo(f"[{document.fields['kind']}] {question}\n  -> {answer}\n")


@app.command("tokenizer")
def tokenizer_command(
    sources: Sources,
    out: Out,
    vocabulary: Annotated[int, typer.Option(help="Tokens, the 256 bytes and 5 special ones included.")] = 8192,
    characters: Annotated[int, typer.Option(help="Read at most so many of one source.")] = 3_000_000,
    generated: Annotated[int, typer.Option(help="Generated examples to learn from as well.")] = 10_000,
    threads: Threads = 1,
) -> None:
    """Learn a byte-level BPE vocabulary from the sources (and generated examples), with the chat template.

    python -m paceline.train tokenizer books=alice.txt chat=dialogues.jsonl.gz --out build/tokenizer
    """
    _threads(threads)
    from dataclasses import replace

    from paceline.train.lm import PRETRAIN, load_documents
    from paceline.train.sources import parse_sources
    from paceline.train.tokenizer import save_tokenizer, train_tokenizer

    config = replace(PRETRAIN, characters=characters, generated=generated)
    training, _ = load_documents(parse_sources(sources), config)
    tokenizer = train_tokenizer((d.plain() for group in training.values() for d in group), vocabulary)
    save_tokenizer(tokenizer, out)
    typer.echo(f"{len(tokenizer):,} tokens, written to {out}")


@app.command("pretrain")
def pretrain_command(
    sources: Sources,
    tokenizer: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Folder that `tokenizer` wrote.")],
    out: Out,
    run: Run,
    minutes: Minutes = None,
    tokens: Tokens = None,
    lr: Rate = 2e-3,
    size: Annotated[str, typer.Option(help="tiny, demo (13 million parameters) or large (90 million).")] = "demo",
    generated: Generated = 150_000,
    save_every: SaveEvery = 5.0,
    compiled: Compiled = True,
    threads: Threads = 1,
) -> None:
    """Train the demo model from random weights on packed text. Ctrl-C saves; the same command goes on.

    python -m paceline.train pretrain books=alice.txt chat=dialogues.jsonl.gz --tokenizer build/tokenizer
    --out build/base --checkpoints build/pretrain --minutes 50
    """
    _threads(threads)
    from dataclasses import replace

    from paceline.errors import meant
    from paceline.train.lm import PRETRAIN, SIZES, pretrain
    from paceline.train.loop import LoopConfig
    from paceline.train.sources import parse_sources
    from paceline.train.tokenizer import load_tokenizer

    if size not in SIZES:
        raise PacelineError(f"no size {size!r}.{meant(size, SIZES)} Sizes: {', '.join(SIZES)}.")
    loop = LoopConfig(minutes=minutes, tokens=tokens, peak_lr=lr, save_every=save_every)
    read, words = parse_sources(sources), load_tokenizer(tokenizer)
    data = replace(PRETRAIN, generated=generated)
    if not pretrain(read, words, out, run, loop, data, SIZES[size], compiled):
        raise typer.Exit(130)


@app.command("chat")
def chat_command(
    sources: Sources,
    model: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Folder that `pretrain` wrote.")],
    out: Out,
    run: Run,
    minutes: Minutes = None,
    tokens: Tokens = None,
    lr: Rate = 1e-3,
    generated: Generated = 150_000,
    save_every: SaveEvery = 5.0,
    compiled: Compiled = True,
    threads: Threads = 1,
) -> None:
    """Tune a pretrained model on conversations; only what the assistant says is learnt.

    python -m paceline.train chat chat=dialogues.jsonl.gz --model build/base --out models/demo
    --checkpoints build/chat --minutes 20
    """
    _threads(threads)
    from dataclasses import replace

    from paceline.train.lm import CHAT, chat
    from paceline.train.loop import LoopConfig
    from paceline.train.sources import parse_sources
    from paceline.train.tokenizer import load_tokenizer

    loop = LoopConfig(minutes=minutes, tokens=tokens, peak_lr=lr, warmup_steps=50, decay=0.6, save_every=save_every)
    data = replace(CHAT, generated=generated)
    if not chat(parse_sources(sources), load_tokenizer(model), model, out, run, loop, data, compiled):
        raise typer.Exit(130)


@app.command("settle")
def settle_command(
    sources: Sources,
    model: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Folder that `chat` wrote.")],
    out: Out,
    run: Run,
    minutes: Minutes = None,
    tokens: Tokens = None,
    lr: Rate = 2e-4,
    generated: Generated = 150_000,
    save_every: SaveEvery = 5.0,
    compiled: Compiled = True,
    threads: Threads = 1,
) -> None:
    """Unlearn loops: the model's own answers that repeat themselves become unlikely, beside ordinary conversations.

    python -m paceline.train settle chat=dialogues.jsonl.gz --model build/chat --out models/demo
    --checkpoints build/settle --tokens 2000000
    """
    _threads(threads)
    from dataclasses import replace

    from paceline.train.lm import CHAT
    from paceline.train.loop import LoopConfig
    from paceline.train.settle import settle
    from paceline.train.sources import parse_sources
    from paceline.train.tokenizer import load_tokenizer

    loop = LoopConfig(minutes=minutes, tokens=tokens, peak_lr=lr, warmup_steps=20, decay=0.5, save_every=save_every)
    data = replace(CHAT, generated=generated)
    if not settle(parse_sources(sources), load_tokenizer(model), model, out, run, loop, data, compiled=compiled):
        raise typer.Exit(130)


@app.command("distil")
def distil_command(
    sources: Sources,
    model: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Folder of the target.")],
    out: Out,
    run: Run,
    minutes: Minutes = None,
    tokens: Tokens = None,
    lr: Rate = 2e-3,
    generated: Generated = 150_000,
    save_every: SaveEvery = 5.0,
    compiled: Compiled = True,
    threads: Threads = 1,
) -> None:
    """Train a small draft model to say what the target would say; it has the target's tokenizer.

    python -m paceline.train distil chat=dialogues.jsonl.gz --model models/demo --out models/demo-draft
    --checkpoints build/draft --tokens 40000000
    """
    _threads(threads)
    from dataclasses import replace

    from paceline.train.distil import DISTIL, distil
    from paceline.train.loop import LoopConfig
    from paceline.train.sources import parse_sources
    from paceline.train.tokenizer import load_tokenizer

    loop = LoopConfig(minutes=minutes, tokens=tokens, peak_lr=lr, save_every=save_every)
    data = replace(DISTIL, generated=generated)
    if not distil(parse_sources(sources), load_tokenizer(model), model, out, run, loop, data, compiled=compiled):
        raise typer.Exit(130)


@app.command("zoo")
def zoo_command(
    config: Annotated[Path, typer.Argument(help="TOML file with [sources], [tokens] and [looping]; see zoo.toml.")],
    out: Annotated[Path, typer.Option(help="Folder of the finished models.")] = Path("models"),
    checkpoints: Annotated[Path, typer.Option(help="Folder of everything in between; resumed from.")] = Path(
        "checkpoints"
    ),
    processes: Annotated[int, typer.Option(help="Processes a stage trains with; one a core pays.")] = 1,
    scale: Annotated[float, typer.Option(help="Multiply every budget, to try it all out.")] = 1.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands alone.")] = False,
) -> None:
    """Train the whole family; stages that are done are skipped, an interrupted one goes on.

    python -m paceline.train zoo zoo.toml --out models --checkpoints checkpoints --processes 2
    """
    from paceline.train.zoo import read_zoo, run_zoo

    raise typer.Exit(run_zoo(read_zoo(config, scale), out, checkpoints, processes, dry_run))


@app.command("held-out")
def held_out_command(
    sources: Sources,
    out: Annotated[Path, typer.Option(help="JSON Lines file to write, {messages} a line.")],
    count: Annotated[int, typer.Option(help="Prompts, an equal share from every source.")] = 80,
) -> None:
    """Write prompts from the held-out part of the sources, to ask a trained model.

    python -m paceline.train held-out sgd=dialogues.jsonl.gz dolly=dolly.jsonl.gz --out build/held-out.jsonl
    """
    import json

    from paceline.train.clean import clean
    from paceline.train.evaluate import held_out_prompts
    from paceline.train.sources import parse_sources, read, split

    valid: dict[str, list[Any]] = {}
    for source in parse_sources(sources):
        valid.setdefault(source.name, []).extend(split(clean(read(source)))[1])
    prompts = held_out_prompts(valid, count)
    out.write_text("".join(json.dumps({"messages": prompt}) + "\n" for prompt in prompts))
    typer.echo(f"{len(prompts)} prompts, written to {out}")


@app.command("evaluate")
def evaluate_command(
    model: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of a trained model.")],
    sources: Sources,
    draft: Annotated[Path | None, typer.Option(help="Folder of its draft model, to measure agreement.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write; printed if not given.")] = None,
    threads: Threads = 1,
) -> None:
    """Loss on held-out text by source against a 5-gram model, and how far the draft model agrees.

    python -m paceline.train evaluate models/demo sgd=dialogues.jsonl.gz --draft models/demo-draft
    """
    _threads(threads)
    import json

    from paceline.train.evaluate import evaluate
    from paceline.train.lm import PRETRAIN
    from paceline.train.sources import parse_sources

    report = evaluate(model, parse_sources(sources), PRETRAIN, draft)
    text = json.dumps(report, indent=2)
    if out:
        out.write_text(text + "\n")
    typer.echo(text)


@app.command("card")
def card_command(
    model: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of the finished model.")],
    draft: Annotated[Path | None, typer.Option(help="Folder of its draft model.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON Lines that `held-out` wrote, for samples.")] = None,
    out: Annotated[Path | None, typer.Option(help="Markdown file to write, loss.png beside it.")] = None,
    show: Annotated[bool, typer.Option(help="Print all 24 prompts and answers.")] = False,
    threads: Threads = 1,
) -> None:
    """Answer fixed and held-out prompts; write the model card from the answers, the reports and the training logs.

    python -m paceline.train card models/demo --draft models/demo-draft --out models/README.md
    """
    _threads(threads)
    from paceline.bench.looping import read_prompts
    from paceline.train.card import answer_all, card, counts, draw_loss, drawn, practised

    answers, practice = answer_all(model), practised(model)
    samples = answer_all(model, {"sample": drawn(read_prompts(prompts))}) if prompts else []
    text = card(model, draft, answers, samples, practice)
    if show:
        for answer in answers:
            typer.echo(f"[{answer.kind}, {answer.tokens} tokens, ended {answer.ended}, looping {answer.loops}]")
            typer.echo(f"{answer.prompt}\n  -> {answer.text}\n")
    if out:
        out.write_text(text)
        draw_loss(model, out.with_name("loss.png"))
        typer.echo(f"{counts(answers)}\n\n{practice}")
    elif not show:
        typer.echo(text)


def main() -> None:
    try:
        app()
    except PacelineError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
