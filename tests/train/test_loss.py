"""The chunked loss gives what torch's own gives, gradients too."""

import torch
import torch.nn.functional as F

from paceline.train.loss import IGNORE, chunked_cross_entropy


def test_cross_entropy_and_its_gradients() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2, 11, 8, requires_grad=True)
    weight = torch.randn(13, 8, requires_grad=True)
    labels = torch.randint(0, 13, (2, 11))
    labels[0, :4] = IGNORE
    expected = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten())
    wanted = torch.autograd.grad(3 * expected, (hidden, weight))
    got_loss = chunked_cross_entropy(hidden, weight, labels, chunk=5)
    got = torch.autograd.grad(3 * got_loss, (hidden, weight))
    torch.testing.assert_close(got_loss, expected)
    torch.testing.assert_close(got, wanted)


def test_nothing_to_learn_is_no_gradient() -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    loss = chunked_cross_entropy(hidden, weight, torch.full((3,), IGNORE))
    loss.backward()
    assert loss == 0
    assert weight.grad is not None
    assert not weight.grad.any()
