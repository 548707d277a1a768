"""`paceline launch`: a coding agent on the terminal, with a server of its own behind it.

`clients.toml` says of each client how it is installed and told where the server is."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from string import Template
from typing import Annotated, Any

import typer

from paceline.cli.parameters import Grouped
from paceline.errors import PacelineError, meant
from paceline.folders import cache_folder

MODEL = "Qwen/Qwen2.5-Coder-1.5B-Instruct"
SERVE = [sys.executable, "-m", "paceline", "serve"]
START_SECONDS = 3600.0  # Time for a server to start: it may have to download its model.


@dataclass(frozen=True)
class Client:
    """A coding agent, as `clients.toml` describes it."""

    command: str
    install: str
    tokens: int
    env: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    once: Mapping[str, str] = field(default_factory=dict)


@cache
def clients() -> dict[str, Client]:
    """All clients, by the names that `paceline launch` takes."""
    table = tomllib.loads(Path(__file__).with_name("clients.toml").read_text("utf-8"))
    return {name: Client(**facts) for name, facts in table.items()}


class Launching(Grouped):
    """A command that leaves all words after its first one as they are."""

    allow_interspersed_args = False

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Clients, the tokens of their first prompts, and what installs them"):
            formatter.write_dl([(name, f"{one.tokens:,}  {one.install}") for name, one in clients().items()])
        super().format_epilog(ctx, formatter)


def launch(
    context: typer.Context,
    client: Annotated[str, typer.Argument(help="The coding agent: codex, claude, opencode, pi, aider, ...")],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [OPTIONS] [-- ARGUMENTS]",
            help=f"The model (default: {MODEL}) and options, as `paceline serve` takes them; after --, what the client "
            "is to be told.",
        ),
    ] = None,
) -> int:
    """Start a server for a model, and a coding agent that asks it; the server ends with the agent.

    \b
    paceline launch codex
    paceline launch claude MODEL --draft sam --context 32768
    paceline launch codex MODEL -- exec "Which files are here?"

    Drafts copy from the files of this folder, too (--corpus), and what is computed of prompts is kept for the next
    session (--prefix-cache). The client's configuration is written into a folder of its own in the cache, never over
    yours. Agents send long prompts, of 8,000 to 18,000 tokens with your files: the model's context must hold them, and
    a small model on a CPU reads its first one for a minute or more. The exit status is the client's."""
    words = words or []
    split = words.index("--") if "--" in words else len(words)
    own, arguments = words[:split], words[split + 1 :]
    agent = _known(client)
    command = shutil.which(agent.command)
    if command is None:
        raise PacelineError(f"{client} is not installed (there is no command {agent.command}): {agent.install}")
    if context.find_root().default_map:
        raise PacelineError("paceline launch reads no --config; give its server options here, or PACELINE_SERVE_...")
    own, key = _of_serve(context, own)
    folder = cache_folder() / "launch" / client
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _server(own, key, folder / "server.log") as (url, name, most):
        if most <= agent.tokens:
            raise PacelineError(
                f"{name} holds {most:,} tokens, and the first prompt of {client} alone has {agent.tokens:,}; "
                "take a model with a longer context"
            )
        facts = {"url": url, "key": key, "model": name, "context": most, "output": most // 4, "folder": folder}
        return _run(agent, command, arguments, {key: str(value) for key, value in facts.items()}, folder)


launch.command_class = Launching  # type: ignore[attr-defined]


def _known(name: str) -> Client:
    if name not in clients():
        raise PacelineError(f"no client is called {name!r}.{meant(name, clients())} Known: {', '.join(clients())}")
    return clients()[name]


def _of_serve(context: typer.Context, words: list[str]) -> tuple[list[str], str]:
    """The words for `paceline serve`, with a model, and its API key; raises UsageError for what it does not take."""
    assert context.parent is not None
    serve = context.parent.command.commands["serve"]  # type: ignore[attr-defined]
    parsed = serve.make_context(f"{context.command_path} CLIENT", list(words), auto_envvar_prefix="PACELINE_SERVE")
    if parsed.get_parameter_source("model").name == "DEFAULT":
        words = [MODEL, *words]
    if parsed.get_parameter_source("draft").name == "DEFAULT":  # suffix copies and needs no states.
        words = [*words, *([] if parsed.params["corpus"] else ["--corpus", "."])]
        words += [] if parsed.params["prefix_cache"] else ["--prefix-cache", str(cache_folder() / "prefixes")]
    keys = parsed.params["api_key"] or [os.environ.get("PACELINE_API_KEY") or secrets.token_urlsafe(24)]
    return [*words, "--name", "*"], keys[0]  # Clients also ask for models that they know.


@contextmanager
def _server(words: list[str], key: str, log: Path) -> Iterator[tuple[str, str, int]]:
    """A server while the context lasts: its address without /v1, the model's name, and how many tokens it holds."""
    from paceline.net.client import get
    from paceline.net.endpoint import Started

    print(f"starting the server; what it says is in {log}", file=sys.stderr, flush=True)
    env = os.environ | {"PACELINE_API_KEY": key}
    with Started([*SERVE, *words], env=env, wait=START_SECONDS, key=key, log=log) as server:
        model = json.loads(get(server.url, "/v1/models", key) or b"")["data"][0]
        yield server.url.removesuffix("/v1"), model["id"], model["max_model_len"]


def _run(agent: Client, command: str, arguments: list[str], facts: Mapping[str, str], folder: Path) -> int:
    """Run the client on this terminal; its exit status."""
    filled = lambda text: Template(text).substitute(facts)  # noqa: E731
    quoted = {name: json.dumps(value)[1:-1] for name, value in facts.items()}  # JSON and TOML escape texts alike.
    for name, text in {**agent.once, **agent.files}.items():
        file = folder / name
        if name in agent.files or not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(Template(text).substitute(quoted).lstrip(), "utf-8")
    env = os.environ | {name: filled(value) for name, value in agent.env.items()}
    process = subprocess.Popen([command, *map(filled, agent.arguments), *arguments], env=env)
    with _signals_for(process):
        status = process.wait()
    return status if status >= 0 else 128 - status


@contextmanager
def _signals_for(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """A context in which Ctrl-C is the client's, which the terminal sends it to, and what else would end us ends it."""
    passed = {signal.SIGINT: lambda *_: None, signal.SIGTERM: lambda *_: process.terminate()}
    if hasattr(signal, "SIGHUP"):
        passed[signal.SIGHUP] = passed[signal.SIGTERM]
    before = {number: signal.signal(number, handler) for number, handler in passed.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
