"""Losses in chunks: the logits of a batch are never held at once, and positions without a label cost nothing.

Exact (tests compare them with torch's own). On a CPU this is a third more tokens a second for a small model with a
large vocabulary; zoo/README.md has the figures.

* Cross-entropy.
* The distance of a draft's distribution from its target's. A further one is a function here and a name in `DISTANCES`.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paceline.train.layers import use_blocks

IGNORE = -100  # Label of a position that is not trained on.

CHUNK = 256  # Positions whose logits are held at once.

WAITING = 64 << 20  # Bytes of errors that wait for the product with their table's gradient.

LK_DECAY = 3.0  # How fast the share of KL in `lk` falls with the acceptance rate: the authors' best value.


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of products with `tensor`: autocast's if it is on, else the tensor's own."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def _cross_entropy(rows: Tensor, table: Tensor, weights: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy over a chunk: labels [C] token ids, rows [C, D], table [V, D].

    Returns the loss, weighted by weights [C] and summed, and its gradient with respect to the logits [C, V]."""
    log_q = torch.log_softmax((rows @ table.T).float(), -1)
    weights, labels = weights[:, None], labels.clamp_min(0)[:, None]
    token = torch.arange(table.shape[0], device=rows.device)[None]
    error = weights * (log_q.exp() - (token == labels).float())
    return -(weights * log_q.gather(1, labels)).sum(), error.to(rows.dtype)


Pair = tuple[Tensor, Tensor]


def _soft(p: Tensor, log_q: Tensor, weights: Tensor) -> Pair:
    """-sum p log q of p, log_q [..., V], weighted by weights [..., 1], and its gradient by the draft's logits."""
    return -(weights * p * log_q).sum(), weights * (log_q.exp() - p)


def _kl_and_tv(p: Tensor, log_q: Tensor, weights: Tensor) -> Pair:
    """As `_soft`, for KL(p || q) + TV(p, q)."""
    (kl, missed), (of_kl, of_missed) = _divergences(p, log_q)
    return (weights * (kl + missed)).sum(), weights * (of_kl + of_missed)


def _lk(p: Tensor, log_q: Tensor, weights: Tensor) -> Pair:
    """As `_soft`, for the hybrid LK loss: s KL(p || q) + (1 - s) TV(p, q) with s = exp(-3 a).

    a is the acceptance rate, the mean of sum min(p, q) over the chunk's positions, of each of their drafts for itself;
    s is a constant to the gradient."""
    (kl, missed), (of_kl, of_missed) = _divergences(p, log_q)
    accepted = 1 - (weights * missed).sum(0) / weights.sum(0).clamp_min(1e-20)
    share = torch.exp(-LK_DECAY * accepted)
    return (weights * torch.lerp(missed, kl, share)).sum(), weights * torch.lerp(of_missed, of_kl, share)


def _divergences(p: Tensor, log_q: Tensor) -> tuple[Pair, Pair]:
    """KL(p || q) and TV(p, q) [C, 1], and their gradients with respect to the draft's logits [C, V]."""
    q = log_q.exp()
    kl = (p * (p.clamp_min(1e-20).log() - log_q)).sum(-1, keepdim=True)
    missed = (q - p).clamp_min(0).sum(-1, keepdim=True)  # 1 - sum min(p, q): the chance that a draft is rejected
    # d missed / dq_j is 1[q_j > p_j]; through the softmax it loses its mean under q.
    above = (q > p).float()
    return (kl, missed), (q - p, q * (above - (q * above).sum(-1, keepdim=True)))


Step = Callable[..., Pair]


