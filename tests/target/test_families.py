"""Every family of the native decoder against transformers: same logits, same greedy text."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests import models
from transformers import AutoModelForCausalLM

from paceline.engine.engine import Engine
from paceline.engine.round import Segment
from paceline.engine.sampling import SamplingParams
from paceline.target.base import Target
from paceline.target.decoder import Decoder
from paceline.target.load import load

LENGTH = 100
"""Longer than what segments are padded to each other for, longer than every window, within every context."""


@pytest.fixture(scope="module", params=[*models.NATIVE])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, object]:
    """A folder, and the transformers model that was saved in it."""
    folder = models.make(request.param, tmp_path_factory.mktemp(request.param))
    return folder, AutoModelForCausalLM.from_pretrained(folder)


def text(length: int = LENGTH, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(4, models.VOCAB_SIZE, length)


def logits_in_pieces(target: Target, ids: np.ndarray, cuts: list[int]) -> torch.Tensor:
    """Logits behind every token [len(ids), V], with the text cut into pieces, one forward each."""
    slot = target.add_row(8)  # less than needed: the cache has to grow
    found = []
    for piece in np.split(ids, cuts):
        chain = np.arange(-1, len(piece) - 1)
        verdict = target.verify([Segment(slot, piece, chain, num_logits=len(piece))])
        found.append(verdict.of(0).clone())
        target.commit(slot, range(len(piece)))
    assert target.length(slot) == len(ids)
    target.drop_row(slot)
    return torch.cat(found)


CUTS = {"whole": [], "chunks": [70, 73, 90], "token by token": list(range(1, LENGTH))}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_logits_are_those_of_transformers(family: tuple[Path, torch.nn.Module], cuts: list[int]) -> None:
    folder, reference = family
    target = load(folder, native=True)
    assert isinstance(target, Decoder)
    ids = text()
    with torch.inference_mode():
        expected = reference(torch.from_numpy(ids)[None]).logits[0]
    assert expected.std(0).mean() > 1, "logits hardly vary: this test would not see an error"
    assert (logits_in_pieces(target, ids, cuts) - expected).abs().max() <= 1e-4


def test_greedy_text_is_that_of_generate(family: tuple[Path, torch.nn.Module]) -> None:
    folder, reference = family
    prompts = [np.tile(text(7, seed), 3)[:n].tolist() for seed, n in enumerate([21, 5, 13])]
    engine = Engine(folder, draft="prompt-lookup")
    found = engine.generate(prompts, SamplingParams(max_tokens=40))
    for prompt, answer in zip(prompts, found, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=40, pad_token_id=models.EOS
        )
        assert answer.tokens == expected[0, len(prompt) :].tolist()


def test_a_trained_model_says_what_transformers_says(stories: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32)
    target = load(stories, dtype="float32", native=True)
    ids = np.random.default_rng(0).integers(3, 512, LENGTH)
    with torch.inference_mode():
        expected = reference(torch.from_numpy(ids)[None]).logits[0]
    for cuts in CUTS.values():
        assert (logits_in_pieces(target, ids, cuts) - expected).abs().max() <= 1e-4
    engine = Engine(target, draft="prompt-lookup")
    prompt = engine.encode("Once upon a time")
    (found,) = engine.generate([prompt.tolist()], SamplingParams(max_tokens=120))
    written = reference.generate(torch.from_numpy(prompt)[None], do_sample=False, max_new_tokens=120)
    assert found.tokens == written[0, len(prompt) :].tolist()
    assert found.text.startswith(", there was a little girl named Lily. She loved to play outside in the park.")


def test_loaded_weights_are_those_saved(tmp_path: Path) -> None:
    """The reference of this file is the model that was saved, not merely what transformers makes of the folder."""
    folder = models.make("qwen2", tmp_path)
    saved, ids = models.model("qwen2"), text(12)
    with torch.inference_mode():
        expected = saved(torch.from_numpy(ids)[None]).logits[0]
    assert (logits_in_pieces(load(folder), ids, []) - expected).abs().max() <= 1e-4
