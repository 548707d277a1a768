"""What a benchmark ran on: versions, processor, threads, memory, command. Knows nothing of the run itself.

    environment(dtype="bfloat16", device="cpu")["cpu"]       # "Intel(R) Xeon(R) ..."
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from paceline import __version__
from paceline.bench.metrics import BASELINE, OVERALL
from paceline.bench.record import PEER, Answer, good

PACKAGES = ("transformers", "tokenizers", "safetensors", "numpy", "numba")


def environment(*, dtype: str, device: str) -> dict[str, Any]:
    """Everything about the machine and the software that could explain a figure."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "paceline": __version__,
        "git": _git(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": _memory(),
        "gpu": gpus or None,
        "device": device,
        "dtype": dtype,
        "load": load(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["paceline", *sys.argv[1:]]),
    }


def machine(facts: dict[str, Any]) -> dict[str, Any]:
    """The part of an environment that must not change in the middle of a run."""
    fixed = ("paceline", "torch", "transformers", "cpu", "threads", "gpu", "device", "dtype")
    return {key: facts[key] for key in fixed}


def load() -> float | None:
    """Processes that wanted to run in the last minute; well above one beside a benchmark, it was not alone."""
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _git() -> str | None:
    """The commit of the source this runs from, if it is a checkout; "+" if it was changed."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


@dataclass
class Peak:
    """Most memory while something ran; None where the system does not tell."""

    bytes: int | None = None


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measures the most memory of this process (on a GPU: of its tensors there) between entering and leaving."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device)
    else:
        is_reset = _reset_resident()
        yield peak
        peak.bytes = _resident_peak() if is_reset else None


def _reset_resident() -> bool:
    """Let Linux forget the process's highest memory so far."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _resident_peak() -> int | None:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


# Whether something else used the processor during a run: what its own figures say. Knows no engine and no file.

ABOVE = 1.1
"""Speed-ups may be above the mean accepted tokens by this factor: that much is noise, more is impossible."""
SCATTER = 2.0
"""Mean time of a plain round over that of the fastest tenth: on a quiet machine they are nearly alike."""
ROUNDS = 50
"""Fewest plain rounds that say how they scatter."""
MORE = 0.5
"""Processes that want to run beside the threads of the run."""


def is_impossible(speedup: float | None, mean_accepted_tokens: float | None) -> bool:
    """Whether no sound measurement can give this speed-up over plain decoding in the same engine.

    A round that verifies a draft takes at least as long as one without."""
    return bool(speedup and mean_accepted_tokens) and speedup > ABOVE * mean_accepted_tokens  # type: ignore[operator]


def disturbances(
    answers: Sequence[Answer], results: Iterable[Mapping[str, Any]], *, threads: int | None = None
) -> list[str]:
    """What a run shows of other processes, in one sentence with its signs; nothing if there are none.

    results: of `metrics.summarize`; threads: the run's own, which the load average counts too."""
    signs = [*_impossible(results), *_scattered(answers), *_loaded(answers, threads)]
    if not signs:
        return []
    return [f"Timings are not reliable, another process seems to have used the processor: {'; '.join(signs)}."]


def _impossible(results: Iterable[Mapping[str, Any]]) -> list[str]:
    return [
        f"{row['method']} has {row['speedup']:.2f} times plain decoding's speed at {row['mean_accepted_tokens']:.2f} "
        "mean accepted tokens, which is impossible"
        for row in results
        if row["category"] == OVERALL
        and not row["method"].startswith(PEER)
        and is_impossible(row["speedup"], row["mean_accepted_tokens"])
    ]


def _scattered(answers: Sequence[Answer]) -> list[str]:
    plain = (answer for answer in good(answers) if answer.method == BASELINE)
    times = [turn.times or () for answer in plain for turn in answer.turns]
    waits = [after - before for of_turn in times for before, after in pairwise(of_turn)]
    if len(waits) < ROUNDS:
        return []
    fast, mean = float(np.percentile(waits, 10)), float(np.mean(waits))
    if mean <= SCATTER * fast:
        return []
    return [f"plain rounds took {1e3 * mean:.1f} ms in the mean, the fastest tenth {1e3 * fast:.1f} ms or less"]


def _loaded(answers: Sequence[Answer], threads: int | None) -> list[str]:
    loads = [answer.load for answer in answers if answer.load is not None]
    if threads is None or not loads or median(loads) <= threads + MORE:
        return []
    return [f"the load average was {median(loads):.1f} with {threads} thread{'s' if threads != 1 else ''} of its own"]
