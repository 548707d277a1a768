"""Random requests, aborts and failures through few slots and little memory: every answer is its answer alone."""

import resource

import pytest
import torch

from paceline.draft.registry import create
from tests import drafters, models, native
from tests.stress import Traffic

DRAFTERS = {
    "coupled": lambda: drafters.Coupled(_table(), (2, 1, 1)),
    "sam": lambda: create("sam"),
    "random tree": lambda: drafters.Random(),
}


def _table():
    return torch.randn(models.VOCAB_SIZE, models.VOCAB_SIZE, generator=torch.Generator().manual_seed(3))


def small():
    """A model of thousands of forwards a second, and room for long texts."""
    decoder, _ = native.pair("llama2", max_position_embeddings=1024, **native.TINY)
    decoder.eos_token_ids = (models.EOS,)
    return decoder


def memory(decoder, rows):
    """Bytes that `rows` rows of 192 tokens take."""
    return rows * 192 * decoder.cache.token_bytes


@pytest.mark.parametrize("name", ["coupled", pytest.param("sam", marks=pytest.mark.slow)])
def test_sixty_requests(monkeypatch, name):
    monkeypatch.setattr("paceline.core.request.AHEAD", 4)  # few reserve what they need
    decoder = small()
    seen = Traffic(60, seed=1).run(decoder, DRAFTERS[name], slots=24, memory=memory(decoder, 5), watch=lambda: None)
    assert seen["preempted"] >= 1
    assert seen["reused"] > 300
    assert seen["aborted"] >= 1
    assert seen["failed"] >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_two_thousand_requests(monkeypatch, name):
    monkeypatch.setattr("paceline.core.request.AHEAD", 4)
    decoder = small()
    sizes = []

    def watch():
        sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)

    seen = Traffic(2000, seed=2).run(decoder, DRAFTERS[name], slots=64, memory=memory(decoder, 12), watch=watch)
    assert seen["preempted"] >= 30
    assert seen["failed"] >= 50
    grown = sizes[-1] - sizes[len(sizes) // 4]
    assert grown < 30e6, f"{grown / 1e6:.0f} MB more at the end than after a quarter"
