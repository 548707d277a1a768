"""Tuning: predictions follow the table, and the command writes a table that `auto` reads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from paceline.cli import main
from paceline.draft.cost import term_names
from paceline.draft.recording import Recording
from paceline.draft.registry import create
from paceline.engine.engine import Engine
from paceline.replay.tune import advice, measured, predict
from paceline.workbench.walk import RecordedAnswer
from tests import models


def table(**terms: float) -> dict[str, object]:
    forward = {name: terms.get(name, 0.0) for name in term_names()}
    return {"model": {"fingerprint": ""}, "forward_ms": forward, "drafting_us": {}}


def answers() -> list[RecordedAnswer]:
    """Prompts of 8 tokens, answers of 10 that say nothing twice."""
    return [RecordedAnswer(np.arange(8) + 100 * i, np.arange(20, 30) + 100 * i) for i in range(4)]


def speed(batch: int, count: int, said: list[RecordedAnswer], draft: str = "none", **terms: float) -> float:
    drafter = create(draft)
    drafter.bind(Recording(None, (999,), 1000))
    return predict(table(**terms), said, drafter, batch, count)


def test_plain_decoding_takes_the_tables_time() -> None:
    # One row: 3 requests of a round for the prompt and 9 more; the last one joins and ends the count.
    assert speed(1, 4, answers(), round=1000.0) == pytest.approx((3 * 10 + 1) / (3 * 10 + 1), rel=0.01)
    assert speed(2, 4, answers(), round=1000.0) == pytest.approx(2.0, rel=0.05)
    assert speed(1, 4, answers(), prompt_token=1000.0) == pytest.approx(31 / 32, rel=0.01)
    # A row costs a second, and joins after the round of its prompt.
    assert speed(2, 4, answers(), row=1000.0) == pytest.approx(22 / 18, rel=0.05)


def test_drafts_that_are_right_save_rounds_and_cost_nodes() -> None:
    again = [RecordedAnswer(np.tile(np.arange(5), 8), np.tile(np.arange(5), 6))] * 3
    free = {"round": 1000.0}
    dear = {"token_after_0": 1000.0}
    assert speed(1, 3, again, "sam", **free) > 5 * speed(1, 3, again, **free)
    assert speed(1, 3, again, "sam", **dear) < 1.1 * speed(1, 3, again, **dear)


def test_the_engine_counts_as_the_prediction_does(tmp_path: Path) -> None:
    folder = models.make_repetitive(tmp_path / "tiny")
    said = [RecordedAnswer(np.arange(5, 13), np.arange(10))] * 4
    engine = Engine(str(folder), "none", max_batch=2)
    assert measured(engine, said, 4) > 0
    assert not engine.has_work
    assert engine.rounds == 11  # two rows of ten rounds; in the next the last two join


def test_advice_says_what_to_use_and_where_it_does_not_pay() -> None:
    plain = {1: 100.0, 32: 1000.0}
    gains = advice({"none": plain, "sam": {1: 150.0, 32: 800.0}, "auto:sam": {1: 152.0, 32: 1003.0}}, "t.json")
    assert "--draft 'auto:sam' --tune t.json" in gains
    assert "1.52 at 1, 1.00 at 32" in gains
    assert "gain nothing above 1 rows" in gains
    nothing = advice({"none": plain, "sam": {1: 90.0, 32: 500.0}, "auto:sam": {1: 99.5, 32: 990.0}}, "t.json")
    assert "--draft none" in nothing
    slower = advice({"none": plain, "sam": {1: 150.0, 32: 800.0}, "auto:sam": {1: 120.0, 32: 1000.0}}, "t.json")
    assert "sam at 1 (1.50)" in slower


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make_repetitive(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)


def test_the_command_writes_a_table_that_auto_reads(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, out = tmp_path / "log.jsonl", tmp_path / "tune.json"
    line = {"prompt": "the little cat and the little dog", "response": "the little cat and the little dog " * 2}
    log.write_text((json.dumps(line) + "\n") * 4)
    arguments = ["tune", tiny, "--traffic", log, "-o", out, "--batches", "1,2", "--seconds", "0.1", "--json"]
    assert main([str(argument) for argument in arguments]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts["predicted"]) == {"none", "sam", "suffix", "auto:sam|suffix"}
    assert set(facts["measured"]["none"]) == {"1"}
    assert all(speed > 0 for of in facts["predicted"].values() for speed in of.values())
    kept = json.loads(out.read_text())
    assert kept["round_ms"]["2 rows"]["plain"] > 0
    assert kept["acceptance"]["sam"]
    assert main(["generate", str(tiny), "the little", "-n", "8", "--draft", "auto", "--tune", str(out)]) == 0
    assert main(["generate", str(tiny), "the little", "-n", "8", "--draft", "sam", "--tune", str(out)]) == 2
    assert "--tune is a table for auto" in capsys.readouterr().err
