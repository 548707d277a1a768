"""What `paceline certify` runs: opens the engine, the reference and the prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import cache
from typing import Any

import numpy as np

from paceline.certify.asking import AFTER_LOADING, Control, chats
from paceline.certify.certificate import certify
from paceline.certify.exact import Exact
from paceline.certify.options import REQUESTS, EngineTest, ServerTest
from paceline.certify.verdict import CANNOT_SAY, NO_DRAFT
from paceline.draft.base import Drafter
from paceline.draft.recording import Recording
from paceline.draft.registry import create
from paceline.draft.spec import cut, exchanged
from paceline.engine.engine import Engine
from paceline.engine.prompt import Prompt, encode
from paceline.errors import PacelineError
from paceline.formats.place import is_gguf
from paceline.formats.precision import exact_dtype
from paceline.formats.tokenizer import Tokenizer
from paceline.moved import aliases
from paceline.net.endpoint import Endpoint
from paceline.peers import HOSTS, create_peer
from paceline.peers.reference import Model, PlainDecoding, Reference
from paceline.runs.environment import environment
from paceline.runs.progress import Progress
from paceline.serve.local import Local
from paceline.target.base import Target
from paceline.target.load import load

LIBRARIES = ("transformers", "vllm", "llama-cpp", "xllamacpp")
"""What names of peers begin with; by itself, a library without drafts."""
CONTEXT = 1024  # Other libraries run with this context at most.
PACED = False
"""Drafts as they are made, and not cut to what pays: more to verify, and as many as in the replay on any machine."""


def local(
    target: Target, tokenizer: Tokenizer | None, draft: str | Callable[[], Drafter], *, batch: int = 8, **options: Any
) -> Local:
    """Our engine as an endpoint. draft: a spec, or a function that makes a drafter; options: further ones of
    `Engine`."""
    drafter = create(draft) if isinstance(draft, str) else draft()
    engine = Engine(target, drafter, tokenizer=tokenizer, max_batch=batch, **options)
    return Local(engine, f"paceline, {drafter.name}", slots=batch)


def certify_engine(subject: EngineTest, watch: Progress) -> dict[str, Any]:
    """Certify an engine that runs `subject.model`, and return the certificate. The budget begins when all is loaded."""
    draft = subject.draft if subject.engine == "paceline" or subject.engine.partition(":")[0] in HOSTS else None
    if draft is not None:
        create(draft)  # A misspelt drafter fails here, before the model is read.
    foreseen = f"; the verdict can only be {CANNOT_SAY!r}: {NO_DRAFT}" if draft == "none" else ""
    watch.say(f"loading {subject.model}{foreseen}")
    target = load(
        subject.model, dtype=subject.dtype, device=subject.device, exact=subject.exact,
        activations=subject.activations,
    )  # fmt: skip
    dtype = str(target.dtype).removeprefix("torch.")
    watch.say(f"loading the reference{AFTER_LOADING}")
    exact, own, reference = _references(subject, target, dtype)
    facts = Recording(target.tokenizer, tuple(target.eos_token_ids), target.vocab_size)
    prompts, starts = _prompts(target, subject.prompts)
    with ExitStack() as opened:
        if subject.engine != "paceline":
            watch.say(f"loading {subject.engine}{AFTER_LOADING}")

        def opening(*, plain: bool = False) -> Endpoint:
            engine = opened.enter_context(closing(_engine(subject, target, dtype, plain=plain)))
            engine.open()
            return engine

        engine, plainly = opening(), cache(lambda: opening(plain=True))
        control = None if subject.engine == "paceline" and subject.draft == "none" else plainly
        plays = target.tokenizer is not None and subject.scope.seconds > 0
        if plays:
            watch.say(f"loading the control{AFTER_LOADING}")
        oracle = Exact(
            exact, own, facts, prompts, starts, min(target.max_context, CONTEXT), draft, subject.engine != "paceline",
            control, _plain_of(subject, target) if plays else None, chats(subject.prompts),
        )  # fmt: skip
        if watch.stopped():
            raise KeyboardInterrupt
        certificate = certify(engine, oracle, subject.scope, watch)
    if target.tokenizer is not None:
        _spell(certificate, target)
    about = {"target": subject.model, "reference": reference}
    return {**about, **certificate, "environment": environment(dtype=dtype, device=str(target.device))}


def _references(subject: EngineTest, target: Target, dtype: str) -> tuple[Model, Model | None, str]:
    """Returns the model in float32, the model in the engine's dtype (None if that is float32), and in words whose code
    runs them."""
    model = subject.model
    own: Model | None = None
    if subject.exact and subject.engine != "paceline":
        raise PacelineError("--exact is for our engine: other engines round as they please")
    if subject.exact and subject.against is None:
        own_bits = target.activations
        plainly = load(model, dtype=subject.dtype, device=target.device, exact=True, activations=own_bits)
        return PlainDecoding(plainly), None, "our own plain decoding, to which drafts must be equal bit for bit"
    kinds = target.quantised or target.expanded
    if kinds is None and not is_gguf(model):
        if dtype != "float32":
            own = Reference.load(model, dtype=dtype, device=target.device)
        return Reference.load(model, dtype="float32", device=target.device), own, "transformers"
    kinds = kinds or "a GGUF file"
    if subject.engine != "paceline":
        raise PacelineError(
            f"{model} has its weights in {kinds}, which only our engine multiplies as it does: "
            f"--engine {subject.engine} runs another model; certify it in 16 bits"
        )
    bits = target.activations
    if subject.against is not None:
        exact = PlainDecoding(load(model, dtype="float32", device=target.device))
        own = PlainDecoding(
            load(model, dtype=subject.dtype, device=target.device, exact=subject.exact, activations=bits)
        )
        return exact, own, f"these weights ({kinds}), expanded to float32"
    word = exact_dtype(subject.dtype, target.quantised)
    exact = PlainDecoding(load(model, dtype=word, device=target.device, activations=bits))
    if dtype != "float32":
        own = PlainDecoding(load(model, dtype=subject.dtype, device=target.device, activations=bits))
    return exact, own, f"our own plain decoding of these weights ({kinds}), not transformers, which has no such model"


def _plain_of(subject: EngineTest, target: Target) -> Control:
    """A control: our plain decoding of the endpoint's model, in the exact dtype of its weights (`exact_dtype`)."""
    bits = target.activations if target.quantised else None
    return plain_control(subject, subject.model, exact_dtype(subject.dtype, target.quantised), bits)


