"""The caches of eagle's and eagle3's heads after rounds in which their own drafts were accepted."""

from collections import Counter

import numpy as np
import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.core.segment import Segment
from paceline.core.tree import DraftTree
from paceline.draft import registry
from paceline.draft.fallback import Fallback
from paceline.draft.models import states as of_states
from paceline.draft.models.model_drafter import ModelDrafter
from paceline.engine.engine import Engine
from tests import drafters, models, native
from tests.draft.answered import NEW, Answered, weakened
from tests.draft.eagles import knowing_head
from tests.pairs import paired

METHODS = ("eagle", "eagle3")


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A target whose next token the heads beside it nearly know."""
    folder = tmp_path_factory.mktemp("heads")
    world = Answered.of(weakened(models.model("llama2", num_hidden_layers=4, tie_word_embeddings=False), 0.02), folder)
    for method in METHODS:
        knowing_head(folder / method, method, world.model)
    return world


def rows_of_two(here, drafter):
    """After every round the rows of three prompts, for which an oracle drafts in some rounds, else `drafter`."""
    engine = Engine(here.target, Fallback([drafters.Idle(here.answers, error=0.3, branches=1), drafter]))
    for prompt in here.prompts[:3]:
        engine.add(prompt, SamplingParams(max_tokens=NEW))
    while engine.has_work:
        engine.step()
        yield from engine.rows


def fresh_reading(here, drafter, text, pairs):
    """Keys and values of the head, and the tapped states, of a text that others of their own read whole."""
    target = native.of(here.model)
    slot = target.add_row(len(text))
    said = target.verify([Segment.chunk(slot, np.array(text), last=False)], drafter.needs)
    states = torch.cat([said.hidden[layer] for layer in drafter.model.network.taps], -1)
    other = type(drafter)(drafter.config)
    other.bind(target)
    network = other.model.network
    own = network.cache.add_row(pairs)
    tokens = np.array(text[1 : pairs + 1])
    with torch.inference_mode():
        embedded = network.embedded(torch.from_numpy(tokens))
        network.forward(embedded, network.first(states[:pairs]), [Segment.chunk(own, tokens, last=False)])
    return network.cache.kv[:, :, own, :, :pairs], states


@pytest.mark.parametrize(
    ("method", "tree", "chunk"), paired(METHODS, [(0, of_states.CHUNK), (12, of_states.CHUNK), (0, 3)])
)
def test_after_every_round_the_cache_is_a_fresh_prefill(here, monkeypatch, method, tree, chunk):
    """It holds pairs with the target's own states alone, for what was drafted is read again."""
    monkeypatch.setattr(of_states, "CHUNK", chunk)
    drafter = registry.create(f"{method}:{here.folder / method},tree={tree}")
    assert isinstance(drafter, ModelDrafter)
    checked, rounds, stood, before = 0, Counter[int](), dict[int, int](), dict[int, tuple[int, int]]()
    for row in rows_of_two(here, drafter):
        text, pairs = row.tokens.tolist(), drafter.model.length(row) - 1
        assert pairs + drafter.model.pending.count(row) == len(text) - 1
        if chunk > len(text):
            assert pairs in before.get(row.id, (0, len(text) - 1)), "where it drafts, it reads all that was there"
        before[row.id] = pairs, len(text) - 1
        if not pairs:
            continue
        keys_values, states = fresh_reading(here, drafter, text, pairs)
        own = drafter.model.pending.cache.kv[:, :, drafter.model.pending.slot(row), :, :pairs]
        torch.testing.assert_close(own, keys_values, atol=1e-5, rtol=1e-5)
        waiting = drafter.model.pending.of(row)
        torch.testing.assert_close(waiting, states[pairs : len(text) - 1], atol=1e-4, rtol=1e-4)
        in_memory = waiting.untyped_storage().nbytes() // (waiting.shape[1] * waiting.itemsize)
        rounds[row.id] += 1
        assert in_memory < len(text) - 1 or rounds[row.id] < 3, "states that were read are freed"
        stood[row.id] = sum(count for source, count in row.runs if source == drafter.name)
        checked += 1
    assert checked >= 6
    assert sum(stood.values()) > 0


@pytest.mark.parametrize(("most", "reads"), [(16 << 20, False), (1, True)])
def test_a_head_that_is_never_asked_reads_only_what_cannot_wait(here, monkeypatch, most, reads):
    monkeypatch.setattr(of_states, "CHUNK", 4)
    monkeypatch.setattr(of_states, "WAITING", most)
    drafter = registry.create(f"eagle3:{here.folder / 'eagle3'}")
    monkeypatch.setattr(drafter, "propose", lambda asks: [DraftTree.root(row.last_token) for row, _ in asks])
    engine = Engine(here.target, drafter)
    engine.add(here.prompts[0], SamplingParams(max_tokens=NEW))
    while engine.has_work:
        engine.step()
        for row in engine.rows:
            assert (drafter.model.length(row) > 1) == reads
            assert not reads or drafter.model.pending.count(row) <= 4
