"""The model and the questions of a benchmark, loaded."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.bench.options import Benchmark
from paceline.bench.ours import mixed_groups
from paceline.bench.runner import LeftOut, Prompt, QuestionGroup, fitting, grouped
from paceline.bench.suites import Question, Suite, read_suite
from paceline.core.rules import check_schedule
from paceline.errors import PromptError
from paceline.formats.place import SMALL_FILES, find, gguf_of, is_gguf
from paceline.formats.tokenizer import Tokenizer
from paceline.logs.transcript import Transcriber
from paceline.runs.environment import environment
from paceline.target.base import Target
from paceline.target.load import load, load_tokenizer

SPARE = 256


@dataclass
class Setting:
    """Everything loaded. folder: the model's, or its GGUF file; prompt: makes the token ids of a turn."""

    benchmark: Benchmark
    folder: Path
    target: Target
    tokenizer: Tokenizer
    prompt: Prompt
    suite: Suite
    groups: list[QuestionGroup]
    left_out: list[LeftOut]

    @property
    def dtype(self) -> str:
        """Name of the target's dtype."""
        return str(self.target.dtype).removeprefix("torch.")

    @property
    def num_questions(self) -> int:
        return sum(len(group.questions) for group in self.groups)

    @property
    def peer_context(self) -> int:
        """The context for peers: tokens of the longest conversation, and SPARE, because an answer may grow when it is
        encoded again. For the model's own context some engines reserve gigabytes."""
        lengths = [
            len(self.prompt(question, [""] * (turns - 1))) + turns * self.benchmark.options.max_tokens
            for group in self.groups
            for question, turns in zip(group.questions, group.turns, strict=True)
        ]
        return min(self.target.max_context, max(lengths) + SPARE)

    def request(self, question: Question, answers: Sequence[str]) -> dict[str, Any]:
        """The body for a question's next turn. Every engine gets the target's end tokens."""
        body = {"prompt": self.prompt(question, answers), "stop_token_ids": self.target.eos_token_ids}
        expected = self.tokenizer.encode_text(question.prediction) if question.prediction else ()
        return {**body, "ignore_eos": True, "prediction": tuple(expected)}

    def question(self, id: str) -> Question:
        """The question with this id."""
        return next(question for question in self.suite.questions if question.id == id)

    def environment(self) -> dict[str, Any]:
        """The machine and the software."""
        return environment(dtype=self.dtype, device=str(self.target.device))


def set_up(benchmark: Benchmark) -> Setting:
    """Load the model and the questions. Raises PacelineError for wrong options."""
    suite = read_suite(benchmark.suite, limit=benchmark.limit, categories=benchmark.categories)
    model = benchmark.model  # Kept as given, because "auto" means another dtype for some names.
    folder = gguf_of(model) if is_gguf(model) else find(model, [*SMALL_FILES, "*.safetensors"])
    native = False if any(check_schedule(name)[0] != "ragged" for name in benchmark.schedules) else None
    tokenizer = load_tokenizer(model)
    target = load(
        model,
        dtype=benchmark.dtype,
        device=benchmark.device,
        native=native,
        exact=benchmark.exact,
        activations=benchmark.activations,
        threads=torch.get_num_threads(),  # All engines get the same number during the whole run.
        tokenizer=tokenizer,
    )
    prompt = partial(_prompt, Transcriber(tokenizer, benchmark.template))
    questions = suite.questions
    if benchmark.schedules:
        questions = tuple(replace(question, turns=question.turns[:1]) for question in questions)
    most = benchmark.options.max_tokens
    fit, left_out = fitting(questions, prompt, max_context=target.max_context, max_tokens=most)
    if not fit:
        raise PromptError(f"no question of {suite.name} fits: {left_out[0].why}; try a smaller --max-tokens")
    groups = mixed_groups(fit, benchmark.batches) if benchmark.schedules else grouped(fit, benchmark.options.batch)
    return Setting(benchmark, folder, target, tokenizer, prompt, suite, groups, left_out)


def _prompt(transcriber: Transcriber, question: Question, answers: Sequence[str]) -> list[int]:
    """Token ids of the question's turn after `answers`, including the conversation before it."""
    messages = []
    for turn, answer in zip(question.turns, answers, strict=False):
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    return list(transcriber.prompt([*messages, {"role": "user", "content": question.turns[len(answers)]}]))
