"""The weights in models/: small enough for a checkout, and each drafter for SmolLM2 says how it was made."""

import json
from pathlib import Path

import pytest

from tests.paths import REPOSITORY

MODELS = REPOSITORY / "models"
MB = 1_000_000
DRAFTERS = ("eagle3", "eagle", "medusa", "hydra", "amphista", "kangaroo", "draft")


def size(*folders: Path) -> float:
    return sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file()) / MB


def test_a_checkout_stays_small() -> None:
    real = size(*MODELS.glob("smollm2*"))
    assert real <= 60
    assert size(MODELS) - real <= 65


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_for_smollm2_has_its_card(name: str) -> None:
    """Whose it is, what it has read, and the held-out figures that the page of results compares with the truth."""
    file = MODELS / f"smollm2-{name}" / "config.json"
    if not file.exists():
        pytest.skip(f"{file.parent} has not been trained yet")
    config = json.loads(file.read_text("utf-8"))
    assert "smollm2" in config["target"]["name"].lower()
    assert config["target"]["weights_fingerprint"]
    assert config["data"]
    assert config["recipe"]["loop"]["tokens"] or config["recipe"]["loop"]["minutes"]
    depths = config["held_out"]["all"]
    assert len(depths) >= 4
    assert all(0 < depth[figure] < 1 for depth in depths[:4] for figure in ("accepted", "overlap", "sampled"))
