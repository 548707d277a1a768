"""Our loop behind transformers' `generate`, our drafters in transformers' loop: greedy text must be `generate`'s."""

from __future__ import annotations

import inspect
from functools import cache

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation import (
    EosTokenCriteria,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
)
from transformers.generation.streamers import BaseStreamer

from paceline.errors import MethodError, PacelineError
from paceline.plugins import transformers as paceline
from tests import models

NEW = 12
FAMILIES = ("llama2", "qwen3", "mistral", "gpt2", "gpt-neox", "phi", "opt", "qwen2-moe")

MIXING = ("o_proj", "down_proj", "c_proj", "out_proj", "fc2", "fc_out", "dense_4h", "attention.dense")
"""Parts of the names of weights that mix what a layer found into the next token."""


@cache
def model_of(family):
    """A random model that soon repeats itself, so that drafts are accepted."""
    model = models.model(family)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in MIXING):
                weight.mul_(0.05)
    model.generation_config.pad_token_id = 3
    model.generation_config.eos_token_id = None
    return model


def batch(count):
    """Prompts of different lengths, padded on the left."""
    generator = torch.Generator().manual_seed(count)
    lengths = [9, 4, 12, 7, 5, 11, 3, 8][:count]
    width = max(lengths)
    ids, mask = torch.full((count, width), 3), torch.zeros(count, width, dtype=torch.long)
    for row, length in enumerate(lengths):
        half = torch.randint(4, models.VOCAB_SIZE, (length,), generator=generator)
        ids[row, width - length :], mask[row, width - length :] = half, 1
    return {"input_ids": ids, "attention_mask": mask}


def ours(model, inputs, draft="sam", **options):
    """With drafts as they are made: more to verify than if they were cut to what pays."""
    options = {"max_new_tokens": NEW, "do_sample": False, "paced": False, **options}
    return model.generate(**inputs, **options, custom_generate=paceline.generate, draft=draft)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_generates_own(family):
    model, accepted = model_of(family), list[int]()
    for count in (1, 8):
        inputs = batch(count)
        plain = model.generate(**inputs, max_new_tokens=20, do_sample=False)
        drafted = ours(model, inputs, on_round=lambda delta: accepted.append(len(delta.tokens)), max_new_tokens=20)
        assert torch.equal(drafted, plain)
    assert torch.equal(ours(model, inputs, paced=True, max_new_tokens=20), plain)
    assert max(accepted) > 1


def test_rows_end_at_end_tokens_and_are_padded_as_by_generate():
    model, inputs = model_of("llama2"), batch(8)
    free = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    ends = [int(free[0, 5]), int(free[3, 9])]
    plain = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=ends)
    assert torch.equal(ours(model, inputs, eos_token_id=ends), plain)


PROCESSED = [
    {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 3}, {"bad_words_ids": [[7], [9, 11]]},
    {"min_new_tokens": 6, "eos_token_id": [5, 6]}, {"suppress_tokens": list(range(20, 60))}, {"forced_eos_token_id": 8},
]


@pytest.mark.parametrize("options", PROCESSED, ids=lambda options: next(iter(options)))
def test_logits_processors_work_on_drafts(options):
    """In a batch; with one prompt below, with every field."""
    model, inputs = model_of("llama2"), batch(8)
    plain = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **options)
    assert torch.equal(ours(model, inputs, **options), plain)


class Evens(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.index_fill(-1, torch.arange(1, scores.shape[-1], 2), -torch.inf)


class Sum(StoppingCriteria):
    """Ends a text when its tokens add up to a multiple of 7."""

    def __call__(self, input_ids, scores, **_):
        return input_ids.sum(-1) % 7 == 0


def test_processors_and_criteria_of_ones_own():
    model = model_of("llama2")
    for count in (1, 8):
        inputs = batch(count)
        mine = {"logits_processor": LogitsProcessorList([Evens()]), "stopping_criteria": StoppingCriteriaList([Sum()])}
        plain = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **mine)
        assert torch.equal(ours(model, inputs, **mine), plain)


class Heard(BaseStreamer):
    def __init__(self):
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


