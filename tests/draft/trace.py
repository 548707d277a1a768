"""Recorded greedy generations, replayed: what a drafter that sees only tokens would have had accepted.

The trace is Vicuna-7B-v1.3's greedy answers to Spec-Bench (optional data; PACELINE_SHARED). Acceptance of a greedy
target depends on its tokens alone, so no model is needed.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.draft.base import Drafter
from paceline.row import Row
from paceline.sampling import SamplingParams

BOS, EOS = 1, 2
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


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
    def mean_accepted_tokens(self) -> float:
        return self.tokens / self.rounds

    def __iadd__(self, other: "Replayed") -> "Replayed":
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)
        return self

    def __str__(self) -> str:
        return (
            f"{self.mean_accepted_tokens:.3f} tokens a round, {self.drafted / self.rounds:.2f} drafted a round, "
            f"a draft in {self.draft_rounds / self.rounds:.1%} of rounds"
        )


def turns(shared: Path, every: int = 1) -> Iterator[Turn]:
    """Every `every`-th question's turns, tokenised as the trace's README says."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="reads the LLaMA tokenizer")
    tokenizer = sentencepiece.SentencePieceProcessor(
        model_file=str(shared / "data/tokenizers/llama/tokenizer.model")
    )
    with open(shared / "data/spec-bench/question.jsonl") as lines:
        questions = {q["question_id"]: q for q in map(json.loads, lines)}
    with open(shared / "data/traces/spec-bench-vicuna-7b-v1.3-greedy.jsonl") as lines:
        for number, line in enumerate(lines):
            if number % every == 0:
                record = json.loads(line)
                yield from _turns(tokenizer, questions[record["question_id"]], record["choices"][0]["turns"])


def _turns(tokenizer: object, question: dict, answers: list[str]) -> Iterator[Turn]:
    text, known = SYSTEM, []
    for asked, answer in zip(question["turns"], answers, strict=True):
        text += f" USER: {asked} ASSISTANT:"
        prompt = known + tokenizer.encode(text)  # type: ignore[attr-defined]
        whole = known + tokenizer.encode(f"{text} {answer}")  # type: ignore[attr-defined]
        assert whole[: len(prompt)] == prompt
        task = "mt-bench" if question["category"] in MT_BENCH else question["category"]
        yield Turn(task, [BOS, *prompt], [*whole[len(prompt) :], EOS])
        known, text = [*whole, EOS], ""


def replay(drafter: Drafter, turn: Turn, id: int) -> Replayed:
    """Draft, keep what the answer confirms, and go on behind it until the answer is complete."""
    text = turn.prompt + turn.answer
    row = Row(id, turn.prompt, SamplingParams(max_tokens=len(turn.answer)), max_context=1 << 20)
    done = Replayed()
    drafter.start(row)
    while len(row) < len(text):
        tree = drafter.propose([row])[0].clipped(row.max_draft)
        assert tree.tokens[0] == row.last_token
        assert tree.is_chain
        truth = text[len(row) :]
        kept = 0
        while kept < tree.num_drafted and tree.tokens[1 + kept] == truth[kept]:
            kept += 1
        row.extend(truth[: kept + 1])
        done.rounds += 1
        done.tokens += kept + 1
        done.drafted += tree.num_drafted
        done.draft_rounds += tree.num_drafted > 0
    drafter.drop(row)
    return done
