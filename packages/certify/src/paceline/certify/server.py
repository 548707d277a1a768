"""What `paceline certify server` runs, and the files of a certificate. Needs no model, no engine and no torch."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.certify.asking import AFTER_LOADING, HELLO, RETRY, Control, chats, control_of
from paceline.certify.certificate import certify
from paceline.certify.options import ServerTest
from paceline.certify.oracles import Reported
from paceline.certify.page import page
from paceline.errors import PacelineError
from paceline.net.completion import CompletionError
from paceline.net.endpoint import Remote
from paceline.outputs import write_json, write_whole
from paceline.runs.progress import Progress


def certify_server(subject: ServerTest, watch: Progress) -> dict[str, Any]:
    """Certify the server `subject.server`, and return the certificate."""
    with ExitStack() as opened:

        def server_at(spec: str) -> Remote:
            return opened.enter_context(Remote(spec, key=subject.keys.of(spec), slots=subject.batch, retry=RETRY))

        server = server_at(subject.server)
        others = [] if subject.control is None else [server_at(subject.control)]
        for one in (server, *others):  # A dead server is named before a model is loaded.
            try:
                one.ask([HELLO], 1)
            except CompletionError as error:
                raise PacelineError(f"{one.url} cannot be asked: {error}") from None
        if others:
            control = Control(others[0])
        else:
            control = control_of(server) if subject.against is None else _ours(subject, subject.against, watch)
            opened.callback(control.source.close)
        certificate = certify(server, Reported(control, chats(subject.prompts)), subject.scope, watch)
    return {
        "target": server.model,
        **certificate,
        "environment": {"started": datetime.now(UTC).isoformat("T", "seconds")},
    }


def _ours(subject: ServerTest, model: str, watch: Progress) -> Control:
    """A control that our engine runs here."""
    from paceline.certify.command import plain_control  # It needs torch.

    watch.say(f"loading {model}, the control{AFTER_LOADING}")
    return plain_control(subject, model, "float32")


def write(certificate: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """Write certificate.json and certificate.html to `folder`, and return their paths."""
    files = folder / "certificate.json", folder / "certificate.html"
    write_json(files[0], certificate, indent=2)
    write_whole(files[1], page(certificate))
    return files
