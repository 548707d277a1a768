"""What goes back to a client: OpenAI's objects, whole or in pieces, with vLLM's statistics of speculation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import time
from typing import Any
from uuid import uuid4

from paceline.engine.request import Completion, RowStats
from paceline.engine.sampling import TokenLogprob
from paceline.serve import reading
from paceline.serve.reading import Reader
from paceline.target.tokenizer import Tokenizer

REASONS = {"stop": "stop", "length": "length", "context": "length", "abort": "abort", "error": "error"}


def reason_of(done: Completion, reader: Reader) -> str:
    """Why the answer to a chat ended, once `reader` has read it."""
    reason = REASONS[done.finish_reason]
    return "tool_calls" if reader.called and reason == "stop" else reason


@dataclass
class Echo:
    """A prompt that comes back. logprobs: of its tokens, None for the first, which nothing predicts."""

    text: str
    logprobs: list[TokenLogprob | None]


class Places:
    """Where each token of an answer begins in its text. prompt: of a text that goes on; empty for one that echoes."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        self._detokenizer = tokenizer.detokenizer(prompt)
        self._at = 0

    def next(self, token: int) -> int:
        """Of the next token."""
        new, at = self._detokenizer.push(token), self._at
        self._at += len(new)
        broken = len(new) - len(new.lstrip("\ufffd"))  # bytes of earlier tokens that made no character
        return at + broken if broken < len(new) else at


@dataclass
class Frame:
    """What every object of one answer has."""

    kind: str  # chat.completion or text_completion
    model: str
    tokenizer: Tokenizer
    prefix: str = "chatcmpl"
    id: str = ""
    created: int = field(default_factory=lambda: int(time()))

    def __post_init__(self) -> None:
        self.id = self.id or f"{self.prefix}-{uuid4().hex}"

    def whole(
        self, choices: list[dict[str, Any]], completions: Sequence[Completion], predicted: int = 0
    ) -> dict[str, Any]:
        """The whole answer. predicted: tokens of the request's prediction."""
        return {
            **self._head(self.kind),
            "choices": choices,
            "usage": usage(completions, predicted),
            "metrics": {"speculative_decoding": speculation(completions[0].stats) if len(completions) == 1 else None},
        }

    def chunk(self, choice: dict[str, Any] | None, **more: Any) -> str:
        """A piece of a stream, as server-sent events have it; None: no choice, as with usage."""
        kind = "chat.completion.chunk" if self.kind == "chat.completion" else self.kind
        body = {**self._head(kind), "choices": [] if choice is None else [choice], **more}
        return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    # Choices --------------------------------------------------------------------------------------------------

    def message(self, index: int, done: Completion, reader: Reader, *, logprobs: bool, ids: bool) -> dict[str, Any]:
        """One choice of a chat. ids: with token ids."""
        message = reading.message(reader.push(done.text) + reader.end())
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": {"content": self.entries(done.logprobs), "refusal": None} if logprobs else None,
            "finish_reason": reason_of(done, reader),
        }
        return choice | ({"token_ids": done.tokens} if ids else {})

    def text(
        self, index: int, done: Completion, prompt: list[int], *, logprobs: bool, ids: bool, echo: Echo | None
    ) -> dict[str, Any]:
        """One choice of a text completion. echo: the prompt, where it is to come back."""
        places = Places(self.tokenizer, () if echo else prompt)
        scored = [*(echo.logprobs if echo else []), *done.logprobs]
        choice: dict[str, Any] = {
            "index": index,
            "text": (echo.text if echo else "") + done.text,
            "logprobs": self.columns(scored, places, prompt[0]) if logprobs else None,
            "finish_reason": REASONS[done.finish_reason],
        }
        return choice | ({"token_ids": done.tokens, "prompt_token_ids": prompt} if ids else {})

    def entries(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """Log-probabilities as chats have them."""
        return [
            self._entry(one.token, one.logprob) | {"top_logprobs": [self._entry(*pair) for pair in one.top]}
            for one in logprobs
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.spelled(token)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}

    def columns(self, logprobs: Sequence[TokenLogprob | None], places: Places, first: int) -> dict[str, Any]:
        """Log-probabilities as text completions have them; None: the prompt's first token, which nothing predicts."""
        texts = [self.tokenizer.decode([first]) if one is None else self.spelled(one.token) for one in logprobs]
        offsets = [places.next(first if one is None else one.token) for one in logprobs]
        values = [None if one is None else max(one.logprob, -9999.0) for one in logprobs]
        tops = [None if one is None else {self.spelled(token): p for token, p in one.top} for one in logprobs]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def spelled(self, token: int) -> str:
        """A token's text."""
        return str(self.tokenizer.inner.decode([token]))


def usage(completions: Sequence[Completion], predicted: int = 0) -> dict[str, Any]:
    """Tokens of the prompt, which is one for all choices, and of the answers."""
    prompt, new = completions[0].prompt_tokens, sum(done.new_tokens for done in completions)
    facts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    facts["prompt_tokens_details"] = {"cached_tokens": completions[0].reused}
    if predicted:
        accepted = sum(n for done in completions for source, n in done.runs if source == "prediction")
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": max(predicted - accepted, 0)}
        facts["completion_tokens_details"] = details
    return facts


def speculation(stats: RowStats) -> dict[str, Any]:
    """A request's speculation in vLLM's shape."""
    depth = max(len(stats.accepted), len(stats.drafted)) - 1
    histogram = [*stats.accepted, *[0] * (depth + 1 - len(stats.accepted))]
    accepted = sum(d * count for d, count in enumerate(histogram))
    return {
        "mean_acceptance_length": (accepted + stats.rounds) / stats.rounds if stats.rounds else 0.0,
        "draft_acceptance_rate": accepted / stats.draft_tokens if stats.draft_tokens else 0.0,
        "acceptance_histogram": histogram,
        "num_spec_steps": stats.rounds,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": stats.draft_tokens,
        "num_spec_tokens": max(depth, 0),
    }
