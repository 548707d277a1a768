"""Measure the loss by quantisation: compare a model's predictions on held-out text with its original's.

Both models read the same text in windows and predict each token from those before it in the window (teacher forcing).
Standard errors are over windows, because the tokens of a window are not independent."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, sqrt

import numpy as np
import torch

from paceline.core.segment import Segment
from paceline.errors import ModelError
from paceline.target.base import Target

WINDOW = 256  # tokens of a window


@dataclass(frozen=True)
class Quality:
    """The comparison of two models; each *_error is a standard error.

    perplexity, of_reference  e**loss of the two models.
    loss                      the model's minus the reference's, nats a token.
    kl                        mean KL(reference || model), nats a token.
    top1                      share of positions where both have the same most probable token.
    tokens                    predicted tokens."""

    perplexity: float
    of_reference: float
    loss: float
    loss_error: float
    kl: float
    kl_error: float
    top1: float
    top1_error: float
    tokens: int

    def lines(self) -> list[str]:
        """The figures for a terminal."""
        return [
            f"perplexity      {self.perplexity:.2f}, reference {self.of_reference:.2f}",
            f"                {100 * (exp(self.loss) - 1):+.2f} % (standard error {100 * self.loss_error:.2f})",
            f"KL divergence   {self.kl:.4f} nats a token (standard error {self.kl_error:.4f})",
            f"same top token  {100 * self.top1:.1f} % (standard error {100 * self.top1_error:.1f})",
            f"over            {self.tokens:,} predicted tokens, windows of {WINDOW}",
        ]

    def sentence(self) -> str:
        """The figures in one sentence."""
        change = 100 * (exp(self.loss) - 1)
        return f"perplexity {change:+.1f} %, the same top token at {100 * self.top1:.1f} % of {self.tokens:,} tokens"


@torch.inference_mode()
def compare(
    model: Target, reference: Target, tokens: Sequence[int], step: Callable[[], None] = lambda: None
) -> Quality:
    """Compare both models on the text `tokens`. step: called after each window.

    Raises ModelError for models with different vocabularies, and for a text of fewer than two windows."""
    if model.vocab_size != reference.vocab_size:
        raise ModelError(
            f"{model.name} knows {model.vocab_size} tokens and {reference.name} {reference.vocab_size}: "
            "what they predict cannot be compared"
        )
    if (context := min(model.max_context, reference.max_context)) < WINDOW:
        raise ModelError(f"windows have {WINDOW} tokens, and {model.name} can read {context}")
    ids = np.array(tokens)
    windows = [ids[begin : begin + WINDOW] for begin in range(0, len(ids) - WINDOW + 1, WINDOW)]
    if len(windows) < 2:
        raise ModelError(f"the text has {len(ids)} tokens; {2 * WINDOW} are the least that can be measured")
    rows = []
    for window in windows:
        rows.append(_window(_log_probabilities(model, window), _log_probabilities(reference, window), window))
        step()
    own, others, kl, top1 = np.array(rows).T
    figures = {"loss": own - others, "kl": kl, "top1": top1}
    return Quality(
        perplexity=exp(own.mean()),
        of_reference=exp(others.mean()),
        **{name: float(values.mean()) for name, values in figures.items()},
        **{f"{name}_error": float(values.std(ddof=1)) / sqrt(len(rows)) for name, values in figures.items()},
        tokens=len(windows) * (WINDOW - 1),
    )


def _log_probabilities(model: Target, window: np.ndarray) -> torch.Tensor:
    """Log-probabilities of the window's second to last tokens, [WINDOW - 1, V]."""
    slot = model.add_row(WINDOW)
    parent = np.arange(-1, WINDOW - 2)
    logits = model.verify([Segment(slot, window[:-1], parent, num_logits=WINDOW - 1)]).logits
    model.drop_row(slot)
    return logits.float().log_softmax(-1)


def _window(own: torch.Tensor, others: torch.Tensor, window: np.ndarray) -> tuple[float, float, float, float]:
    """Means over a window: both losses, KL, and the share of equal top tokens."""
    next_token = torch.from_numpy(window[1:]).unsqueeze(1)
    kl = (others.exp() * (others - own)).sum(-1).mean()
    same = (own.argmax(-1) == others.argmax(-1)).float().mean()
    return float(-own.gather(1, next_token).mean()), float(-others.gather(1, next_token).mean()), float(kl), float(same)
