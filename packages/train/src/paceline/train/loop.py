"""The training loop of all recipes.

It takes a module whose forward maps a batch to a loss, and a stream of batches. It does the rest: bf16 autocast and
several processes through accelerate, Muon and AdamW, the learning rate, clipping, checkpoints from which a run resumes
exactly, validation by source, and a log.

Every process draws the same batch and trains on its share of the rows, so the number of processes changes only the
speed: `torchrun --nproc-per-node 2 -m paceline train ...`."""

import math
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from rich.console import Console
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.interrupt import Interrupt
from paceline.outputs import STEPS, Appender, replacing
from paceline.textfiles import objects

if TYPE_CHECKING:
    from accelerate import Accelerator

warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")  # Intended for norms.

Batch = dict[str, Tensor]
LOG = "log.jsonl"  # The log of a run, in its folder.
CHECKPOINT = "checkpoint.pt"  # A training's checkpoint, in the folder of --checkpoints.
EARLIER = "checkpoint.safetensors"  # The checkpoint of a training that an earlier version began.

# Schedule: warm-up, stable, linear decay. With a budget of minutes the decay follows the clock, so that a run that was
# paused still ends in time.


@dataclass(frozen=True)
class LoopConfig:
    """How long and how to train. Give either `tokens` or `minutes`."""

    tokens: int | None = None  # The budget in input tokens.
    minutes: float | None = None  # The budget in minutes of wall clock, pauses included.
    optimiser: str = "muon"  # Muon for matrices inside the model; "adamw": AdamW for all parameters
    peak_lr: float = 2e-3
    final_lr: float = 0.02  # A share of the peak rate.
    warmup_steps: int = 100
    decay: float = 0.25  # The learning rate falls linearly in this last share of the budget.
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0  # gradient norm
    micro_tokens: int = 4096  # Tokens in one forward pass; larger batches are cut into several.
    mixed_precision: str = "bf16"  # or "no"
    seed: int = 0
    log_every: int = 20  # steps
    save_every: float = 5.0  # minutes
    validate_every: float = 10.0  # minutes, and at the end

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.minutes is None):
            raise PacelineError("give the training budget as tokens or as minutes, one of the two")
        if self.optimiser not in ("muon", "adamw"):
            raise PacelineError(f"no optimiser {self.optimiser!r}; there are muon and adamw")


@dataclass
class Progress:
    """The state of a run. seconds: summed over resumes; losses: since the last row of the log."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)


def share_done(config: LoopConfig, progress: Progress) -> float:
    """Share of the budget that is spent, 0 to 1. A budget of 0 is spent at once, to measure the untrained module."""
    if config.tokens is not None:
        spent, budget = float(progress.tokens), float(config.tokens)
    else:
        assert config.minutes is not None
        spent, budget = progress.seconds, 60 * config.minutes
    return min(spent / budget, 1.0) if budget else 1.0


def learning_rate(config: LoopConfig, step: int, done: float) -> float:
    """Warm-up by steps, then stable, then linear decay over the last `decay` of the budget."""
    rate = config.peak_lr * min((step + 1) / max(config.warmup_steps, 1), 1.0)
    if config.decay > 0 and done > 1 - config.decay:
        left = max(1 - done, 0.0) / config.decay
        rate *= config.final_lr + (1 - config.final_lr) * left
    return rate


class Stream(Protocol):
    """A source of batches whose position can be saved. progress, 0 to 1: the mixture may change over a run."""

    def next(self, progress: float) -> Batch: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def save_checkpoint(
    path: Path, module: nn.Module, optimisers: Sequence[torch.optim.Optimizer], progress: Progress, stream: Stream
) -> None:
    """Write all state of a run to one file, first under another name: a kill leaves the old file whole."""
    state = {
        "model": {name: p.detach() for name, p in module.named_parameters()},
        "optimisers": [optimiser.state_dict()["state"] for optimiser in optimisers],
        "rng": torch.get_rng_state(),
        # This device's state is enough: all processes draw equally many numbers.
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "progress": vars(progress),
        "stream": stream.state_dict(),
    }
    with replacing(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch says so that the disk is full.
            raise OSError(str(error).partition("\n")[0]) from None


def load_checkpoint(
    path: Path, module: nn.Module, optimisers: Sequence[torch.optim.Optimizer], stream: Stream
) -> Progress:
    """Restore a run. PacelineError if the file is broken or the checkpoint is of another model."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        saved = {name: tensor.shape for name, tensor in state["model"].items()}
        of_each = [*state["optimisers"]]
    except (RuntimeError, UnpicklingError, EOFError, KeyError, TypeError, AttributeError, IndexError) as error:
        why = str(error).partition("\n")[0]
        raise PacelineError(f"{path} is not a whole checkpoint ({why}); delete it to start again") from None
    if {name: p.shape for name, p in module.named_parameters()} != saved or len(of_each) != len(optimisers):
        raise PacelineError(f"{path} is a checkpoint of another model; choose other --checkpoints or delete it")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(state["model"][name])
    for optimiser, of in zip(optimisers, of_each, strict=True):
        optimiser.load_state_dict({"state": of, "param_groups": optimiser.state_dict()["param_groups"]})
    torch.set_rng_state(state["rng"])
    if torch.cuda.is_available() and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    stream.load_state_dict(state["stream"])
    return Progress(**state["progress"])


