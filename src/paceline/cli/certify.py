"""`paceline certify`: is an engine, with its drafter, lossless?"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.certify.options import Subject
from paceline.cli import options
from paceline.cli.parameters import with_options
from paceline.cli.show import Steps, say
from paceline.draft.spec import option
from paceline.errors import PacelineError
from paceline.formats.place import check_place
from paceline.given import checked
from paceline.interrupt import Interrupt
from paceline.net.keys import check_server
from paceline.outputs import CERTIFICATE, ISSUE, JUNIT, PAGE, write_whole, writes, writes_in
from paceline.runs.progress import Progress
from paceline.textfiles import readable


@dataclass(frozen=True)
class CertifyOptions(Subject):
    """The engine under test, and what is done with its certificate."""

    model: Annotated[
        str | None, typer.Argument(
            help="Model that the engine runs: a folder, smollm2, or a Hugging Face id.", metavar="[TARGET]",
            callback=checked(check_place),
        )
    ] = None
    draft: options.Draft = "none"
    prompts: str | None = option(
        None, 'Prompts for greedy answers in JSON Lines: {"prompt": "..."} or {"messages": [...]}.',
        callback=readable,
    )
    dtype: options.Dtype = "auto"
    device: options.Device = "auto"
    exact: options.Exact = None
    activations: options.Activations = None
    threads: options.Threads = None
    out: Path | None = option(
        None, "Folder for certificate.json and certificate.html.",
        callback=writes_in(certificate_json=CERTIFICATE, certificate_html=PAGE),
    )
    report: Path | None = option(
        None,
        "Markdown file for a report to the engine's developers; it is written if a bug is found.",
        callback=writes(ISSUE),
    )
    junit: Path | None = option(None, "File to write the results of the tests to as JUnit XML.", callback=writes(JUNIT))
    as_json: options.AsJson = False


@with_options
def certify(asked: CertifyOptions) -> int:
    """Say whether an engine with its drafter writes what the model alone would write. Greedy answers are compared token
    by token, and sampled answers by the distribution of their tokens. The tests cover the situations in which engines
    with drafts break: cached prompts, other requests, long contexts, stop strings, penalties, structured output,
    streams. The exit status is 0 if the engine is lossless, 1 if it is not, and 3 if the tests cannot say.

    \b
    paceline certify MODEL -d sam
    paceline certify MODEL -d sam --engine vllm --peer-python ENV/bin/python --out certificate
    paceline certify MODEL --engine transformers-lookup --shift 0.05
    paceline certify --server http://localhost:8000/v1 --reference http://localhost:8001/v1 --report issue.md
    paceline certify MODEL --server http://localhost:8000/v1 --budget 15m --junit junit.xml

    A server is compared with --reference. Without it, it is compared with TARGET in this process; without a TARGET,
    with itself without drafts, if a request can switch them off (paceline); and otherwise with its own answers one at a
    time and their log-probabilities. A bug is shown by the smallest requests that were found for it, as lines of
    curl."""
    if asked.engine.startswith(("http://", "https://")):
        asked = replace(asked, server=asked.engine, engine="paceline")
    if asked.model is None and asked.server is None:
        raise PacelineError("name either a TARGET, or a server by --server, or both")
    if asked.reference not in (None, "float32") and asked.server is None:
        raise PacelineError(
            "--reference is a server to compare --server with; a TARGET is its own reference, or float32 is"
        )
    for server in filter(None, (asked.server, asked.reference if asked.server else None)):
        check_server(server, asked.keys)
    options.use_threads(asked.threads)
    from paceline.certify.command import certify_engine, certify_server, write
    from paceline.certify.page import issue, junit
    from paceline.certify.verdict import EXIT_STATUS, NOT_LOSSLESS

    subject: Subject = replace(asked, prompts=_read(asked.prompts))  # type: ignore[arg-type]
    ending = "ending; the certificate of what was tested follows, and Ctrl-C again leaves without one"
    with Steps("starting") as steps, Interrupt(on_first=lambda: steps.err.print(ending)) as interrupt:
        watch = Progress(steps.say, steps.show, limit=steps.limit, stopped=lambda: interrupt.pressed)
        if asked.server is not None:
            certificate = certify_server(subject, watch)
        else:
            certificate = certify_engine(subject, watch)
    files = list(write(certificate, asked.out)) if asked.out is not None else []
    if asked.junit is not None:
        write_whole(asked.junit, junit(certificate))
        files.append(asked.junit)
    if asked.report is not None and certificate["verdict"] == NOT_LOSSLESS:
        write_whole(asked.report, issue(certificate))
        files.append(asked.report)
    if asked.as_json:
        print(json.dumps(certificate, indent=2))
    else:
        _print(certificate, files)
    if interrupt.pressed:
        say("interrupted; the certificate is of what was tested until then", err=True)
        return 130
    return EXIT_STATUS[certificate["verdict"]]


def _read(file: str | None) -> list[Any] | None:
    """Prompts of a file; PromptError for the first line that is broken."""
    if file is None:
        return None
    from paceline.cli.prompts import from_file
    from paceline.core.sampling import SamplingParams

    jobs, broken = from_file(file, SamplingParams())
    if broken:
        raise broken[0]
    return [job.prompt for job in jobs]


def _print(certificate: dict[str, Any], files: Sequence[Path]) -> None:
    from paceline.certify.page import detectable, findings, verdict

    written = [f"wrote {file}" for file in files]
    lines = [f"{certificate['engine']}: {verdict(certificate)}"]
    lines += [f"  {line}" for line in (*findings(certificate), *detectable(certificate), *written)]
    say(*lines)
