"""`paceline predict`: would a second device that drafts ahead pay, by datasheets, before either is bought?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options
from paceline.errors import PacelineError, meant

if TYPE_CHECKING:
    from paceline.cost.model import Machine, Size

HIT = 0.5
"""Hit rate where none is given: what `mirror` reaches on the demo model (docs/methods/mirror.md)."""


def predict(
    model: options.Model,
    draft: Annotated[str, typer.Option("--draft", "-d", help="Folder or hub id of the draft model.")],
    on: Annotated[str, typer.Option(help="Device of the model, as in the cost model: H100-SXM, RTX-4090, ...")],
    beside: Annotated[
        str | None, typer.Option(help="Device of the draft. [default: another one like the model's]")
    ] = None,
    hit: Annotated[
        float | None,
        typer.Option(help="Share of windows that are there in time. [default: --table's, or 0.5]", min=0, max=1),
    ] = None,
    table: Annotated[
        Path | None, typer.Option(help="What `paceline tune --beside` wrote: its hit rate is the draft's own.")
    ] = None,
    window: Annotated[int, typer.Option(help="Tokens of a window.", min=1)] = 5,
    branches: Annotated[int, typer.Option(help="Windows drafted ahead at once.", min=1)] = 24,
    context: Annotated[int, typer.Option(help="Tokens before the answer.", min=0)] = 512,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, and nothing else.")] = False,
) -> int:
    """Would drafting on a second device pay, and from which size of the model on? Reads configurations, no weights, and
    takes all weights to have 16 bits, those of GGUF files too.

    A round of `mirror` on two devices is compared with a round of plain speculation with the same draft on the first.
    Figures of devices are datasheets'; the hit rate is yours to measure (`paceline tune MODEL --beside DRAFT`).

    \b
    paceline predict MODEL --draft DRAFT --on H100-SXM
    paceline predict MODEL --draft DRAFT --on H100-SXM --beside L4 --table tune.json
    """
    from paceline.cost.mirror import law_on, size_that_pays

    sizes = _size(model), _size(draft)
    machines = _machine("--on", on), _machine("--beside", beside or on)
    rate = hit if hit is not None else HIT if table is None else _measured_hit(table)
    settings: dict[str, Any] = {"hit": rate, "window": window, "branches": branches, "context": context}
    law = law_on(*machines, *sizes, **settings)
    pays = size_that_pays(*machines, *sizes, **settings)
    facts = {
        "model": model, "draft": draft, "on": on, "beside": beside or on, **settings, "law": vars(law),
        "round": law.round, "plain_round": law.plain_round, "speedup": law.speedup,
        "parameters": sizes[0].parameters, "pays_from_parameters": pays,
    }  # fmt: skip
    if as_json:
        print(json.dumps(facts))
        return 0
    print(
        f"{model} on {on}: {1e3 * law.after:.2f} ms a forward of {window + 1} tokens; {draft} on {beside or on}: "
        f"{1e3 * law.ahead:.2f} ms for {branches} windows ahead, {1e3 * (law.late or 0):.2f} ms for one after a miss "
        f"({1 - rate:.0%} of rounds)"
    )
    print(
        f"a round: {1e3 * law.round:.2f} ms; plain speculation on {on} alone: {1e3 * law.plain_round:.2f} ms; "
        f"{law.speedup:.2f} times as fast with two devices"
    )
    where = "it pays beside no size of this family" if pays is None else (
        f"it pays from about {pays / 1e6:,.0f} million parameters on; this model has {sizes[0].parameters / 1e6:,.0f}"
    )  # fmt: skip
    print(where)
    return 0


def _size(model: str) -> Size:
    """MethodError or ModelError for what has no configuration of a Llama-family model."""
    from paceline.cost.model import Size
    from paceline.target.folder import SMALL_FILES, find, gguf_of, is_gguf
    from paceline.target.load import read_config
    from paceline.target.quantised.gguf import GGUF, config_of
    from paceline.target.shape import unsupported

    config = config_of(GGUF(gguf_of(model))) if is_gguf(model) else read_config(find(model, SMALL_FILES))
    reason = unsupported(config)
    if reason:
        raise PacelineError(f"{model}: its forwards cannot be predicted, {reason}")
    return Size.of(config)


def _machine(option: str, name: str) -> Machine:
    from paceline.cost.model import DEVICES, Machine

    if name not in DEVICES:
        raise PacelineError(f"{option} is {name!r}.{meant(name, DEVICES)} Devices: {', '.join(DEVICES)}.")
    return Machine(DEVICES[name])


def _measured_hit(table: Path) -> float:
    from paceline.jsonl import loads

    try:
        return float(loads(table.read_bytes())["beside"]["separate"]["hit"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PacelineError(
            f"{table} has no hit rate ({type(error).__name__}: {error}); "
            f"`paceline tune MODEL --beside DRAFT -o {table}` writes one"
        ) from None