@pytest.mark.parametrize("name", ["streamer", "stream_to"])
def test_a_streamer_hears_prompt_and_answer(name):
    model, inputs, heard = model_of("llama2"), batch(1), Heard()
    out = ours(model, inputs, **{name: heard})
    assert heard.tokens == out[0].tolist()
    assert heard.ended
    with pytest.raises(PacelineError, match="streamer takes one prompt"):
        ours(model, batch(8), **{name: Heard()})


def test_seeds_make_samples_reproducible_whatever_is_drafted():
    model, inputs = model_of("llama2"), batch(8)
    how = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.9}
    samples = []
    for seed, draft in ((1, "sam"), (1, "none"), (2, "sam")):
        torch.manual_seed(seed)
        samples.append(ours(model, inputs, draft, **how))
    assert torch.equal(samples[0], samples[1])
    assert not torch.equal(samples[0], samples[2])


class Together(StoppingCriteria):
    """Ends all texts when their last tokens add up to a multiple of `of`; notes the shapes it is shown."""

    def __init__(self, of):
        self.of, self.shapes = of, list[tuple[int, ...]]()

    def __call__(self, input_ids, scores, **_):
        self.shapes.append(tuple(input_ids.shape))
        return torch.full((len(input_ids),), bool(input_ids[:, -1].sum() % self.of == 0))


class Second(StoppingCriteria):
    """Ends each text when the text after it in the batch says an even token: of padding, too."""

    def __call__(self, input_ids, scores, **_):
        return input_ids[:, -1].roll(-1) % 2 == 0


@pytest.mark.parametrize("ends", [None, [5, 6, 7, 8, 9, 10]], ids=["no end tokens", "end tokens"])
@pytest.mark.parametrize("make", [lambda: Together(5), lambda: Together(3), Second], ids=["sum 5", "sum 3", "second"])
def test_a_criterion_sees_the_batch_as_in_generate(make, ends):
    """Step after step, the whole batch, with padding after texts that have ended."""
    ones = [make(), make()]
    texts = [
        model_of("llama2").generate(
            **batch(8), max_new_tokens=NEW, do_sample=False, eos_token_id=ends,
            stopping_criteria=StoppingCriteriaList([one]), **how,
        )
        for one, how in zip(ones, ({}, {"custom_generate": paceline.generate, "paced": False}), strict=True)
    ]
    assert torch.equal(*texts)
    assert getattr(ones[0], "shapes", None) == getattr(ones[1], "shapes", None)


@pytest.mark.parametrize("one", [EosTokenCriteria(list(range(40, 60))), MaxLengthCriteria(20), MaxLengthCriteria(45)])
def test_a_criterion_of_the_callers_takes_the_place_of_the_configs(one):
    model, inputs = model_of("llama2"), batch(8)
    options = {"stopping_criteria": StoppingCriteriaList([one]), "eos_token_id": [30, 31]}
    plain = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **options)
    assert torch.equal(ours(model, inputs, **options), plain)


class Table(LogitsProcessor):
    """Adds a row of its own to each text of the batch."""

    def __call__(self, input_ids, scores):
        return scores + torch.arange(8.0).unsqueeze(1)


def test_a_processor_of_the_whole_batch_is_refused():
    with pytest.raises(PacelineError, match=r"Table.*do not work on one row alone"):
        ours(model_of("llama2"), batch(8), logits_processor=LogitsProcessorList([Table()]))


def test_penalties_on_the_prompt_with_several_answers_of_each():
    model, inputs = model_of("llama2"), batch(2)
    options = {"num_return_sequences": 3, "do_sample": True, "top_k": 1, "encoder_repetition_penalty": 3.0}
    plain = model.generate(**inputs, max_new_tokens=NEW, **options)
    assert torch.equal(ours(model, inputs, **options), plain)


# Every field and every argument ---------------------------------------------------------------------------------------

