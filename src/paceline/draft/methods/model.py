"""model: any causal model drafts for the target (speculative decoding with a draft model).

Leviathan et al. 2023 (arXiv 2211.17192); Chen et al. 2023 (arXiv 2302.01318). The draft model runs like a target, with
a cache of its own; the loop is `stepping.py`. A forward costs the time to read its weights, or, on a fast accelerator,
the time to launch the kernels of its layers. It has the target's tokenizer, or one of its own (`tokenizers.py`).

    Engine("smollm2", draft="model:DRAFT,stop=svip")
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch

from paceline.core.request import Request
from paceline.core.segment import Segment
from paceline.core.tree import DraftTree, IntArray
from paceline.draft.base import up_to_ends
from paceline.draft.models.checkpoint import check_target, recorded_target
from paceline.draft.models.drafts import Draft, segments
from paceline.draft.models.stepping import SteppingConfig
from paceline.draft.models.streams import Streaming, Streams, open_streams
from paceline.draft.models.tokenizers import Bridge, Way
from paceline.draft.models.vocab import cut_head, kept_tokens
from paceline.draft.spec import option, quoted
from paceline.errors import MethodError, ModelError
from paceline.target.base import Facts
from paceline.target.cache import CachedTarget
from paceline.target.load import has_tokenizer, load, load_tokenizer
from paceline.target.tokenizer import Tokenizer

CHUNK = 512  # most tokens of a prompt in one forward of the draft model
FEW = 16  # most that wait for a draft, where a token that is not committed leaves as much as a hundred keys and values


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
    tokenizer: Way = option(
        "target", "of the draft model: the target's, or its own; tli: draft tokens that both have; slem: draft text"
    )


class Model(Streaming):
    """Drafts with another model, usually a smaller one of the target's family.

    With the option `context`, the model's cache may hold only the end of a row's text, from token `_first` on.

    bridge  between the tokenizers, if the draft model has one of its own: places in a row are then of its tokens."""

    name = "model"
    paper = "Leviathan et al. 2023, Speculative Decoding, arXiv 2211.17192"
    Config: ClassVar[type[Any] | None] = StreamedConfig
    config: ModelConfig
    drafts_ahead = True

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self._slots: dict[int, int] = {}
        self._first: dict[int, int] = {}
        self.streams: Streams | None = None
        self.bridge: Bridge | None = None
        self._wanted = getattr(config, "streams", 0)
        self._way: Way = getattr(config, "tokenizer", "target")
        if self._wanted and config.tree:
            raise MethodError("streams draft chains: leave out tree or streams")

    def bind(self, target: Facts) -> None:
        """Load the draft model. MethodError if it has another tokenizer than the options say."""
        super().bind(target)
        path, own = self.config.checkpoint, self._own_tokenizer(target)
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
        if own is not None:
            self.cross(own, target)
        elif self.model.vocab_size < target.vocab_size:  # the same tokenizer, padded to fewer rows
            self.columns = torch.arange(self.model.vocab_size, device=target.device)
        if self.config.vocab is not None:
            self.columns = kept_tokens(self.config.vocab, path, target)
            refusal = f"vocab={self.config.vocab}: {path} has no output head that could be trimmed; leave vocab out"
            cut_head(self.model, self.columns, refusal)
        self.weight_bytes = self.model.weight_bytes
        if self._wanted:
            self.streams = open_streams(path, self.model, self._wanted)
            self.num_streams = self.streams.count
            self.weight_bytes += self.streams.nbytes

    def _own_tokenizer(self, target: Facts) -> Tokenizer | None:
        """The draft model's tokenizer if it is not the target's. MethodError if that is not what the options say."""
        path = self.config.checkpoint
        if target.tokenizer is None:
            if self._way != "target":
                raise MethodError(f"tokenizer={self._way} needs the target's tokenizer, and {target.name} has none")
            return None
        # A draft model without a tokenizer remembers that of the target it was trained for.
        made_for = None if has_tokenizer(path) else recorded_target(path)
        if made_for is not None:
            check_target(Path(path), made_for, target, any_target=True)
            return None
        own = load_tokenizer(path)
        if self._way == "target":
            check_tokenizer(path, own, target.tokenizer)
        return None if own.fingerprint == target.tokenizer.fingerprint else own

    def cross(self, own: Tokenizer, target: Facts) -> None:
        """Draft with the tokenizer `own`. MethodError for options that it excludes."""
        assert target.tokenizer is not None
        if self.model.recurrent:
            raise MethodError(
                f"{self.config.checkpoint} has a tokenizer of its own and a recurrent state, which cannot take back "
                "tokens whose text is tokenized again"
            )
        self.bridge = bridge = Bridge(own, target.tokenizer, self._way, self.model.vocab_size, target.vocab_size)
        way, path = "slem" if bridge.guesses else "tli", self.config.checkpoint
        if self._wanted or self.config.vocab is not None or (bridge.guesses and self.config.tree):
            raise MethodError(f"tokenizer={way} takes no streams and no vocab{', and drafts no tree' * bridge.guesses}")
        if bridge.guesses:
            self._vocab_size = bridge.vocab_size
        else:
            cut_head(self.model, bridge.own_ids, f"{path} has no output head that can be cut: take tokenizer=slem")
            self.columns = bridge.target_ids.to(target.device)
        self.drafts_ahead = False
        self.notes = (
            f"{path} has a tokenizer of its own, with {bridge.share:.0%} of the target's tokens: it drafts "
            + ("text, which is tokenized again (slem)" if bridge.guesses else "these alone (tli)"),
        )

    def _dtype(self, target: Facts) -> str | torch.dtype:
        own = f"auto-{str(target.dtype).removeprefix('torch.')}"  # a quantised draft model stays quantised
        return own if self.config.dtype == "auto" else self.config.dtype

    def start(self, row: Request) -> None:
        self.open(row, 0)

    def drop(self, row: Request) -> None:
        super().drop(row)
        self.close(row)
        if self.bridge is not None:
            self.bridge.drop(row)

    def open(self, row: Request, first: int) -> None:
        """Give a row a slot, for its tokens from `first` on."""
        self._first[row.id] = first
        self._slots[row.id] = self.model.add_row(self.expected(row))

    def expected(self, row: Request) -> int:
        """The number of tokens to reserve memory for."""
        to_come = row.expected_length - len(row)
        return max(0, min(len(self.text(row)) + to_come - self._first[row.id], self.model.max_context))

    def close(self, row: Request) -> None:
        """Free a row's slot, if it got one."""
        if row.id in self._slots:
            self.model.drop_row(self._slots.pop(row.id))
            if self.bridge is not None:
                self.bridge.empty(row)
        self._first.pop(row.id, None)

    def text(self, row: Request) -> IntArray:
        """The row's tokens as the draft model reads them."""
        return row.tokens if self.bridge is None else self.bridge.text(row)

    def propose(self, rows: Sequence[Request]) -> list[DraftTree]:
        bridge = self.bridge
        if bridge is None:
            return super().propose(rows)
        for row in rows:  # the last tokens of a text can change when it goes on
            held = bridge.release(row, self._first[row.id])
            cast(CachedTarget, self.model).truncate(self._slots[row.id], held)
        trees = super().propose(rows)
        return [self._retold(bridge, *each) for each in zip(rows, trees, strict=True)] if bridge.guesses else trees

    def _retold(self, bridge: Bridge, row: Request, tree: DraftTree) -> DraftTree:
        """A chain of the draft model's tokens as one of the target's."""
        draft = self._drafts.get(row.id)
        if draft is None:
            return tree
        tokens = np.array(bridge.say(row, draft.drafted)[: row.max_draft], np.int64)
        tokens, _ = up_to_ends(tokens, np.arange(len(tokens)), self.end_tokens(row))
        tree = DraftTree.chain(row.last_token, tokens, source=self.name if len(tokens) else "", calls=draft.calls)
        draft.run_index = [None] * len(tree)
        return tree

    def begin(self, row: Request) -> Draft:
        if self.bridge is None:
            return super().begin(row)
        ends = frozenset(self.model.eos_token_ids) if self.bridge.guesses else self.end_tokens(row)
        return Draft.chain(row, self.text(row)[self.cached(row) :].tolist(), ends)

    def _takes_best(self, row: Request) -> bool:
        return super()._takes_best(row) if self.bridge is None or not self.bridge.guesses else True

    def draft_limit(self, row: Request) -> int:
        if self.bridge is not None:
            if not self.bridge.can_draft(row):
                return 0
        elif self.model.vocab_size < self._vocab_size and row.tokens.max() >= self.model.vocab_size:
            return 0  # the text has a token of the target's padding, which the draft model lacks
        # The last drafted token is not run; streams come after the one before it.
        unread = self.model.max_context - (len(self.text(row)) - self._begin(row))
        return min(row.max_draft, unread + 1 - self.num_streams)

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
        text, most = self.text(row), FEW if self.model.recurrent else CHUNK
        while (unread := len(text) - (begin := self.cached(row))) > most:
            self.read_chunk(row, text[begin : begin + min(CHUNK, unread - 1)])

    def _begin(self, row: Request) -> int:
        """The first token of a row that the draft model sees in this round: `context` tokens back if it has more than
        those to read, or if its own context is full; else as before."""
        first, context, length = self._first[row.id], self.config.context, len(self.text(row))
        if context is None:
            return first
        full = not 0 < length - first <= self.model.max_context
        return max(0, length - context) if full or length - self.cached(row) > context else first

    def read_chunk(self, row: Request, tokens: IntArray) -> None:
        """Run a row's next tokens, at most CHUNK, and commit them."""
        slot = self._slots[row.id]
        self.model.verify([Segment.chunk(slot, np.array(tokens), last=False)])
        self.model.commit(slot, range(len(tokens)))
        if self.bridge is not None:
            self.bridge.hold(row, tokens)

    def run(self, drafts: Sequence[Draft], num_logits: Sequence[int]) -> torch.Tensor:
        parts = segments(drafts, num_logits, lambda row: self._slots[row.id])
        if self.bridge is not None:
            for part, draft in zip(parts, drafts, strict=True):
                part.tokens = self.bridge.ids(draft)
        logits = self.model.verify(parts).logits if self.streams is None else self.streams.run(parts)
        return logits[..., : self._vocab_size]

    def keep(self, draft: Draft, nodes: Sequence[int]) -> None:
        if self.bridge is not None:
            if self.bridge.guesses:  # what was accepted is seen when the row's text is
                nodes = range(draft.num_run)
            self.bridge.hold(draft.row, self.bridge.ids(draft)[list(nodes)])
        self.model.commit(self._slots[draft.row.id], nodes)

    def arrange(self, row: Request, nodes: Sequence[int]) -> None:
        cast(CachedTarget, self.model).cache.arrange(self._slots[row.id], nodes)


def check_tokenizer(path: str, drafts: Tokenizer, targets: Tokenizer) -> None:
    """MethodError, with what differs, unless both tokenizers give every token the same id."""
    if drafts.fingerprint == targets.fingerprint:
        return
    own, others = drafts.inner.get_vocab(), targets.inner.get_vocab()
    moved = sum(others[token] != id for token, id in own.items() if token in others)
    only = len(own.keys() - others.keys()), len(others.keys() - own.keys())
    raise MethodError(
        f"the draft model {path} has another tokenizer than the target: {only[0]} of its {len(own)} tokens the target "
        f"does not have, {only[1]} of the target's {len(others)} it does not have, {moved} have another id; "
        f"model:{quoted(path)},tokenizer=own drafts with it"
    )
