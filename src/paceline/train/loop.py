"""The one training loop every recipe shares.

It is given a module whose forward takes a batch and returns a loss, and a stream of batches; it does the rest: bf16
autocast through accelerate, AdamW, a warm-up-stable-decay schedule, clipping, checkpoints from which a run resumes
exactly, validation by source, a progress line and a JSON-lines log. The budget is a number of tokens or of minutes;
with minutes the decay is planned on the clock, so a run that was paused still ends in its slot.

Doesn't know: language models, drafters, tokenizers, text.

    python -m paceline.train pretrain --help
"""

import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.errors import PacelineError

Batch = dict[str, Tensor]


class Stream(Protocol):
    """A source of batches whose position can be saved. `progress` lets the mixture change over a run."""

    def next(self, progress: float) -> Batch: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class LoopConfig:
    """How long and how to train. Give `tokens` or `minutes`."""

    tokens: int | None = None  # budget, input tokens
    minutes: float | None = None  # budget, wall clock, pauses included
    peak_lr: float = 2e-3
    final_lr: float = 0.02  # share of the peak
    warmup_steps: int = 100
    decay: float = 0.25  # last share of the budget, learning rate falls linearly
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0  # gradient norm
    mixed_precision: str = "bf16"  # or "no"
    seed: int = 0
    log_every: int = 20  # steps
    save_every: float = 5.0  # minutes
    validate_every: float = 10.0  # minutes; and always at the end

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.minutes is None):
            raise PacelineError("give the training budget as tokens or as minutes, one of the two")


@dataclass
class Progress:
    """Where a run is. `seconds` adds up over resumes."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


def share_done(config: LoopConfig, progress: Progress) -> float:
    """Share of the budget that is spent, 0 to 1."""
    if config.tokens is not None:
        return min(progress.tokens / config.tokens, 1.0)
    assert config.minutes is not None
    return min(progress.seconds / (60 * config.minutes), 1.0)


def learning_rate(config: LoopConfig, step: int, done: float) -> float:
    """Warm-up by steps, then stable, then linear decay over the last `decay` of the budget."""
    rate = config.peak_lr * min((step + 1) / max(config.warmup_steps, 1), 1.0)
    if config.decay > 0 and done > 1 - config.decay:
        left = max(1 - done, 0.0) / config.decay
        rate *= config.final_lr + (1 - config.final_lr) * left
    return rate


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay for matrices, none for norms and biases. Tied weights count once."""
    trained = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]


def save_checkpoint(
    path: Path, module: nn.Module, optimiser: torch.optim.Optimizer, progress: Progress, stream: Stream
) -> None:
    """One safetensors file, written beside its final place and moved there: a kill leaves the old one whole."""
    tensors = {f"model.{name}": p.detach() for name, p in module.named_parameters()}
    for index, state in optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{index}.{key}": torch.as_tensor(value) for key, value in state.items()}
    tensors["rng"] = torch.get_rng_state()
    header = {"progress": vars(progress), "stream": stream.state_dict()}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    save_file({k: t.contiguous() for k, t in tensors.items()}, beside, metadata={"paceline": json.dumps(header)})
    with beside.open("rb") as stream_:
        os.fsync(stream_.fileno())
    os.replace(beside, path)


