"""Command line of the training recipes. Sources are files of yours, given as NAME=PATH or PATH.

python -m paceline.train --help          the same as `paceline train --help`
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.errors import PacelineError
from paceline.train import options

HELP = """Train drafters for a model (draft, vocab), or a model family from nothing (zoo, and its stages)."""

app = typer.Typer(
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

Sources = Annotated[
    list[str],
    typer.Argument(help="Text files as NAME=PATH or PATH: .txt, .jsonl, and both with .gz. A name may repeat."),
]


@app.callback()
def recipes() -> None:
    # Said before a recipe is imported: the package without its extra has the rest of the command line.
    if importlib.util.find_spec("accelerate") is None:
        raise PacelineError("training needs more packages: pip install 'paceline[train]'")


def later(name: str, where: str, summary: str) -> None:
    """Register a command whose function lies in a recipe's module: "package.module:function", typed for Typer. The
    module, and torch with it, is imported when the command is asked for, not to list it."""

    def command(context: typer.Context) -> None:
        module, _, function = where.partition(":")
        one = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
        run: Callable[..., Any] = getattr(importlib.import_module(module), function)
        one.command(name)(run)
        recipe = typer.main.get_command(one)
        with recipe.make_context(context.command_path, context.args) as own:
            raise typer.Exit(recipe.invoke(own) or 0)

    unread = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(name, short_help=summary, add_help_option=False, context_settings=unread)(command)


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
    out: options.Out,
    vocabulary: Annotated[int, typer.Option(help="Tokens, the 256 bytes and 5 special ones included.")] = 8192,
    characters: Annotated[int, typer.Option(help="Read at most so many of one source.")] = 3_000_000,
    generated: Annotated[int, typer.Option(help="Generated examples to learn from as well.")] = 10_000,
    threads: options.Threads = 1,
) -> None:
    """Learn a byte-level BPE vocabulary from the sources (and generated examples), with the chat template.

    python -m paceline.train tokenizer books=alice.txt chat=dialogues.jsonl.gz --out build/tokenizer
    """
    options.use_threads(threads)
    from dataclasses import replace

    from paceline.train.rows import PRETRAIN, load_documents
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
    out: options.Out,
    run: options.Run,
    minutes: options.Minutes = None,
    tokens: options.Tokens = None,
    lr: options.Rate = 2e-3,
    size: Annotated[str, typer.Option(help="tiny, demo (13 million parameters) or large (90 million).")] = "demo",
    generated: options.Generated = 150_000,
    save_every: options.SaveEvery = 5.0,
    compiled: options.Compiled = True,
    threads: options.Threads = 1,
) -> None:
    """Train the demo model from random weights on packed text. Ctrl-C saves; the same command goes on.

    python -m paceline.train pretrain books=alice.txt chat=dialogues.jsonl.gz --tokenizer build/tokenizer
    --out build/base --checkpoints build/pretrain --minutes 50
    """
    options.use_threads(threads)
    from dataclasses import replace

    from paceline.errors import meant
    from paceline.train.lm import SIZES, pretrain
    from paceline.train.loop import LoopConfig
    from paceline.train.rows import PRETRAIN
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
    out: options.Out,
    run: options.Run,
    minutes: options.Minutes = None,
    tokens: options.Tokens = None,
    lr: options.Rate = 1e-3,
    generated: options.Generated = 150_000,
    save_every: options.SaveEvery = 5.0,
    compiled: options.Compiled = True,
    threads: options.Threads = 1,
) -> None:
    """Tune a pretrained model on conversations; only what the assistant says is learnt.

    python -m paceline.train chat chat=dialogues.jsonl.gz --model build/base --out models/demo
    --checkpoints build/chat --minutes 20
    """
    options.use_threads(threads)
    from dataclasses import replace

    from paceline.train.lm import chat
    from paceline.train.loop import LoopConfig
    from paceline.train.rows import CHAT
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
    out: options.Out,
    run: options.Run,
    minutes: options.Minutes = None,
    tokens: options.Tokens = None,
    lr: options.Rate = 2e-4,
    generated: options.Generated = 150_000,
    save_every: options.SaveEvery = 5.0,
    compiled: options.Compiled = True,
    threads: options.Threads = 1,
) -> None:
    """Unlearn loops: the model's own answers that repeat themselves become unlikely, beside ordinary conversations.

    python -m paceline.train settle chat=dialogues.jsonl.gz --model build/chat --out models/demo
    --checkpoints build/settle --tokens 2000000
    """
    options.use_threads(threads)
    from dataclasses import replace

    from paceline.train.loop import LoopConfig
    from paceline.train.settle import SETTLE, settle
    from paceline.train.sources import parse_sources
    from paceline.train.tokenizer import load_tokenizer

    loop = LoopConfig(minutes=minutes, tokens=tokens, peak_lr=lr, warmup_steps=20, decay=0.5, save_every=save_every)
    data = replace(SETTLE, generated=generated)
    if not settle(parse_sources(sources), load_tokenizer(model), model, out, run, loop, data, compiled=compiled):
        raise typer.Exit(130)


@app.command("distil")
def distil_command(
    sources: Sources,
    model: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Folder of the target.")],
    out: options.Out,
    run: options.Run,
    minutes: options.Minutes = None,
    tokens: options.Tokens = None,
    lr: options.Rate = 2e-3,
    generated: options.Generated = 150_000,
    save_every: options.SaveEvery = 5.0,
    compiled: options.Compiled = True,
    threads: options.Threads = 1,
) -> None:
    """Train a small draft model to say what the target would say; it has the target's tokenizer.

    python -m paceline.train distil chat=dialogues.jsonl.gz --model models/demo --out models/demo-draft
    --checkpoints build/draft --tokens 40000000
    """
    options.use_threads(threads)
    from dataclasses import replace

    from paceline.train.distil import DISTIL, distil
    from paceline.train.loop import LoopConfig
    from paceline.train.sources import parse_sources
    from paceline.train.tokenizer import load_tokenizer

    loop = LoopConfig(minutes=minutes, tokens=tokens, peak_lr=lr, save_every=save_every)
    data = replace(DISTIL, generated=generated)
    if not distil(parse_sources(sources), load_tokenizer(model), model, out, run, loop, data, compiled=compiled):
        raise typer.Exit(130)


@app.command("draft")
def draft_command(
    target: options.Target,
    out: options.Out,
    run: options.DrafterRun = None,
    data: options.Data = None,
    prompts: options.Prompts = None,
    generate: options.Generate = 0,
    max_tokens: options.AnswerTokens = 128,
    temperature: options.AnswerHeat = None,
    minutes: options.Minutes = None,
    tokens: options.Tokens = None,
    lr: options.Rate = 2e-3,
    layers: Annotated[int, typer.Option(help="Layers of the draft model.", min=1)] = 3,
    hidden: Annotated[int, typer.Option(help="Its width, a multiple of 64.", min=64)] = 128,
    length: Annotated[int, typer.Option(help="Tokens of a training row.", min=8)] = 512,
    rows: Annotated[int, typer.Option(help="Rows of a batch.", min=1)] = 32,
    seed: int = 0,
    save_every: options.SaveEvery = 5.0,
    compiled: options.Compiled = True,
    threads: options.Threads = 1,
) -> None:
    """Train a draft model on the target's own answers, recorded or generated, for `--draft model:OUT`.

    paceline train draft models/demo --prompts mine=prompts.jsonl --generate 5000 --out build/draft

    The answers are kept in CHECKPOINTS/answers.jsonl. Ctrl-C saves; the same command goes on from there. At the end the
    draft is measured on held-out answers: how often would its tokens be accepted?
    """
    options.use_threads(threads)
    from paceline.train.draft import PASSES, DraftConfig, train_draft
    from paceline.train.lm import ModelConfig
    from paceline.train.loop import LoopConfig

    if hidden % 64:
        raise PacelineError(f"--hidden is {hidden}; heads are 64 wide, so it is a multiple of 64")
    run = options.run_folder(out, run, minutes, tokens)
    shape = ModelConfig(hidden=hidden, layers=layers, heads=hidden // 64, kv_heads=1, intermediate=3 * hidden)
    config = DraftConfig(shape, length, rows)
    answers = options.own_answers(target, data, prompts, generate, run / "answers.jsonl", max_tokens, temperature, seed)
    tokens = options.budget(answers, minutes, tokens, PASSES)
    loop = LoopConfig(minutes=minutes, tokens=tokens, peak_lr=lr, seed=seed, save_every=save_every)
    if not train_draft(target, answers, out, run, loop, config, compiled):
        raise typer.Exit(130)


@app.command("vocab")
def vocab_command(
    target: Annotated[
        Path, typer.Argument(exists=True, help="Folder of the target; with --text, its SentencePiece file will do.")
    ],
    more: Annotated[list[Path] | None, typer.Argument(help="More files, behind --text.", metavar="[FILE]...")] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="JSON Lines of the target's answers; several may follow.", metavar="FILE")
    ] = None,
    questions: Annotated[
        Path | None, typer.Option(help="Spec-Bench's question.jsonl, for its answers' categories.", dir_okay=False)
    ] = None,
    prompts: options.Prompts = None,
    generate: options.Generate = 0,
    max_tokens: options.AnswerTokens = 128,
    temperature: options.AnswerHeat = None,
    out: Annotated[Path | None, typer.Option(help="A .safetensors file, or the folder of a drafter.")] = None,
    keep: Annotated[
        int | None, typer.Option(help="Tokens kept by vocab=FILE; a quarter, at most 32,768, if left out.", min=1)
    ] = None,
    check: Annotated[
        Path | None, typer.Option(help="A vocabulary: say how well it covers the answers, and write nothing.")
    ] = None,
    seed: int = 0,
    threads: options.Threads = 1,
) -> None:
    """Count which tokens the target writes, for drafters with a trimmed vocabulary (`vocab=K`).

    paceline train vocab models/demo --text answers.jsonl more.jsonl --out models/demo-draft

    paceline train vocab models/demo --prompts mine=prompts.jsonl --generate 2000 --out build/vocab.safetensors

    Only replies count. Those to a tenth of the prompts are kept aside, and how much of them the most frequent tokens
    cover is printed for several sizes, by source. Generated answers are kept beside OUT; the same command goes on from
    there.
    """
    options.use_threads(threads)
    from paceline.train import vocab

    place = check or out
    if place is None or (out and check):
        raise PacelineError("say where to write the vocabulary, --out, or which one to check, --check")
    files = [*(text or []), *(more or [])]
    if generate and out:
        beside = vocab.place_of(out).with_suffix(".answers.jsonl")
        files.append(options.own_answers(target, None, prompts, generate, beside, max_tokens, temperature, seed))
    if not files:
        raise PacelineError("there is nothing to count: name recorded answers, --text, or say how many to --generate")
    if check:
        lines = vocab.check(target, files, place, questions)
    else:
        lines = vocab.train_vocabulary(target, files, place, keep, questions)
    typer.echo("\n".join(lines))


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
    threads: options.Threads = 1,
) -> None:
    """Loss on held-out text by source against a 5-gram model, and how far the draft model agrees.

    python -m paceline.train evaluate models/demo sgd=dialogues.jsonl.gz --draft models/demo-draft
    """
    options.use_threads(threads)
    import json

    from paceline.train.evaluate import evaluate
    from paceline.train.rows import PRETRAIN
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
    drafter: Annotated[
        list[Path] | None, typer.Option(help="Folder of another drafter of it, kangaroo or sorted; may be repeated.")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON Lines that `held-out` wrote, for samples.")] = None,
    out: Annotated[Path | None, typer.Option(help="Markdown file to write, loss.png beside it.")] = None,
    show: Annotated[bool, typer.Option(help="Print all 24 prompts and answers.")] = False,
    threads: options.Threads = 1,
) -> None:
    """Answer fixed and held-out prompts; write the model card from the answers, the reports and the training logs.

    python -m paceline.train card models/demo --draft models/demo-draft --out models/README.md
    """
    options.use_threads(threads)
    from paceline.bench.looping import read_prompts
    from paceline.train.card import answer_all, card, counts, draw_loss, drawn, practised

    answers, practice = answer_all(model), practised(model)
    samples = answer_all(model, {"sample": drawn(read_prompts(prompts))}) if prompts else []
    text = card(model, draft, drafter or [], answers, samples, practice)
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


later("sorted", "paceline.train.s2d:sorted_command", "Cut a draft with several exits from a model's first layers.")
later("kangaroo", "paceline.train.kangaroo:kangaroo_command", "Train an adapter with which a target drafts for itself.")
later("vision", "paceline.evals.vision.train:train_command", "Tune a dual encoder on size, position, existence, count.")


def main() -> None:
    try:
        app()
    except PacelineError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
