"""Vicuna-7B-v1.3's recorded greedy answers to Spec-Bench, for tests and tables: `paceline.replay`, turn by turn.

The trace is optional data (PACELINE_SHARED).
"""

from dataclasses import dataclass

import numpy as np
import pytest

from paceline.logs import transcript
from paceline.logs.conversations import read_trace
from paceline.replay import walk

BOS, EOS = 1, 2


@dataclass(frozen=True)
class Turn:
    """One answer: the task it belongs to, the tokens of its prompt, and its own."""

    task: str
    prompt: list[int]
    answer: list[int]


@dataclass
class Replayed:
    """Counts over whole answers."""

    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    draft_rounds: int = 0

    @property
    def mean_accepted_tokens(self):
        return self.tokens / self.rounds

    def __iadd__(self, other):
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)
        return self


def conversations(shared, every=1):
    """Every `every`-th question's conversation."""
    pytest.importorskip("sentencepiece", reason="reads the LLaMA tokenizer")
    data = shared / "data"
    tokenizer = transcript.open_tokenizer(data / "tokenizers/llama/tokenizer.model")
    vicuna = transcript.Transcriber(tokenizer, "vicuna")
    exchanges = read_trace(
        data / "traces/spec-bench-vicuna-7b-v1.3-greedy.jsonl", questions=data / "spec-bench/question.jsonl"
    )
    return [vicuna.conversation(exchange) for exchange in exchanges[::every]]


def turns(shared, every=1):
    """The turns of every `every`-th question, in plain lists."""
    for one in conversations(shared, every):
        for turn in one.turns:
            yield Turn(one.category, turn.prompt.tolist(), turn.answer.tolist())


def replay(drafter, turn, id):
    """What a drafter would have had accepted of one turn."""
    tally = walk.ReplayTally()
    walk.replay(drafter, walk.RecordedAnswer(np.array(turn.prompt), np.array(turn.answer)), id, tally)
    return Replayed(tally.new_tokens, tally.rounds, tally.draft_tokens, tally.draft_rounds)
