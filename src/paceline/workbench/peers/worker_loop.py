"""What the scripts of other environments share: answering lines of JSON with lines of JSON, and what memory they took.
See `worker.py`.

    serve(Engine)      # Engine(the first line), then its `answer` to every other line, or `forget` or `nudge`

Imports nothing of Paceline: it runs where only another engine is installed. Answers go to what was standard output when
it started; whatever the engine and its children print there goes to standard error instead."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

# A script's folder comes first in its search path, and modules in this one are called as the engines are.
_HERE = Path(__file__).resolve().parent
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != _HERE]


def serve(engine: Callable[[dict[str, Any]], Any]) -> None:
    """Make an engine of the first line, say {"ready": its facts} or {"missing": why}, and do what the others ask."""
    _die_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests = map(json.loads, sys.stdin)
    try:
        made = engine(next(requests))
    except ImportError as error:
        return _send(answers, {"missing": _one_line(error)})
    except Exception as error:
        return _send(answers, {"error": _one_line(error)})
    _send(answers, {"ready": made.facts()})
    for request in requests:
        try:
            _send(answers, _done(made, request))
        except Exception as error:
            _send(answers, {"error": _one_line(error)})


def _done(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """{"forget": true}: its drafter as new; {"wake": seconds}: busy for so long with short answers; else an answer."""
    if "forget" in request:
        engine.forget()
    elif "wake" in request:
        began = perf_counter()
        while perf_counter() - began < request["wake"]:
            engine.nudge()
    else:
        return dict(engine.answer(request))
    return {"done": True}


def _die_with_parent() -> None:
    """Whoever asks stops this process between two answers, and it could not see then that nobody will ask any more."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _send(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


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
