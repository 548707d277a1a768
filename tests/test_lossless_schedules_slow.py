"""Every schedule at every batch size on questions of Spec-Bench: answers are those of plain decoding one at a time.

Minutes: `pytest -m slow -n 0 -s tests/test_lossless_schedules_slow.py`; SCHEDULE_QUESTIONS=480 asks all of them.
"""

import os
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.bench.metrics import partial
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.target.load import load, load_tokenizer
from tests.spec_bench import encode, parting, questions

pytestmark = pytest.mark.slow

QUESTIONS, NEW = int(os.environ.get("SCHEDULE_QUESTIONS", "60")), 32
BATCHES = (1, 2, 4, 8, 16, 32)
DRAFTERS = ("sam", "model:{folder}-draft", "recycling,tree=16")
TIES = 0.005
"""Share of the answers that may part at a tie in float32, as in the test of drafters."""


@cache
def world(folder, file):
    """The demo model through transformers, prompts, and plain answers one at a time."""
    target, tokenizer = load(folder, dtype="float32", device="cpu", native=False), load_tokenizer(folder)
    prompts = [encode(tokenizer, text, target.max_context - NEW) for text in questions(file, QUESTIONS)]
    plain = Engine(target, "none", max_batch=1, tokenizer=tokenizer)
    answers = plain.generate(prompts, SamplingParams(max_tokens=NEW))
    return target, tokenizer, prompts, [done.tokens for done in answers]


@cache
def judges(folder):
    """transformers' model in float32 and float64."""
    one, other = (AutoModelForCausalLM.from_pretrained(folder, dtype=d) for d in (torch.float32, torch.float64))
    return one, other


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("draft", DRAFTERS)
@pytest.mark.parametrize("schedule", ["ragged", "equal", "grouped"])
def test_answers_are_those_of_plain_decoding_one_at_a_time(demo, shared, schedule, draft):
    file = shared / "data" / "spec-bench" / "question.jsonl"
    if not file.exists():
        pytest.skip(f"{file} not found; set PACELINE_SHARED")
    target, tokenizer, prompts, plain = world(demo, file)
    ties, wrong = 0, []
    for batch in BATCHES:
        spec = draft.format(folder=demo)
        engine = Engine(target, spec, max_batch=batch, schedule=schedule, tokenizer=tokenizer)
        out = [done.tokens for done in engine.generate(prompts, SamplingParams(max_tokens=NEW))]
        same = [mine == known for mine, known in zip(out, plain, strict=True)]
        share = sum(partial(mine, known) for mine, known in zip(out, plain, strict=True)) / len(plain)
        print(f"{schedule}, {draft}, batch {batch}: E {sum(same)}/{len(same)}, P {share:.1%}", flush=True)
        for i in (i for i, is_same in enumerate(same) if not is_same):
            with torch.inference_mode():
                why = parting(judges(demo), prompts[i], plain[i], out[i])
            print(f"  question {i}: {why.told}")
            ties += why.tie
            wrong += [] if why.tie else [why.told]
    assert not wrong
    assert ties <= TIES * len(plain) * len(BATCHES)
