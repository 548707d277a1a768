"""dflash is trained on what it meets in a draft: a packed pass over many blocks is the drafter run below each, and
no block reads what does not exist when it drafts."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from paceline.core.segment import Segment
from paceline.draft.methods.dflash import DFlashNetwork
from paceline.train.dflash import DFlashConfig, DFlashLoss
from paceline.train.loss import IGNORE
from tests import models, native

KEEP = torch.arange(3, 300, 2)
BLOCK = 4


def network(family="llama2"):
    return models.model(family, num_hidden_layers=4, tie_word_embeddings=False)


def loss_of(model, markov=0, confidence=False, **more):
    config = DFlashConfig(block=BLOCK, anchors=3, markov=markov, confidence=confidence, **more)
    loss = DFlashLoss(model, KEEP, config)
    models.randomize(loss.module)
    return loss.eval()


def drafted(loss, ids):
    """Logits of the drafts below every position, by depth, [T - 1 - k, D]."""
    with torch.no_grad():
        return [(hidden @ loss.table().T)[0] for hidden in loss.drafts(ids, BLOCK)[1]]


@pytest.mark.parametrize("markov", [0, 8])
@pytest.mark.parametrize("family", ["llama2", "llama3"])
def test_every_block_of_training_is_a_block_of_drafting(family, markov):
    """At every position of a text, whose own tokens stand before the drafted ones."""
    model = network(family)
    loss = loss_of(model, markov, confidence=True)
    text = np.random.default_rng(0).integers(4, models.VOCAB_SIZE, 14)
    ids = torch.from_numpy(text)[None]
    target, tensors = native.of(model), {name: t.detach() for name, t in loss.saved().items()}
    drafter = DFlashNetwork("x", loss.facts(), tensors, target)
    states, _ = loss.target_states(ids)
    taps, wanted, checked = states[0, :, :-1].flatten(-2), drafted(loss, ids), 0
    for anchor in range(1, len(text)):
        slot = drafter.layers.cache.add_row(len(text) + BLOCK)
        with torch.inference_mode():
            drafter.read(taps[:anchor], [Segment.chunk(slot, text[:anchor], last=False)])
            drafter.layers.cache.commit(slot, range(anchor))
            block = Segment(slot, np.zeros(BLOCK, np.int64), np.arange(-1, BLOCK - 1), num_logits=BLOCK)
            logits = drafter.head(drafter.fill([int(text[anchor])], [block]))
            for depth in range(min(BLOCK, len(text) - anchor)):
                before = torch.tensor(text[anchor + depth])
                own = logits[depth] + drafter.bias(before) if markov else logits[depth]
                torch.testing.assert_close(own, wanted[depth][anchor - 1], atol=2e-3, rtol=1e-3)
                checked += 1
        drafter.layers.cache.drop_row(slot)
    assert checked == 13 + 12 + 11 + 10


def test_a_block_reads_the_text_strictly_before_its_first_token():
    """The states of that token and of later ones change nothing; neither do other blocks of the pass."""
    loss = loss_of(network())
    ids = torch.randint(4, models.VOCAB_SIZE, (1, 12))
    other = ids.clone()
    other[0, 8] = (other[0, 8] + 1) % models.VOCAB_SIZE
    before, after = drafted(loss, ids), drafted(loss, other)
    for depth in range(BLOCK):  # the draft at position t begins with token t + 1
        torch.testing.assert_close(before[depth][:7], after[depth][:7])
        assert (before[depth][7] - after[depth][7]).abs().max() > 1e-3
    few = loss_of(network())
    few.config = DFlashConfig(block=BLOCK, anchors=1)
    few.load_state_dict(loss.state_dict())
    for one, alone in zip(before, drafted(few, ids), strict=True):
        torch.testing.assert_close(one, alone, atol=1e-4, rtol=1e-4)


def test_the_loss_is_the_weighted_distance_where_the_target_wrote_the_tokens():
    model = network()
    loss = loss_of(model, markov=8)
    ids = torch.randint(4, models.VOCAB_SIZE, (1, 12))
    labels = ids.roll(-1, 1)
    labels[0, :4], labels[0, 9:] = IGNORE, IGNORE  # the target wrote tokens 5 to 9
    last, inputs = loss.drafts(ids, BLOCK)
    total, weights = torch.zeros(()), 0.0
    at, chosen = loss._anchors(torch.tensor([[False] * 4 + [True] * 4 + [False] * 3]))
    assert chosen.all()
    for depth, hidden in enumerate(inputs):
        for t in at[0].tolist():
            if t >= 4 and t + 2 + depth <= 9:
                p = model.lm_head(last[0, t + 1 + depth])[KEEP].softmax(-1)
                total = total - 0.8**depth * (p * (loss.table() @ hidden[0, t]).log_softmax(-1)).sum()
                weights += 0.8**depth
    torch.testing.assert_close(loss(ids, labels).detach(), (total / weights).detach(), atol=1e-3, rtol=1e-4)


def test_the_confidence_head_learns_overlaps_and_teaches_the_block_nothing():
    model = network()
    loss = loss_of(model, markov=8, confidence=True)
    ids = torch.randint(4, models.VOCAB_SIZE, (2, 16))
    labels = ids.roll(-1, 1)
    labels[:, -1] = IGNORE
    without = loss_of(model, markov=8)
    shared = {name: t for name, t in loss.state_dict().items() if "confidence" not in name}
    without.load_state_dict(shared)
    both, alone = loss(ids, labels), without(ids, labels)
    both.backward()
    alone.backward()
    gradients = dict(loss.named_parameters())
    for name, parameter in without.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad)
    head = gradients["module.confidence_head.proj.weight"]
    assert bool(head.grad.any())
    hidden, last = torch.randn(5, 64 + 8), torch.randn(5, 64)
    wanted = torch.minimum((hidden @ loss.table().T).softmax(-1), model.lm_head(last)[:, KEEP].softmax(-1)).sum(-1)
    logits = loss.module.confidence_head["proj"](hidden)[:, 0]
    each = F.binary_cross_entropy_with_logits(logits, wanted)
    torch.testing.assert_close(loss._unsure(hidden, last, torch.ones(5)), each, atol=1e-4, rtol=1e-4)
