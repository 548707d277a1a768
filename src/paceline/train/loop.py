"""The one training loop every recipe shares.

It is given a module whose forward takes a batch and returns a loss, and a stream of batches; it does the rest: bf16
autocast and several processes through accelerate, Muon and AdamW (`optimisers.py`), the schedule (`plan.py`), clipping,
checkpoints from which a run resumes exactly (`checkpoint.py`), validation by source, and a log (`log.py`).

Every process draws the same batch and trains on its share of the rows, so the number of processes changes the speed
and nothing else: `torchrun --nproc-per-node 2 -m paceline.train ...`.

Doesn't know: language models, drafters, tokenizers, text.
"""

import signal
import time
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.train.checkpoint import Resumable, load_checkpoint, save_checkpoint
from paceline.train.log import Reporter
from paceline.train.optimisers import make_optimisers
from paceline.train.plan import LoopConfig, Progress, learning_rate, share_done

Batch = dict[str, Tensor]


class Stream(Resumable, Protocol):
    """A source of batches whose position can be saved. `progress`, 0 to 1, lets the mixture change over a run."""

    def next(self, progress: float) -> Batch: ...


class StopSignal:
    """SIGINT and SIGTERM ask for a clean stop; a second one ends the process as usual."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._ask)
            except ValueError:  # not in the main thread: the caller's business
                break
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(number, self._before[number])


def train(
    module: nn.Module,
    stream: Stream,
    config: LoopConfig,
    run: Path,
    validation: dict[str, list[Batch]] | None = None,
    stop_after: int | None = None,
) -> bool:
    """Train `module` in place until the budget is spent; True when it is, False when a signal stopped the run.

    run         folder of checkpoint and log; if it has a checkpoint, the run goes on from there
    validation  held-out batches by source
    stop_after  a step after which to stop as a signal would; for tests"""
    torch.manual_seed(config.seed)
    accelerator = Accelerator(mixed_precision=config.mixed_precision, cpu=not torch.cuda.is_available())
    first = accelerator.is_main_process
    optimisers = make_optimisers(module, config)
    prepared, *wrapped = accelerator.prepare(module, *optimisers)
    checkpoint = run / "checkpoint.safetensors"
    reporter = Reporter(config, run / "log.jsonl", quiet=not first)
    progress = Progress()
    if checkpoint.exists():
        progress = load_checkpoint(checkpoint, module, optimisers, stream)
        reporter.say(f"resumed at step {progress.step}, {progress.tokens:,} tokens")
    base, began = progress.seconds, time.monotonic()
    saved = validated = base
    reporter.start(progress)
    module.train()

    def save() -> None:
        if first:
            save_checkpoint(checkpoint, module, optimisers, progress, stream)
        accelerator.wait_for_everyone()

    def check() -> None:
        if validation:
            reporter.validation(progress, validate(module, accelerator, validation) if first else {})
            accelerator.wait_for_everyone()

    with StopSignal() as stop, reporter:
        while (done := share_done(config, progress)) < 1:
            rate = learning_rate(config, progress.step, done)
            for optimiser in optimisers:
                for group in optimiser.param_groups:
                    group["lr"] = rate
            batch = stream.next(done)
            loss = _forward_backward(prepared, accelerator, batch, config.micro_tokens)
            norm = accelerator.clip_grad_norm_(prepared.parameters(), config.clip)
            for accelerated in wrapped:
                accelerated.step()
                accelerated.zero_grad()
            progress.step += 1
            progress.tokens += batch["input_ids"].numel()
            progress.seconds = base + time.monotonic() - began
            # Signals and clocks differ between processes; all must decide the same.
            progress.seconds, stopping = _agree(accelerator, progress.seconds, stop.requested)
            reporter.step(progress, loss, norm, rate)
            if progress.seconds - validated > 60 * config.validate_every:
                check()
                validated = progress.seconds
            if progress.seconds - saved > 60 * config.save_every:
                save()
                saved = progress.seconds
            if stopping or progress.step == stop_after:
                save()
                reporter.say(f"stopped at step {progress.step}; the same command goes on from there")
                return False
        check()
        save()
    return True


def _forward_backward(prepared: nn.Module, accelerator: Accelerator, batch: Batch, micro_tokens: int) -> Tensor:
    """Gradients of this process's rows, summed over micro-batches; the mean loss. Gradients meet in the last one."""
    rows = len(next(iter(batch.values())))
    world, rank = accelerator.num_processes, accelerator.process_index
    if rows % world:
        raise PacelineError(f"a batch of {rows} rows cannot be shared by {world} processes; choose a divisor of {rows}")
    own = {k: t[rank::world] for k, t in batch.items()}
    micro_rows = max(micro_tokens * rows // batch["input_ids"].numel(), 1)
    starts = range(0, rows // world, micro_rows)
    total = torch.zeros((), device=accelerator.device)
    for start in starts:
        part = {k: t[start : start + micro_rows].to(accelerator.device) for k, t in own.items()}
        share = len(next(iter(part.values()))) / (rows // world)
        together = nullcontext() if start == starts[-1] else accelerator.no_sync(prepared)
        with together:
            loss = prepared(**part) * share
            accelerator.backward(loss)
        total += loss.detach()
    return total if world == 1 else accelerator.reduce(total, "mean")


def _agree(accelerator: Accelerator, seconds: float, stopping: bool) -> tuple[float, bool]:
    if accelerator.num_processes == 1:
        return seconds, stopping
    both = torch.tensor([seconds, float(stopping)], dtype=torch.float64, device=accelerator.device)
    gathered = accelerator.gather(both[None])
    return float(gathered[0, 0]), bool(gathered[:, 1].any())


def validate(module: nn.Module, accelerator: Accelerator, validation: dict[str, list[Batch]]) -> dict[str, float]:
    """Mean loss of each source."""
    module.eval()
    row = {}
    with torch.no_grad(), accelerator.autocast():
        for name, batches in validation.items():
            values = [float(module(**{k: t.to(accelerator.device) for k, t in b.items()})) for b in batches]
            row[name] = round(sum(values) / max(len(values), 1), 4)
    module.train()
    return row
