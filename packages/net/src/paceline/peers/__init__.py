"""Other engines for the same run and the same table: a registry of peers, with names as of drafters.

    name[:checkpoint][,key=value...]        or the command of a server: vllm serve Qwen/Qwen3-0.6B --port {port}

    peer = create_peer("vllm-ngram,k=5", "smollm2", dtype="float32", threads=2, python="env/bin/python",
                       batch=1, max_context=2048, tokenizer=tokenizer)
    peer.open()                              # NotInstalled, with what to do, if it is not there
    peer.ask([{"prompt": tokens, "max_tokens": 64}])

Every peer is an `Endpoint` that gets token ids and gives token ids; none of them tokenises. What this module reads from
a peer's class is `Config`, a frozen dataclass of its options (see `paceline.draft.spec`), where there are any. An
engine is imported when its peer is opened, never before."""

from __future__ import annotations

import importlib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

from paceline.draft.spec import OptionInfo, Part, options, parse, values
from paceline.errors import MethodError, PacelineError, meant

if TYPE_CHECKING:
    from paceline.peers.peer import Peer as Engine

__path__ = extend_path(__path__, __name__)  # Its modules come from several distributions.
PEER = "peer:"  # Prefix of the names of other engines.


class NotInstalled(PacelineError):
    """A peer lacks a package. The message names it, and says how to install it."""


@dataclass(frozen=True)
class Peer:
    """An entry of the table: place of the class, description, and needed package ("" for none)."""

    path: str
    help: str
    needs: str = ""


TABLE = tomllib.loads(Path(__file__).with_name("peers.toml").read_text("utf-8"))
PEERS = {name: Peer(**facts) for name, facts in TABLE.items()}
WITH_PYTHON = ("vllm", "xllamacpp")  # Engines that run in environments of their own.
HOSTS = {"transformers": "transformers-paceline", "vllm": "vllm-paceline", "llama-cpp": "llama-cpp-paceline"}
"""Hosts of our plug-ins, and the peers that they are."""


def named(spec: str) -> Part | None:
    """Parse `spec`, and look the peer up; None for the command of a server. Imports no peer, so no torch.

    Raises MethodError, one line, for a peer that does not exist."""
    if " " in spec.strip():
        return None
    part = parse(spec.strip(), spec)
    if part.name not in PEERS:
        guess = meant(part.name.lower(), PEERS)
        raise MethodError(f"There is no peer {part.name!r}.{guess} Peers: {', '.join(PEERS)}.")
    return part


def parse_peer(spec: str) -> tuple[type[Engine], Any]:
    """The class of the peer that `spec` names, and its options (None if it has none). A spec of several words is the
    command of a server.

    Raises MethodError, one line, for a peer, an option or a value that does not exist."""
    part = named(spec)
    if part is None:
        from paceline.peers.served import CommandConfig, Served  # This needs an HTTP client.

        return Served, CommandConfig(command=spec.strip())
    peer = _load(part.name)
    config = getattr(peer, "Config", None)
    chosen = values(part, config)
    return peer, None if config is None else config(**chosen)


def create_peer(spec: str, model: str, *, python: str | None, **setup: Any) -> Engine:
    """The peer that `spec` names, not opened yet. python: as for `python_for`; setup: the other fields of `Setup`, with
    the target's own dtype, not "auto". Raises MethodError for a spec that names no peer."""
    from paceline.peers.setup import Setup

    peer, config = parse_peer(spec)
    own = Setup(model, python=python_for(spec, python), **setup)
    return peer(f"{PEER}{spec.strip()}", own, config)  # type: ignore[arg-type]


def python_for(spec: str, python: str | None) -> str | None:
    """The interpreter for a peer: `python` is a path for all, or "vllm=PATH,xllamacpp=PATH"."""
    paths = dict(part.split("=", 1) for part in (python or "").split(",") if part.partition("=")[0] in WITH_PYTHON)
    return paths.get(spec.strip().partition(",")[0].partition(":")[0].partition("-")[0]) if paths else python


def describe(name: str) -> tuple[OptionInfo, ...]:
    """The options of a peer in the table, for a listing."""
    return options(getattr(_load(name), "Config", None))


def _load(name: str) -> Any:
    module, _, attribute = PEERS[name].path.partition(":")
    return getattr(importlib.import_module(module), attribute)
