"""Two alignment runs of one plan, phase by phase, as a Markdown table: drafts and prefix reuse against plain decoding.

    paceline eval align --model models/demo -t 0 --dtype float32 --concurrency 1 --out runs/ours
    paceline eval align --model models/demo -t 0 --dtype float32 --concurrency 1 --out runs/plain -d none --no-reuse
    python benchmarks/align_phases.py runs/ours runs/plain

Prompt tokens that are run, tokens a round and the engine's seconds; and whether every answer and thought is identical.
"""

import sys
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.evals.align.figures import GENERATIONS, KIND, by_phase, planned_rows
from paceline.workbench.runs import read_about


def compare(folder: Path, plain: Path) -> dict[str, Any]:
    """Two runs phase by phase, on what both have answered: whether that is identical, rounds and prefill saved.

    Raises PacelineError if they have nothing in common."""
    abouts = [read_about(path, KIND) for path in (folder, plain)]
    ours, theirs = (
        {
            (row["item"], row["method"]): (row["response"], row["thought"])
            for row in planned_rows(path / GENERATIONS, of)
        }
        for path, of in zip((folder, plain), abouts, strict=True)
    )
    both = ours.keys() & theirs.keys()
    if not both:
        raise PacelineError(f"{folder} and {plain} have no answers in common; run both with the same options")
    before = {(row["method"], row["phase"]): row for row in by_phase(plain, abouts[1], both)}
    phases = []
    for row in by_phase(folder, abouts[0], both):
        if (other := before.get((row["method"], row["phase"]))) is not None:
            prefill, prefill_before = (one["prefilled"] - one["cached"] for one in (row, other))
            phases.append(
                row
                | {
                    "tokens_a_round_before": other["tokens_a_round"],
                    "seconds_before": other["seconds"],
                    "prefill": prefill,
                    "prefill_before": prefill_before,
                    "prefill_saved": 1 - prefill / prefill_before if prefill_before else None,
                }
            )
    different = sorted(item for item in both if ours[item] != theirs[item])
    return {"answers": len(both), "different": different, "phases": phases}


def row(phase: dict[str, Any]) -> str:
    """A line of the table."""
    saved = phase["prefill_saved"]
    cells = [
        f"{phase['method']}: {phase['phase']}",
        phase["requests"],
        phase["generated"],
        f"{phase['tokens_a_round']:.2f}",
        f"{phase['prefill_before']:,}",
        f"{phase['prefill']:,}",
        "" if saved is None else f"{100 * saved:.0f} %",
        f"{phase['seconds_before']:.1f}",
        f"{phase['seconds']:.1f}",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> int:
    """Print the table; 1 if an answer differs."""
    compared = compare(*map(Path, sys.argv[1:3]))
    print("| phase | requests | tokens | tokens a round | prefill plainly | with reuse | saved | s plainly | s |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    print("\n".join(map(row, compared["phases"])))
    print(
        f"\n{compared['answers'] - len(compared['different'])} of {compared['answers']} answers and thoughts identical."
    )
    return 1 if compared["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