SAMPLED = {"do_sample": True}
HONOURED = {
    "max_length": {"max_length": 15, "max_new_tokens": None},
    "max_new_tokens": {"max_new_tokens": 7},
    "min_length": {"min_length": 25, "eos_token_id": list(range(4, 200))},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": list(range(4, 200))},
    "max_time": {"max_time": 1e-9},
    "stop_strings": {"stop_strings": ["e", "a", "t", "'", "0", "(", "1"], "tokenizer": "tiny", "max_new_tokens": 20},
    "do_sample": {"do_sample": True, "top_k": 1, "repetition_penalty": 1.1},
    "temperature": {**SAMPLED, "temperature": 1e-5},
    "top_k": {**SAMPLED, "top_k": 1},
    "top_p": {**SAMPLED, "top_p": 1e-6},
    "min_p": {**SAMPLED, "min_p": 1.0},
    "top_h": {**SAMPLED, "top_h": 1e-6},
    "typical_p": {**SAMPLED, "typical_p": 1e-6},
    "epsilon_cutoff": {**SAMPLED, "epsilon_cutoff": 0.99},
    "eta_cutoff": {**SAMPLED, "eta_cutoff": 0.99, "temperature": 0.05, "max_new_tokens": 20},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 3.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1, "max_new_tokens": 80},
    "bad_words_ids": {"bad_words_ids": [[n] for n in range(4, 160)]},
    "forced_bos_token_id": {"forced_bos_token_id": 9, "input_ids": torch.tensor([[1]])},
    "forced_eos_token_id": {"forced_eos_token_id": 8},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 1.6), "eos_token_id": 5},
    "suppress_tokens": {"suppress_tokens": list(range(4, 160))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(4, 160))},
    "sequence_bias": {"sequence_bias": [[[7], 9.0], [[7, 9], 8.0]]},
    "watermarking_config": {"watermarking_config": {"bias": 9.0, "seeding_scheme": "lefthash"}},
    "token_healing": {
        "token_healing": True,
        "tokenizer": "tiny",
        "input_ids": torch.tensor([[0, 68, 224, 90, 82, 85]]),  # "a wor"
    },
    "num_return_sequences": {**SAMPLED, "top_k": 1, "num_return_sequences": 3},
    "return_dict_in_generate": {"return_dict_in_generate": True},
    "pad_token_id": {"pad_token_id": 11, "eos_token_id": list(range(4, 100)), "count": 8},
    "bos_token_id": {"bos_token_id": 77, "input_ids": None},
    "eos_token_id": {"eos_token_id": list(range(4, 100))},
}
"""Fields that change the text: with these options it is another than without, and it is `generate`'s."""
REFUSED = {
    "num_beams": {"num_beams": 2}, "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers": {"dola_layers": "high"},
    "num_beam_groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
    "constraints": {"constraints": [object()], "num_beams": 2},
    "force_words_ids": {"force_words_ids": [[5]], "num_beams": 2}, "guidance_scale": {"guidance_scale": 1.5},
    "output_scores": {"return_dict_in_generate": True, "output_scores": True},
    "output_logits": {"return_dict_in_generate": True, "output_logits": True},
    "output_attentions": {"return_dict_in_generate": True, "output_attentions": True},
    "output_hidden_states": {"return_dict_in_generate": True, "output_hidden_states": True},
    "is_assistant": {"is_assistant": True}, "assistant_ensemble_weight": {"assistant_ensemble_weight": 0.5},
    "cache_implementation": {"cache_implementation": "offloaded"},
}
WORDS = {"guidance_scale": "GuidanceLogitsProcessor", "output_attentions": "output_attentions|eager"}
HARMLESS = {
    # of beams alone
    "early_stopping": True, "length_penalty": 2.0, "diversity_penalty": 0.0, "low_memory": True,
    # how generate computes, not what
    "use_cache": False, "cache_config": {}, "max_cache_len": 64, "compile_config": None, "disable_compile": True,
    "continuous_batching_config": None, "prefill_chunk_size": 4,
    # drafts of transformers' own, which change no text
    "use_mtp": False, "num_assistant_tokens": 3, "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.1, "prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 3,
    "assistant_early_exit": None, "assistant_lookbehind": 4, "target_lookbehind": 4, "speculation_type": None,
    # of encoders; logits as they are, in another form; notes
    "decoder_start_token_id": 9, "renormalize_logits": True, "remove_invalid_values": True,
    "_from_model_config": False, "transformers_version": "5",
}  # fmt: skip
"""Fields that change no text: with this value it is the same."""