def _step_of(distance: Callable[[Tensor, Tensor, Tensor], Pair]) -> Step:
    """The step for a chunk: p at target_rows [C, Dt], q at rows [C, D], or [C, S, D] for S drafts of a position; both
    use `table` without a target_table."""

    def step(
        rows: Tensor, table: Tensor, weights: Tensor, target_rows: Tensor, target_table: Tensor | None = None
    ) -> Pair:
        p = torch.softmax((target_rows @ (table if target_table is None else target_table).T).float(), -1)
        p = p if rows.dim() == 2 else p[:, None]
        loss, error = distance(p, torch.log_softmax((rows @ table.T).float(), -1), weights[..., None])
        return loss, error.to(rows.dtype)

    return step


@torch.no_grad()
def overlaps(hidden: Tensor, table: Tensor, target_hidden: Tensor, target_table: Tensor) -> Tensor:
    """What p and q have in common, sum min(p, q), at N positions [N]; arguments as of `distance`."""
    p = torch.softmax((target_hidden @ target_table.T).float(), -1)
    return torch.minimum(p, torch.softmax((hidden @ table.T).float(), -1)).sum(-1)


Distance = Literal["soft", "kl+tv", "lk"]
DISTANCES = {"soft": _step_of(_soft), "kl+tv": _step_of(_kl_and_tv), "lk": _step_of(_lk)}
"""Distances of a draft's distribution from its target's, which every recipe that learns one can minimise.

* soft: cross-entropy with the target's distribution. Its least possible value is the entropy of p.
* kl+tv: KL keeps q's tail alive; TV is the rate at which drafts are rejected (Zhou et al. 2024, "DistillSpec", section
  4).
* lk: KL at first, whose gradient is large where p and q hardly overlap; more TV the more drafts are accepted (Samarin
  et al. 2026, "LK Losses", arXiv 2602.23881, section 4.2). Its authors take one weight for all positions of a depth in
  a batch, here it is one for each chunk of them."""


@cache
def _compiled(step: Step) -> Step:
    """A compiled step; the step itself, with a warning, once compiling has failed, as without Python's headers."""
    fast, failed = torch.compile(step, dynamic=True), False

    def run(*given: Any) -> Pair:
        nonlocal failed
        if not failed:
            try:
                compiled: Pair = fast(*given)
                return compiled
            except RuntimeError as error:
                failed = True
                warnings.warn(f"the loss is not compiled: {str(error).strip().partition(chr(10))[0]}", stacklevel=2)
        return step(*given)

    return run


