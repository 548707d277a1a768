"""Every drafter of the registry for one random target: what those with a checkpoint read lies in folders."""

from copy import copy, deepcopy
from functools import cached_property

import numpy as np
import torch

from paceline.core.sampling import SamplingParams
from paceline.draft.models.tokenizers import intersection
from paceline.draft.registry import describe, names
from paceline.engine.engine import Engine
from paceline.formats.heads.checkpoint import TargetFacts
from paceline.formats.tokenizer import Tokenizer
from paceline.train.kangaroo import AdapterModule
from paceline.train.saving import save_drafter
from tests import models, native
from tests.draft import blocks, mtps
from tests.draft.answered import weakened
from tests.draft.assistants import knowing_assistant
from tests.draft.eagles import knowing_head, parallel
from tests.draft.head_worlds import World as Heads
from tests.draft.stores import corpus
from tests.draft.tongues import byte_level
from tests.plain import decode

EXIT = 2
SPECS = {
    "rest": "rest:{corpus}",
    "model": "model:{model}",
    "s2d": "s2d:{model},exits=2,4",
    "mirror": "mirror:{model},where=line",
    "kangaroo": "kangaroo:{kangaroo}",
    "medusa": "medusa:{medusa}",
    "hydra": "hydra:{hydra}",
    "amphista": "amphista:{amphista}",
    "eagle": "eagle:{eagle}",
    "eagle3": "eagle3:{eagle3}",
    "dflash": "dflash:{dflash}",
    "mtp": "mtp:{mtp}",
}
"""Of drafters with a checkpoint; {name}: a folder that `Folders` makes."""
NETWORKS = {"medusa": {}, "hydra": {"layers": 1, "prefix": False}, "amphista": {}}
SILENT = ("none", "grammar")
"""They draft nothing for ordinary requests."""


def specs():
    """A spec for every drafter of the registry."""
    for name in names():
        if describe(name).checkpoint == "required":
            assert name in SPECS, f"give {name} a checkpoint in SPECS"
    return {name: SPECS.get(name, name) for name in names()}


class Folders(Heads):
    """A target whose layers add little, so that drafts are accepted, and what drafters for it read.

    share  how much the target's layers add, of what they would. sureness: factor of its logits. changes: to its
           configuration. family: of a Gemma 4, for its assistant."""

    def __init__(self, folder, share=0.02, sureness=8, family="llama2", **changes):
        self.folder, self.share, self._made = folder, share, dict[str, str]()
        sizes = {"num_hidden_layers": 4} if family == "llama2" else {}
        model = models.model(family, tie_word_embeddings=False, **sizes, **changes)
        self.model = weakened(model, share, sureness=sureness)  # so are its heads
        self.target = native.of(self.model, eos=() if "vocab_size" in changes else (models.EOS,))
        rng, vocab_size = np.random.default_rng(1), self.target.vocab_size
        self.prompts = [rng.integers(min(4, vocab_size - 1), vocab_size, n).tolist() for n in (23, 5, 1, 12)]
        self._answers = {}

    def answers(self, params):
        """What transformers writes, token by token and without a cache; worked out once."""
        if (key := repr(params)) not in self._answers:
            each = [params] * len(self.prompts) if isinstance(params, SamplingParams) else params
            self._answers[key] = [
                decode(self.model, prompt, one, eos=(models.EOS,))
                for prompt, one in zip(self.prompts, each, strict=True)
            ]
        return self._answers[key]

    @cached_property
    def long(self):
        """Two prompts, one near the end of the context, and plain decoding's answers to them."""
        prompts = [(self.prompts[0] * 6)[: models.MAX_CONTEXT - 5], self.prompts[1]]
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        return prompts, params, Engine(self.target).generate(prompts, params)

    def __getitem__(self, name):
        if name not in self._made:
            self._made[name] = str(self._make(name, self.folder / name))
        return self._made[name]

    @property
    def spoken(self):
        """What drafters are told of the target, with a tokenizer."""
        facts = copy(self.target)
        facts.tokenizer = Tokenizer(models.tokenizer())
        return facts

    @torch.no_grad()
    def _foreign(self, at):
        """The target with another tokenizer: tokens that both have are embedded alike, the others at random."""
        own, model = byte_level(["the cats sat there", "größer 日本語"], 290, ("</s>", "<s>")), deepcopy(self.model)
        pairs = intersection(own, self.spoken.tokenizer)
        model.resize_token_embeddings(len(own.inner))
        embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
        for new, old in zip(embeddings, (self.model.model.embed_tokens, self.model.lm_head), strict=True):
            new.weight.normal_(std=float(old.weight.std()), generator=torch.Generator().manual_seed(0))
            new.weight[[*pairs]] = old.weight[[*pairs.values()]]
        model.config.bos_token_id, model.config.eos_token_id = 1, 0
        model.save_pretrained(at)
        own.inner.save_pretrained(at)

    def _make(self, name, at):
        if name in NETWORKS:
            return self.save(self.module(name, **NETWORKS[name]), name, at).partition(":")[2]
        if name == "model":
            self.model.save_pretrained(at)
        elif name == "foreign":
            self._foreign(at)
        elif name == "corpus":
            answers = self.answers(SamplingParams(max_tokens=24, ignore_eos=True))
            corpus(at, ["".join(map(chr, answer.tokens)) for answer in answers])
        elif name == "kangaroo":
            facts, untrained = TargetFacts.of(self.target), AdapterModule(self.model).state_dict()
            save_drafter(at, name, config={"exit_layer": EXIT}, tensors=untrained, target=facts)
        elif name == "dflash":
            blocks.save(at, self.model, scale=0.2)
        elif name == "dflash2":
            blocks.save(at, self.model, "second")
        elif name == "peagle":
            parallel(self.model, at)
        elif name == "assistant":
            knowing_assistant(self.model, min(self.share, 0.02)).save_pretrained(at)
        elif name == "mtp":
            mtps.save(at, mtps.knowing_head(self.model, min(self.share, 0.02)))
        else:
            knowing_head(at, name, self.model)
        return at
