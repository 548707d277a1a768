"""The chunked losses give what torch's own give, gradients too."""

import shutil

import pytest
import torch
import torch.nn.functional as F

from paceline.train.loss import CHUNK, DISTANCES, IGNORE, _compiled, chunked_cross_entropy, distance

torch.manual_seed(0)
N, V = 22, 13
LABELS, KEPT = torch.randint(0, V, (N,)), torch.arange(N) % 3 > 0
LABELS[:4] = IGNORE
STATES, TABLE = torch.randn(N, 6), torch.randn(V, 6)
"""Of a target with another width."""
SHARES = torch.tensor([1.0, 0.5]).expand(11, 2)


def log_p(hidden, weight):
    return (hidden @ weight.T).log_softmax(-1)


def kl_and_tv(hidden, weight):
    p, log_q = (STATES @ TABLE.T).softmax(-1)[KEPT], log_p(hidden, weight)[KEPT]
    return (F.kl_div(log_q, p, reduction="none").sum(-1) + 0.5 * (log_q.exp() - p).abs().sum(-1)).mean()


def soft(hidden, weight):
    return -((STATES @ TABLE.T).softmax(-1) * log_p(hidden, weight)).sum(-1)[KEPT].mean()


def several(hidden, weight):
    """Two drafts of each of eleven positions, of which the second weighs half."""
    p, log_q = (STATES @ TABLE.T).softmax(-1)[:11, None], log_p(hidden, weight).view(11, 2, V)
    return ((-(p * log_q).sum(-1) * SHARES)[KEPT[:11]]).sum() / SHARES[KEPT[:11]].sum()


def lk(hidden, weight, chunk, count=N):
    """Chunk by chunk: the weight of KL follows the chunk's own acceptance rate."""
    kept = KEPT[:count]
    p, log_q = (STATES[:count] @ TABLE.T).softmax(-1)[kept], log_p(hidden, weight)[kept]
    total = torch.zeros(())
    for of_p, of_q in zip(p.split(chunk), log_q.split(chunk), strict=True):
        overlap = torch.minimum(of_p, of_q.exp()).sum(-1)
        share = torch.exp(-3 * overlap.detach().mean())
        total = total + (share * F.kl_div(of_q, of_p, reduction="none").sum(-1) + (1 - share) * (1 - overlap)).sum()
    return total / len(p)


LOSSES = {
    "cross-entropy": (
        lambda h, w: chunked_cross_entropy(h.view(2, 11, 8), w, LABELS.view(2, 11), chunk=5),
        lambda h, w: F.cross_entropy(h @ w.T, LABELS),
    ),
    "kl+tv": (lambda h, w: distance("kl+tv", h, w, STATES, TABLE, KEPT, chunk=4), kl_and_tv),
    "soft": (lambda h, w: distance("soft", h, w, STATES, TABLE, KEPT, chunk=4), soft),
    "soft, two drafts": (
        lambda h, w: distance("soft", h.view(11, 2, 8), w, STATES[:11], TABLE, KEPT[:11], chunk=4, weights=SHARES),
        several,
    ),
    "lk, two drafts": (
        lambda h, w: distance("lk", h.view(11, 2, 8), w, STATES[:11], TABLE, KEPT[:11], weights=torch.ones(11, 2)),
        lambda h, w: sum(lk(h.view(11, 2, 8)[:, draft], w, CHUNK, 11) for draft in (0, 1)) / 2,
    ),
    "lk, one chunk": (lambda h, w: distance("lk", h, w, STATES, TABLE, KEPT), lambda h, w: lk(h, w, CHUNK)),
    "lk, chunks of four": (lambda h, w: distance("lk", h, w, STATES, TABLE, KEPT, chunk=4), lambda h, w: lk(h, w, 4)),
}


@pytest.mark.parametrize("waiting", [0, 1 << 30], ids=["each chunk", "at once"])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_their_gradients_are_torchs(loss, waiting, monkeypatch):
    monkeypatch.setattr("paceline.train.loss.WAITING", waiting)
    torch.manual_seed(1)
    inputs = torch.randn(N, 8, requires_grad=True), torch.randn(V, 8, requires_grad=True)
    ours, theirs = (of(*inputs) for of in LOSSES[loss])
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(3 * ours, inputs), torch.autograd.grad(3 * theirs, inputs))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("kind", DISTANCES)
def test_a_compiled_distance_is_the_same(kind):
    """Also of another number of positions, for which it is not compiled again."""
    inputs = torch.randn(N, 8, requires_grad=True), torch.randn(V, 8, requires_grad=True)
    for kept in (KEPT, ~KEPT):
        slow, fast = (
            distance(kind, *inputs, STATES, TABLE, kept, chunk=4, compiled=compiled) for compiled in (False, True)
        )
        torch.testing.assert_close(fast, slow)
        torch.testing.assert_close(torch.autograd.grad(fast, inputs), torch.autograd.grad(slow, inputs))


def test_where_compiling_fails_nothing_is_compiled(monkeypatch):
    def broken(*given):
        raise RuntimeError("no Python.h\nand more")

    monkeypatch.setattr(torch, "compile", lambda step, dynamic: broken)
    monkeypatch.setattr("paceline.train.loss._compiled", _compiled.__wrapped__)
    inputs = torch.randn(N, 8, requires_grad=True), torch.randn(V, 8, requires_grad=True)
    with pytest.warns(UserWarning, match=r"the loss is not compiled: no Python\.h$"):
        slow = distance("soft", *inputs, STATES, TABLE, KEPT, compiled=True)
    assert torch.equal(slow, distance("soft", *inputs, STATES, TABLE, KEPT))


def test_nothing_to_learn_is_no_gradient():
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    loss = chunked_cross_entropy(hidden, weight, torch.full((3,), IGNORE))
    loss.backward()
    assert loss == 0
    assert not weight.grad.any()
    assert distance("soft", hidden, weight, hidden, weight, torch.zeros(3, dtype=torch.bool)).item() == 0  # and not NaN


def test_soft_cross_entropy_with_a_shared_table_moves_the_states_alone():
    torch.manual_seed(0)
    hidden, last = torch.randn(2, CHUNK + 50, 8, dtype=torch.float64)
    table = torch.randn(20, 8, dtype=torch.float64, requires_grad=True)
    hidden.requires_grad_(True)
    where = torch.arange(CHUNK + 50) % 10 > 0
    p = (last @ table.T).softmax(-1)[where].detach()
    [wanted] = torch.autograd.grad(-(p * log_p(hidden, table)[where]).sum(-1).mean(), hidden)
    loss = distance("soft", hidden, table, last, table, where)
    loss.backward()
    torch.testing.assert_close(hidden.grad, wanted, atol=1e-6, rtol=1e-5)
    assert table.grad is None
    entropy = -(p * p.log()).sum(-1).mean()
    loss = distance("soft", last, table, last, table, where)
    torch.testing.assert_close(loss.double(), entropy, atol=1e-5, rtol=1e-5)
