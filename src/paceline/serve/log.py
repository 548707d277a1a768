"""The log of requests: JSON Lines that `paceline replay` reads as they are, one line an answer. Off unless asked for.

It holds the token ids of prompts and answers, that is, everything that users said and got.
"""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from time import time

from paceline.records import Appender
from paceline.serve.worker import Job


class RequestLog:
    """Appends to a file; a kill leaves whole lines."""

    def __init__(self, file: Path):
        self._lines = Appender.open(file)
        self._lock = Lock()

    def write(self, job: Job) -> None:
        """One answer."""
        done = job.completion
        record = {
            "time": round(time(), 3),
            "prompt_tokens": job.row.tokens[: job.row.prompt_length].tolist() if job.row else [],
            "tokens": done.tokens,
            "finish_reason": done.finish_reason,
            "seconds": round(done.seconds, 4),
            "rounds": done.rounds,
            "drafted": done.stats.draft_tokens,
            "temperature": job.params.temperature,
        }
        with self._lock:
            self._lines.append([record])

    def close(self) -> None:
        """Close the file."""
        self._lines.close()
