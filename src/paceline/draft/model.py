"""model: any causal model with the target's tokenizer drafts for it (speculative decoding with a draft model).

Leviathan et al. 2023 (arXiv 2211.17192); Chen et al. 2023 (arXiv 2302.01318). The draft model runs like a target, with
a cache of its own; the loop is `stepping.py`. A forward costs the time to read its weights, or, on a fast accelerator,
the time to launch the kernels of its layers.

    Engine("models/demo", draft="model:models/demo-draft,stop=svip")
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch

from paceline.draft.neural.checkpoint import check_target, recorded_target
from paceline.draft.neural.drafts import Draft, segments
from paceline.draft.neural.stepping import SteppingConfig
from paceline.draft.neural.streams import Streaming, Streams, open_streams
from paceline.draft.neural.vocab import trim
from paceline.draft.spec import option
from paceline.engine.request import Request
from paceline.engine.round import Segment
from paceline.engine.tree import IntArray
from paceline.errors import MethodError, ModelError
from paceline.target.base import Facts
from paceline.target.cache import CachedTarget
from paceline.target.load import has_tokenizer, load, load_tokenizer
from paceline.target.tokenizer import Tokenizer

CHUNK = 512
"""Most tokens of a prompt in one forward of the draft model."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(SteppingConfig):
    """Options of drafters with a draft model."""

    checkpoint: str = option(help="folder or hub id of the draft model")
    dtype: Literal["auto", "float32", "bfloat16", "int8", "int4"] = option(
        "auto",
        "of the draft model's weights; auto: the target's. int8 and int4 read less memory and change drafts a little",
    )
    context: int | None = option(
        None, "most tokens of a text that it reads at once, the last ones of a longer one; none: all", least=1
    )


@dataclass(frozen=True, kw_only=True)
class StreamedConfig(ModelConfig):
    """Options of `model`."""

    streams: int = option(0, "of a draft model with streams: tokens a forward drafts after the next one", least=0)


