"""The table of `paceline bench --schedule`: a line for every drafter, schedule and batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from paceline.cli.show import plain_table

SCHEDULE_WORDS = """
gain: tokens/s over those of plain decoding at the same batch. E: answers that are, token for token, those of plain
decoding one at a time; P: the share of their tokens before the first that differs. align: share of the time that
realigning rows takes. group: rounds whose rows were all equally long. idle: row slots without a row. P50, P90, P99:
seconds from handing in all requests at once to the last token of one."""


def schedule_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """results: of `metrics.summarize`, the overall ones."""
    from paceline.bench.together import beside_plain, scheduled

    columns = ("tok/s", "gain", "E", "P", "align", "group", "idle", "P50", "P90", "P99")
    table = plain_table("method", *columns, text=("method",), gap=1)
    beside = beside_plain(results)
    for r in sorted(results, key=lambda r: scheduled(r)["batch"]):
        table.add_row(
            escape(r["method"]),
            _figure(r["tokens_per_second"], ".1f"),
            _figure(beside.get(r["method"]), ".2f"),
            *(_figure(r[name], ".1%") for name in ("identical", "partial_match")),
            *(_figure(r[name], ".0%") for name in ("align_share", "group_rate", "idle_slots")),
            *(_figure(r[name], ".2f") for name in ("latency_p50", "latency_p90", "latency_p99")),
        )
    return table


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
