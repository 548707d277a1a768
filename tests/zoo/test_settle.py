"""Unlearning loops: what is marked, what a batch holds, and that it works."""


import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.bench.record import is_looping
from paceline.train.loop import LoopConfig, train
from paceline.train.loss import IGNORE, chunked_cross_entropy
from zoo.settle import SelfCorrection, SettleConfig, SettleLoss, answers, correction, order_of, repeats, unlikely
from zoo.text import DataConfig, StageMixture

CONFIG = SettleConfig(every=2, prompts=4, tokens=80, rows=2)


def test_repeats_are_tokens_that_complete_a_known_ngram():
    assert repeats([1, 2, 3, 1, 2, 3, 4], 2).tolist() == [False] * 4 + [True, True, False]
    assert repeats([5] * 5, 3).tolist() == [False, False, False, True, True]
    assert not repeats([1], 4).any()


def test_a_correction_marks_the_answers_repeats_alone():
    config = SettleConfig(ngram=2, tolerated=0.1)
    ids, unwanted = correction([7, 7, 7, 7], [1, 2, 1, 2, 3], config, 100) or ([], [])
    assert (ids, unwanted) == ([7, 7, 7, 7, 1, 2, 1, 2], [IGNORE] * 6 + [2, IGNORE])
    assert correction([7], [1, 2, 1, 2, 3], SettleConfig(ngram=2, tolerated=0.25), 100) is None
    ids, unwanted = correction([7, 8, 9], [1, 2, 1, 2, 3], config, 4) or ([], [])  # the beginning of the prompt goes
    assert (ids, unwanted) == ([1, 2, 1, 2], [IGNORE, IGNORE, 2, IGNORE])


def test_every_prompt_is_asked_once_an_epoch():
    prompts = [[i] for i in range(10)]
    first, second = ([order_of(prompts, e * 10 + i, 0)[0] for i in range(10)] for e in (0, 1))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def looper():
    """A network that says one token for ever: its logits hardly depend on what it reads."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    network = LlamaForCausalLM(LlamaConfig(vocab_size=40, intermediate_size=64, head_dim=64, **shape))
    network.generation_config.eos_token_id = [1]
    with torch.no_grad():
        network.model.norm.weight.zero_()
        network.model.norm.weight += 2.0
        network.lm_head.weight[3:20] += 0.02
    return network


def conversation_rows():
    rng = np.random.default_rng(0)
    rows = rng.integers(3, 40, (50, 16))
    labels = np.where(rng.random((50, 16)) < 0.3, 1, rng.integers(3, 40, (50, 16)))  # answers end often
    return StageMixture({"a": (rows, labels)}, DataConfig(16, 4, {}, {}))


def test_batches_hold_both_and_resume(monkeypatch):
    said = [([5, 6], [9] * 10), ([5, 6], [3, 4, 5, 1])]
    monkeypatch.setattr("zoo.settle.answers", lambda *args, **kw: iter(said))
    stream = SelfCorrection(None, conversation_rows(), [[5, 6]], CONFIG, pad=0)
    batch = stream.next(0.0)
    assert batch["input_ids"].shape == (6, 16)
    unwanted = batch["unwanted"][batch["unwanted"] != IGNORE]
    assert unwanted.tolist() == [9] * 6  # of ten: from the fifth on
    assert (int((batch["labels"] != IGNORE).sum()), stream.caught) == (4 * 16, [0.25])
    other = SelfCorrection(None, conversation_rows(), [[5, 6]], CONFIG, pad=0)
    other.load_state_dict(stream.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(stream.next(0.5).values(), other.next(0.5).values(), strict=True))


def test_a_looping_network_learns_to_stop(tmp_path):
    network = looper()
    prompts = [[5, 6, 7 + i] for i in range(8)]

    def loops():
        return sum(is_looping(answer) for _, answer in answers(network, prompts, CONFIG, seed=0))

    before = loops()
    assert before > 0
    stream = SelfCorrection(network, conversation_rows(), prompts, CONFIG, pad=0)
    config = LoopConfig(tokens=96 * 60, mixed_precision="no", peak_lr=1e-2, warmup_steps=2, decay=0.2)
    assert train(SettleLoss(network), stream, config, tmp_path)
    assert loops() < before
    assert stream.caught[0] > stream.caught[-1]


def test_unlikelihood_is_added_at_unwanted_tokens():
    """By hand; and a token that is certain still gets a finite push away from it."""
    torch.manual_seed(0)
    hidden, table = torch.randn(9, 4), torch.randn(7, 4)
    labels, unwanted = torch.randint(0, 7, (9,)), torch.randint(0, 7, (9,))
    labels[:3], unwanted[4:8] = IGNORE, IGNORE  # unlikelihood alone, both, likelihood alone
    log_p = (hidden @ table.T).log_softmax(-1)
    like = -log_p[3:].gather(1, labels[3:, None]).sum()
    wrong = torch.cat([log_p[:4].gather(1, unwanted[:4, None]), log_p[8:].gather(1, unwanted[8:, None])])
    found = unlikely(chunked_cross_entropy(hidden, table, labels), hidden, table, labels, unwanted)
    torch.testing.assert_close(found, (like - torch.log(1 - wrong.exp()).sum()) / 9)
    sure = torch.tensor([[100.0, 0.0]], requires_grad=True)
    unlikely(torch.zeros(()), sure, torch.eye(2), torch.tensor([IGNORE]), torch.tensor([0])).backward()
    assert sure.grad.isfinite().all()
    assert sure.grad[0, 0] > 0  # downhill is away from it
