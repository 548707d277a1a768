"""Target: the interface of the model whose output must not change. It knows no drafter and no acceptance rule.

A target owns a ragged KV cache: each row has its own slot and length. `verify` runs segments (a row's tree, or a chunk
of its prompt) in ONE forward, and writes their keys and values after the row's. `commit` keeps the accepted path's keys
and values, and drops the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from paceline.core.clock import Clock
from paceline.core.segment import Needs as Needs
from paceline.core.segment import Segment, Verdict
from paceline.errors import ModelError
from paceline.formats.facts import Facts, Inside
from paceline.formats.tokenizer import Tokenizer
from paceline.kernels.linear import Linear
from paceline.target.threads import Threads

LayerCallback = Callable[[int, torch.Tensor], None]
"""callback(number of layers run, hidden [N, H]), called during a forward."""


class Target(Facts, ABC):
    """The model that the engine runs. Its attributes besides `Facts`:

    max_context          largest number of tokens of a row.
    cache                its rows' keys and values; a `RaggedCache` can be shared and laid out anew.
    weight_bytes         bytes of weights that a forward over a single token reads. The input embedding does not count,
                         unless it is also the output head.
    weights_fingerprint  identifies the weights: it differs after each training.
    quantised            description of the formats of weights in blocks; None without blocks.
    activations          bits to which products with weights in blocks round their inputs; None without blocks.
    expanded             description of blocks that were expanded to 16 or 32 bits; None: there were none.
    notes                lines about this model that a user should read.
    sampling             values of SamplingParams that the checkpoint recommends, by field.
    folder               folder or GGUF file of its checkpoint; None: it was made in memory.
    brings_head          there is a head for multi-token prediction in it.
    tokenizer            the model's tokenizer; drafters with token ids on disk compare its fingerprint with theirs.
    same_on_any_threads  logits are the same, bit for bit, on any number of processor threads.
    same_on_any_processor  exact logits are the same, bit for bit, on any processor (docs/exact.md).
    exact                a token's logits depend on its text alone (`make_exact`).
    expert_share         share of a mixture's experts that a token reads; 0.0 without experts.
    recurrent            rows have a state, which cannot forget committed tokens.
    is_interrupted       asked between two layers, by targets that run their layers themselves: whether the forward must
                         end with Interrupted. Nothing of it is committed. None: it runs to its end."""

    weight_bytes: int = 0
    cache: Any = None
    weights_fingerprint: str = ""
    quantised: str | None = None
    activations: int | None = None
    expanded: str | None = None
    notes: Sequence[str] = ()
    sampling: Mapping[str, float] = MappingProxyType({})
    folder: Path | None = None
    brings_head: bool = False
    tokenizer: Tokenizer | None = None
    same_on_any_threads = False
    same_on_any_processor = False
    exact: bool = False
    expert_share = 0.0
    recurrent = False
    is_interrupted: Callable[[], bool] | None = None

    @property
    def ends(self) -> tuple[torch.Tensor, Linear] | None:
        return None

    @property
    def inside(self) -> Inside | None:
        return None

    @property
    def products(self) -> Sequence[Linear]:
        """The model's products with weights, if they are ours."""
        return ()

    def apart(self) -> Target:
        """A target of the same weights with its own rows, if possible; else this target."""
        return self

    @property
    def prefix_key(self) -> str:
        """A text that identifies the target's keys and values: equal texts mean equal values for the same tokens."""
        blocks = f"{self.quantised} {self.activations}"
        return f"{self.weights_fingerprint} {self.dtype} {blocks} {self.expanded} {self.exact}"

    @cached_property
    def threads(self) -> Threads:
        """Processor threads of a round, for engines that set no number: on CPUs chosen by measured time, else fixed."""
        return Threads(None if self.device.type == "cpu" else torch.get_num_threads())

    @property
    def exact_is_free(self) -> bool:
        """Whether `make_exact` costs no time."""
        return False

    def make_exact(self) -> None:
        """From now on, compute a token's logits the same, bit for bit, alone, in any draft or batch, and for any chunks
        of the prompt. Call it before the first row. It affects all engines of this target.

        Raises ModelError if this target cannot."""
        raise ModelError(
            f"exact: {self.name} runs in transformers, where the number of tokens decides in which order "
            "sums are added; it needs a family that the native decoder runs (docs/models.md)"
        )

    def trim_head(self, ids: torch.Tensor) -> None:
        """Reduce the head to a drafter's vocabulary, the K tokens `ids` int64, ascending: logits are then [M, K] in
        that order. Inputs may still be any token. ModelError if the head cannot be trimmed."""
        raise ModelError(f"{self.name} has no output head that could be trimmed")

    def check(self, needs: Needs) -> None:
        """Raise ModelError if this target cannot meet a drafter's needs."""

    @abstractmethod
    def add_row(self, expected_length: int) -> int:
        """Add an empty row with memory for `expected_length` tokens, which grows if needed. Returns its slot."""

    @abstractmethod
    def drop_row(self, slot: int) -> None:
        """Free a slot."""

    @abstractmethod
    def length(self, slot: int) -> int:
        """Number of committed tokens of a row."""

    @abstractmethod
    def verify(
        self, segments: Sequence[Segment], needs: Needs = Needs(), on_layer: LayerCallback | None = None,
        clock: Clock | None = None,
    ) -> Verdict:  # fmt: skip
        """Run all segments in one forward. Nothing is committed.

        clock  gets the forward's time: "prepare", "layers", "head", and "top_k" for the best logits."""

    @abstractmethod
    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Keep the keys and values of nodes `path` as the row's next tokens, and drop those of the segment's other
        nodes.

        path  numbers of nodes in the segment that was just run, ascending from 0."""
