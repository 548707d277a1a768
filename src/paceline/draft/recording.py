"""Recording: what a drafter is bound to where no model runs, as over recorded answers or inside another engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from paceline.target.tokenizer import Tokenizer


@dataclass
class Recording:
    """What a drafter meets in place of a model: its tokenizer and its end token. It cannot run anything."""

    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    name: str = "a recording"
    weights_fingerprint: str = ""
    max_context: int = 1 << 40
    num_layers: int = 0
    hidden_size: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Recording:
        """A recording in this tokenizer's tokens; it must name an end token, as `open_tokenizer` sees to."""
        assert tokenizer.eos_token_id is not None
        return cls(tokenizer, (tokenizer.eos_token_id,), tokenizer.vocab_size)
