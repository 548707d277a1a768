"""Facts: what heads and drafters know of the model for which they draft."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from paceline.core.segment import Segment
    from paceline.formats.shape import Shape
    from paceline.formats.tokenizer import Tokenizer
    from paceline.kernels.linear import Linear

BEFORE_NORM = -1
"""Stands in `Needs.hidden_layers` for the states before the final norm."""


class Facts(Protocol):
    """The properties of a model that drafters know. The model may run in another engine.

    quantised, activations, exact, folder, brings_head, threads  as in `Target`; also None if the model runs elsewhere.
    ends    input embedding [V, H] and output head; None: there is no access to them.
    inside  the model's layers; None: there is no access to them."""

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
    quantised: str | None
    activations: int | None
    exact: bool
    folder: Path | None
    brings_head: bool

    @property
    def threads(self) -> Any: ...
    @property
    def ends(self) -> tuple[torch.Tensor, Linear] | None: ...
    @property
    def inside(self) -> Inside | None: ...


class Inside(Facts, Protocol):
    """What heads know of a model if they run parts of it.

    norm    weight of the final norm [H]. ops: its elementwise steps. cache: the rows' keys and values.
    layers  its layers; `nbytes` of each is the bytes of its weights.
    rows, embedded, reach, new_cache, run_layers, logits: as in `paceline.target.decoder.Decoder`."""

    shape: Shape
    head: Linear
    norm: torch.Tensor
    ops: Any
    cache: Any
    weight_bytes: int
    expert_share: float
    recurrent: bool

    @property
    def embedding(self) -> torch.Tensor: ...
    def rows(self, tokens: torch.Tensor) -> torch.Tensor: ...
    def embedded(self, tokens: torch.Tensor) -> torch.Tensor: ...
    def reach(self, count: int) -> None: ...
    @property
    def layers(self) -> Sequence[Any]: ...
    def new_cache(self, layers: int, first: int | None = None) -> Any: ...
    def run_layers(
        self, segments: Sequence[Segment], last: int, *, first: int = 0, cache: Any = None
    ) -> torch.Tensor: ...
    def logits(self, hidden: torch.Tensor, normalise: bool = True) -> torch.Tensor: ...
