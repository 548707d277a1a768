"""Engines in processes of their own, with the interpreters of environments of their own."""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.workbench.contestant import Contestant, NotInstalled
from paceline.workbench.peers.setup import Setup

THREADS = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")
ANSWER_SECONDS = 3600.0  # of an answer, after which an engine is taken to hang


def environment(setup: Setup) -> dict[str, str]:
    """Ours, without what would lead another interpreter to our packages, and to a GPU that the target does not use."""
    ours = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    if setup.device == "cpu":
        ours["CUDA_VISIBLE_DEVICES"] = ""
    # numba, which vLLM's n-grams are compiled with, sets the number of torch's threads to its own.
    return ours | ({} if setup.threads is None else dict.fromkeys(THREADS, str(setup.threads)))


class Worker:
    """A process that answers a line of JSON with a line of JSON. Its standard error goes to a file of its own.

    It is stopped between two answers, on Linux: an idle vLLM's threads wake up a thousand times a second, which makes
    whoever answers meanwhile slower. (Its script sees to it that it does not outlive us.)

    command  interpreter and script; name  what an error calls it; how  how to install what it runs.
    Raises NotInstalled if there is no such program."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], name: str, how: str):
        self.name = name
        self.log = tempfile.NamedTemporaryFile(prefix="paceline-peer-", suffix=".log", delete=False)  # noqa: SIM115
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log,
                env=dict(environment),
                text=True,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C is ours to answer, and its children die with it
            )
        except OSError as error:
            self._drop_log()
            raise NotInstalled(f"{name}: {command[0]} cannot be run ({error.strerror}): {how}") from None
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with suppress(ValueError):  # closed meanwhile
            for line in self.process.stdout:
                self._lines.put(line)
        self._lines.put("")

    def ask(self, message: Mapping[str, Any], limit: float | None = None) -> dict[str, Any]:
        """Its answer. PacelineError for an error, its death, or after `limit` seconds, which end it as Ctrl-C does.

        limit  None: ANSWER_SECONDS."""
        limit = ANSWER_SECONDS if limit is None else limit
        assert self.process.stdin is not None
        try:
            self._pause(False)
            with suppress(BrokenPipeError):  # it is dead; the end of its output says so too
                self.process.stdin.write(json.dumps(message) + "\n")
                self.process.stdin.flush()
            line = self._lines.get(timeout=limit)
            reply = json.loads(line) if line else None
        except queue.Empty:
            self._kill()
            raise PacelineError(f"{self.name} said nothing for {limit:g} s; {self._tail()}") from None
        except ValueError:
            self._kill()
            raise PacelineError(f"{self.name} answered what is no JSON: {line.strip()[:200]!r}") from None
        except BaseException:
            self._kill()
            raise
        if reply is None:
            self._lines.put("")  # for whoever asks again
            self._kill()
            raise PacelineError(f"{self.name} ended (exit status {self.process.returncode}); {self._tail()}")
        self._pause(True)
        if "error" in reply:
            raise PacelineError(f"{self.name}: {reply['error']}")
        return dict(reply)

    def stop(self) -> None:
        """Let it end by itself, or make it; removes its log."""
        self._pause(False)
        with suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        self._kill()
        self._drop_log()

    def _pause(self, on: bool) -> None:
        if sys.platform == "linux" and self.process.poll() is None:
            self.process.send_signal(signal.SIGSTOP if on else signal.SIGCONT)

    def _kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _drop_log(self) -> None:
        self.log.close()
        Path(self.log.name).unlink(missing_ok=True)

    def _tail(self) -> str:
        """The last line of its standard error."""
        lines = Path(self.log.name).read_text("utf-8", errors="replace").strip().splitlines()
        return f"its last words: {lines[-1].strip()[:300]}" if lines else "it left no message"


class InWorker(Contestant):
    """A contestant in a process of its own. engine: its name; how: what to install, and what to say then."""

    engine = how = ""

    def __init__(self, name: str, setup: Setup, config: Any, max_batch: int):
        super().__init__(name, max_batch=max_batch, in_process=False)
        self.setup, self.config = setup, config
        self.worker: Worker | None = None

    def start(self, script: Path, environment: Mapping[str, str], asked: Mapping[str, Any], limit: float) -> None:
        """Run a script with --peer-python; what it says of itself becomes the settings."""
        python = self.setup.python
        if python is None:
            raise NotInstalled(f"{self.name}: {self.engine} wants an environment of its own: {self.how}")
        self.worker = Worker([python, str(script)], environment, self.name, self.how)
        reply = self.worker.ask(asked, limit)
        if "missing" in reply:
            raise NotInstalled(f"{self.name}: {python} cannot run it ({reply['missing']}): {self.how}")
        self.settings = dict(reply["ready"])

    def ask(self, message: Mapping[str, Any], limit: float | None = None) -> dict[str, Any]:
        if self.worker is None:
            raise PacelineError(f"{self.name} is not running")
        return self.worker.ask(message, limit)

    def wake(self, seconds: float) -> None:
        if self.worker is not None:
            self.worker.ask({"wake": seconds})

    def close(self) -> None:
        if self.worker is not None:
            self.worker.stop()
            self.worker = None
