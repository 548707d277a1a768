"""Target: the interface of the model whose output must not change. Knows nothing of drafters or acceptance.

A target owns a ragged cache: every row has a slot and a length of its own. `verify` runs segments (a row's tree, or
a chunk of its prompt) through the model in ONE forward and writes their keys and values after the row's; `commit` keeps
those of the accepted path and forgets the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from paceline.engine.clock import Clock
from paceline.engine.round import Segment, Verdict
from paceline.errors import ModelError
from paceline.target.threads import Threads
from paceline.target.tokenizer import Tokenizer

BEFORE_NORM = -1
"""The states that the final norm reads, in `Needs.hidden_layers`."""


@dataclass(frozen=True)
class Needs:
    """What a drafter needs from the target's forward.

    hidden_layers  hidden states wanted: l means the input of layer l (l = 0: the embeddings), num_layers means
                   after the final norm, BEFORE_NORM before it. Given for every token of the forward, prompts included.
    top_k          the number of best logits wanted for every verified node.
    resume_layer   layers 0..resume_layer-1 of drafted nodes are the drafter's own work: segments may come with
                   `hidden`, and the target goes on from there.
    callback_layer call `Drafter.on_layer` when this many layers are done.
    """

    hidden_layers: tuple[int, ...] = ()
    top_k: int = 0
    resume_layer: int | None = None
    callback_layer: int | None = None

    @property
    def whole_prompt(self) -> bool:
        """Whether the drafter must see the states of every token of a prompt, so that none of them may come from an
        earlier request's cache."""
        return bool(self.hidden_layers) or self.callback_layer is not None

    def __or__(self, other: Needs) -> Needs:
        """What two drafters need together."""
        return Needs(
            tuple(sorted({*self.hidden_layers, *other.hidden_layers})),
            max(self.top_k, other.top_k),
            self.resume_layer if self.resume_layer is not None else other.resume_layer,
            self.callback_layer if self.callback_layer is not None else other.callback_layer,
        )


LayerCallback = Callable[[int, torch.Tensor], None]
"""Called as callback(layers done, hidden [N, H]) in the middle of a forward."""


class Facts(Protocol):
    """What drafters may know of the model they draft for, which may run in another engine."""

    name: str
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    weights_fingerprint: str
    tokenizer: Tokenizer | None
    num_layers: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device


class Target(ABC):
    """The model that the engine runs.

    max_context   tokens that a row may hold.
    weight_bytes  of weights that a forward over one token reads: all but the input embedding, of which it reads one
                  row, unless that is the output head as well.
    weights_fingerprint  tells one training from another.
    quantised     the blocks of eight and four bits that weights are in; None for others.
    measured      what that has changed, where it was measured.
    expanded      the blocks from which weights of 16 or 32 bits were expanded.
    tokenizer     the engine's, if it has one: drafters with token ids on disk compare its fingerprint with theirs.
    clock         the engine's; `verify` books its parts "prepare", "layers" and "head" there.
    same_on_any_threads  the logits are the same, bit for bit, on any number of processor threads.
    exact         a token's logits depend on its text alone (`make_exact`).
    """

    vocab_size: int
    num_layers: int
    hidden_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    weight_bytes: int = 0
    weights_fingerprint: str = ""
    quantised: str | None = None
    expanded: str | None = None
    measured: str | None = None
    name: str
    dtype: torch.dtype
    device: torch.device
    clock: Clock
    tokenizer: Tokenizer | None = None
    same_on_any_threads = False
    exact = False

    @property
    def notes(self) -> list[str]:
        """What a user should know of this model: a line each."""
        if self.quantised is None:
            return [f"{self.name} has its weights in {self.expanded}"] if self.expanded else []
        return [
            f"{self.name} has its weights in {self.quantised}: another model than in 16 bits"
            f"{f' ({self.measured})' if self.measured else ''}, and drafting does not change what it says"
        ]

    @cached_property
    def threads(self) -> Threads:
        """Processor threads for the rounds of all engines of this target, chosen by how long rounds take; fixed on an
        accelerator, where they hardly matter."""
        return Threads(None if self.device.type == "cpu" else torch.get_num_threads())

    @contextmanager
    def threads_of(self, number: int) -> Iterator[None]:
        """Run rounds on `number` processor threads, then choose them as before, unless the caller fixed another number
        meanwhile: that one stays."""
        before, own = self.threads, Threads(number)
        self.threads = own
        try:
            yield
        finally:
            if self.threads is own and own.fixed == number:
                self.threads = before

    @property
    def exact_is_free(self) -> bool:
        """Whether `make_exact` costs no time."""
        return False

    def make_exact(self) -> None:
        """Give every token the same logits, bit for bit, whatever is verified with it: alone, in a draft of any shape,
        in a batch, and however a prompt was cut. To be called before the first row; for all engines of this target.

        Raises ModelError if this target cannot."""
        raise ModelError(
            f"exact: {self.name} runs in transformers, where the number of tokens decides in which order "
            "sums are added; it needs a family that the native decoder runs (Llama, Mistral, Qwen2, Qwen3, SmolLM)"
        )

    def check(self, needs: Needs) -> None:  # noqa: B027
        """Raise ModelError if this target cannot give a drafter what it needs."""

    @abstractmethod
    def add_row(self, expected_length: int) -> int:
        """A slot for a new, empty row. Memory for `expected_length` tokens is taken at once, more when it is needed."""

    @abstractmethod
    def drop_row(self, slot: int) -> None:
        """Free a slot."""

    @abstractmethod
    def length(self, slot: int) -> int:
        """Committed tokens of a row that the cache holds."""

    @abstractmethod
    def verify(
        self, segments: Sequence[Segment], needs: Needs = Needs(), on_layer: LayerCallback | None = None
    ) -> Verdict:
        """One forward over every segment. Nothing is committed."""

    @abstractmethod
    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Keep the keys and values of the nodes `path` (node numbers of the segment just run, in order, 0 first)
        as the row's next tokens, and forget the segment's other nodes."""
