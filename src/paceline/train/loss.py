"""Losses in chunks: the logits of a batch are never held at once, and positions without a label cost nothing.

Exact (tests compare them with torch's own). On a CPU this is a third more tokens a second for a small model with a
large vocabulary; zoo/README.md has the figures.

* Cross-entropy, optionally with an unlikelihood term (Welleck et al. 2020, "Neural text generation with unlikelihood
  training", section 5) at positions where one token is known to be wrong.
* The distance of a draft's distribution from its target's. A further one is a function here and a name in `DISTANCES`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from paceline.train.layers import use_blocks

IGNORE = -100
"""Label of a position that is not trained on."""

CHUNK = 256
"""Positions whose logits are held at once."""


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of products with `tensor`: autocast's if it is on, else the tensor's own."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def _chunk(
    rows: Tensor, table: Tensor, wanted: Tensor, unwanted: Tensor, like: Tensor, unlike: Tensor
) -> tuple[Tensor, Tensor]:
    """Loss summed over a chunk, and its gradient with respect to the logits [C, V], in the dtype of `rows`.

    rows [C, D], table [V, D]; wanted, unwanted [C] token ids; like, unlike [C] weights of the two terms (0: no term).
    """
    logits = (rows @ table.T).float()
    norm = torch.logsumexp(logits, -1, keepdim=True)
    wanted, unwanted, like, unlike = wanted[:, None], unwanted[:, None], like[:, None], unlike[:, None]
    p_unwanted = (logits.gather(1, unwanted) - norm).exp()
    left = (1 - p_unwanted).clamp_min(1e-6)
    loss = (like * (norm - logits.gather(1, wanted)) - unlike * left.log()).sum()
    # The gradient of -log(1 - p_u) is p_u / (1 - p_u) (1[j = u] - p_j). For j = u that is p_u; written in that form it
    # does not vanish where p_u rounds to 1.
    push = unlike * p_unwanted / left
    token = torch.arange(table.shape[0], device=rows.device)[None]
    error = (like - push) * (logits - norm).exp()
    error = error - torch.where(token == wanted, like, 0.0)
    error = error + torch.where(token == unwanted, (push + unlike) * p_unwanted, 0.0)
    return loss, error.to(rows.dtype)


def _soft_cross_entropy(
    rows: Tensor, table: Tensor, target_rows: Tensor, weights: Tensor, target_table: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """-sum p log q over a chunk: p is the target's distribution at target_rows [C, Dt], q the draft's at rows [C, D].

    Returns the loss, weighted by weights [C] and summed, and its gradient with respect to the draft's logits [C, V].
    Without a target_table both distributions use `table`."""
    p, log_q = _distributions(rows, table, target_rows, target_table)
    weights = weights[:, None]
    return -(weights * p * log_q).sum(), (weights * (log_q.exp() - p)).to(rows.dtype)


def _kl_and_tv(
    rows: Tensor, table: Tensor, target_rows: Tensor, weights: Tensor, target_table: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `_soft_cross_entropy`, for KL(p || q) + TV(p, q)."""
    p, log_q = _distributions(rows, table, target_rows, target_table)
    q, weights = log_q.exp(), weights[:, None]
    kl = (p * (p.clamp_min(1e-20).log() - log_q)).sum(-1, keepdim=True)
    missed = (q - p).clamp_min(0).sum(-1, keepdim=True)  # 1 - sum min(p, q): the chance that a draft is rejected
    loss = (weights * (kl + missed)).sum()
    # d missed / dq_j is 1[q_j > p_j]; through the softmax it loses its mean under q.
    above = (q > p).float()
    error = (q - p) + q * (above - (q * above).sum(-1, keepdim=True))
    return loss, (weights * error).to(rows.dtype)


def _distributions(
    rows: Tensor, table: Tensor, target_rows: Tensor, target_table: Tensor | None
) -> tuple[Tensor, Tensor]:
    p = torch.softmax((target_rows @ (table if target_table is None else target_table).T).float(), -1)
    return p, torch.log_softmax((rows @ table.T).float(), -1)


Distance = Literal["soft", "kl+tv"]
DISTANCES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"soft": _soft_cross_entropy, "kl+tv": _kl_and_tv}
"""Distances of a draft's distribution from its target's, which every recipe that learns one can minimise.

* soft: cross-entropy with the target's distribution. Its least possible value is the entropy of p.
* kl+tv: KL keeps q's tail alive; TV is the rate at which drafts are rejected (Zhou et al. 2024, "DistillSpec", section
  4)."""


