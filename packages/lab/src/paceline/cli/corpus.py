"""`paceline corpus`: build a corpus to copy from, and say what is in one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from paceline.cli import options
from paceline.cli.parameters import Grouped, app_of, with_options
from paceline.cli.show import Steps
from paceline.draft.spec import option
from paceline.errors import StoreError
from paceline.given import listed
from paceline.outputs import check_folder

if TYPE_CHECKING:
    from paceline.draft.text.store import Store

HELP = """Build a corpus to copy from, or show what is in one.

\b
paceline corpus build build/answers --text answers.jsonl --tokenizer MODEL
paceline corpus info build/answers
"""

corpus = app_of(no_args_is_help=True, help=HELP)


@corpus.command(cls=Grouped, short_help="Make a corpus of text files.")
@with_options
def build(
    out: Annotated[
        Path,
        typer.Argument(
            help="Folder to write; it is written whole or not at all.", metavar="OUT", callback=check_folder
        ),
    ],
    more: Annotated[list[Path] | None, typer.Argument(help="More text files.", metavar="[FILE]...")] = None,
    text: list[Path] | None = option(
        None, "Text to read: a .txt or .jsonl file, plain or .gz; more files may follow.", metavar="FILE"
    ),
    tokenizer: options.Tokenizer = "",
    parts: str = option("", "Parts to build, joined by commas: ngrams, suffix-array. [default: all]"),
    max_tokens: int | None = option(None, "Stop reading after this many tokens.", least=2),
    eos: str | None = option(None, "Token between documents. [default: the tokenizer's end token]"),
    ray: options.Ray = None,
    workers: options.RayWorkers = None,
    as_json: options.AsJson = False,
) -> int:
    """Tokenise text files into a store that drafters copy from.

    \b
    paceline corpus build build/answers --text answers.jsonl.gz --tokenizer smollm2
    paceline corpus build build/large --text /data/*.jsonl --tokenizer smollm2 --ray=head:6379
    paceline generate smollm2 "Hello" --draft sam,corpus=build/answers

    A .txt file is one document. A line of a .jsonl file holds "text", "response", "prompt" and "response",
    "messages", or "choices" with "turns"; every text in it is a document. Of token ids (`paceline serve --log`) the
    answers are documents."""
    if workers is not None and ray is None:
        raise StoreError("--workers are Ray's; add --ray")
    files = [*(text or []), *(more or [])]
    if not files or not tokenizer:
        raise StoreError("paceline corpus build OUT --text FILE... --tokenizer MODEL: a corpus needs all three")

    from paceline.draft.text.corpus import PARTS, Plan
    from paceline.formats.tokenizer_files import load_tokenizer
    from paceline.replay.corpus import Sharded, read_here
    from paceline.replay.corpus import build as build_store

    began = time.perf_counter()
    with Steps("reading", 100, "%") as steps:

        def estimated(tokens: int, documents: int, disk: int, memory: int) -> None:
            size = f"about {decimal(disk)} on disk, {decimal(memory)} of memory"
            steps.err.print(f"{tokens:,} tokens in {documents:,} documents: {size}", markup=False, soft_wrap=True)

        def report(what: str, done: float) -> None:
            steps.show(round(100 * done), what=what)

        plan = Plan(listed(parts) or [*PARTS], max_tokens, eos, estimated)
        read = read_here if ray is None else Sharded(tokenizer, ray, workers)
        store = build_store(out, files, load_tokenizer(tokenizer), plan, report, read)
    _show(store, as_json, seconds=round(time.perf_counter() - began, 2))
    return 0


@corpus.command(cls=Grouped, short_help="Show what is in a corpus.")
def info(
    store: Annotated[Path, typer.Argument(help="Folder of a corpus.", metavar="STORE")],
    as_json: options.AsJson = False,
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
