"""`paceline predict`: would a second device that drafts ahead pay, by datasheets, before either is bought?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli import options
from paceline.draft.spec import option
from paceline.errors import PacelineError, meant
from paceline.workbench.options import with_options

if TYPE_CHECKING:
    from paceline.cost.model import Machine, Size

HIT = 0.5
"""Hit rate where none is given: what `mirror` reaches on the demo model (docs/methods/mirror.md)."""


@dataclass(kw_only=True)
class PredictOptions:
    """The two models, their devices, and how mirror drafts."""

    model: options.Model
    draft: str = option(help="Folder or hub id of the draft model.", names=("--draft", "-d"))
    on: str = option(help="Device of the model, as in the cost model: H100-SXM, RTX-4090, ...")
    draft_on: str | None = option(None, "Device of the draft. [default: a second one like the model's]")
    hit: float | None = option(
        None, "Share of windows that are there in time. [default: --table's, or 0.5]", least=0, most=1
    )
    table: Path | None = option(None, "What `paceline tune --mirror` wrote, for the hit rate that it measured.")
    window: int = option(5, "Tokens of a window.", least=1)
    branches: int = option(24, "Windows drafted ahead at once.", least=1)
    context: int = option(512, "Tokens before the answer.", least=0)
    as_json: options.AsJson = False


@with_options
def predict(asked: PredictOptions) -> int:
    """Would drafting on a second device pay, and from which size of the model on? Reads configurations, no weights, and
    takes all weights to have 16 bits, those of GGUF files too.

    A round of `mirror` on two devices is compared with a round of plain speculation with the same draft on the first.
    Figures of devices are datasheets'; the hit rate is yours to measure (`paceline tune MODEL --mirror DRAFT`).

    \b
    paceline predict MODEL --draft DRAFT --on H100-SXM
    paceline predict MODEL --draft DRAFT --on H100-SXM --draft-on L4 --table tune.json
    """
    from paceline.cost.mirror import latency_on, size_that_pays

    model, draft, on, draft_on = asked.model, asked.draft, asked.on, asked.draft_on or asked.on
    sizes = _size(model), _size(draft)
    machines = _machine("--on", on), _machine("--draft-on", draft_on)
    rate = asked.hit if asked.hit is not None else HIT if asked.table is None else _measured_hit(asked.table)
    settings: dict[str, Any] = {
        "hit": rate, "window": asked.window, "branches": asked.branches, "context": asked.context
    }  # fmt: skip
    latency = latency_on(*machines, *sizes, **settings)
    pays = size_that_pays(*machines, *sizes, **settings)
    if asked.as_json:
        facts = {
            "model": model, "draft": draft, "on": on, "draft_on": draft_on, **settings, "latency": vars(latency),
            "round": latency.round, "plain_round": latency.plain_round, "speedup": latency.speedup,
            "parameters": sizes[0].parameters, "pays_from_parameters": pays,
        }  # fmt: skip
        print(json.dumps(facts))
        return 0
    print(
        f"{model} on {on}: {1e3 * latency.after:.2f} ms a forward of {asked.window + 1} tokens; {draft} on {draft_on}: "
        f"{1e3 * latency.ahead:.2f} ms for {asked.branches} windows ahead, {1e3 * (latency.late or 0):.2f} ms for one "
        f"after a miss ({1 - rate:.0%} of rounds)\n"
        f"a round: {1e3 * latency.round:.2f} ms; plain speculation on {on} alone: {1e3 * latency.plain_round:.2f} ms; "
        f"{latency.speedup:.2f} times as fast with two devices"
    )
    here = sizes[0].parameters / 1e6
    print(
        "it pays with no size of this family" if pays is None else
        f"it pays from about {pays / 1e6:,.0f} million parameters on; this model has {here:,.0f}"
    )  # fmt: skip
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
        return float(loads(table.read_bytes())["mirror"]["separate"]["hit"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PacelineError(
            f"{table} has no hit rate ({type(error).__name__}: {error}); "
            f"`paceline tune MODEL --mirror DRAFT -o {table}` writes one"
        ) from None