def plain_control(subject: EngineTest | ServerTest, model: str, dtype: str, activations: int | None = None) -> Control:
    """A control: our plain decoding of `model`. Raises PacelineError if it has no tokenizer."""
    plainly = load(model, dtype=dtype, device=subject.device, activations=activations)
    if plainly.tokenizer is None:
        raise PacelineError(f"{model} has no tokenizer, and a server is asked with text")
    return Control(local(plainly, plainly.tokenizer, "none", batch=subject.batch))


def _engine(subject: EngineTest, target: Target, dtype: str, *, plain: bool = False) -> Endpoint:
    """The engine under test, not opened yet. plain: without drafts."""
    if subject.engine == "paceline":
        draft = "none" if plain else subject.draft
        return local(target, target.tokenizer, draft, batch=subject.batch, budget=PACED)
    name, colon, checkpoint = subject.engine.partition(":")
    spec = subject.engine
    if name in HOSTS:
        draft = exchanged(subject.draft, ",", ";")
        spec = f"{HOSTS[name]}{colon}{checkpoint},draft={draft},paced={str(PACED).lower()}"
    if plain:
        library = next(one for one in LIBRARIES if name.startswith(one))
        spec = f"{library}:{cut(checkpoint, ',')[0]}" if "llama" in library else library
    engine = create_peer(
        spec,
        subject.model,
        dtype=dtype,
        threads=subject.threads,
        python=subject.peer_python,
        batch=subject.batch,
        max_context=min(target.max_context, CONTEXT),
        tokenizer=target.tokenizer,
        ends=target.eos_token_ids,
        device=str(target.device),
    )
    engine.guarded = False
    return engine


def _prompts(target: Target, given: Sequence[Prompt] | None) -> tuple[list[list[int]], list[list[int]]]:
    """Returns token ids of prompts for greedy answers, and of short beginnings for sampled answers."""
    tokenizer = target.tokenizer
    if tokenizer is None:
        rng = np.random.default_rng(0)
        of = [rng.integers(target.vocab_size, size=n).tolist() for n in (3, 5, 8, 13)]
        return [one * 3 for one in of], [one[:3] * 2 for one in of]
    starts = [tokenizer.encode(text) for text in REQUESTS["beginnings"]]
    if given is not None:
        return [encode(one, tokenizer, target.vocab_size, target.max_context).tolist() for one in given], starts
    questions = REQUESTS["questions"]
    if tokenizer.has_chat_template:
        questions = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in questions]
    else:
        questions = [tokenizer.encode(text) for text in questions]
    return [*questions, *starts], starts


def _spell(certificate: dict[str, Any], target: Target) -> None:
    """Add the texts of the token ids that diverged."""
    assert target.tokenizer is not None
    for one in certificate["greedy"]["shown"]:
        one["before_text"] = target.tokenizer.decode(one["before"])
        for name in ("said", "best"):
            one[f"{name}_text"] = "" if one[name] is None else target.tokenizer.decode([one[name]])


aliases(__name__)
