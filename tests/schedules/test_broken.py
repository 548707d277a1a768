"""Four ways to break a rectangular batch (Zhang et al. 2025, arXiv 2510.22876) show in the shares of the benchmark."""

import numpy as np
import pytest
import torch
from tests import drafters
from tests.schedules import world

from paceline.bench.metrics import partial
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.peers.setup import cut
from paceline.target import rectangles
from paceline.target.rectangles import RectangularCache


@pytest.fixture(scope="module")
def llama():
    return world.of()


def shares(given, known):
    """E and P of all answers."""
    pairs = list(zip(given, known, strict=True))
    return float(np.mean([mine == known for mine, known in pairs])), float(np.mean([partial(*pair) for pair in pairs]))


def see_padding(monkeypatch):
    inner = rectangles.visible

    def visible(segments, places, queries, keys):
        return inner(segments, [(0, end, node) for _, end, node in places], queries, keys)

    monkeypatch.setattr(rectangles, "visible", visible)


def keep_rejected(monkeypatch):
    inner = RectangularCache.commit
    monkeypatch.setattr(
        RectangularCache, "commit", lambda self, slot, path: inner(self, slot, [*path[:-1], path[-1], path[-1] + 1])
    )
    monkeypatch.setattr(RectangularCache, "length", lambda self, slot: self._row(slot).length)


def positions_by_place(monkeypatch):
    inner = rectangles.RectangularTarget._run

    def run(self, segments, padding, tokens, positions, mask, cache, hidden_layers):
        places = torch.full_like(positions, cache.get_seq_length()) + torch.cat(
            [torch.from_numpy(segment.depth) for segment in segments]
        )
        return inner(self, segments, padding, tokens, places, mask, cache, hidden_layers)

    monkeypatch.setattr(rectangles.RectangularTarget, "_run", run)


def stay_out_of_line(monkeypatch):
    inner = RectangularCache.arrange

    def arrange(self, slots, counts):
        block = inner(self, slots, counts)
        block.kv[:, :, :, :, : block.end] = block.kv[:, :, :, :, : block.end].roll(1, 4)
        return block

    monkeypatch.setattr(RectangularCache, "arrange", arrange)


@pytest.mark.parametrize("mutant", [see_padding, keep_rejected, positions_by_place, stay_out_of_line])
def test_our_own_target_broken_in_the_same_ways_is_caught(llama, mutant, monkeypatch):
    known = [text[len(p) :] for p, text in llama.answers.items()]
    mutant(monkeypatch)
    engine = Engine(llama.target, drafters.Oracle(llama.answers, error=0.3), max_batch=4, schedule="equal")
    out = engine.generate(llama.prompts, SamplingParams(max_tokens=world.NEW))
    exactly, partly = shares([done.tokens for done in out], known)
    assert exactly < 1
    assert partly < 1


def test_matching_counts_tokens_up_to_the_end():
    assert partial([5, 6, 9], [5, 6, 7]) == pytest.approx(2 / 3)
    assert partial([5, 6], [5, 6, 7, 8]) == 0.5
    assert partial([5, 6, 7, 8], [5, 6]) == 1
    assert partial([], []) == 1
    assert cut([2, 3], [2]) == [2]
