"""`paceline certify`: is an engine, with its drafter, lossless?"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.certify.options import EngineTest, ServerTest
from paceline.cli import options
from paceline.cli.parameters import with_options
from paceline.cli.show import Steps, say
from paceline.draft.spec import option
from paceline.formats.place import check_place
from paceline.interrupt import Interrupt
from paceline.net.keys import check_server
from paceline.outputs import CERTIFICATE, ISSUE, JUNIT, PAGE, write_whole, writes, writes_in
from paceline.runs.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Written:
    """What is done with a certificate; and the file of prompts that it is made with."""

    prompts: options.Prompts = None
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
def certify(asked: EngineTest, written: Written) -> int:
    """Say whether an engine with its drafter writes what the model alone would write. Greedy answers are compared token
    by token, and sampled answers by the distribution of their tokens. The tests cover the situations in which engines
    with drafts break: cached prompts, other requests, long contexts, stop strings, penalties, structured output,
    streams. The exit status is 0 if the engine is lossless, 1 if it is not, and 3 if the tests cannot say.

    \b
    paceline certify MODEL -d sam
    paceline certify MODEL -d sam --engine vllm --peer-python ENV/bin/python --out certificate
    paceline certify MODEL --engine transformers-lookup --shift 0.05
    paceline certify server --help        a running server

    A bug is shown by the smallest requests that were found for it."""
    return _certify(asked, written)


@with_options
def certify_server(asked: ServerTest, written: Written) -> int:
    """Say whether a server with its drafts writes what the model alone would write, by the tests of `paceline certify`.

    \b
    paceline certify server http://localhost:8000/v1 --against http://localhost:8001/v1 --report issue.md
    paceline certify server http://localhost:8000/v1 --against MODEL --budget 15m --junit junit.xml

    The exit status is 0 if the server is lossless, 1 if it is not, and 3 if the tests cannot say. A bug is shown by the
    smallest requests that were found for it, as lines of curl."""
    for server in filter(None, (asked.server, asked.control)):
        check_server(server, asked.keys)
    if asked.against is not None and asked.control is None:
        check_place(asked.against)
    return _certify(asked, written)


def _certify(asked: EngineTest | ServerTest, written: Written) -> int:
    asked.use_threads()
    from paceline.certify import server
    from paceline.certify.page import issue, junit
    from paceline.certify.verdict import EXIT_STATUS, NOT_LOSSLESS

    asked = replace(asked, prompts=_read(written.prompts))
    ending = "ending; the certificate of what was tested follows, and Ctrl-C again leaves without one"
    with Steps("starting") as steps, Interrupt(on_first=lambda: steps.err.print(ending)) as interrupt:
        watch = Progress(steps.say, steps.show, limit=steps.limit, stopped=lambda: interrupt.pressed)
        if isinstance(asked, ServerTest):
            certificate = server.certify_server(asked, watch)
        else:
            from paceline.certify.command import certify_engine  # It needs torch.

            certificate = certify_engine(asked, watch)
    files = list(server.write(certificate, written.out)) if written.out is not None else []
    if written.junit is not None:
        write_whole(written.junit, junit(certificate))
        files.append(written.junit)
    if written.report is not None and certificate["verdict"] == NOT_LOSSLESS:
        write_whole(written.report, issue(certificate))
        files.append(written.report)
    if written.as_json:
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
    from paceline.core.params import SamplingParams

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
