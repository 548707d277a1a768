"""Mean accepted tokens on Vicuna-7B's recorded answers to Spec-Bench, against what is published."""

import pytest

from paceline.draft.registry import create
from tests.draft.trace import Replayed, replay, turns


def test_sam_accepts_as_much_as_the_paper_without_its_corpus(shared):
    """The paper's ablation has 1.85 for the dynamic automaton alone, drafts of 40."""
    if not (shared / "data" / "traces").is_dir():
        pytest.skip("no recorded generations in the shared data")
    drafter, total = create("sam,grow=0"), Replayed()
    for id, turn in enumerate(turns(shared)):
        total += replay(drafter, turn, id)
    assert total.mean_accepted_tokens == pytest.approx(1.85, abs=0.02)