def load_checkpoint(path: Path, module: nn.Module, optimiser: torch.optim.Optimizer, stream: Stream) -> Progress:
    """Put everything back as it was; raises when the checkpoint is of another model."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["paceline"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  not a dict
    own = {f"model.{name}": p for name, p in module.named_parameters()}
    saved = {key: t for key, t in tensors.items() if key.startswith("model.")}
    if {k: p.shape for k, p in own.items()} != {k: t.shape for k, t in saved.items()}:
        raise PacelineError(f"{path} is a checkpoint of another model; choose another --run folder or delete it")
    with torch.no_grad():
        for key, parameter in own.items():
            parameter.copy_(saved[key])
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if key.startswith("optimiser."):
            _, index, name = key.split(".")
            state.setdefault(int(index), {})[name] = tensor
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
    torch.set_rng_state(tensors["rng"])
    stream.load_state_dict(header["stream"])
    return Progress(**header["progress"])


class StopSignal:
    """SIGINT and SIGTERM ask for a clean stop; a second one ends the process as usual."""

    def __init__(self) -> None:
        self.asked = False
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
        self.asked = True
        signal.signal(number, self._before[number])


def train(
    module: nn.Module,
    stream: Stream,
    config: LoopConfig,
    run: Path,
    validation: dict[str, list[Batch]] | None = None,
    log: Path | None = None,
    stop_after: int | None = None,
    on_step: Callable[[Progress, float], None] | None = None,
) -> bool:
    """Train `module` in place until the budget is spent; True when it is, False when a signal stopped the run.

    `run` holds the checkpoint; a run folder that already has one is resumed. `stop_after` (steps) acts as a signal
    would, for tests.
    """
    console = Console(stderr=True)
    torch.manual_seed(config.seed)
    accelerator = Accelerator(mixed_precision=config.mixed_precision, cpu=not torch.cuda.is_available())
    optimiser = torch.optim.AdamW(
        parameter_groups(module, config.weight_decay), lr=config.peak_lr, betas=config.betas, fused=True
    )
    prepared, optimiser = accelerator.prepare(module, optimiser)
    checkpoint, log = run / "checkpoint.safetensors", log or run / "log.jsonl"
    progress = Progress()
    if checkpoint.exists():
        progress = load_checkpoint(checkpoint, module, optimiser.optimizer, stream)
        console.print(f"resumed at step {progress.step}, {progress.tokens:,} tokens")
    log.parent.mkdir(parents=True, exist_ok=True)
    base, began = progress.seconds, time.monotonic()
    saved = validated = base
    shown_step, shown_at, shown_tokens = progress.step, began, progress.tokens
    losses: list[Tensor] = []
    module.train()

    def write(row: dict[str, Any]) -> None:
        with log.open("a") as file:
            file.write(json.dumps({"step": progress.step, "tokens": progress.tokens, **row}) + "\n")

    def check() -> None:
        if validation:
            row = validate(prepared, accelerator, validation)
            write({"minutes": round(progress.seconds / 60, 2), "valid": row})
            console.print("  valid  " + "  ".join(f"{name} {loss:.3f}" for name, loss in row.items()))

    with StopSignal() as stop:
        # Silent where standard error is not a terminal: there, one line at every log point instead.
        with console.status("compiling ...", spinner="line") as status:
            while (done := share_done(config, progress)) < 1:
                rate = learning_rate(config, progress.step, done)
                for group in optimiser.param_groups:
                    group["lr"] = rate
                batch = {k: t.to(accelerator.device) for k, t in stream.next(done).items()}
                loss = prepared(**batch)
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(prepared.parameters(), config.clip)
                optimiser.step()
                optimiser.zero_grad()
                losses.append(loss.detach())
                progress.step += 1
                progress.tokens += batch["input_ids"].numel()
                progress.seconds = base + time.monotonic() - began
                if on_step:
                    on_step(progress, float(losses[-1]))
                if progress.step % config.log_every == 0:
                    mean = float(torch.stack(losses).mean())
                    if not math.isfinite(mean):
                        raise PacelineError(f"the loss is {mean} at step {progress.step}; try a smaller --lr")
                    now = time.monotonic()
                    speed = (progress.tokens - shown_tokens) / max(now - shown_at, 1e-9)
                    left = _seconds_left(config, progress, speed)
                    line = (
                        f"step {progress.step}  loss {mean:.3f}  lr {rate:.2e}  {speed:,.0f} tokens/s  "
                        f"{progress.tokens / 1e6:.2f} M tokens  {left / 60:.1f} min left"
                    )
                    if console.is_terminal:
                        status.update(line)
                    elif shown_step == 0 or progress.step % (10 * config.log_every) == 0:
                        console.print(line)
                    write(
                        {
                            "loss": round(mean, 4), "lr": rate, "norm": round(float(norm), 3),
                            "tokens_per_s": round(speed), "minutes": round(progress.seconds / 60, 2),
                        }
                    )  # fmt: skip
                    losses, shown_step, shown_at, shown_tokens = [], progress.step, now, progress.tokens
                if progress.seconds - validated > 60 * config.validate_every:
                    check()
                    validated = progress.seconds
                if progress.seconds - saved > 60 * config.save_every:
                    save_checkpoint(checkpoint, module, optimiser.optimizer, progress, stream)
                    saved = progress.seconds
                if stop.asked or progress.step == stop_after:
                    save_checkpoint(checkpoint, module, optimiser.optimizer, progress, stream)
                    console.print(f"stopped at step {progress.step}; the same command goes on from there")
                    return False
        check()
        save_checkpoint(checkpoint, module, optimiser.optimizer, progress, stream)
    return True


def validate(prepared: nn.Module, accelerator: Accelerator, validation: dict[str, list[Batch]]) -> dict[str, float]:
    """Mean loss of each source."""
    prepared.eval()
    row = {}
    with torch.no_grad():
        for name, batches in validation.items():
            values = [float(prepared(**{k: t.to(accelerator.device) for k, t in b.items()})) for b in batches]
            row[name] = round(sum(values) / max(len(values), 1), 4)
    prepared.train()
    return row


def _seconds_left(config: LoopConfig, progress: Progress, speed: float) -> float:
    if config.tokens is not None:
        return (config.tokens - progress.tokens) / max(speed, 1e-9)
    assert config.minutes is not None
    return 60 * config.minutes - progress.seconds


def read_log(path: Path) -> list[dict[str, Any]]:
    """The rows of a log, in order."""
    lines: Iterable[str] = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.strip()]
