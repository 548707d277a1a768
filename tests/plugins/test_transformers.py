"""Our loop behind transformers' `generate`, our drafters in transformers' loop: greedy text must be `generate`'s."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation import LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from paceline.errors import MethodError, PacelineError
from paceline.plugins import transformers as paceline
from tests import models

NEW = 20
FAMILIES = ("llama2", "llama3", "qwen2", "qwen3", "mistral", "gpt2", "gpt-neox", "phi", "gptj", "opt", "qwen2-moe")

MIXING = ("o_proj", "down_proj", "c_proj", "out_proj", "fc2", "fc_out", "dense_4h", "attention.dense")
"""Parts of the names of weights that mix what a layer found into the next token."""


@cache
def model_of(family: str) -> Any:
    """A random model that soon repeats itself, so that drafts are accepted."""
    model = models.model(family)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in MIXING):
                weight.mul_(0.05)
    model.generation_config.pad_token_id = 3
    model.generation_config.eos_token_id = None
    return model


def batch(count: int) -> dict[str, torch.Tensor]:
    """Prompts of different lengths, padded on the left."""
    generator = torch.Generator().manual_seed(count)
    lengths = [9, 4, 12, 7, 5, 11, 3, 8][:count]
    width = max(lengths)
    ids, mask = torch.full((count, width), 3), torch.zeros(count, width, dtype=torch.long)
    for row, length in enumerate(lengths):
        half = torch.randint(4, models.VOCAB_SIZE, (length,), generator=generator)
        ids[row, width - length :], mask[row, width - length :] = half, 1
    return {"input_ids": ids, "attention_mask": mask}


def ours(model: Any, inputs: dict[str, torch.Tensor], draft: str = "sam", **options: Any) -> torch.Tensor:
    """With drafts as they are made: more to verify than if they were cut to what pays."""
    options = {"max_new_tokens": NEW, "do_sample": False, "paced": False, **options}
    return model.generate(**inputs, **options, custom_generate=paceline.generate, draft=draft)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_generates_own(family: str) -> None:
    model = model_of(family)
    accepted = []
    for count in (1, 8):
        inputs = batch(count)
        plain = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        drafted = ours(model, inputs, on_round=lambda delta: accepted.append(len(delta.tokens)))
        assert torch.equal(drafted, plain)
        assert torch.equal(ours(model, inputs, paced=True), plain)
    assert max(accepted) > 1


def test_rows_end_at_end_tokens_and_are_padded_as_by_generate() -> None:
    model, inputs = model_of("llama2"), batch(8)
    free = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    ends = [int(free[0, 5]), int(free[3, 9])]
    plain = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=ends)
    assert torch.equal(ours(model, inputs, eos_token_id=ends), plain)


PROCESSED = [
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 3},
    {"bad_words_ids": [[7], [9, 11]]},
    {"min_new_tokens": 6, "eos_token_id": [5, 6]},
    {"suppress_tokens": list(range(20, 60))},
    {"forced_eos_token_id": 8},
]


@pytest.mark.parametrize("options", PROCESSED, ids=lambda options: next(iter(options)))
def test_logits_processors_work_on_drafts(options: dict[str, Any]) -> None:
    model = model_of("llama2")
    for count in (1, 8):
        inputs = batch(count)
        plain = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **options)
        assert torch.equal(ours(model, inputs, **options), plain)


class Evens(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(-1, torch.arange(1, scores.shape[-1], 2), -torch.inf)


class Sum(StoppingCriteria):
    """Ends a text when its tokens add up to a multiple of 7."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids.sum(-1) % 7 == 0


def test_processors_and_criteria_of_ones_own() -> None:
    model = model_of("llama2")
    for count in (1, 8):
        inputs = batch(count)
        mine = {
            "logits_processor": LogitsProcessorList([Evens()]),
            "stopping_criteria": StoppingCriteriaList([Sum()]),
        }
        plain = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **mine)
        assert torch.equal(ours(model, inputs, **mine), plain)


class Heard(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_a_streamer_hears_prompt_and_answer() -> None:
    model, inputs, heard = model_of("llama2"), batch(1), Heard()
    out = ours(model, inputs, stream_to=heard)
    assert heard.tokens == out[0].tolist()
    assert heard.ended
    with pytest.raises(PacelineError, match="streamer takes one prompt"):
        ours(model, batch(8), stream_to=Heard())


def test_seeds_make_samples_reproducible_whatever_is_drafted() -> None:
    model, inputs = model_of("llama2"), batch(8)
    how = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.9}
    samples = []
    for seed, draft in ((1, "sam"), (1, "none"), (2, "sam")):
        torch.manual_seed(seed)
        samples.append(ours(model, inputs, draft, **how))
    assert torch.equal(samples[0], samples[1])
    assert not torch.equal(samples[0], samples[2])


def test_what_cannot_be_honoured_is_refused_by_name() -> None:
    model, inputs = model_of("llama2"), batch(1)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
        ({"num_beams": 2}, "num_beams"),
        ({"guidance_scale": 1.5}, "GuidanceLogitsProcessor"),
        ({"max_new_tokens": 1000}, "do not fit the model's context"),
    ]
    for options, words in refused:
        with pytest.raises(PacelineError, match=words):
            ours(model, inputs, **options)
    with pytest.raises(PacelineError, match="pads on the right"):
        ours(model, {name: of.flip(-1) for name, of in batch(8).items()})
    with pytest.raises(MethodError, match="no drafter"):
        ours(model, inputs, "samm")


def test_return_dict_holds_the_sequences() -> None:
    model, inputs = model_of("llama2"), batch(1)
    out = ours(model, inputs, return_dict_in_generate=True)
    assert torch.equal(out.sequences, ours(model, inputs))  # type: ignore[attr-defined]


def test_candidates_draft_in_their_loop() -> None:
    model, inputs, long = model_of("llama2"), batch(1), 80
    plain = model.generate(**inputs, max_new_tokens=long, do_sample=False)
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    hook = model.register_forward_pre_hook(count)
    try:
        with paceline.candidates(model, "sam"):
            for _ in range(2):  # a second request in the same seat
                out = model.generate(**inputs, max_new_tokens=long, do_sample=False, prompt_lookup_num_tokens=1)
                assert torch.equal(out, plain)
    finally:
        hook.remove()
    assert forwards < 2 * long
    assert "_get_candidate_generator" not in vars(model)
    with pytest.raises(MethodError, match="asks the target for"), paceline.candidates(model, "recycling"):
        pass