def given(options):
    """Inputs and options of a case; "tiny" is the tests' tokenizer."""
    options = dict(options)
    inputs = dict(batch(options.pop("count", 1)))
    if "input_ids" in options:
        inputs = {"input_ids": options.pop("input_ids")}
    if options.get("tokenizer") == "tiny":
        options["tokenizer"] = models.tokenizer()
        options["tokenizer"].pad_token = "</s>"
    return inputs, {"max_new_tokens": NEW, "do_sample": False, **options}


def both(options):
    """What generate and ours make of a case."""
    texts = []
    for own in ({}, {"custom_generate": paceline.generate, "draft": "sam", "paced": False}):
        inputs, how = given(options)
        out = model_of("llama2").generate(**inputs, **how, **own)
        texts.append(getattr(out, "sequences", out))
    return texts[0], texts[1]


def test_every_field_of_a_generation_config_stands_in_a_table():
    fields = set(vars(GenerationConfig()))
    assert fields == (set(HONOURED) | set(REFUSED) | set(HARMLESS)) & fields
    assert len(HONOURED | REFUSED | HARMLESS) == len(HONOURED) + len(REFUSED) + len(HARMLESS)


@pytest.mark.parametrize("field", HONOURED)
def test_fields_that_change_the_text(field):
    plain, drafted = both(HONOURED[field])
    assert torch.equal(drafted, plain)
    inputs, how = given({name: value for name, value in HONOURED[field].items() if name != field})
    if field not in ("do_sample", "return_dict_in_generate", "max_length", "bos_token_id"):
        torch.manual_seed(1)  # some cases draw without the field, and the best token may come each time
        without = model_of("llama2").generate(**inputs, **how)
        assert without.shape != plain.shape or not torch.equal(without, plain), "the case proves nothing"


@pytest.mark.parametrize("field", REFUSED)
def test_fields_that_are_refused_by_name(field):
    inputs, how = given(REFUSED[field])
    with pytest.raises((PacelineError, ValueError), match=WORDS.get(field, field)):
        model_of("llama2").generate(**inputs, **how, custom_generate=paceline.generate)


@pytest.mark.parametrize("field", HARMLESS)
def test_fields_that_change_no_text(field):
    plain, drafted = both({field: HARMLESS[field], "max_new_tokens": 8})
    assert torch.equal(drafted, plain)


def test_contrastive_search_and_dola_are_what_generate_itself_refuses():
    """With sampling, or without top_k, generate does not look at penalty_alpha."""
    plain, drafted = both({"penalty_alpha": 0.6, "top_k": 1})
    assert torch.equal(drafted, plain)
    for field in ("penalty_alpha", "dola_layers"):
        inputs, how = given(REFUSED[field])
        with pytest.raises(ValueError, match="trust_remote_code"):
            model_of("llama2").generate(**inputs, **how)
        with pytest.raises(PacelineError, match=f"{field} cannot be honoured"):
            ours(model_of("llama2"), inputs, **how)


ARGUMENTS = {
    "inputs": ({"inputs": batch(1)["input_ids"], "input_ids": None}, ""),
    "generation_config": ({"generation_config": GenerationConfig(max_new_tokens=5), "max_new_tokens": 5}, ""),
    "logits_processor": ({"logits_processor": LogitsProcessorList([Evens()])}, ""),
    "stopping_criteria": ({"stopping_criteria": StoppingCriteriaList([Sum()])}, ""),
    "prefix_allowed_tokens_fn": ({"prefix_allowed_tokens_fn": lambda _, text: [4 + len(text) % 40, 9]}, ""),
    "synced_gpus": ({"synced_gpus": True}, "synced_gpus"),
    "assistant_model": ({"assistant_model": object()}, "assistant_model"),
    "streamer": ({"streamer": None}, ""),  # tested above
    "negative_prompt_ids": ({"negative_prompt_ids": torch.tensor([[5]])}, ""),
    "negative_prompt_attention_mask": ({"negative_prompt_attention_mask": torch.tensor([[1]])}, ""),
    "custom_generate": ({}, ""),
    "kwargs": ({"max_mew_tokens": 5}, "max_mew_tokens"),
}
"""Arguments of `model.generate`, and the words of their refusal."""
MODEL_ARGUMENTS = {
    "past_key_values": ({"past_key_values": DynamicCache()}, "past_key_values"),
    "inputs_embeds": ({"inputs_embeds": torch.zeros(1, 3, 64), "input_ids": None}, "inputs_embeds"),
    "position_ids": ({"position_ids": torch.arange(9).unsqueeze(0) + 1}, "position_ids"),
    "assistant_tokenizer": ({"assistant_tokenizer": object()}, "assistant_tokenizer"),
    "trust_remote_code": ({"trust_remote_code": True}, ""), "return_dict": ({"return_dict": True}, "return_dict"),
}


