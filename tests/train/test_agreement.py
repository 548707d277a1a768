"""How far two distributions agree."""

import numpy as np
import pytest
import torch

from paceline.train.loss import IGNORE
from paceline.train.trainer import Logits, agreement, agreement_lines


def test_agreement_is_the_overlap_of_two_distributions() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    rows = {"a": (np.zeros((2, 4), np.int32), np.array([[IGNORE, 1, 1, IGNORE]] * 2, np.int32))}

    def always(law: torch.Tensor) -> Logits:
        return lambda ids: law.log().expand(*ids.shape, 3)

    fits = agreement(always(p), always(q), rows)
    assert [(a.source, a.tokens) for a in fits] == [("a", 4), ("all", 4)]
    assert fits[-1].overlap == pytest.approx(0.7)
    assert fits[-1].top1 == 0
    assert agreement(always(p), always(p), rows)[-1].top1 == 1
    assert "accepted  70.0%" in agreement_lines(fits)[-1]
