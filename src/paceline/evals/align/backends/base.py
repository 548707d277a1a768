"""Backend: who answers. One method, `complete`: messages, and the beginning of the answer if there is one.

A prefix makes the assistant's turn go on from a given text: the backend never decodes it, it prefills it. The reply
holds what comes after it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from paceline.evals.align.prompts import Message
from paceline.evals.align.types import Call


@dataclass(frozen=True)
class Decoding:
    """How tokens are chosen. A field that is None is left to the server; extra goes into the request as it is."""

    max_tokens: int = 4200
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def is_greedy(self) -> bool:
        """Temperature 0: the same request has the same answer."""
        return self.temperature == 0

    def told(self) -> dict[str, Any]:
        """The fields of a request's body."""
        told = {key: value for key, value in asdict(self).items() if value is not None and key != "extra"}
        return told | self.extra


@dataclass(frozen=True)
class Request:
    """One completion.

    prefix    the assistant's turn so far, the marker that opens its thought included; a backend that renders the chat
              template itself leaves out what the template has written of it (`thoughts.continued`).
    forced    the end of the prefix that a method put there and no request before this one had (see `Call.injected`).
    stop      texts that end it; the reply ends before them.
    phase     what it is for, in reports: "answer", "step 1", "feedback", "judge".
    scope     what it belongs to: the item, or the scenario for a judge. Our engine's drafter remembers within it.
    sample    which of several answers to the same request this is; it shifts the seed.
    schema    JSON schema that the reply must have, for servers that can guide decoding."""

    messages: tuple[Message, ...]
    decoding: Decoding
    phase: str
    scope: str = ""
    prefix: str = ""
    forced: str = ""
    stop: tuple[str, ...] = ()
    sample: int = 0
    schema: dict[str, Any] | None = None

    @property
    def seeded(self) -> Decoding:
        """The decoding with this sample's own seed."""
        seed = self.decoding.seed
        return self.decoding if seed is None else replace(self.decoding, seed=seed + self.sample)


@dataclass
class Reply:
    """What came back. finish_reason: "stop", "length" or what else the server says. reasoning: a thought that the
    server took out of the text. logprobs: of each token, as servers of chats give them, where they were asked for.
    opened: whether the chat template opened the thought, where the backend has rendered it."""

    text: str
    call: Call
    reasoning: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    opened: bool = False

    @property
    def finish_reason(self) -> str:
        return self.call.finish_reason


class Backend(Protocol):
    """An endpoint or an engine.

    label  how reports and files name the model."""

    label: str

    async def complete(self, request: Request) -> Reply:
        """Answer; raises CompletionError when that is not possible, after every retry."""

    async def close(self) -> None:
        """Let go of connections, threads and models."""
