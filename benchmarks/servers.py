"""Is what `paceline tune --server` writes near the best? On vLLM, against a grid of eight configurations.

    python benchmarks/servers.py MODEL LOG --vllm ENV/bin/python --out DIR

One server runs at a time. First `paceline tune --server` measures plain vLLM with LOG and writes its configuration.
Then the grid and that configuration serve the same requests of LOG, one request at a time and eight at a time
(`paceline bench --endpoint`), `--repeats` times in an order that is drawn anew. The table has tokens a second, medians
over the repeats, and the written configuration's over the best of the grid.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from serve import free_port, running

LOADS = (1, 8)


def ngram(least: int, most: int, k: int) -> dict[str, Any]:
    """vLLM's drafter that looks tokens up."""
    return {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_min": least, "prompt_lookup_max": most}


GRID: dict[str, dict[str, Any] | None] = {
    "off": None,
    **{f"ngram 1-3, k={k}": ngram(1, 3, k) for k in (1, 2, 4, 8)},
    **{f"ngram 2-5, k={k}": ngram(2, 5, k) for k in (3, 5)},
    "ngram 4-8, k=8": ngram(4, 8, 8),
}


def main() -> None:
    """Tune, measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face folder")
    parser.add_argument("log", help="prompts and answers of that model, as `paceline replay` reads them")
    parser.add_argument("--vllm", required=True, help="the interpreter of vLLM's environment")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=5.0, help="of tuning")
    parser.add_argument("--limit", type=int, default=48, help="requests at each load")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    tuned = options.out / "tuned"
    if not (tuned / "configuration.json").exists():
        served(options, None, lambda url: paceline(
            "tune", options.model, "--server", url, "--traffic", options.log, "-o", tuned, "--batches", "1,2,4,8,16,32",
            "--minutes", options.minutes, "-n", options.max_tokens,
        ))  # fmt: skip
    written = json.loads((tuned / "configuration.json").read_text())["configurations"][0]["speculative_config"]
    contest = {**GRID, "written": written}
    speeds: dict[tuple[str, int], list[float]] = {}
    for repeat in range(options.repeats):
        for name in Random(repeat).sample(list(contest), len(contest)):
            folder = options.out / f"{name.replace(' ', '-').replace(',', '')}-{repeat}"
            served(options, contest[name], lambda url, folder=folder: measure(options, url, folder))
            for load in LOADS:
                speeds.setdefault((name, load), []).append(speed(folder / str(load)))
    print("\n".join(table(speeds, list(contest))))
    print(f"\nwritten: {json.dumps(written)}")


def served(options: argparse.Namespace, config: dict[str, Any] | None, use: Any) -> None:
    """Run vLLM with a speculative_config, and `use` with its address."""
    port = free_port()
    command = [
        *(options.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", str(Path(options.model).resolve())),
        *("--served-model-name", "served", "--port", str(port), "--dtype", options.dtype, "--max-num-seqs", "32"),
        *("--max-model-len", "2048", "--no-enable-prefix-caching", "--no-enable-log-requests"),
        *(("--speculative-config", json.dumps(config)) if config else ()),
    ]
    os.environ["NUMBA_NUM_THREADS"] = str(os.cpu_count())
    with running(command, port):
        use(f"http://127.0.0.1:{port}/v1")


def measure(options: argparse.Namespace, url: str, folder: Path) -> None:
    """The requests at every load; what is there is not measured again."""
    for load in LOADS:
        if not (folder / str(load) / "summary.json").exists():
            paceline(
                "bench", "--endpoint", url, "--suite", options.log, "--limit", options.limit, "--concurrency", load,
                "-n", options.max_tokens, "--warm-up", 1, "--out", folder / str(load),
            )  # fmt: skip


def paceline(*arguments: object) -> None:
    """A command of ours; its output goes to standard error."""
    subprocess.run([sys.executable, "-m", "paceline", *map(str, arguments)], check=True, stdout=sys.stderr)


def speed(folder: Path) -> float:
    """Tokens a second of a run."""
    return float(json.loads((folder / "summary.json").read_text())["results"][0]["tokens_per_second"])


def table(speeds: dict[tuple[str, int], list[float]], names: Sequence[str]) -> list[str]:
    """Markdown: tokens a second by load, and the written configuration's over the best of the grid."""
    medians = {key: median(of) for key, of in speeds.items()}
    lines = ["| | " + " | ".join(f"{load} at once" for load in LOADS) + " |", "|---|" + "---:|" * len(LOADS)]
    lines += [f"| {name} | {' | '.join(f'{medians[name, load]:.1f}' for load in LOADS)} |" for name in names]
    ratios = [medians["written", load] / max(medians[name, load] for name in GRID) for load in LOADS]
    return [*lines, f"| written over the best | {' | '.join(f'{ratio:.3f}' for ratio in ratios)} |"]


if __name__ == "__main__":
    main()
