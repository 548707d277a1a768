"""The progress line of a training, and its log: JSON Lines of loss, learning rate, gradient norm and speed."""

import json
import math
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from paceline.errors import PacelineError
from paceline.jsonl import Appender, objects, write_whole
from paceline.train.plan import LoopConfig, Progress, seconds_left


class Reporter:
    """The progress line and the log. Processes other than the first print and write nothing."""

    def __init__(self, config: LoopConfig, log: Path, quiet: bool) -> None:
        self._config, self._log, self._quiet = config, log, quiet
        self._console = Console(stderr=True, quiet=quiet)
        # It shows nothing if standard error is not a terminal; then some log points print a line instead.
        self._status = self._console.status("compiling ...", spinner="line")
        self._since = (0.0, 0)
        self._printed = False

    def __enter__(self) -> "Reporter":
        self._status.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._status.__exit__(*error)

    def start(self, progress: Progress) -> None:
        """Drop rows that a killed run wrote after its last checkpoint, so that no step is logged twice."""
        self._since = (time.monotonic(), progress.tokens)
        if self._quiet:
            return
        self._log.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read_log(self._log) if row["step"] <= progress.step]
        write_whole(self._log, "".join(json.dumps(row) + "\n" for row in kept))

    def say(self, text: str) -> None:
        self._console.print(text)

    def step(self, progress: Progress, loss: Tensor, norm: Tensor | float | None, rate: float) -> None:
        """Note the loss of a step; at every `log_every`-th, log the mean and show it. PacelineError if it is NaN."""
        config = self._config
        progress.losses.append(float(loss))
        if progress.step % config.log_every:
            return
        mean = sum(progress.losses) / len(progress.losses)
        progress.losses = []
        if not math.isfinite(mean):
            raise PacelineError(f"the loss is {mean} at step {progress.step}; try a smaller --lr")
        now = time.monotonic()
        speed = (progress.tokens - self._since[1]) / max(now - self._since[0], 1e-9)
        line = (
            f"step {progress.step}  loss {mean:.3f}  lr {rate:.2e}  {speed:,.0f} tokens/s  "
            f"{progress.tokens / 1e6:.2f} M tokens  {seconds_left(config, progress, speed) / 60:.1f} min left"
        )
        if self._console.is_terminal:
            self._status.update(line)
        elif not self._printed or progress.step % (10 * config.log_every) == 0:
            self.say(line)
            self._printed = True
        self._write(
            progress,
            {
                "loss": round(mean, 4), "lr": rate, "norm": round(float(norm or 0), 3),
                "tokens_per_s": round(speed), "minutes": round(progress.seconds / 60, 2),
            },
        )  # fmt: skip
        self._since = (now, progress.tokens)

    def validation(self, progress: Progress, row: dict[str, float]) -> None:
        self._write(progress, {"minutes": round(progress.seconds / 60, 2), "valid": row})
        self.say("  valid  " + "  ".join(f"{name} {loss:.3f}" for name, loss in row.items()))

    def _write(self, progress: Progress, row: dict[str, Any]) -> None:
        if not self._quiet:
            with Appender.open(self._log) as lines:
                lines.append([{"step": progress.step, "tokens": progress.tokens, **row}])


def read_log(path: Path) -> list[dict[str, Any]]:
    """The rows of a log, in order."""
    return [row for _, row in objects(path, PacelineError, "a row of a training's log")] if path.exists() else []
