"""The weights in models/: small enough for a checkout, and each drafter for SmolLM2 says how it was made."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.paths import REPOSITORY

MODELS = REPOSITORY / "models"
MB = 1_000_000
DRAFTERS = ("eagle3", "dflash", "eagle", "medusa", "hydra", "amphista", "kangaroo", "draft")


def test_a_checkout_stays_small() -> None:
    sizes = Counter[str]()
    for file in filter(Path.is_file, MODELS.rglob("*")):
        folder = file.relative_to(MODELS).parts[0]
        sizes[folder if folder == "smollm2-dflash" else folder.partition("-")[0]] += file.stat().st_size
    assert sizes["smollm2-dflash"] <= 15 * MB
    assert sizes["smollm2"] <= 60 * MB
    assert sizes.total() <= 130 * MB


def test_nothing_of_smollm2_itself_is_shipped() -> None:
    """Its tokenizer and template are the package's; a drafter knows the tokenizer by its fingerprint."""
    of_drafters = {"config.json", "generation_config.json", "model.safetensors", "slots.json", "training.jsonl"}
    files = {file.name for folder in MODELS.glob("smollm2-*/") for file in folder.iterdir()}
    assert files <= of_drafters


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
    assert config["recipe"]["spent"]["tokens"]
    depths = config["held_out"]["all"]
    assert len(depths) >= 3
    assert all(0 < depth[figure] < 1 for depth in depths[:3] for figure in ("accepted", "overlap", "sampled"))
