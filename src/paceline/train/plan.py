"""How long and how to train, where a run is, and the learning rate at every step of it.

Warm-up, stable, linear decay. The budget is a number of tokens or of minutes; with minutes the decay is planned on the
clock, so a run that was paused still ends in its slot.
"""

from dataclasses import dataclass, field

from paceline.errors import PacelineError


@dataclass(frozen=True)
class LoopConfig:
    """How long and how to train. Give `tokens` or `minutes`."""

    tokens: int | None = None  # budget, input tokens
    minutes: float | None = None  # budget, wall clock, pauses included
    optimiser: str = "muon"  # for matrices inside the model; "adamw": AdamW for all parameters
    peak_lr: float = 2e-3
    final_lr: float = 0.02  # share of the peak
    warmup_steps: int = 100
    decay: float = 0.25  # last share of the budget, in which the learning rate falls linearly
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0  # gradient norm
    micro_tokens: int = 4096  # tokens in one forward pass; larger batches are cut into several
    mixed_precision: str = "bf16"  # or "no"
    seed: int = 0
    log_every: int = 20  # steps
    save_every: float = 5.0  # minutes
    validate_every: float = 10.0  # minutes; and always at the end

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.minutes is None):
            raise PacelineError("give the training budget as tokens or as minutes, one of the two")
        if self.optimiser not in ("muon", "adamw"):
            raise PacelineError(f"no optimiser {self.optimiser!r}; there are muon and adamw")


@dataclass
class Progress:
    """Where a run is. `seconds` adds up over resumes; `losses` are those since the last row of the log."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)


def share_done(config: LoopConfig, progress: Progress) -> float:
    """Share of the budget that is spent, 0 to 1. A budget of 0 is spent at once: the untrained module is measured."""
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


def seconds_left(config: LoopConfig, progress: Progress, speed: float) -> float:
    """Seconds until the budget is spent, at `speed` tokens a second."""
    if config.tokens is not None:
        return (config.tokens - progress.tokens) / max(speed, 1e-9)
    assert config.minutes is not None
    return 60 * config.minutes - progress.seconds
