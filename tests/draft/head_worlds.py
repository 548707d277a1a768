"""A random target, and random heads for it in folders, as `paceline train` writes them and as others do."""

from __future__ import annotations

import json

import numpy as np
import torch

from paceline.draft.shapes import SLOTS_FILE
from paceline.formats.heads.checkpoint import TargetFacts
from paceline.train.heads import (
    AmphistaConfig,
    AmphistaLoss,
    HeadsLoss,
    HydraConfig,
    HydraLoss,
    MedusaConfig,
    MedusaLoss,
)
from paceline.train.saving import save_drafter
from tests import models, native

HEADS = 3
ACCURACIES = [[0.5, 0.2, 0.1], [0.4, 0.15, 0.05], [0.3, 0.1, 0.05]]


class World:
    """A target of a family in both forms, with prompts. The heads' last layers echo the target's own head, so that
    some drafts are accepted."""

    def __init__(self, family="llama2", **changes):
        self.model = models.model(family, tie_word_embeddings=False, **changes)
        self.target = native.of(self.model)
        rng = np.random.default_rng(1)
        self.prompts = [rng.integers(4, self.target.vocab_size, n).tolist() for n in (23, 5, 34, 2, 11, 1, 60, 8)]

    def module(self, kind, **changes):
        """Heads with random weights, as they are trained."""
        torch.manual_seed(3)
        made: HeadsLoss
        if kind == "medusa":
            made = MedusaLoss(self.model, MedusaConfig(depth=HEADS, **changes))
        elif kind == "hydra":
            made = HydraLoss(self.model, HydraConfig(depth=HEADS, **changes))
        else:
            made = AmphistaLoss(self.model, AmphistaConfig(depth=HEADS, **changes))
        stir(made)
        if kind == "hydra":  # embeddings are small, and each must weigh as much as the state
            for head in made.network.hydra_mlp:
                head[0].res_connection.weight.data[:, self.target.hidden_size :] *= 10
        return made.eval()

    def save(self, module, kind, folder, facts=None):
        """A folder as `paceline train` writes it; "kind:folder". facts: of config.json, if not the module's own."""
        tensors = {name: weight.detach() for name, weight in module.saved().items()}
        facts = module.facts() if facts is None else facts
        save_drafter(folder, kind, config=facts, tensors=tensors, target=TargetFacts.of(self.target))
        (folder / SLOTS_FILE).write_text(json.dumps({"accuracies": ACCURACIES}))
        return f"{kind}:{folder}"


def stir(module, scale=0.2):
    """Move every parameter by as much as matters, from wherever it begins."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += scale * torch.randn_like(parameter) / max(parameter.shape[-1], 1) ** 0.5


def random_tensors(shapes, seed=0):
    """Tensors of those names and shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
