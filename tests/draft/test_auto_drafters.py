"""Every drafter of the registry inside `auto`: it is asked, no request fails, and the text is plain decoding's."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.draft.auto import TRIALS, Auto
from paceline.draft.neural.checkpoint import TargetFacts, save_drafter
from paceline.draft.neural.heads.networks import Switches
from paceline.draft.registry import describe, names
from paceline.engine.engine import Engine
from paceline.engine.sampling import SamplingParams
from paceline.train.kangaroo import no_adapter
from tests import models, native
from tests.draft.eagles import forgetful, knowing_head
from tests.draft.head_worlds import HEADS
from tests.draft.head_worlds import World as Heads
from tests.draft.stores import corpus
from tests.draft.test_cost import times_of

EXIT = 2
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
SPECS = {
    "rest": "rest:{corpus}",
    "model": "model:{model}",
    "s2d": "s2d:{model};exits=2;4",
    "mirror": "mirror:{model};where=line",
    "kangaroo": "kangaroo:{kangaroo}",
    "kangaroo, trees": "kangaroo:{kangaroo};tree=9;width=3",
    "kangaroo, after sam": "sam|kangaroo:{kangaroo}",
    "medusa": "medusa:{medusa}",
    "hydra": "hydra:{hydra}",
    "amphista": "amphista:{amphista}",
    "eagle": "eagle:{eagle}",
    "eagle3": "eagle3:{eagle3}",
}
"""Of drafters with a checkpoint; {name}: a folder that `Folders` makes."""
NETWORKS: dict[str, dict[str, Any]] = {
    "medusa": {},
    "hydra": {"layers": 1, "prefix": False},
    "amphista": {"switches": Switches(heads=HEADS)},
}
SILENT = ("none", "grammar")
"""They draft nothing for these requests."""
FACTS = {
    "hydra": {"tied": True, "hydra_num_layers": 1, "hydra_head_arch": "mlp"},
    "amphista": {"network": asdict(Switches(heads=HEADS))},
}


class Folders(Heads):
    """A target whose layers add little, so that drafts are accepted; its answers; and what drafters for it read."""

    def __init__(self, folder: Path):
        self.folder, self._made = folder, dict[str, str]()
        self.model = forgetful(models.model("llama2", num_hidden_layers=4, tie_word_embeddings=False), 0.02)
        with torch.no_grad():
            self.model.lm_head.weight *= 8  # surer of itself, as its heads then are
        self.target = native.of(self.model)
        rng = np.random.default_rng(1)
        self.prompts = [rng.integers(4, models.VOCAB_SIZE, n).tolist() for n in (23, 5, 1, 12)]

    @cached_property
    def answers(self) -> list[list[int]]:
        return [done.tokens for done in Engine(self.target).generate(self.prompts, PARAMS)]

    def __getitem__(self, name: str) -> str:
        if name not in self._made:
            self._made[name] = str(self._make(name, self.folder / name))
        return self._made[name]

    def _make(self, name: str, at: Path) -> object:
        if name in NETWORKS:
            return self.save(self.module(name, **NETWORKS[name]), name, at, FACTS.get(name, {})).partition(":")[2]
        if name == "model":
            self.model.save_pretrained(at)
        elif name == "corpus":
            corpus(at, ["".join(map(chr, answer)) for answer in self.answers])
        elif name == "kangaroo":
            facts = TargetFacts.of(self.target)
            save_drafter(at, name, config={"exit_layer": EXIT}, tensors=no_adapter(self.model), target=facts)
        else:
            knowing_head(at, name, self.model)
        return at


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("drafters"))


@pytest.mark.parametrize("name", [name for name in dict.fromkeys([*names(), *SPECS]) if name != "auto"])
def test_a_drafter_inside_auto_is_asked_and_changes_no_answer(folders: Folders, name: str) -> None:
    if name not in SPECS:
        assert describe(name).checkpoint != "required", "give it a checkpoint in SPECS"
    engine = Engine(folders.target, f"auto:{SPECS.get(name, name).format_map(folders)},explore=0", max_batch=3)
    auto = engine.drafter
    assert isinstance(auto, Auto)
    auto.times = times_of(round=1.0, token_after_0=0.05)
    params = [replace(PARAMS, prediction=answer) for answer in folders.answers]
    drafted = 0
    for _ in range(2):  # some remember the first time
        out = engine.generate(folders.prompts, params)
        assert [done.finish_reason for done in out] == ["length"] * len(out)
        assert [done.tokens for done in out] == folders.answers
        drafted += sum(done.stats.draft_tokens for done in out)
    assert auto.candidates[-1].drafts > TRIALS, "it was not asked"
    assert drafted or name in SILENT
