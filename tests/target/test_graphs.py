"""Rounds in forms, as a CUDA device records them: on a CPU every form is run as it is; `PACELINE_TEST_DEVICE=cuda`
records them (docs/log.md)."""

import numpy as np
import pytest
import torch
from tests import drafters, models, native

from paceline.core.sampling import SamplingParams
from paceline.core.segment import Segment
from paceline.core.tree import DraftTree
from paceline.engine.engine import Engine
from paceline.formats.facts import BEFORE_NORM
from paceline.target.base import Needs
from paceline.target.graphs import Recorder


def with_forms(family):
    decoder = native.of(models.model(family), eos=())
    if decoder.recorder is None:
        decoder.recorder = Recorder(decoder, record=False)
    return decoder


def in_forms(decoder, monkeypatch):
    """Whether each forward from now on had a form."""
    seen = []
    verify = Recorder.verify

    def watched(self, segments, needs):
        verdict = verify(self, segments, needs)
        seen.append(verdict is not None)
        return verdict

    monkeypatch.setattr(Recorder, "verify", watched)
    return seen


@pytest.mark.parametrize("family", ["llama3", "mistral-window", "qwen3-bias"])
def test_answers_are_those_of_forwards_without_forms(family, monkeypatch):
    plain, decoder = native.of(models.model(family), eos=()), with_forms(family)
    plain.recorder = None
    rng = np.random.default_rng(0)
    prompts = [rng.integers(4, models.VOCAB_SIZE, n).tolist() for n in (70, 5, 34, 1, 61)]
    wish = SamplingParams(max_tokens=24)
    expected = [done.tokens for done in Engine(plain, max_batch=1).generate(prompts, wish)]
    answers = {tuple(p): [*p, *tokens] for p, tokens in zip(prompts, expected, strict=True)}
    seen = in_forms(decoder, monkeypatch)
    drafter = drafters.Oracle(answers, error=0.2, branches=2)
    engine = Engine(decoder, drafter, max_batch=3, prefill_chunk=80)
    assert [done.tokens for done in engine.generate(prompts, wish)] == expected
    if decoder.shape.window is None:  # a window is a mask that no form has
        assert sum(seen) > len(seen) / 2


def test_a_form_gives_the_states_and_logits_of_the_nodes_alone(monkeypatch):
    decoder = with_forms("llama3")
    recorder, needs = decoder.recorder, Needs(hidden_layers=(1, decoder.num_layers, BEFORE_NORM), top_k=3)
    rng = np.random.default_rng(1)
    slots = []
    for length in (9, 20):
        slots.append(decoder.add_row(length))
        decoder.verify([Segment.chunk(slots[-1], rng.integers(4, models.VOCAB_SIZE, length), last=True)])
        decoder.commit(slots[-1], range(length))
    tree = DraftTree(np.array([5, 6, 7, 8, 9]), np.array([-1, 0, 0, 1, 2]))
    segments = [Segment.tree(slots[1], tree), Segment.chunk(slots[0], np.array([4, 8, 6]), last=True)]
    verdicts = []
    for use in (recorder, None):
        decoder.recorder = use
        verdicts += [decoder.verify(segments, needs) for _ in range(3)]  # run, recorded, replayed
    for verdict in verdicts[:3]:
        assert (verdict.logits_at, verdict.hidden_at) == (verdicts[-1].logits_at, verdicts[-1].hidden_at)
        assert torch.allclose(verdict.logits, verdicts[-1].logits, atol=1e-4)
        assert verdict.top_k is not None
        for layer, states in verdict.hidden.items():
            assert torch.allclose(states, verdicts[-1].hidden[layer], atol=1e-4)


def test_a_cache_in_other_memory_has_another_form():
    """A recording writes to the addresses that it was made with, also where a cache of the same shape is elsewhere."""
    decoder = with_forms("llama3")
    assert decoder.recorder is not None
    segment, forms, cache = Segment.chunk(decoder.add_row(8), np.array([4, 8, 6]), last=True), [], decoder.cache
    for _ in range(2):
        forms += [decoder.recorder._form([segment], Needs()) for _ in range(2)]
        before = cache.kv  # alive, so that the copy is not where it was
        cache.kv = before.clone()
    assert forms[0] == forms[1]
    assert forms[2] == forms[3]
    assert forms[0] is not None
    assert forms[0] != forms[2]


def test_rounds_without_a_form_are_run_as_usual():
    decoder = with_forms("llama3")
    recorder = decoder.recorder
    assert recorder is not None
    slots = [decoder.add_row(8) for _ in range(3)]

    def chunk(slot, length):
        return Segment.chunk(slot, np.full(length, 5), last=True)

    assert recorder.verify([chunk(slots[0], 65)], Needs()) is None  # long
    assert recorder.verify([chunk(slots[0], 3), chunk(slots[2], 3)], Needs()) is None  # a gap
    hidden = chunk(slots[0], 2)
    hidden.hidden = torch.zeros(2, decoder.hidden_size)
    assert recorder.verify([hidden], Needs()) is None
    assert recorder.verify([chunk(slots[0], decoder.max_context - 1)], Needs()) is None
