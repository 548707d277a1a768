"""The compiled top-k beside torch's, which it stands in for."""

import numpy as np
import pytest
import torch

from paceline.kernels.rows import top_tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 255, 256, 257, 1000, 8192])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_equals_sorting(dtype, size, k):
    random = torch.Generator().manual_seed(size)
    logits = torch.randn(5, size, generator=random).to(dtype)
    logits[1] = logits[1].abs()
    logits[2] = -logits[2].abs()
    logits[3] = torch.randint(-2, 3, (size,), generator=random).to(dtype)  # many equals: lower ids first
    logits[4, : size // 2] = -torch.inf
    k = min(k, size)
    values, tokens = top_tokens(logits, k)
    order = np.argsort(-logits.float().numpy(), axis=1, kind="stable")[:, :k]
    assert tokens.tolist() == order.tolist()
    assert torch.equal(values, logits.gather(1, tokens))
    assert torch.equal(values, logits.topk(k).values)


def test_ascending_and_descending():
    logits = torch.arange(3000.0).repeat(2, 1)
    logits[1] = logits[1].flip(0)
    assert top_tokens(logits, 3)[1].tolist() == [[2999, 2998, 2997], [0, 1, 2]]


def test_no_rows():
    assert top_tokens(torch.empty(0, 50), 8)[1].shape == (0, 8)


@pytest.mark.parametrize("logits", [torch.randn(3, 40).double(), torch.randn(40, 3).T])
def test_what_is_not_compiled_is_torch_s(logits):
    assert torch.equal(top_tokens(logits, 4)[1], logits.topk(4).indices)


def test_more_than_there_are():
    with pytest.raises(RuntimeError):
        top_tokens(torch.randn(2, 3), 4)
