"""What `paceline certify` runs: opens the engine, the reference and the prompts, and writes the certificate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.bench.environment import environment
from paceline.bench.peers import PEERS, create_peer
from paceline.certify.certificate import Plan, Subject, Watch, certify
from paceline.certify.engines import Host, Ours, UnderTest
from paceline.certify.reference import Model, PlainDecoding, Reference
from paceline.engine.prompt import Prompt, encode, is_chat
from paceline.errors import PacelineError, meant
from paceline.jsonl import write_whole
from paceline.target.base import Target
from paceline.target.folder import is_gguf
from paceline.target.load import load
from paceline.target.quantised.checkpoint import exact_dtype

if TYPE_CHECKING:
    from paceline.certify.endpoint import Messages

HOSTS = {"transformers": "transformers-paceline", "vllm": "vllm-paceline", "llama-cpp": "llama-cpp-paceline"}
"""Hosts of our plug-ins, and the peers that they are."""
TEXTS = (
    "one two three one two three one two",
    "The cat sat on the mat. The cat sat on the",
    "a b a b a b a",
    "red, blue, red, blue, red,",
)
"""Beginnings that drafters have something to say to."""
QUESTIONS = (
    "Hello! What can you do?",
    "Count from 1 to 9, and then again from 1 to 9.",
    "Repeat after me: the cat sat on the mat, the cat sat on the mat.",
    "Write a short poem about the sea.",
    "What is 12 plus 30? Explain every step.",
    "Translate to German: The old teacher looks for the blue key in the garden.",
    "List five animals, and then the same five animals in another order.",
    "Who was Ada Lovelace?",
)


@dataclass(frozen=True)
class Wish:
    """The command's options."""

    model: str | None
    draft: str
    engine: str
    prompts: Sequence[Prompt] | None
    plan: Plan
    batch: int
    dtype: str
    device: str
    threads: int | None
    python: str | None


def certify_engine(wish: Wish, watch: Watch) -> dict[str, Any]:
    """The certificate of an engine that runs the model in `wish.model`."""
    if wish.model is None:
        raise PacelineError("name the model that the engine runs, or --endpoint URL for a server")
    watch.say(f"loading {wish.model}")
    target = load(wish.model, dtype=wish.dtype, device=wish.device)
    dtype = str(target.dtype).removeprefix("torch.")
    exact, own, reference = _references(wish, target, dtype)
    subject = Subject(exact, own, target.tokenizer, target.eos_token_ids, target.vocab_size)
    prompts, starts = _prompts(target, wish.prompts)
    draft = wish.draft if wish.engine == "paceline" or wish.engine.partition(":")[0] in HOSTS else None
    with closing(_open(wish, target, dtype)) as engine:
        certificate = certify(
            engine, subject, prompts, starts, wish.plan,
            draft=draft, chains=wish.engine != "paceline", watch=watch,
        )  # fmt: skip
    if target.tokenizer is not None:
        _spell(certificate, target)
    about = {"target": wish.model, "reference": reference}
    return {**about, **certificate, "environment": environment(dtype=dtype, device=str(target.device))}


def _references(wish: Wish, target: Target, dtype: str) -> tuple[Model, Model | None, str]:
    """The model in float32, and in the engine's dtype if that is another; and in words whose code they run."""
    model = str(wish.model)
    own: Model | None = None
    kinds = target.quantised or target.expanded
    if kinds is None and not is_gguf(model):
        if dtype != "float32":
            own = Reference.load(model, dtype=dtype, device=target.device)
        return Reference.load(model, dtype="float32", device=target.device), own, "transformers"
    kinds = kinds or "a GGUF file"
    if wish.engine != "paceline":
        raise PacelineError(
            f"{model} has its weights in {kinds}, which only our engine multiplies as it does: "
            f"--engine {wish.engine} runs another model; certify it in 16 bits"
        )
    plainly = PlainDecoding(load(model, dtype=exact_dtype(wish.dtype), device=target.device))
    if dtype != "float32":
        own = PlainDecoding(load(model, dtype=wish.dtype, device=target.device))
    return plainly, own, f"our own plain decoding of these weights ({kinds}), not transformers"