def test_every_argument_of_generate_stands_in_a_table():
    assert set(inspect.signature(GenerationMixin.generate).parameters) - {"self"} == set(ARGUMENTS)


@pytest.mark.parametrize("name", ARGUMENTS | MODEL_ARGUMENTS)
def test_arguments_are_honoured_or_refused_by_name(name):
    options, refusal = (ARGUMENTS | MODEL_ARGUMENTS)[name]
    inputs = {"input_ids": batch(1)["input_ids"]}
    how = inputs | {"max_new_tokens": NEW, "do_sample": False} | options
    model = model_of("llama2")
    if refusal:
        with pytest.raises((PacelineError, ValueError), match=refusal):
            model.generate(**how, custom_generate=paceline.generate)
    else:
        plain = model.generate(**how)
        assert torch.equal(model.generate(**how, custom_generate=paceline.generate, paced=False), plain)


def test_what_else_is_refused_by_name():
    model, inputs = model_of("llama2"), batch(1)
    with pytest.raises(PacelineError, match="do not fit the model's context"):
        ours(model, inputs, max_new_tokens=1000)
    with pytest.raises(PacelineError, match="pads on the right"):
        ours(model, {name: of.flip(-1) for name, of in batch(8).items()})
    with pytest.raises(MethodError, match="no drafter"):
        ours(model, inputs, "samm")


class Nine(StoppingCriteria):
    """Ends each text after token 9."""

    eos_token_id = None

    def __call__(self, input_ids, scores, **_):
        return input_ids[:, -1] == 9


def test_what_a_round_brought_after_a_texts_end_is_padding():
    config, prompts = GenerationConfig(max_length=8), torch.zeros(2, 2, dtype=torch.long)
    config._pad_token_tensor = torch.tensor(5)
    ends = paceline._Ends(StoppingCriteriaList([MaxLengthCriteria(8), Nine()]), prompts, config)
    ends.take(0, [1, 9, 3])
    for tokens in ([1, 2, 4], [4, 9, 6]):
        ends.take(1, tokens)
    assert ends.sequences()[:, 2:].tolist() == [[1, 9, 5, 5, 5], [1, 2, 4, 4, 9]]


def test_stop_strings_end_each_text_of_a_batch():
    for ends in (None, [5, 6, 7]):
        plain, drafted = both(HONOURED["stop_strings"] | {"count": 8, "eos_token_id": ends})
        assert torch.equal(drafted, plain)


def test_other_functions_are_left_as_transformers_calls_them():
    seen = {}

    def theirs(model, input_ids, tokenizer=None, mine=0, **others):
        seen.update(tokenizer=tokenizer, mine=mine, others=set(others))
        return input_ids

    model_of("llama2").generate(**batch(1), max_new_tokens=2, custom_generate=theirs, tokenizer=object(), mine=3)
    assert (seen["tokenizer"], seen["mine"]) == (None, 3)
    assert not {"draft", "streamer"} & seen["others"]


def test_return_dict_holds_the_sequences():
    model, inputs = model_of("llama2"), batch(1)
    out = ours(model, inputs, return_dict_in_generate=True)
    assert torch.equal(out.sequences, ours(model, inputs))