class Model(Streaming):
    """Drafts with another model that has the target's tokenizer, usually a smaller one of its family.

    With the option `context`, the model's cache may hold only the end of a row's text, from token `_first` on."""

    name = "model"
    lossless = "yes"
    paper = "Leviathan et al. 2023, Speculative Decoding, arXiv 2211.17192"
    Config: ClassVar[type[Any] | None] = StreamedConfig
    drafts_ahead = True

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.config = config
        self._slots: dict[int, int] = {}
        self._first: dict[int, int] = {}
        self.streams: Streams | None = None
        self._wanted = config.streams if isinstance(config, StreamedConfig) else 0
        if self._wanted and config.tree:
            raise MethodError("streams draft chains: leave out tree or streams")

    def bind(self, target: Facts) -> None:
        """Load the draft model. MethodError if its tokenizer is another than the target's."""
        super().bind(target)
        path = self.config.checkpoint
        if target.tokenizer is not None:
            # A draft model without a tokenizer remembers that of the target it was trained for.
            made_for = None if has_tokenizer(path) else recorded_target(path)
            if made_for is not None:
                check_target(Path(path), made_for, target, any_target=True)
            else:
                check_tokenizer(path, load_tokenizer(path), target.tokenizer)
        self.model = load(path, dtype=self._dtype(target), device=target.device)
        if getattr(target, "exact", False):  # then a row's draft must not depend on its batch either
            with suppress(ModelError):
                self.model.make_exact()
        if target.tokenizer is None and self.model.vocab_size != target.vocab_size:
            raise MethodError(
                f"model:{path} knows {self.model.vocab_size} tokens and the target {target.vocab_size}: "
                "a draft model needs the target's tokenizer"
            )
        if (self.config.context or 0) > self.model.max_context:
            raise MethodError(f"context is {self.config.context}; {path} can read {self.model.max_context} tokens")
        if self.model.vocab_size < target.vocab_size:  # the same tokenizer, padded to fewer rows
            self.columns = torch.arange(self.model.vocab_size, device=target.device)
        if self.config.vocab is not None:
            self.columns = trim(self.model, self.config.vocab, path, target)
        self.weight_bytes = self.model.weight_bytes
        if self._wanted:
            self.streams = open_streams(path, self.model, self._wanted)
            self.num_streams = self.streams.count
            self.weight_bytes += self.streams.nbytes

    def _dtype(self, target: Facts) -> str | torch.dtype:
        own = f"auto-{str(target.dtype).removeprefix('torch.')}"  # a quantised draft model stays quantised
        return own if self.config.dtype == "auto" else self.config.dtype

    def start(self, row: Request) -> None:
        self.open(row, 0)

    def drop(self, row: Request) -> None:
        super().drop(row)
        self.close(row)

    def open(self, row: Request, first: int) -> None:
        """Give a row a slot, for its tokens from `first` on."""
        self._first[row.id] = first
        self._slots[row.id] = self.model.add_row(self.expected(row))

    def expected(self, row: Request) -> int:
        """The number of tokens to reserve memory for."""
        return max(0, min(row.expected_length - self._first[row.id], self.model.max_context))

    def close(self, row: Request) -> None:
        """Free a row's slot, if it got one."""
        if row.id in self._slots:
            self.model.drop_row(self._slots.pop(row.id))
        self._first.pop(row.id, None)

    def draft_limit(self, row: Request) -> int:
        if self.model.vocab_size < self._vocab_size and row.tokens.max() >= self.model.vocab_size:
            return 0  # the text has a token of the target's padding, which the draft model lacks
        # The last drafted token is not run; streams come after the one before it.
        return min(row.max_draft, self.model.max_context - (len(row) - self._begin(row)) + 1 - self.num_streams)

    def cached(self, row: Request) -> int:
        return self._first[row.id] + self.model.length(self._slots[row.id])

    def read(self, row: Request) -> IntArray:
        """The tokens of a row in the draft model's cache."""
        return row.tokens[self._first[row.id] : self.cached(row)]

    def catch_up(self, row: Request) -> None:
        first = self._begin(row)
        if first != self._first[row.id]:
            self.close(row)
            self.open(row, first)
        while len(row) - (begin := self.cached(row)) > CHUNK:
            self.read_chunk(row, row.tokens[begin : begin + CHUNK])

    def _begin(self, row: Request) -> int:
        """The first token of a row that the draft model sees in this round: `context` tokens back if it has more than
        those to read, or if its own context is full; else as before."""
        first, context = self._first[row.id], self.config.context
        if context is None:
            return first
        full = len(row) - first > self.model.max_context
        return len(row) - context if full or len(row) - self.cached(row) > context else first

    def read_chunk(self, row: Request, tokens: IntArray) -> None:
        """Run a row's next tokens, at most CHUNK, and commit them."""
        slot = self._slots[row.id]
        self.model.verify([Segment.chunk(slot, np.array(tokens), last=False)])
        self.model.commit(slot, range(len(tokens)))

    def run(self, drafts: Sequence[Draft], num_logits: Sequence[int]) -> torch.Tensor:
        parts = segments(drafts, num_logits, lambda row: self._slots[row.id])
        logits = self.model.verify(parts).logits if self.streams is None else self.streams.run(parts)
        return logits[..., : self._vocab_size]

    def keep(self, draft: Draft, nodes: Sequence[int]) -> None:
        self.model.commit(self._slots[draft.row.id], nodes)

    def arrange(self, row: Request, nodes: Sequence[int]) -> None:
        cast(CachedTarget, self.model).arrange(self._slots[row.id], nodes)


def check_tokenizer(path: str, drafts: Tokenizer, targets: Tokenizer) -> None:
    """MethodError, with what differs, unless both tokenizers give every token the same id."""
    if drafts.fingerprint == targets.fingerprint:
        return
    own, others = drafts.inner.get_vocab(), targets.inner.get_vocab()
    moved = sum(others[token] != id for token, id in own.items() if token in others)
    only = len(own.keys() - others.keys()), len(others.keys() - own.keys())
    raise MethodError(
        f"the draft model {path} has another tokenizer than the target: {only[0]} of its {len(own)} tokens the target "
        f"does not have, {only[1]} of the target's {len(others)} it does not have, {moved} have another id"
    )
