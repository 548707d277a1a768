"""`paceline corpus`: build a corpus to copy from, and say what is in one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import TaskProgressColumn, TimeRemainingColumn

from paceline.cli import options
from paceline.cli.show import progress_bar
from paceline.errors import StoreError
from paceline.jsonl import check_folder

if TYPE_CHECKING:
    from paceline.draft.text.store import Store

corpus = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Out = Annotated[
    Path, typer.Argument(help="Folder to write; it appears whole or not at all.", metavar="OUT", callback=check_folder)
]
More = Annotated[list[Path] | None, typer.Argument(help="More files, after --text.", metavar="[FILE]...")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


@corpus.command(short_help="Make a corpus of text files.")
def build(
    out: Out,
    more: More = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="A .txt or .jsonl file, plain or .gz; several may follow.", metavar="FILE"),
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(help="The model's folder or hub id, a folder with a tokenizer.json, or a SentencePiece file.")
    ] = "",
    parts: Annotated[
        str, typer.Option(help="What to build, joined by commas: automaton, ngrams, suffix-array; all if left out.")
    ] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Stop reading after this many tokens.", min=2)] = None,
    eos: Annotated[str | None, typer.Option(help="Token between documents; the tokenizer's own if left out.")] = None,
    ray: options.Ray = None,
    workers: options.RayWorkers = None,
    as_json: AsJson = False,
) -> int:
    """Tokenise text files into a store that drafters copy from.

    \b
    paceline corpus build build/answers --text answers.jsonl.gz --tokenizer models/demo
    paceline corpus build build/all --text *.txt more.jsonl --tokenizer tokenizer.model --parts automaton
    paceline corpus build build/large --text /data/*.jsonl --tokenizer models/demo --ray=head:6379
    paceline generate models/demo "Hello" --draft sam,corpus=build/answers

    A .txt file is one document. A line of a .jsonl file holds "text", "response", "prompt" and "response",
    "messages", or "choices" with "turns"; every text in it is a document.
    """
    if workers is not None and ray is None:
        raise StoreError("--workers are Ray's; add --ray")
    files = [*(text or []), *(more or [])]
    if not files or not tokenizer:
        raise StoreError("paceline corpus build OUT --text FILE... --tokenizer MODEL: a corpus needs all three")

    import transformers

    from paceline.draft.text.corpus import PARTS, Plan
    from paceline.target.load import load_tokenizer
    from paceline.workbench.corpus import Sharded
    from paceline.workbench.corpus import build as build_store

    transformers.logging.set_verbosity_error()
    err = Console(stderr=True, highlight=False)

    def estimated(tokens: int, documents: int, disk: int, memory: int) -> None:
        room = f"about {decimal(disk)} on disk, {decimal(memory)} of memory"
        err.print(f"{tokens:,} tokens in {documents:,} documents: {room}", markup=False, soft_wrap=True)

    plan = Plan([part.strip() for part in parts.split(",")] if parts else [*PARTS], max_tokens, eos, estimated)
    began = time.perf_counter()
    with progress_bar(err, TaskProgressColumn(), TimeRemainingColumn()) as bar:
        tasks: dict[str, Any] = {}

        def report(what: str, done: float) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=1.0)
            bar.update(tasks[what], completed=done)

        read = Sharded(tokenizer, ray, workers) if ray is not None else None
        store = build_store(out, files, load_tokenizer(tokenizer), plan, report, read)
    _show(store, as_json, seconds=round(time.perf_counter() - began, 2))
    return 0


@corpus.command(short_help="Show what is in a corpus.")
def info(
    store: Annotated[Path, typer.Argument(help="Folder of a corpus.", metavar="STORE")], as_json: AsJson = False
) -> int:
    """Show what is in a corpus: its tokens, documents, tokenizer, parts and size."""
    from paceline.draft.text.store import open_store

    _show(open_store(store, kind="corpus"), as_json)
    return 0


def _show(store: Store, as_json: bool, **more: Any) -> None:
    """The header's facts, as lines or as one JSON object."""
    header = store.header
    keys = ("tokens", "documents", "vocab_size", "eos", "tokenizer_name", "tokenizer", "parts")
    facts = {"store": str(store.folder), **{key: header[key] for key in keys}}
    facts |= {"bytes": sum(header["arrays"].values()), "arrays": header["arrays"], **more}
    if as_json:
        print(json.dumps(facts))
        return
    tokens, size = facts["tokens"], facts["bytes"]
    print(f"{facts['store']}: {tokens:,} tokens in {facts['documents']:,} documents")
    print(f"tokenizer: {facts['tokenizer_name']} ({facts['tokenizer']}), {facts['vocab_size']:,} tokens")
    print(f"parts: {', '.join(facts['parts']) or 'none'}; documents end with token {facts['eos']}")
    print(f"size: {decimal(size)}, {size / tokens:.1f} bytes a token")
    if "seconds" in more:
        print(f"built in {more['seconds']:.1f} s")