Look = Callable[[int], tuple[dict[str, float], str]]
"""From the tokens read so far to figures for the log, and a line that says them (`outlook.py`)."""


class Reporter:
    """The progress line, and the log: JSON Lines of loss, learning rate, gradient norm, speed. quiet: neither. From
    `start` on no other training can write into the log."""

    def __init__(self, config: LoopConfig, log: Path, quiet: bool) -> None:
        self._config, self._log, self._quiet = config, log, quiet
        self._lines: Appender | None = None
        self._console = Console(stderr=True, quiet=quiet)
        # Shows nothing if standard error is not a terminal; every tenth log point prints a line then.
        self._status = self._console.status("compiling ...", spinner="line")
        self._since = (0.0, 0)
        self._printed = False

    def __enter__(self) -> Self:
        self._status.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._status.__exit__(*error)
        if self._lines is not None:
            self._lines.close()

    def start(self, progress: Progress) -> None:
        """Drop log rows that a killed run wrote after its last checkpoint, so that no step is logged twice."""
        self._since = (time.monotonic(), progress.tokens)
        if self._quiet:
            return
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._lines = Appender.open(self._log, STEPS)
        self._lines.replace(row for row in read_log(self._log) if row["step"] <= progress.step)

    def say(self, text: str) -> None:
        self._console.print(text)

    def step(self, progress: Progress, loss: Tensor, norm: Tensor | float | None, rate: float) -> None:
        """Record a step's loss; every `log_every` steps log and show the mean. PacelineError if that is not finite."""
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
        if config.tokens is not None:
            left = (config.tokens - progress.tokens) / max(speed, 1e-9)
        else:
            left = 60 * (config.minutes or 0) - progress.seconds
        line = (
            f"step {progress.step}  loss {mean:.3f}  lr {rate:.2e}  {speed:,.0f} tokens/s  "
            f"{progress.tokens / 1e6:.2f} M tokens  {left / 60:.1f} min left"
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

    def validation(
        self, progress: Progress, losses: dict[str, float], expected: tuple[dict[str, float], str] | None
    ) -> None:
        """Log and say the losses by source, and what `Look` returns."""
        figures, line = expected or ({}, "")
        row = {"minutes": round(progress.seconds / 60, 2), "valid": losses}
        self._write(progress, row | ({"expected": figures} if figures else {}))
        self.say("  valid  " + "  ".join(f"{name} {loss:.3f}" for name, loss in losses.items()))
        if line:
            self._console.print(f"  {line}", highlight=False, soft_wrap=True)

    def _write(self, progress: Progress, row: dict[str, Any]) -> None:
        if self._lines is not None:
            self._lines.append([{"step": progress.step, "tokens": progress.tokens, **row}])


def read_log(path: Path) -> list[dict[str, Any]]:
    return [row for _, row in objects(path, PacelineError, "a row of a training's log")] if path.exists() else []


def make_optimisers(module: nn.Module, config: LoopConfig) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between embedding and head, AdamW for the rest. Tied weights count once.

    Muon's steps are scaled to the size of AdamW's (Liu et al. 2025, "Muon is scalable for LLM training", section 2), so
    that both use the same learning rate. Matrices have weight decay, norms and biases none."""
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    inner = [p for name, p in trained if p.dim() == 2 and not _is_table(name)]
    tables = [p for name, p in trained if p.dim() >= 2 and (p.dim() > 2 or _is_table(name))]
    vectors = [p for _, p in trained if p.dim() < 2]
    muon: list[torch.optim.Optimizer] = []
    if config.optimiser == "muon" and inner:
        muon = [
            torch.optim.Muon(inner, lr=config.peak_lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
        ]
        inner = []
    groups = [
        {"params": inner + tables, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    adamw = [torch.optim.AdamW(groups, lr=config.peak_lr, betas=config.betas, fused=True)] if groups else []
    return [*muon, *adamw]


def _is_table(name: str) -> bool:
    """Whether a parameter is an embedding or an output head: rows are tokens, so Muon's orthogonal steps do not fit."""
    return any(part in name for part in ("embed", "lm_head", "markov", "codebook"))


def train(
    module: nn.Module, stream: Stream, config: LoopConfig, run: Path, validation: dict[str, list[Batch]] | None = None,
    stop_after: int | None = None, look: Look | None = None, look_first: bool = False,
) -> bool:  # fmt: skip
    """Train `module` in place until the budget is spent. Returns True then, and False when a signal stopped the run.

    run         folder of checkpoint and log; the run resumes from a checkpoint in it.
    validation  held-out batches by source.
    look        called whenever these are read, with the tokens read so far. look_first: also before the first step.
    stop_after  a step after which to stop as on a signal; for tests."""
    from accelerate import Accelerator  # Imported late, because --help needs no extra.

    torch.manual_seed(config.seed)
    accelerator = Accelerator(mixed_precision=config.mixed_precision, cpu=not torch.cuda.is_available())
    first = accelerator.is_main_process
    optimisers = make_optimisers(module, config)
    prepared, *wrapped = accelerator.prepare(module, *optimisers)
    checkpoint = run / CHECKPOINT
    reporter = Reporter(config, run / LOG, quiet=not first)
    progress = Progress()
    if not checkpoint.exists() and (run / EARLIER).exists():
        old = f"{run / EARLIER} is of an earlier version of Paceline, which alone can go on with it"
        raise PacelineError(f"{old}: delete it to start again, or choose other --checkpoints")
    if checkpoint.exists():
        progress = load_checkpoint(checkpoint, module, optimisers, stream)
        reporter.say(f"resumed at step {progress.step}, {progress.tokens:,} tokens")
    base, began = progress.seconds, time.monotonic()
    saved = validated = base
    module.train()

    def save() -> None:
        if first:
            save_checkpoint(checkpoint, module, optimisers, progress, stream)
        accelerator.wait_for_everyone()

    def check() -> None:
        if validation:
            losses = validate(module, accelerator, validation) if first else {}
            with accelerator.autocast():
                expected = look(progress.tokens) if look is not None and first else None
            module.train()
            reporter.validation(progress, losses, expected)
            accelerator.wait_for_everyone()

    with Interrupt(signal.SIGINT, signal.SIGTERM) as stop, reporter:
        reporter.start(progress)
        if look_first and not progress.step and share_done(config, progress) < 1:
            check()
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
            # Signals and clocks differ between processes, but all must make the same decision.
            progress.seconds, stopping = _agree(accelerator, progress.seconds, stop.pressed)
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


def _forward_backward(prepared: nn.Module, accelerator: "Accelerator", batch: Batch, micro_tokens: int) -> Tensor:
    """The mean loss; gradients accumulate over this process's micro-batches, and are exchanged in the last one."""
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
        with nullcontext() if start == starts[-1] else accelerator.no_sync(prepared):
            loss = prepared(**part) * share
            accelerator.backward(loss)
        total += loss.detach()
    return total if world == 1 else accelerator.reduce(total, "mean")


def _agree(accelerator: "Accelerator", seconds: float, stopping: bool) -> tuple[float, bool]:
    if accelerator.num_processes == 1:
        return seconds, stopping
    both = torch.tensor([seconds, float(stopping)], dtype=torch.float64, device=accelerator.device)
    gathered = accelerator.gather(both[None])
    return float(gathered[0, 0]), bool(gathered[:, 1].any())


def validate(module: nn.Module, accelerator: "Accelerator", validation: dict[str, list[Batch]]) -> dict[str, float]:
    module.eval()
    row = {}
    with torch.no_grad(), accelerator.autocast():
        for name, batches in validation.items():
            values = [float(module(**{k: t.to(accelerator.device) for k, t in b.items()})) for b in batches]
            row[name] = round(sum(values) / max(len(values), 1), 4)
    module.train()
    return row
