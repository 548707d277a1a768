"""`paceline certify`: is an engine, with its drafter, lossless?"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from paceline.cli import options
from paceline.errors import PacelineError
from paceline.jsonl import check_folder

if TYPE_CHECKING:
    from paceline.certify.certificate import Watch

KEY = "OPENAI_API_KEY"


def certify(
    model: Annotated[
        str | None, typer.Argument(help="What the engine runs: a folder, or a Hugging Face id.", metavar="[TARGET]")
    ] = None,
    draft: options.Draft = "none",
    engine: Annotated[
        str,
        typer.Option(help="paceline, transformers, vllm, llama-cpp:FILE.gguf (with --draft), or a peer of `bench`."),
    ] = "paceline",
    endpoint: Annotated[
        str | None, typer.Option(help="URL[#model] of an OpenAI-compatible server instead, up to /v1.")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="A server of the same model without drafts. [default: its own log-probabilities]")
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(help='JSON Lines for greedy answers: {"prompt": "..."} or {"messages": [...]}.')
    ] = None,
    shift: Annotated[
        float, typer.Option(help="Smallest shift of a sampled law to be found with 95 %.", min=0.001, max=0.5)
    ] = 0.02,
    requests: Annotated[
        int | None, typer.Option(help="Sampled requests; 0: greedy alone. [default: as many as --shift takes]", min=0)
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Of a greedy answer.", min=1)] = 64,
    batch: Annotated[int, typer.Option(help="Most requests at once.", min=1)] = 8,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    seed: Annotated[int, typer.Option(help="Of the requests' seeds.", min=0)] = 0,
    peer_python: Annotated[
        str | None, typer.Option(help="Interpreter of an environment with vLLM.", envvar="PACELINE_VLLM_PYTHON")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for certificate.json and certificate.html.", callback=check_folder)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the certificate as one JSON object.")] = False,
) -> None:
    """Say whether an engine, with its drafter, writes what the model alone would: greedy token by token, sampled by
    the law of its first tokens. Exit status 0 only if it does, 1 if it does not.

    \b
    paceline certify MODEL -d sam
    paceline certify MODEL -d sam --engine vllm --peer-python ENV/bin/python --out certificate
    paceline certify MODEL --engine transformers-lookup --shift 0.05
    paceline certify --endpoint http://localhost:8000/v1 --reference http://localhost:8001/v1 --json

    A server's key is read from OPENAI_API_KEY.
    """
    if (model is None) == (endpoint is None):
        raise PacelineError("name either a TARGET, or a server by --endpoint")
    if reference is not None and endpoint is None:
        raise PacelineError("--reference is a server to compare --endpoint with; a TARGET is its own reference")
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    from paceline.certify.certificate import Plan
    from paceline.certify.command import Wish, certify_engine, certify_server, write
    from paceline.pages.certificate import findings

    plan = Plan(shift, requests, max_tokens=max_tokens, seed=seed)
    wish = Wish(model, draft, engine, _read(prompts), plan, batch, dtype, device, threads, peer_python)
    watch = _watch()
    if endpoint is not None:
        certificate = certify_server(endpoint, reference, wish, os.environ.get(KEY), watch)
    else:
        certificate = certify_engine(wish, watch)
    files = write(certificate, out) if out is not None else ()
    if as_json:
        print(json.dumps(certificate, indent=2))
    else:
        _print(certificate, findings(certificate), [str(file) for file in files])
    raise typer.Exit(0 if certificate["lossless"] else 1)


def _read(file: str | None) -> list[Any] | None:
    """Prompts of a file; PromptError for the first line that is broken."""
    if file is None:
        return None
    from paceline.cli.prompts import from_file
    from paceline.engine.sampling import SamplingParams

    jobs, broken = from_file(file, SamplingParams())
    if broken:
        raise broken[0]
    return [job.prompt for job in jobs]


def _watch() -> Watch:
    """Progress on standard error, where that is a terminal."""
    from paceline.certify.certificate import Watch

    console = Console(stderr=True)
    if not console.is_terminal:
        return Watch()
    doing = ""

    def say(text: str) -> None:
        nonlocal doing
        doing = text
        step(0, 0)

    def step(done: int, of: int) -> None:
        sys.stderr.write(f"\r\x1b[K{doing}" + (f": {done:,} of {of:,}" if of else ""))
        sys.stderr.flush()
        if of and done >= of:
            sys.stderr.write("\r\x1b[K")

    return Watch(say, step)


def _print(certificate: dict[str, Any], lines: list[str], files: list[str]) -> None:
    from paceline.pages.certificate import detectable

    console = Console()
    verdict = "lossless, as far as was tested" if certificate["lossless"] else "NOT LOSSLESS"
    console.print(f"{certificate['engine']}: {verdict}", markup=False, highlight=False, soft_wrap=True)
    missing = [f"Not tested: {'; '.join(certificate['not_tested'])}."] if certificate["not_tested"] else []
    for line in [*lines, *detectable(certificate), *missing, *(f"wrote {file}" for file in files)]:
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
