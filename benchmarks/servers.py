"""Is what `paceline tune --server` writes near the best? On vLLM, against a grid of eight configurations.

    python benchmarks/servers.py MODEL LOG --vllm ENV/bin/python --out DIR

First `paceline tune --server` measures a vLLM that drafts and a plain one with LOG, and writes a configuration. Then
the grid and that configuration run side by side, as many servers as there are, and answer the same requests of LOG in
turn, one request at a time and eight at a time (`paceline bench --server URL,URL,...`): a machine that is slower for
a while is slower for all. The table has tokens a second, and the written configuration's over the best of the grid.
Every server has the model in memory, 1 GB for its cache and 1.5 GB of libraries; --only takes as many as fit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
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
DRAFTING = "ngram 2-5, k=5"  # the server that is tuned


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
    parser.add_argument("--only", nargs="+", choices=[*GRID, "written"], help="of these configurations [default: all]")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    tuned = options.out / "tuned"
    if not (tuned / "configuration.json").exists():
        with vllm(options, GRID[DRAFTING], free_port()) as url, vllm(options, None, free_port()) as plain:
            paceline(
                "tune", options.model, "--server", url, "--without", plain, "--traffic", options.log, "-o", tuned,
                "--batches", "1,2,4,8,16,32", "--minutes", options.minutes, "-n", options.max_tokens,
            )  # fmt: skip
    written = json.loads((tuned / "configuration.json").read_text())["configurations"][0]["speculative_config"]
    contest = {**GRID, "written": written}
    names = options.only or list(contest)
    file = options.out / "ports.json"  # the same ones in a run that goes on: servers are known by their addresses
    ports = json.loads(file.read_text()) if file.exists() else {name: free_port() for name in names}
    file.write_text(json.dumps(ports))
    with ExitStack() as servers:
        urls = [servers.enter_context(vllm(options, contest[name], ports[name])) for name in names]
        for load in LOADS:
            if not (options.out / str(load) / "summary.json").exists():
                paceline(
                    "bench", "--server", ",".join(urls), "--suite", options.log, "--limit", options.limit,
                    "--concurrency", load, "-n", options.max_tokens, "--warm-up", 1, "--repeats", options.repeats,
                    "--out", options.out / str(load),
                )  # fmt: skip
    print("\n".join(table(options.out, names, ports)))
    print(f"\nwritten: {json.dumps(written)}")


@contextmanager
def vllm(options: argparse.Namespace, config: dict[str, Any] | None, port: int) -> Iterator[str]:
    """The address of a vLLM with a speculative_config."""
    command = [
        *(options.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", str(Path(options.model).resolve())),
        *("--served-model-name", "served", "--port", str(port), "--dtype", options.dtype, "--max-num-seqs", "32"),
        *("--max-model-len", "2048", "--no-enable-prefix-caching", "--no-enable-log-requests"),
        *(("--speculative-config", json.dumps(config)) if config else ()),
    ]
    os.environ |= {"NUMBA_NUM_THREADS": str(os.cpu_count()), "VLLM_CPU_KVCACHE_SPACE": "1"}
    with running(command, port):
        yield f"http://127.0.0.1:{port}/v1"


def paceline(*arguments: object) -> None:
    """A command of ours; its output goes to standard error."""
    subprocess.run([sys.executable, "-m", "paceline", *map(str, arguments)], check=True, stdout=sys.stderr)


def table(folder: Path, names: Sequence[str], ports: Mapping[str, int]) -> list[str]:
    """Markdown: tokens a second by load, and the written configuration's over the best of the grid."""
    of_server = {f"127.0.0.1:{port}": name for name, port in ports.items()}
    speeds = {
        (of_server[row["method"]], load): float(row["tokens_per_second"])
        for load in LOADS for row in json.loads((folder / str(load) / "summary.json").read_text())["results"]
        if row["category"] == "overall"
    }  # fmt: skip
    lines = ["| | " + " | ".join(f"{load} at once" for load in LOADS) + " |", "|---|" + "---:|" * len(LOADS)]
    lines += [f"| {name} | {' | '.join(f'{speeds[name, load]:.1f}' for load in LOADS)} |" for name in names]
    if "written" in names:
        best = [max(speeds[name, load] for name in names if name != "written") for load in LOADS]
        ratios = [f"{speeds['written', load] / of:.3f}" for load, of in zip(LOADS, best, strict=True)]
        lines.append(f"| written over the best | {' | '.join(ratios)} |")
    return lines


if __name__ == "__main__":
    main()
