"""The noise of sampled answers: the generator's published vectors, a plain reference, its law, and its independence."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from paceline import processor
from paceline.core import noise as module
from paceline.core import noise_rows
from paceline.core.noise import MULTIPLIERS, WEYL, Noise, folded
from paceline.core.noise_rows import tokens_of_rows
from paceline.errors import NumericError

VECTORS = [
    (0, (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (2**64 - 1, (2**32 - 1,) * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (0x299F31D0A4093822, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
"""Key, counter, and words of Philox4x32-10: Random123's known answers."""


def words(key, counter):
    """Philox4x32-10, plainly."""
    c, k = list(counter), [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        a, b = MULTIPLIERS[0] * c[0], MULTIPLIERS[1] * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + WEYL[0]) & 0xFFFFFFFF, (k[1] + WEYL[1]) & 0xFFFFFFFF]
    return c


def exponential(key, position, token):
    first, second = (words(key, (token // 4, position, word, 0))[token % 4] for word in (0, 1))
    return -np.log1p(-(first + (second + 0.5) / 2**32) / 2**32)


def times(key, position, tokens, probs):
    return np.array([exponential(key, position, int(t)) for t in tokens]) / np.maximum(probs.double().numpy(), 1e-300)


@pytest.mark.parametrize(("key", "counter", "expected"), VECTORS)
def test_the_words_are_the_published_ones(key, counter, expected):
    wanted = [int(word, 16) for word in expected.split()]
    assert words(key, counter) == wanted
    assert [int(word) for word in module._philox(np.uint64(key), *map(np.uint64, counter))] == wanted


def law(size, kept, spread, dtype, seed):
    """A distribution over `size` tokens of which `kept` are possible."""
    rng = np.random.default_rng(seed)
    probs = np.zeros(size)
    probs[rng.choice(size, kept, replace=False)] = rng.random(kept) ** spread + 1e-12
    return torch.from_numpy(probs / probs.sum()).to(dtype)


@settings(max_examples=80)
@given(
    st.sampled_from([1, 2, 3, 5, 255, 256, 257, 700]), st.floats(0, 1), st.sampled_from([0.0, 1.0, 9.0]),
    st.sampled_from([torch.float32, torch.float64]), st.integers(0, 2**70), st.integers(0, 5000), st.integers(1, 9),
)  # fmt: skip
def test_the_race_is_the_plain_one(size, share, spread, dtype, seed, position, count):
    """Its winner, the runners-up, on any columns, and on an accelerator's way."""
    kept = max(1, round(share * size))
    probs, noise = law(size, kept, spread, dtype, seed % 1000), Noise(seed)
    for tokens in (None, np.sort(np.random.default_rng(1).choice(5 * size, size, replace=False))):
        ids = np.arange(size) if tokens is None else tokens
        expected = times(noise.key, position, ids, probs)
        expected[probs.numpy() == 0] = np.inf
        order = np.argsort(expected, kind="stable")[: min(count, kept)]
        best, found = noise.guess(probs, position, count, tokens)
        assert best.tolist() == order.tolist()
        np.testing.assert_allclose(found, expected[order], rtol=1e-9)
    assert noise.choose(probs, position) == noise.guess(probs, position)[0][0]
    assert tokens_of_rows(torch.stack([probs, probs]), [noise.key, 7], [position, 3]) == [
        noise.choose(probs, position), Noise(7).choose(probs, 3)
    ]  # fmt: skip


def test_rows_on_an_accelerator_are_decided_in_pieces(monkeypatch):
    probs = torch.stack([law(300, 300, 2.0, torch.float32, seed) for seed in range(7)])
    alone = [Noise(seed).choose(row, seed) for seed, row in enumerate(probs)]
    for piece in (1, 700, 1 << 24):
        monkeypatch.setattr(noise_rows, "PIECE", piece)
        assert tokens_of_rows(probs, range(7), range(7)) == alone


@pytest.mark.parametrize("probs", [[0.0, 0.0], [np.nan, 1.0], [np.inf, 1.0], [1.0, np.nan] * 300], ids=len)
def test_what_cannot_be_drawn_from(probs):
    for dtype in (torch.float32, torch.float64):
        broken = torch.tensor(probs, dtype=dtype)
        assert not len(Noise(0).guess(broken, 0, 3)[0])
        with pytest.raises(NumericError):
            Noise(0).choose(broken, 0)
        with pytest.raises(NumericError):
            tokens_of_rows(broken.unsqueeze(0), [0], [0])


def test_a_scale_of_the_probabilities_changes_nothing():
    probs = law(500, 400, 2.0, torch.float64, 3)
    assert [Noise(1).choose(probs, i) for i in range(50)] == [Noise(1).choose(8 * probs, i) for i in range(50)]


def test_seeds_of_any_size():
    assert (folded(5), folded(2**64 + 5), folded(2**64)) == (5, 4, 1)
    one, other = Noise(None), Noise(None)
    assert one.seed != other.seed
    probs = law(300, 300, 1.0, torch.float32, 0)
    assert [Noise(one.seed).choose(probs, i) for i in range(20)] == [one.choose(probs, i) for i in range(20)]


@pytest.mark.parametrize(
    "level", [one for one in processor.levels() if "NUMBA_CPU_NAME" in processor._FOLLOWERS.get(one, {})]
)
def test_every_level_of_processor_gives_the_same_tokens(level):
    """Of those for which other code is compiled; in a process of its own, because what is compiled stays."""
    code = (
        "import torch; from paceline.core.noise import Noise; g = torch.Generator().manual_seed(0); "
        "p = torch.rand(5000, generator=g) ** 6; n = Noise(11); "
        "print([n.choose(p, i) for i in range(40)], [t.hex() for t in n.guess(p, 3, 9)[1].tolist()])"
    )
    env = os.environ | {processor.VARIABLE: level}
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    probs = torch.rand(5000, generator=torch.Generator().manual_seed(0)) ** 6
    noise = Noise(11)
    found = [noise.choose(probs, i) for i in range(40)], [t.hex() for t in noise.guess(probs, 3, 9)[1].tolist()]
    assert said.strip() == " ".join(map(str, found))


# The law -------------------------------------------------------------------------------------------------------------


def p_of_frequencies(probs, draws, seed, power=1.0):
    """Chi-square of the tokens of so many draws; tokens expected fewer than ten times are put together. power: of the
    probabilities by which they are drawn."""
    noise, drawn = Noise(seed), probs**power
    counts = np.bincount([noise.choose(drawn, i) for i in range(draws)], minlength=len(probs))
    expected = probs.double().numpy() / float(probs.double().sum()) * draws
    order = np.argsort(-expected)
    alone = int((expected >= 10).sum())
    rare = np.cumsum(expected[order][alone:]) // 10
    groups = np.append(np.arange(alone), alone + np.minimum(rare, max(rare[-1] - 1, 0) if len(rare) else 0)).astype(int)
    seen, hoped = (np.bincount(groups, of[order]) for of in (counts, expected))
    assert np.count_nonzero(hoped) > 3
    return float(stats.chisquare(seen[hoped > 0], hoped[hoped > 0]).pvalue)


@pytest.mark.parametrize("size", [5, 1000])
@pytest.mark.parametrize("seed", [0, 1])
def test_tokens_come_as_often_as_they_are_probable(size, seed):
    assert p_of_frequencies(law(size, size, 3.0, torch.float32, 0), 30_000, seed) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("size", "spread"), [(5, 3.0), (1000, 3.0), (150_000, 3.0), (150_000, 0.0)])
@pytest.mark.timeout(1800)
def test_tokens_come_as_often_in_a_million_draws(size, spread):
    assert p_of_frequencies(law(size, size, spread, torch.float32, 0), 1_000_000, 5) > 1e-3


def test_a_wrong_law_would_show():
    assert p_of_frequencies(law(1000, 1000, 3.0, torch.float32, 0), 30_000, 0, power=1.5) < 1e-6


def uniform(key, positions, tokens):
    """The noise, spread evenly over [0, 1), at so many places."""
    flat = [1 - np.exp(-module._exponential(np.uint64(key), int(i), int(v))) for i in positions for v in tokens]
    return np.array(flat).reshape(len(positions), len(tokens))


NEIGHBOURS = ("positions", "tokens", "seeds")


@pytest.mark.parametrize("kind", NEIGHBOURS)
def test_neighbours_are_independent(kind):
    """No correlation of neighbouring numbers, and as many runs above and below the middle as chance makes."""
    if kind == "positions":
        numbers = uniform(3, np.arange(20_000), np.array([17]))[:, 0]
    elif kind == "tokens":
        numbers = uniform(3, np.array([5]), np.arange(20_000))[0]
    else:
        numbers = np.array([uniform(seed, np.array([4]), np.array([9]))[0, 0] for seed in range(10_001)])
    assert stats.kstest(numbers, "uniform").pvalue > 1e-3
    count = len(numbers)
    for lag in (1, 2, 4):
        assert abs(np.corrcoef(numbers[:-lag], numbers[lag:])[0, 1]) < 4 / np.sqrt(count)
    above = numbers > 0.5
    runs, expected = 1 + np.count_nonzero(above[1:] != above[:-1]), 1 + (count - 1) / 2
    assert abs(runs - expected) < 4 * np.sqrt((count - 1) / 4)


def test_other_decisions_have_numbers_of_their_own():
    noise, probs = Noise(3), torch.tensor([0.3, 0.7])
    happened = np.array([noise.happens(0.3, i) for i in range(20_000)])
    taken = np.array([noise.choose(probs, i) == 0 for i in range(20_000)])
    assert abs(happened.mean() - 0.3) < 0.013
    assert abs(np.corrcoef(happened, taken)[0, 1]) < 0.03
    assert not any(noise.happens(0.0, i) for i in range(100))
    assert all(noise.happens(1.0, i) for i in range(100))
