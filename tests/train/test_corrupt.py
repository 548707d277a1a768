"""Noise in rows: where it may stand, where its tokens come from, and that the labels stay."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import PacelineError
from paceline.train.data import pack_whole
from paceline.train.loss import IGNORE
from paceline.train.noise import NoiseConfig, Noisy, Span, answers_in, noisy, segments
from tests import models

PAPER = NoiseConfig()
MANY = NoiseConfig(lengths=(3, 6), every=48)


def row(*conversations, length=600):
    """A packed row of conversations, (tokens of the prompt, of the answer) each: ids, labels, and (begin, first token
    of the answer, end) of each. All tokens are different."""
    rendered, spans, at, token = [], [], 0, 0
    for prompt, answer in conversations:
        rendered.append((list(range(token, token + prompt + answer)), [False] * prompt + [True] * answer))
        spans.append((at, at + prompt, at + prompt + answer - 1))
        at, token = at + prompt + answer - 1, token + prompt + answer
    ids, labels = pack_whole(rendered, length, pad=0)
    return ids[0].astype(np.int64), labels[0].astype(np.int64), spans


def test_answers_are_found_in_packed_rows():
    ids, labels, spans = row((4, 10), (1, 7), (3, 1), (2, 5))
    assert [tuple(answer) for answer in answers_in(ids, labels)] == spans
    assert list(answers_in(np.arange(5), np.full(5, IGNORE))) == []


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 120)), min_size=1, max_size=4), st.integers(0, 1000),
    st.sampled_from([PAPER, MANY]),
)
def test_noise_stays_in_the_answers_and_comes_from_before(conversations, seed, config):
    ids, labels, spans = row(*conversations)
    before = labels.copy()
    corrupted = noisy(ids, labels, config, np.random.default_rng(seed))
    assert (labels == before).all()
    changed = np.flatnonzero(corrupted != ids).tolist()
    least, most = config.lengths
    for (begin, first, end), (_, tokens) in zip(spans, conversations, strict=True):
        own = [at for at in changed if begin <= at < end]
        count = max(tokens // config.every, 1) if config.every else 1
        assert len(own) <= count * most
        assert bool(own) == (tokens > least) or (least < most and tokens <= most)
        for at in own:
            assert first <= at < end  # never in the prompt, never the last token
            assert corrupted[at] in corrupted[begin:at]
    assert not set(changed) - {at for begin, _, end in spans for at in range(begin, end)}


def test_the_start_is_uniform_and_reaches_both_ends():
    answer, rng = Span(0, 10, 22), np.random.default_rng(0)
    starts = [segments(answer, PAPER, rng)[0][0] for _ in range(8000)]
    counts = np.bincount(starts)[10:]
    assert len(counts) == 8  # 10..17: the segment ends at 21, the last input
    assert counts.min() > 900


def test_many_segments_keep_their_distance():
    rng = np.random.default_rng(1)
    for _ in range(200):
        where = segments(Span(0, 5, 5 + 299), MANY, rng)
        assert len(where) == 6
        assert all(3 <= length <= 6 for _, length in where)
        for (start, length), (following, _) in pairwise(where):
            assert following - start - length >= MANY.gap
        assert where[-1][0] + where[-1][1] <= 304


def test_later_noise_may_copy_earlier_noise():
    """From one end of the text alone: drawn from the clean prefix, the second position could never hold its own
    token's predecessor's copy more often than chance."""
    ids, labels, _ = row((2, 30))
    config, chains = NoiseConfig(lengths=(2, 2)), 0
    for seed in range(4000):
        corrupted = noisy(ids, labels, config, np.random.default_rng(seed))
        changed = np.flatnonzero(corrupted != ids)
        chains += len(changed) == 2 and corrupted[changed[0]] == corrupted[changed[1]]
    # The second copies the first with chance 1 / position, and the token the first copied as often.
    assert 300 < chains < 900


def test_other_sources():
    ids, labels, _ = row((4, 40))
    masked = noisy(ids, labels, NoiseConfig(source="mask", mask=99), np.random.default_rng(0))
    assert (masked[masked != ids] == 99).all()
    assert (masked != ids).sum() == 5
    anywhere = noisy(ids, labels, NoiseConfig(source="vocabulary", vocab_size=10**6), np.random.default_rng(0))
    assert (anywhere != ids).sum() == 5
    assert anywhere.max() > 1000


@pytest.mark.parametrize("config", [NoiseConfig(lengths=(0, 0)), NoiseConfig(share=0.0)])
def test_without_noise_rows_are_what_they_were(config):
    ids, labels, _ = row((4, 40))
    assert (noisy(ids, labels, config, np.random.default_rng(0)) == ids).all()


def test_some_answers_may_stay_clean():
    ids, labels, spans = row(*[(3, 30)] * 15)
    corrupted = noisy(ids, labels, NoiseConfig(share=0.5), np.random.default_rng(0))
    touched = sum((corrupted[begin:end] != ids[begin:end]).any() for begin, _, end in spans)
    assert 2 < touched < 13


@pytest.mark.parametrize("lengths", [(0, 5), (6, 5)])
def test_what_cannot_be(lengths):
    with pytest.raises(PacelineError):
        NoiseConfig(lengths=lengths)


class Rows:
    """A stream of one batch."""

    def __init__(self):
        ids, labels, _ = row((4, 60), (3, 80))
        self.batch = {
            "input_ids": torch.from_numpy(np.stack([ids] * 3)), "labels": torch.from_numpy(np.stack([labels] * 3)),
        }

    def next(self, progress):
        return self.batch

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_a_stream_is_the_seed_s_and_goes_on_where_it_was():
    one, same, other = (Noisy(Rows(), PAPER, seed) for seed in (0, 0, 1))
    first = one.next(0)["input_ids"]
    assert torch.equal(first, same.next(0)["input_ids"])
    assert not torch.equal(first, other.next(0)["input_ids"])
    assert not torch.equal(first[0], first[1])
    resumed = Noisy(Rows(), PAPER, 0)
    resumed.load_state_dict(one.state_dict())
    assert torch.equal(one.next(0)["input_ids"], resumed.next(0)["input_ids"])
    assert torch.equal(one.next(0)["labels"], Rows().batch["labels"])


def test_the_logits_before_a_segment_are_those_of_the_clean_row():
    """Bit for bit: noise changes nothing before it, the prediction of the first replaced token included."""
    model = models.model("llama3")
    ids = torch.from_numpy(np.random.default_rng(0).integers(4, 280, 40))
    labels = np.concatenate([np.full(9, IGNORE), ids[10:].numpy(), [7]])
    corrupted = torch.from_numpy(noisy(ids.numpy(), labels, PAPER, np.random.default_rng(3)))
    start = int((corrupted != ids).nonzero()[0])
    with torch.inference_mode():
        clean, other = model(ids[None]).logits[0], model(corrupted[None]).logits[0]
    assert torch.equal(clean[:start], other[:start])
    assert not torch.equal(clean[start], other[start])
