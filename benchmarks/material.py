"""What the scripts about drafters run on: made-up tokens, and answers that a model recorded."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import numpy as np

from paceline.workbench import transcript
from paceline.workbench.conversations import read_trace

VOCAB_SIZE = 32_000
EOS = 2
"""Of the recorded answers."""


def text(n: int) -> np.ndarray:
    """Zipf-distributed tokens of which half stand in copied spans, as in text that repeats its prompt."""
    random = np.random.default_rng(0)
    made = random.zipf(1.2, n) % VOCAB_SIZE
    for at in range(64, n - 16, 32):
        origin = random.integers(0, at - 16)
        made[at : at + 16] = made[origin : origin + 16]
    return made


def best(work: Callable[[], object], times: int = 7) -> float:
    """Seconds of the fastest of `times` runs: what the work costs when nothing else disturbs it."""
    seconds = []
    for _ in range(times):
        began = perf_counter()
        work()
        seconds.append(perf_counter() - began)
    return min(seconds)


def conversations() -> Sequence[transcript.Transcript]:
    """Vicuna-7B-v1.3's greedy answers to Spec-Bench, from the optional data that PACELINE_SHARED names."""
    if "PACELINE_SHARED" not in os.environ:
        sys.exit("the recorded answers are optional data: set PACELINE_SHARED to its folder")
    data = Path(os.environ["PACELINE_SHARED"]) / "data"
    vicuna = transcript.Transcriber(transcript.open_tokenizer(data / "tokenizers/llama/tokenizer.model"), "vicuna")
    trace = data / "traces/spec-bench-vicuna-7b-v1.3-greedy.jsonl"
    exchanges = read_trace(trace, questions=data / "spec-bench/question.jsonl")
    return [vicuna.conversation(exchange) for exchange in exchanges]
