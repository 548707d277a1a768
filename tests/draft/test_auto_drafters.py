"""Every drafter of the registry inside `auto`: it is asked, no request fails, and the text is plain decoding's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.draft.auto import TRIALS, Auto
from paceline.engine.engine import Engine
from paceline.engine.sampling import SamplingParams
from tests.draft.folders import SILENT, Folders, specs
from tests.draft.test_cost import times_of

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
WITHIN = {name: spec.replace(",", ";") for name, spec in specs().items() if name != "auto"} | {
    "kangaroo, trees": "kangaroo:{kangaroo};tree=9;width=3",
    "kangaroo, after sam": "sam|kangaroo:{kangaroo}",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("drafters"))


@pytest.mark.parametrize("name", WITHIN)
def test_a_drafter_inside_auto_is_asked_and_changes_no_answer(folders: Folders, name: str) -> None:
    engine = Engine(folders.target, f"auto:{WITHIN[name].format_map(folders)},explore=0", max_batch=3)
    auto = engine.drafter
    assert isinstance(auto, Auto)
    auto.times = times_of(round=1.0, token_after_0=0.05)
    answers = [answer.tokens for answer in folders.answers(PARAMS)]
    params = [replace(PARAMS, prediction=answer) for answer in answers]
    drafted = 0
    for _ in range(2):  # some remember the first time
        out = engine.generate(folders.prompts, params)
        assert [done.finish_reason for done in out] == ["length"] * len(out)
        assert [done.tokens for done in out] == answers
        drafted += sum(done.stats.draft_tokens for done in out)
    assert auto.candidates[-1].drafts > TRIALS, "it was not asked"
    assert drafted or name in SILENT