def certify_server(endpoint: str, reference: str | None, wish: Wish, key: str | None, watch: Watch) -> dict[str, Any]:
    """The certificate of a server."""
    from paceline.certify.endpoint import Server, certify_endpoint  # brings an HTTP client along

    prompts: list[Messages] = [({"role": "user", "content": text},) for text in QUESTIONS]
    if wish.prompts is not None:
        prompts = [_messages(prompt) for prompt in wish.prompts]
    server = Server(endpoint, key=key, slots=wish.batch)
    against = None if reference is None else Server(reference, key=key, slots=wish.batch)
    certificate = certify_endpoint(server, against, prompts, wish.plan, watch)
    return {
        "target": server.model,
        **certificate,
        "environment": {"started": datetime.now(UTC).isoformat("T", "seconds")},
    }


def _open(wish: Wish, target: Target, dtype: str) -> UnderTest:
    """The engine under test. Raises PacelineError for one that does not exist, or is not installed."""
    if wish.engine == "paceline":
        return Ours(target, target.tokenizer, wish.draft, batch=wish.batch)
    name, colon, checkpoint = wish.engine.partition(":")
    spec = wish.engine
    if name in HOSTS:
        draft = wish.draft.replace(",", ";")
        # Drafts as they are made, and not cut to what pays: more to verify, and as many as in the replay.
        spec = f"{HOSTS[name]}{colon}{checkpoint},draft={draft},paced=false"
    elif name.partition(",")[0] not in PEERS:
        known = ("paceline", *HOSTS, *PEERS)
        raise PacelineError(f"there is no engine {name!r}.{meant(name, known)} Engines: {', '.join(known)}")
    contestant = create_peer(
        spec,
        str(wish.model),
        dtype=dtype,
        threads=wish.threads,
        python=wish.python,
        batch=wish.batch,
        max_context=min(target.max_context, 1024),
        decode=target.tokenizer.decode if target.tokenizer is not None else str,
        device=str(target.device),
    )
    return Host(contestant, target.eos_token_ids)


def _prompts(target: Target, given: Sequence[Prompt] | None) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of prompts for greedy answers, and of short beginnings for sampled ones."""
    tokenizer = target.tokenizer
    if tokenizer is None:
        rng = np.random.default_rng(0)
        of = [rng.integers(target.vocab_size, size=n).tolist() for n in (3, 5, 8, 13)]
        return [one * 3 for one in of], [one[:3] * 2 for one in of]
    starts = [tokenizer.encode(text) for text in TEXTS]
    if given is not None:
        return [encode(one, tokenizer, target.vocab_size, target.max_context).tolist() for one in given], starts
    if tokenizer.has_chat_template:
        return [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in QUESTIONS], starts
    return [*starts, *(tokenizer.encode(text) for text in QUESTIONS)], starts


def _messages(prompt: Prompt) -> Messages:
    """A prompt as a server of chats takes it."""
    return tuple(prompt) if is_chat(prompt) else ({"role": "user", "content": str(prompt)},)  # type: ignore[arg-type]


def _spell(certificate: dict[str, Any], target: Target) -> None:
    """Put texts beside the token ids of what diverged."""
    assert target.tokenizer is not None
    for one in certificate["greedy"]["shown"]:
        one["before_text"] = target.tokenizer.decode(one["before"])
        for name in ("said", "best"):
            one[f"{name}_text"] = "" if one[name] is None else target.tokenizer.decode([one[name]])


def write(certificate: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """certificate.json and certificate.html in `folder`."""
    from paceline.pages.certificate import page

    files = folder / "certificate.json", folder / "certificate.html"
    write_whole(files[0], json.dumps(certificate, indent=2) + "\n")
    write_whole(files[1], page(certificate))
    return files
