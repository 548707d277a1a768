"""EngineConfig: how an engine runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.core.accept import Rule
from paceline.engine.scheduler import Schedule
from paceline.errors import PacelineError
from paceline.target.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine runs: the fields that `Engine(model, draft, **fields)` takes. PacelineError for a limit below 1."""

    max_batch: int = 8
    """Most rows answered at once; others wait."""
    prefill_chunk: int = 512
    """Most prompt tokens in one forward, so that a long prompt does not hold up the other rows."""
    max_slowdown: float | None = None
    """Longest time of a round that runs prompt tokens beside rows that are decoding, in rounds without prompt tokens.
    None: there is no bound, and the pieces of a prompt do not depend on measured times."""
    max_rows_per_client: int | None = None
    """Most rows at once of one `Row.client`; None: there is no bound."""
    schedule: str | Schedule | None = None
    """Which rows run when: "ragged" (the default), "equal", "grouped", or a Schedule."""
    rule: Rule | None = None
    """The acceptance rule; None: the rule of a row's drafter if it has one, else the lossless rule."""
    budget: bool = True
    """Draft as much as pays, by the time of rounds and the acceptance of drafts; False: as much as the drafter
    likes."""
    cache_memory: int | str | None = None
    """Most memory for keys and values, in bytes or as "2GB"; None: half of the free memory. Requests wait for it. If
    rows outgrow it, the youngest is preempted and run again later (docs/batching.md)."""
    reuse: bool = True
    """Copy the keys and values of earlier requests whose prompts begin alike."""
    prefix_cache: str | Path | None = None
    """A folder for the keys and values of prompts, which later processes with the same model reuse."""
    prefix_cache_size: int | str = "8GB"
    """Most bytes of that folder; the files used longest ago are removed."""
    threads: int | None = None
    """Processor threads of a round; None: torch's number, or fewer while other processes want the cores."""
    tokenizer: Tokenizer | None = None
    """Reads prompts and writes answers; None: the target's own. A model that is not loaded yet is loaded with it."""
    exact_profile: bool = False
    """Wait for the accelerator after every part of a round, so that `Engine.profile` is exact; that costs time."""
    dtype: str = "auto"
    """As in `paceline.target.load.load`, for a model that is not loaded yet; so are `device` and `activations`."""
    device: str = "auto"
    exact: bool | None = None
    """The same logits, bit for bit, with any draft and in any batch (docs/exact.md). None: where that costs no time;
    False: never. True also applies to a Target that is loaded already."""
    activations: int | None = None

    def __post_init__(self) -> None:
        names = ("max_batch", "prefill_chunk", "max_slowdown", "max_rows_per_client")
        limits = {name: getattr(self, name) for name in names}
        if low := [f"{name} is {limit}" for name, limit in limits.items() if limit is not None and not limit >= 1]:
            raise PacelineError(f"{' and '.join(low)}; it must be 1 or more.")
