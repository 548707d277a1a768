"""Two alignment runs of one plan beside each other, phase by phase, as a Markdown table: drafts and prefix reuse
against plain decoding.

    paceline eval align --model models/demo -t 0 --dtype float32 --concurrency 1 --out runs/ours
    paceline eval align --model models/demo -t 0 --dtype float32 --concurrency 1 --out runs/plain -d none --no-reuse
    python benchmarks/align_phases.py runs/ours runs/plain

Prompt tokens that are run, tokens a round and the engine's seconds; and whether every answer and thought is identical.
"""

import sys
from pathlib import Path
from typing import Any

from paceline.evals.align.phases import compare


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
    told = compare(*map(Path, sys.argv[1:3]))
    print("| phase | requests | tokens | tokens a round | prefill plainly | with reuse | saved | s plainly | s |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    print("\n".join(map(row, told["phases"])))
    print(f"\n{told['answers'] - len(told['different'])} of {told['answers']} answers and thoughts identical.")
    return 1 if told["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
