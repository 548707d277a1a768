"""dflash is trained on what it meets in a draft: a packed pass over many blocks is the drafter run below each, and
no block reads what does not exist when it drafts."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from paceline.core.segment import Segment
from paceline.draft.methods.dflash import DFlashNetwork
from paceline.train.dflash import DFlash2Config, DFlash2Loss, DFlashConfig, DFlashLoss
from paceline.train.loss import IGNORE
from tests import models, native
from tests.draft import blocks

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


# DFlash2 -------------------------------------------------------------------------------------------------------------


def second_of(model, keep=KEEP, randomized=True, best=5, **more):
    loss = DFlash2Loss(model, keep, DFlash2Config(block=BLOCK, anchors=3, rank=6, best=best, **more))
    if randomized:
        models.randomize(loss.module)
    return loss.eval()


@pytest.mark.parametrize("window", [5, 40])
@pytest.mark.parametrize("keep", [KEEP, torch.arange(models.VOCAB_SIZE)])
def test_every_block_of_dflash2_is_a_block_of_drafting(window, keep):
    """And chooses the same tokens with the same probabilities, at every position of a text."""
    model = network()
    loss, text = second_of(model, keep, window=window), np.random.default_rng(0).integers(4, models.VOCAB_SIZE, 14)
    target, tensors = native.of(model), {name: t.detach() for name, t in loss.saved().items()}
    drafter, ids = DFlashNetwork("x", loss.facts(), tensors, target), torch.from_numpy(text)[None]
    states, _ = loss.target_states(ids)
    with torch.no_grad():
        wanted = [loss.probs(hidden[0], 0) for hidden in loss.drafts(ids, BLOCK)[1]]
    for anchor in range(1, len(text)):
        slot = drafter.layers.cache.add_row(2 * len(text))
        with torch.inference_mode():
            drafter.read(states[0, :anchor, :-1].flatten(-2), [Segment.chunk(slot, text[:anchor], last=False)])
            drafter.layers.cache.commit(slot, range(anchor))
            block = Segment(slot, np.zeros(BLOCK + 1, np.int64), np.arange(-1, BLOCK), num_logits=BLOCK)
            read = drafter.fill([int(text[anchor])], [block])
            for depth in range(min(BLOCK, len(text) - anchor)):
                values, columns = (one[0] for one in drafter.head(read[depth : depth + 1]).topk(5))
                before = torch.tensor(text[anchor + depth])
                q = (values + drafter.bias(before[None], columns, read[depth])[0]).softmax(-1)
                own = torch.zeros(models.VOCAB_SIZE).scatter(0, keep[columns], q)
                torch.testing.assert_close(own, wanted[depth][anchor - 1], atol=2e-3, rtol=1e-3)
        drafter.layers.cache.drop_row(slot)


def test_an_untrained_dflash2_is_dflash_bit_for_bit():
    """Whatever its layers are: the convolutions are the identity, and the selector changes no logit."""
    loss, ids = second_of(network(), randomized=False), torch.randint(4, models.VOCAB_SIZE, (2, 12))
    for name, weight in loss.module.named_parameters():
        if "conv" not in name and "successor" not in name:
            torch.nn.init.normal_(weight, std=0.2)
    at = torch.tensor([[2, 7], [0, 9]])
    with torch.no_grad():
        context, _ = loss.states(ids)
        convolved, hidden = loss.filled(context, ids, at), next(loss.drafts(ids, 1)[1])[0]
        for layer in loss.module.layers:
            del layer.attention_conv, layer.mlp_conv
        assert torch.equal(loss.filled(context, ids, at), convolved)
        columns, logits = loss.candidates(hidden)
        assert torch.equal(logits, (hidden[:, :64] @ loss.of_target.T).gather(1, columns))


def test_a_file_of_dflash2_is_in_the_published_layout():
    model = network()
    loss = second_of(model, torch.arange(models.VOCAB_SIZE))
    published, own = blocks.second(model), loss.facts()
    assert loss.saved().keys() == blocks.second_tensors(model).keys()
    assert own["dflash_config"].keys() == published["dflash_config"].keys()
    for key in ("architectures", "model_type", "num_hidden_layers", "num_target_layers", "is_causal"):
        assert own[key] == published[key]
    assert (own["layer_types"], own["sliding_window"]) == (["sliding_attention"] * 2, 512)
    assert own["dflash_config"]["block_size"] == BLOCK + 1
    assert "draft_vocab_size" not in own


def test_the_selector_learns_the_texts_token_after_the_texts_token():
    """Where it is among the best; each of the two losses is divided by its own weights."""
    torch.manual_seed(0)
    model = network()
    loss, ids = second_of(model, best=60), torch.randint(4, models.VOCAB_SIZE, (2, 12))
    ids[:, ::2] = KEEP[ids[:, ::2] % 100]
    labels = ids.roll(-1, 1)
    labels[:, :3], labels[:, 10:] = IGNORE, IGNORE
    known = torch.zeros(2, 11, dtype=torch.bool)
    known[:, 3:9] = True
    last, inputs = loss.drafts(ids, BLOCK)
    at, chosen = loss._anchors(known)
    sums, places = torch.zeros(2, 2), [(row, int(at[row, n])) for row, n in chosen.nonzero().tolist()]
    for depth, hidden in enumerate(inputs):
        for row, t in places:
            if t + 2 + depth <= 10:
                p = model.lm_head(last[row, t + 1 + depth])[KEEP].softmax(-1)
                logits = loss.of_target @ hidden[row, t, :64]
                sums[0] += 0.8**depth * torch.stack([-(p * logits.log_softmax(-1)).sum(), torch.tensor(1.0)])
                values, best = logits.topk(60)
                token, before = ids[row, t + 2 + depth], ids[row, t + 1 + depth]
                selector = loss.module.candidate_selector
                state = selector.hidden_projection(hidden[row, t, :64])
                edges = selector.successor_codebook[best] @ (selector.predecessor_codebook[before] * state)
                if (place := (KEEP[best] == token).nonzero()).numel():
                    chance = (values + edges).log_softmax(-1)[place[0, 0]]
                    sums[1] += 0.8**depth * torch.stack([-chance, torch.tensor(1.0)])
    assert sums[1, 1] > 0, "some text is among the best"
    wanted = (sums[:, 0] / sums[:, 1]).sum()
    torch.testing.assert_close(loss(ids, labels).detach(), wanted.detach(), atol=1e-3, rtol=1e-4)
