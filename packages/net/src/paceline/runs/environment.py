"""Facts of the machine and the software of a measurement: versions, processor, threads, memory, command."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from paceline import __version__, processor

CPUINFO = Path("/proc/cpuinfo")
PACKAGES = ("transformers", "tokenizers", "safetensors", "numpy", "numba")


def environment(*, dtype: str, device: str) -> dict[str, Any]:
    """Everything about the machine and the software that could explain a figure."""
    torch: Any = sys.modules.get("torch")  # Where nothing has imported it, it explains no figure.
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch else []
    return {
        "paceline": __version__,
        "git": _git(),
        "python": platform.python_version(),
        "torch": torch.__version__ if torch else None,
        **{name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu": cpu(),
        "level": processor.level(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability() if torch else None,
        "cores": cores(),
        "threads": torch.get_num_threads() if torch else None,
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
    fixed = ("paceline", "torch", "transformers", "cpu", "level", "threads", "gpu", "device", "dtype")
    return {key: facts[key] for key in fixed}


def cores() -> int:
    """Processor cores that this process may use."""
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable is not None else os.cpu_count() or 1


def load() -> float | None:
    """Load average of one minute: well above a benchmark's own threads, other processes ran."""
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def cpu() -> str:
    """The processor's name, as its maker calls the model."""
    try:
        lines = CPUINFO.read_text().splitlines()
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
        command = ["git", "describe", "--always", "--dirty=+"]
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


class Peak:
    """Most memory of this process from now on. gpu: of its tensors on this device of torch instead."""

    def __init__(self, gpu: Any = None):
        self.gpu, self.told = gpu, True
        if gpu is not None:
            import torch

            torch.cuda.reset_peak_memory_stats(gpu)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # Linux forgets the highest memory so far
        except OSError:
            self.told = False

    def read(self) -> int | None:
        """Bytes; None where the system does not tell."""
        if self.gpu is not None:
            import torch

            return int(torch.cuda.max_memory_allocated(self.gpu))
        lines = Path("/proc/self/status").read_text().splitlines() if self.told else []
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