@cache
def _compiled(step: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(step, dynamic=False)


class _ChunkedLoss(torch.autograd.Function):
    """Computes gradients chunk by chunk in the forward pass; none for a frozen table."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        step: Callable[..., tuple[Tensor, Tensor]],
        targets: tuple[Tensor, ...],
        fixed: tuple[Tensor, ...],
        chunk: int,
    ) -> Tensor:
        # hidden [N, D], N a multiple of `chunk`; weight [V, D]; targets [N, ...], given to `step` in chunks
        table = weight.detach().to(hidden.dtype)
        d_hidden = torch.empty_like(hidden)
        learns = ctx.needs_input_grad[1]
        d_weight = torch.zeros(weight.shape if learns else 0, dtype=torch.float32, device=weight.device)
        total = torch.zeros((), dtype=torch.float32, device=weight.device)
        for start in range(0, len(hidden), chunk):
            rows = hidden[start : start + chunk].detach()
            loss, error = step(rows, table, *(t[start : start + chunk] for t in targets), *fixed)
            total += loss
            d_hidden[start : start + chunk] = error @ table
            if learns:
                d_weight += error.T @ rows
        ctx.save_for_backward(d_hidden, d_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        learns = ctx.needs_input_grad[1]
        return d_hidden * grads[0].to(d_hidden.dtype), d_weight * grads[0] if learns else None, None, None, None, None


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    unwanted: Tensor | None = None,
    chunk: int = CHUNK,
    compiled: bool = False,
) -> Tensor:
    """Mean cross-entropy of `hidden @ weight.T` over the labelled positions.

    hidden [..., D], weight [V, D], labels [...] with IGNORE where not trained. unwanted [...]: for each position a
    token that should be unlikely (IGNORE: none), for which -log(1 - p) is added.
    """
    labels, hidden = labels.reshape(-1), hidden.reshape(-1, hidden.shape[-1])
    unwanted = torch.full_like(labels, IGNORE) if unwanted is None else unwanted.reshape(-1)
    used = (labels != IGNORE) | (unwanted != IGNORE)
    if not bool(used.all()):
        hidden, labels, unwanted = hidden[used], labels[used], unwanted[used]
    count = max(len(labels), 1)
    rest = -len(labels) % chunk  # padding, of weight 0, gives the compiled step a single shape
    if rest:
        hidden = pad(hidden, (0, 0, 0, rest))
        labels, unwanted = pad(labels, (0, rest), value=IGNORE), pad(unwanted, (0, rest), value=IGNORE)
    like = (labels != IGNORE).float() / count
    unlike = (unwanted != IGNORE).float() / count
    targets = (labels.clamp_min(0), unwanted.clamp_min(0), like, unlike)
    step = _compiled(_chunk) if compiled else _chunk
    loss: Tensor = _ChunkedLoss.apply(hidden, weight, step, targets, (), chunk)
    return loss


def distance(
    kind: str,
    hidden: Tensor,
    table: Tensor,
    target_hidden: Tensor,
    target_table: Tensor,
    where: Tensor,
    chunk: int = CHUNK,
    compiled: bool = False,
) -> Tensor:
    """Mean distance of the draft's distribution q from the target's p over the positions of `where`, 0 if there are
    none. q = softmax(hidden @ table.T), p = softmax(target_hidden @ target_table.T).

    kind   of `DISTANCES`.
    hidden [..., D], table [V, D]; target_hidden [..., Dt], target_table [V, Dt] of the same V tokens; where bool [...].

    `hidden` learns, and `table` unless it is the target's."""
    shared = table is target_table
    where, hidden = where.reshape(-1), hidden.to(autocast_dtype(hidden))
    hidden = hidden.reshape(-1, hidden.shape[-1])[where]
    target_hidden = target_hidden.reshape(-1, target_hidden.shape[-1])[where].to(hidden.dtype)
    weights = torch.full((len(hidden),), 1 / max(len(hidden), 1), device=hidden.device)
    rest = -len(hidden) % chunk  # padding, of weight 0, gives a compiled step a single shape
    hidden, target_hidden = pad(hidden, (0, 0, 0, rest)), pad(target_hidden, (0, 0, 0, rest))
    step = _compiled(DISTANCES[kind]) if compiled else DISTANCES[kind]
    fixed = () if shared else (target_table.detach().to(hidden.dtype),)
    targets = (target_hidden, pad(weights, (0, rest)))
    loss: Tensor = _ChunkedLoss.apply(hidden, table.detach() if shared else table, step, targets, fixed, chunk)
    return loss


class LmLoss(nn.Module):
    """A causal language model whose forward is its training loss. input_ids, labels [B, T], labels shifted; unwanted
    [B, T]: tokens that should not come next, for the unlikelihood term."""

    def __init__(self, model: Any, compiled: bool = False) -> None:
        super().__init__()
        self.model = model
        if compiled:
            use_blocks(model)
        self.compiled = compiled
        # A function, not a module: the compiled copy must not appear among the parameters.
        self._compiled = torch.compile(self._hidden) if compiled else self._hidden

    def _hidden(self, input_ids: Tensor) -> Tensor:
        hidden: Tensor = self.model.model(input_ids=input_ids, use_cache=False).last_hidden_state
        return hidden

    def forward(self, input_ids: Tensor, labels: Tensor, unwanted: Tensor | None = None) -> Tensor:
        hidden = (self._compiled if self.training else self._hidden)(input_ids)
        hidden = hidden.to(autocast_dtype(hidden))
        compiled = self.compiled and self.training
        return chunked_cross_entropy(hidden, self.model.lm_head.weight, labels, unwanted, compiled=compiled)
