"""Scorers: what chooses among answers, for best-of-n and tpo. The judge itself, a scoring server, or a local model.

The paper used FsfairX-LLaMA3-RM-v0.1, a classifier with one output over a conversation.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from paceline.errors import ModelError
from paceline.evals.align.judge import Judge
from paceline.evals.align.prompts import query_of
from paceline.evals.align.scoring import Scoring, score
from paceline.evals.align.types import Call, Item, Scenario
from paceline.workbench.client import Client, CompletionError, Retry


class Scorer(Protocol):
    """label names it in a run's description."""

    label: str

    async def score(self, item: Item, scenario: Scenario, response: str) -> tuple[float, list[Call]]:
        """The higher the better, and what asking cost."""


class JudgeScorer:
    """The judge's SAR of one answer: the benchmark's own measure, so what it chooses flatters itself; say so."""

    def __init__(self, judge: Judge, scoring: Scoring, adversarial: bool):
        self.label = f"judge {judge.label}"
        self._judge, self._scoring, self._adversarial = judge, scoring, adversarial

    async def score(self, item: Item, scenario: Scenario, response: str) -> tuple[float, list[Call]]:
        judgement = await self._judge.judge(item, scenario, query_of(item, self._adversarial), response)
        return score(judgement.verdicts, scenario, self._scoring).sar, judgement.calls


class ServerScorer:
    """A server that scores text: POST {"model", "input"} to `url`, as vLLM's /classify and /pooling take it, or
    {"inputs"} to one whose path ends in /predict (text-embeddings-inference). The first number of the reply counts."""

    def __init__(self, spec: str, adversarial: bool, retry: Retry = Retry(), timeout: float = 120.0):
        self.url, _, self.model = spec.partition("#")
        self.label = spec
        self._adversarial = adversarial
        self._client = Client([self.url], timeout=timeout, retry=retry)

    async def score(self, item: Item, scenario: Scenario, response: str) -> tuple[float, list[Call]]:
        text = f"User: {query_of(item, self._adversarial)}\n\nAssistant: {response}"
        body = {"inputs": text} if self.url.endswith("/predict") else {"model": self.model, "input": text}
        answer = await self._client.post(body)
        try:
            return first_number(answer), []
        except ValueError as error:
            raise CompletionError(f"the scorer {self.url} answered without one: {error}") from None


class ModelScorer:
    """A reward model in this process: transformers' classifier with one output, over the conversation."""

    def __init__(self, folder: str, adversarial: bool):
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self.label, self._adversarial = folder, adversarial
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder)
            self._model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        except (OSError, ValueError) as error:
            raise ModelError(f"{folder} cannot be read as a reward model: {' '.join(str(error).split())}") from None

    async def score(self, item: Item, scenario: Scenario, response: str) -> tuple[float, list[Call]]:
        turns = [
            {"role": "user", "content": query_of(item, self._adversarial)},
            {"role": "assistant", "content": response},
        ]
        return await asyncio.to_thread(self._score, turns), []

    def _score(self, turns: list[dict[str, str]]) -> float:
        import torch

        ids = self._tokenizer.apply_chat_template(turns, tokenize=True, return_tensors="pt", return_dict=False)
        with torch.inference_mode():
            return float(self._model(ids).logits.flatten()[0])


def first_number(value: Any) -> float:
    """The first number in a JSON value that is named score, or stands in a list; ValueError if there is none."""
    if isinstance(value, bool) or value is None:
        raise ValueError("no score in the reply")
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, list) and value:
        return first_number(value[0])
    if isinstance(value, dict):
        for key in ("score", "data", "probs", "results"):
            if key in value:
                return first_number(value[key])
    raise ValueError("no score in the reply")
