"""Lossless with every schedule: what test_lossless.py proves for `ragged`, for rows that are realigned.

Every drafter that needs no checkpoint, on a small random model. A draft model, trees of all kinds and the invariants
are in tests/schedules."""

import pytest

from paceline.core.sampling import SamplingParams
from paceline.draft import registry
from paceline.engine.engine import Engine
from tests.plain import texts
from tests.schedules import world

INFOS = [registry.describe(name) for name in registry.names()]
NEED_NONE = [info.name for info in INFOS if info.checkpoint != "required" and info.lossless == "yes"]
DRAFTERS = [name for name in NEED_NONE if name != "mtp"]  # whose head is in the checkpoint of its target
GREEDY = SamplingParams(max_tokens=world.NEW)


@pytest.mark.parametrize(("name", "schedule"), [(name, ("equal", "grouped")[i % 2]) for i, name in enumerate(DRAFTERS)])
def test_greedy_and_sampled_answers_are_plain_ones(name, schedule):
    """Every other row is greedy."""
    of = world.of()
    greedy = [i % 2 == 0 for i in range(len(of.prompts))]
    params = [GREEDY if first else sampled for first, sampled in zip(greedy, world.SAMPLED, strict=True)]
    known = [(of.answers if first else of.samples)[tuple(p)] for first, p in zip(greedy, of.prompts, strict=True)]
    engine = Engine(of.target, name, max_batch=3, schedule=schedule)
    assert texts(of.prompts, engine.generate(of.prompts, params)) == known
