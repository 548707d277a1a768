"""The log of requests: JSON Lines that `paceline replay` reads as they are, one line an answer. Off unless asked for.

It holds the token ids of prompts and answers, that is, everything that users said and got.
"""

from __future__ import annotations

import os
from pathlib import Path
from threading import Lock
from time import time

from paceline.errors import PacelineError
from paceline.jsonl import Appender
from paceline.serve.worker import Job

BLOCK = 1 << 16
"""Bytes read at once from the end of a file."""


class RequestLog:
    """Appends to a file. Each line is written at once; should a kill or a power cut leave a part of one, it is dropped
    here, before the next line could join it."""

    def __init__(self, file: Path):
        drop_part(file)
        self._lines = Appender.open(file)
        self._lock = Lock()

    def write(self, job: Job) -> None:
        """One answer."""
        done = job.completion
        record = {
            "time": round(time(), 3),
            "prompt_tokens": job.row.tokens[: job.row.prompt_length].tolist() if job.row else job.prompt,
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


def drop_part(file: Path) -> None:
    """Cut a file off after its last whole line; nothing happens if it ends with one, or is no file."""
    if not file.is_file():
        return
    try:
        with file.open("r+b") as lines:
            end = size = lines.seek(0, os.SEEK_END)
            while end:
                begin = max(end - BLOCK, 0)
                lines.seek(begin)
                if (at := lines.read(end - begin).rfind(b"\n")) >= 0:
                    end = begin + at + 1
                    break
                end = begin
            if end < size:
                lines.truncate(end)
    except OSError as error:
        raise PacelineError(f"{file} cannot be written: {error.strerror}") from error