class _ChunkedLoss(torch.autograd.Function):
    """Computes gradients chunk by chunk in the forward pass; none for a frozen table."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, step: Step, targets: tuple[Tensor, ...], fixed: tuple[Tensor, ...],
        chunk: int,
    ) -> Tensor:  # fmt: skip
        # hidden [N, ..., D], weight [V, D]; targets [N, ...], given to `step` in chunks
        table = weight.detach().to(hidden.dtype)
        d_hidden = torch.empty_like(hidden)
        of_table = _OfTable(table) if ctx.needs_input_grad[1] else None
        total = torch.zeros((), dtype=torch.float32, device=weight.device)
        for start in range(0, len(hidden), chunk):
            rows = hidden[start : start + chunk].detach()
            loss, error = step(rows, table, *(t[start : start + chunk] for t in targets), *fixed)
            total += loss
            d_hidden[start : start + chunk] = error @ table
            if of_table is not None:
                of_table.add(error, rows)
        ctx.gradients = d_hidden, of_table.gradient() if of_table is not None else None
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        d_hidden, d_table = ctx.gradients
        del ctx.gradients  # They are changed in place: a table's gradient is large.
        return d_hidden.mul_(grads[0]), None if d_table is None else d_table.mul_(grads[0]), None, None, None, None


class _OfTable:
    """The gradient [V, D], in float32, of a table. Adding to it costs more than a chunk's product, so the errors of
    several chunks are multiplied at once."""

    def __init__(self, table: Tensor) -> None:
        self._table = table
        self._waiting: list[Pair] = []
        self._sum: Tensor | None = None

    def add(self, error: Tensor, rows: Tensor) -> None:
        """error [..., V], rows [..., D]."""
        self._waiting.append((error.flatten(0, -2), rows.flatten(0, -2)))
        if sum(waiting.nbytes for waiting, _ in self._waiting) > WAITING:
            self._multiply()

    def gradient(self) -> Tensor:
        if self._waiting:
            self._multiply()
        return torch.zeros_like(self._table, dtype=torch.float32) if self._sum is None else self._sum

    def _multiply(self) -> None:
        errors, rows = (torch.cat(parts) for parts in zip(*self._waiting, strict=True))
        self._waiting.clear()
        more = errors.T @ rows
        self._sum = more.float() if self._sum is None else self._sum.add_(more)


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int = CHUNK, compiled: bool = False
) -> Tensor:
    """Mean cross-entropy of `hidden @ weight.T` over the labelled positions; 0 if there are none.

    hidden [..., D], weight [V, D], labels [...] with IGNORE where not trained."""
    return _mean(_cross_entropy, hidden, weight, labels, labels != IGNORE, (), chunk, compiled)


def distance(
    kind: str, hidden: Tensor, table: Tensor, target_hidden: Tensor, target_table: Tensor, where: Tensor,
    chunk: int = CHUNK, compiled: bool = False, weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Mean distance of the draft's distribution q from the target's p over the positions of `where`, 0 if there are
    none. q = softmax(hidden @ table.T), p = softmax(target_hidden @ target_table.T).

    kind   of `DISTANCES`. weights: of the positions [...]; None: all the same.
    hidden [..., D], table [V, D]; target_hidden [..., Dt], target_table [V, Dt] of the same V tokens; where bool [...].
    With hidden and weights [..., S, *] there are S drafts of each position, for which p is computed once.

    `hidden` learns, and `table` unless it is the target's."""
    fixed: tuple[Tensor, ...] = ()
    if table is target_table:
        table = table.detach()
    else:
        fixed = (target_table.detach().to(autocast_dtype(hidden)),)
    target_hidden = target_hidden.to(autocast_dtype(hidden))
    return _mean(DISTANCES[kind], hidden, table, target_hidden, where, fixed, chunk, compiled, weights)


def _mean(
    step: Step, hidden: Tensor, table: Tensor, targets: Tensor, where: Tensor, fixed: tuple[Tensor, ...], chunk: int,
    compiled: bool, shares: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The mean of `step` over the positions of `where` [...], which weigh `shares` [...], or the same; hidden, targets
    [..., *] are given to it in chunks."""
    hidden, targets = hidden.to(autocast_dtype(hidden))[where], targets[where]
    weights = torch.ones(hidden.shape[:-1], device=hidden.device) if shares is None else shares[where].float()
    weights = weights / weights.sum().clamp_min(1e-20)
    chunk = max(chunk * len(hidden) // max(weights.numel(), 1), 1)
    if compiled:
        step = _compiled(step)
    loss: Tensor = _ChunkedLoss.apply(hidden, table, step, (weights, targets), fixed, chunk)
    return loss


class LmLoss(nn.Module):
    """A causal language model whose forward is its training loss. input_ids, labels [B, T], labels shifted."""

    def __init__(self, model: Any, compiled: bool = False) -> None:
        super().__init__()
        self.model = model
        if compiled:
            use_blocks(model)
        self.compiled = compiled
        # A function, not a module: the compiled copy must not appear among the parameters.
        self._compiled = torch.compile(self._hidden) if compiled else self._hidden

    def _hidden(self, input_ids: Tensor) -> Any:
        return self.model.model(input_ids=input_ids, use_cache=False).last_hidden_state

    def hidden(self, input_ids: Tensor) -> Any:
        """Inputs of the output head [B, T, H]."""
        return (self._compiled if self.training else self._hidden)(input_ids)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        compiled = self.compiled and self.training
        return chunked_cross_entropy(self.hidden(input_ids), self.model.lm_head.weight, labels, compiled=compiled)
