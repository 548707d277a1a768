"""What every drafter in training has: the loss over a few tokens, and the probabilities that it drafts with."""

import copy

import pytest
import torch
import torch.nn.functional as F

from paceline.train.dflash import DFlash2Config, DFlash2Loss, DFlashConfig, DFlashLoss
from paceline.train.draft import begin_embedding
from paceline.train.eagle import Eagle3Loss, EagleLoss
from paceline.train.heads import AmphistaConfig, AmphistaLoss, HydraConfig, HydraLoss, MedusaConfig, MedusaLoss
from paceline.train.kangaroo import KangarooLoss
from paceline.train.llama import ModelConfig, new_llama
from paceline.train.mtp import MtpLoss
from paceline.train.student import Student
from tests import models


def test_the_loss_over_a_few_tokens_is_between_the_distributions_among_them():
    student = Student(models.model("llama2", tie_word_embeddings=False), "soft")
    head = student.teacher.lm_head.weight
    student.tokens = few = torch.tensor([2, 3, 50, 200])
    hidden, last = torch.randn(2, 5, head.shape[1]), torch.randn(2, 5, head.shape[1])
    where = torch.tensor([[True, True, False, True, True], [False, True, True, False, False]])
    p, log_q = F.softmax(last @ head[few].T, -1), F.log_softmax(hidden @ head[few].T, -1)
    want = -(p * log_q).sum(-1)[where].mean()
    torch.testing.assert_close(student.distance(hidden, last, where), want)
    probs = student.probs(hidden[where], 0)
    assert probs.shape == (6, len(head))
    torch.testing.assert_close(probs[:, few], log_q[where].exp())
    assert not probs[:, 4:50].any()
    student.tokens = None
    torch.testing.assert_close(student.probs(hidden[where], 0), F.softmax(hidden[where] @ head.T, -1))


def test_a_drafts_embedding_begins_as_near_the_targets_as_its_width_allows():
    table = torch.randn(300, 8) @ torch.randn(8, 64) + 0.01 * torch.randn(300, 64) + 3  # 8 axes hold nearly all
    rows = table - table.mean(0)
    want = rows @ rows.T / rows.norm(dim=1).mean() ** 2
    for width in (64, 128):
        network = new_llama(ModelConfig(width, layers=1, heads=1, kv_heads=1, intermediate=64), 0, vocab_size=300)
        begin_embedding(network, table)
        own = network.get_input_embeddings().weight.detach()[:, :64]
        torch.testing.assert_close(own @ own.T, want, rtol=0, atol=1e-3)
        assert float(own[:, 8:].square().sum() / own.square().sum()) < 1e-4, "the largest axes come first"
        assert network.lm_head.weight is network.get_input_embeddings().weight


KEEP = torch.arange(3, 300, 2)
STUDENTS = {
    "medusa": lambda model: MedusaLoss(model, MedusaConfig(share=1)),
    "hydra": lambda model: HydraLoss(model, HydraConfig(share=1)),
    "amphista": lambda model: AmphistaLoss(model, AmphistaConfig(share=1)),
    "kangaroo": KangarooLoss,
    "eagle": EagleLoss,
    "eagle3": lambda model: Eagle3Loss(model, KEEP),
    "dflash": lambda model: DFlashLoss(model, KEEP, DFlashConfig(markov=8, confidence=True)),
    "dflash2": lambda model: DFlash2Loss(model, KEEP, DFlash2Config(rank=8)),
    "mtp": MtpLoss,
    "mtp of experts": MtpLoss,
}


@pytest.mark.parametrize("kind", STUDENTS)
def test_the_drafter_alone_learns(kind):
    """All of it does, and nothing of the target."""
    model = models.model("qwen3-moe" if "experts" in kind else "llama2", tie_word_embeddings=False)
    student = STUDENTS[kind](model)
    models.randomize(student)
    before = copy.deepcopy(model.state_dict())
    ids = torch.randint(4, models.VOCAB_SIZE, (2, 16))
    optimiser = torch.optim.AdamW(student.parameters(), lr=0.1)
    student(ids, ids.roll(-1, 1)).backward()
    optimiser.step()
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    assert [name for name, weight in student.named_parameters() if weight.grad is None or not weight.grad.any()] == []
