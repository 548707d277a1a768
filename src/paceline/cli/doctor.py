"""`paceline doctor`: show this machine's features, and how a model would run on it."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline import __version__, processor
from paceline.cli import options
from paceline.cli.parameters import with_options
from paceline.cli.show import Steps, say
from paceline.engine.options import ModelOptions
from paceline.errors import PacelineError
from paceline.formats.place import check_place
from paceline.given import checked

if TYPE_CHECKING:
    from paceline.target.base import Target

BUSY = 0.5  # At this load of the processor, other processes probably need its cores.


@with_options
def doctor(
    model: Annotated[
        str | None,
        typer.Argument(help=f"{options.WHAT_A_MODEL_IS} It is only read.", callback=checked(check_place)),
    ] = None,
    running: ModelOptions = ModelOptions(),
    compile: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Compile all kernels now, which takes a minute or two, instead of when a command first needs them. "
            "With a model, its own as well. They are kept.",
        ),
    ] = False,
    as_json: options.AsJson = False,
) -> int:
    """Say what this machine has, and with which kernels, dtype, exactness and threads a model would run on it.

    \b
    paceline doctor
    paceline doctor smollm2
    paceline doctor --compile                     so that no later command waits for it
    PACELINE_CPU=avx2 paceline doctor smollm2     as on a processor with AVX2 alone (avx-vnni, avx512, amx)
    """
    running.use_threads()
    kept = {"kernels": f"compiled and kept, {_compile_all()} parts"} if compile else {}
    facts = _machine() | kept
    if model is not None:
        from paceline.target.load import load

        facts["model"] = _model(load(model, **asdict(running)), running)
    if as_json:
        print(json.dumps(facts, indent=2))
        return 0
    forced = f" ({processor.VARIABLE} says so; it has {', '.join(facts['levels'])})" if facts["forced"] else ""
    own = "" if facts["kernels_on_torchs_threads"] else "; our kernels have their own"
    say(
        f"paceline   {__version__}",
        f"processor  {facts['processor']}, level {facts['level']}{forced}",
        f"threads    {facts['threads']} of {facts['processors']} processors{own}",
        f"load       {_load(facts)}",
        f"torch      {facts['torch']}, kernels for {facts['torch_level']}, {facts['device']}",
    )
    for name, value in (kept | facts.get("model", {})).items():
        say(f"{name:9}  {value}")
    return 0


def _compile_all() -> int:
    """Compile what is not compiled yet, and show how far it is. Returns the number of parts."""
    from paceline.cli.ahead import parts

    told, all_parts = logging.getLogger("paceline.compiling"), parts()
    before, told.disabled = told.disabled, True
    try:
        with Steps("compiling", len(all_parts), "parts") as steps:
            for done, (name, compile) in enumerate(all_parts):
                steps.show(done, what=name)
                compile()
    finally:
        told.disabled = before
    return len(all_parts)


def _load(facts: dict[str, Any]) -> str:
    if (load := facts["load"]) is None:
        return "unknown here"
    said = f"{load:.1f} of {facts['processors']} processors in the last minute"
    if load < BUSY * facts["processors"]:
        return said
    return f"{said}: others want them, and threads that wait for each other lose most; --threads 1 waits for nobody"


def _machine() -> dict[str, Any]:
    import torch

    from paceline import kernels
    from paceline.runs.environment import cpu, load
    from paceline.target.load import device_named

    return {
        "paceline": __version__,
        "processor": cpu(),
        "level": processor.level(),
        "levels": processor.levels(),
        "forced": os.environ.get(processor.VARIABLE),
        "processors": os.cpu_count(),
        "load": load(),
        "threads": torch.get_num_threads(),
        "kernels_on_torchs_threads": kernels.parallel() is not None,
        "torch": torch.__version__,
        "torch_level": torch.backends.cpu.get_cpu_capability(),
        "device": str(device_named("auto")),
    }


def _inside(target: Target) -> str | None:
    """The drafter that a model brings, and what it would cost; None if it brings none."""
    from paceline.draft.registry import create
    from paceline.formats.heads.gguf import has_head

    if target.folder is None or not has_head(Path(target.folder)):
        return None
    drafter = create("mtp")
    try:
        drafter.bind(target)
    except PacelineError as error:
        return f"a head for multi-token prediction, which cannot draft here: {error}"
    share = drafter.weight_bytes / max(target.weight_bytes, 1)
    return f"a head for multi-token prediction: with --draft mtp a drafted token reads {share:.2f} of the model's bytes"


def _model(target: Target, asked: ModelOptions) -> dict[str, str]:
    """Words on how a model would run, and why."""
    from paceline.core.rules import split_dtype
    from paceline.formats.precision import usual

    weights = target.quantised or target.expanded or str(target.dtype).removeprefix("torch.")
    products = Counter(product.product.kernel for product in target.products)
    by = ", ".join(f"{count} by {kernel}" for kernel, count in products.most_common()) or "transformers' own"
    if target.exact:
        why = "as asked" if asked.exact else "which costs no time here"
        bits = "on any processor" if target.same_on_any_processor else "on processors of this family"
        exact = f"yes, {why}: with any draft, in any batch and {bits}, a token has the same logits"
    else:
        exact = "no: a near-tie may flip with a draft or in a batch; --exact rules it out where the model can"
    word, own = str(target.dtype).removeprefix("torch."), split_dtype(asked.dtype)[1]
    reason = "as asked" if own == word else "so that nothing but inputs of products is rounded"
    if target.activations != 16 and own != word:
        reason = "the model's own" if word != "float32" else "the model's own, or this processor has no units for it"
    facts = {
        "model": f"{target.name}, {target.weight_bytes / 1e6:,.0f} MB read for a token",
        "weights": weights,
        "dtype": f"{word}{' for all else' if target.quantised else ''}: {reason}",
    }
    if target.activations is not None:
        rest = target.dtype if own == word else None
        why = "as asked" if asked.activations else usual(target.weight_bytes, rest)[1]
        facts["inputs"] = f"rounded to {target.activations} bits: {why}"
    facts |= {
        "products": by,
        "exact": exact,
        "drafter": "suffix, unless --draft says otherwise: it copies what is likely to follow the same words",
        "context": f"{target.max_context:,} tokens",
    }
    if inside := _inside(target):
        facts["inside"] = inside
    if target.brings_head:
        facts["drafter"] = f"{options.WITH_HEAD}, unless --draft says otherwise: the head inside or copied words"
    if target.tokenizer is not None and target.tokenizer.begins:
        facts["chats"] = f"begin with {target.tokenizer.inner.bos_token}, as the file says, whatever the template has"
    return facts | {"note": " ".join(target.notes[1:])} if target.notes[1:] else facts
