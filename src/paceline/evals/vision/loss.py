"""The losses of SPEC (Peng et al. 2024, poster): CLIP's, and hard negatives of both modalities.

    L = L_clip + mu (L_hn of pictures against captions + L_hn of captions against pictures)

A case is K pairs that differ in one value, so the hard negatives of a pair are the other pairs of its case; nothing has
to be mined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Scope = Literal["own", "batch"]
"""Hard negatives of a pair: those of its own case, or of every case in the batch. The poster's formula can be read
either way."""
Negatives = Literal["both", "text", "image"]
"""Which modality has hard negatives; "text" is what was usual before."""

LARGEST_SCALE = 100.0
"""Of the logits; CLIP (Radford et al. 2021, 2.5) keeps its learnt temperature below this."""


@dataclass(frozen=True)
class Pairs:
    """n pictures and n captions, row i of one for row i of the other."""

    images: Tensor
    """(n, d), of unit length."""
    texts: Tensor
    """(n, d), of unit length."""
    captions: Tensor
    """(n,): equal numbers for equal captions."""
    cases: Tensor | None = None
    """(n,): equal numbers for pairs of one case; None where there are no cases."""


def clip_loss(pairs: Pairs, scale: Tensor) -> Tensor:
    """The contrastive loss, the mean of both directions. Pairs with the same caption are not each other's negatives."""
    logits = scale.float() * (pairs.images.float() @ pairs.texts.float().T)
    logits = logits.masked_fill(_same_caption(pairs), -torch.inf)
    own = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def hard_loss(
    hard: Pairs, generic: Pairs | None, scale: Tensor, scope: Scope = "own", negatives: Negatives = "both"
) -> Tensor:
    """L_hn, the mean of both directions: each hard pair against the generic pairs and its hard negatives."""
    assert hard.cases is not None
    same_case = hard.cases[:, None] == hard.cases[None]
    others = same_case & ~torch.eye(len(same_case), dtype=torch.bool, device=same_case.device)
    never = _same_caption(hard) | (~same_case if scope == "own" else torch.zeros_like(same_case))
    to_text = direction_loss(
        hard.images,
        hard.texts,
        generic.texts if generic else None,
        never | others if negatives == "image" else never,
        scale,
    )
    to_image = direction_loss(
        hard.texts,
        hard.images,
        generic.images if generic else None,
        never | others if negatives == "text" else never,
        scale,
    )
    return (to_text + to_image) / 2


def direction_loss(queries: Tensor, keys: Tensor, generic: Tensor | None, never: Tensor, scale: Tensor) -> Tensor:
    """Cross entropy of query i against key i, the keys not in `never`, and all generic keys."""
    logits = (scale.float() * (queries.float() @ keys.float().T)).masked_fill(never, -torch.inf)
    if generic is not None:
        logits = torch.cat([logits, scale.float() * (queries.float() @ generic.float().T)], 1)
    return F.cross_entropy(logits, torch.arange(len(queries), device=logits.device))


def _same_caption(pairs: Pairs) -> Tensor:
    """(n, n): true for two different pairs with one caption, which would be false negatives."""
    same = pairs.captions[:, None] == pairs.captions[None]
    return same & ~torch.eye(len(same), dtype=torch.bool, device=same.device)
