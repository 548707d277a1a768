"""The chunked loss gives what torch's own gives, gradients too."""

import torch
import torch.nn.functional as F

from paceline.train.loss import CHUNK, IGNORE, chunked_cross_entropy, chunked_distillation, soft_cross_entropy


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


def test_unlikelihood_and_its_gradients() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(9, 8, requires_grad=True)
    weight = torch.randn(13, 8, requires_grad=True)
    labels, unwanted = torch.randint(0, 13, (9,)), torch.randint(0, 13, (9,))
    labels[:2], unwanted[3:6] = IGNORE, IGNORE  # unlikelihood alone, both, likelihood alone
    log_p = torch.log_softmax(hidden @ weight.T, -1)
    like = -log_p[2:].gather(1, labels[2:, None]).sum()
    where = unwanted != IGNORE
    unlike = -torch.log(1 - log_p[where].gather(1, unwanted[where][:, None]).exp()).sum()
    expected = (like + unlike) / 9
    got = chunked_cross_entropy(hidden, weight, labels, unwanted, chunk=4)
    torch.testing.assert_close(got, expected)
    wanted = torch.autograd.grad(expected, (hidden, weight))
    torch.testing.assert_close(torch.autograd.grad(got, (hidden, weight)), wanted)


def test_a_certain_unwanted_token_gives_a_finite_push() -> None:
    hidden, weight = torch.tensor([[100.0, 0.0]], requires_grad=True), torch.eye(2, requires_grad=True)
    loss = chunked_cross_entropy(hidden, weight, torch.tensor([IGNORE]), torch.tensor([0]))
    loss.backward()
    assert torch.isfinite(loss)
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()
    assert hidden.grad[0, 0] > 0  # downhill is away from it


def test_distillation_and_its_gradients() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 7, 4, requires_grad=True), torch.randn(11, 4, requires_grad=True)
    target_hidden, target_weight = torch.randn(2, 7, 6), torch.randn(11, 6)
    kept = torch.rand(2, 7) < 0.7
    p = torch.softmax(target_hidden @ target_weight.T, -1)[kept]
    log_q = torch.log_softmax(hidden @ weight.T, -1)[kept]
    kl = F.kl_div(log_q, p, reduction="none").sum(-1)
    expected = (kl + 0.5 * (log_q.exp() - p).abs().sum(-1)).mean()
    got = chunked_distillation(hidden, weight, target_hidden, target_weight, kept, chunk=4)
    torch.testing.assert_close(got, expected)
    wanted = torch.autograd.grad(expected, (hidden, weight))
    torch.testing.assert_close(torch.autograd.grad(got, (hidden, weight)), wanted)


def test_soft_cross_entropy_and_its_gradient() -> None:
    torch.manual_seed(0)
    hidden, last = torch.randn(2, CHUNK + 50, 8, dtype=torch.float64)
    table = torch.randn(20, 8, dtype=torch.float64)
    hidden.requires_grad_(True)
    kept = torch.arange(CHUNK + 50) % 10 > 0
    p = (last @ table.T).softmax(-1)[kept]
    plain = -(p * (hidden @ table.T).log_softmax(-1)[kept]).sum(-1).mean()
    [wanted] = torch.autograd.grad(3 * plain, hidden)
    chunked = soft_cross_entropy(hidden, last, table, kept)
    [gradient] = torch.autograd.grad(3 * chunked, hidden)
    torch.testing.assert_close(chunked.double(), plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, wanted, atol=1e-6, rtol=1e-5)
    entropy = -(p * p.log()).sum(-1).mean()
    torch.testing.assert_close(soft_cross_entropy(last, last, table, kept).double(), entropy, atol=1e-5, rtol=1e-5)
    assert soft_cross_entropy(hidden, last, table, ~kept & kept).item() == 0  # and not NaN
