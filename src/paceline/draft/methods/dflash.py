"""dflash: one forward over a block of masks drafts all of its tokens, from the target's states of the text before it.

Z Lab 2026, "DFlash" (arXiv 2602.06036). The block is the last token and masks. Its positions see each other and, in
every layer, the text before them: keys and values made of several of the target's states. DSpark (arXiv 2607.05147)
adds two heads. The Markov head gives a low-rank bias by the token before, so that the tokens fit together; the
confidence head predicts whether a token is accepted, and ends chains. DDTree (Ringel and Romano 2026, arXiv 2604.12989)
grows a tree over the positions' distributions. DFlash2 (Z Lab's code, 2026) has convolutions over the block's
positions, and chooses among each position's best tokens by the token before. Folders are from `paceline train dflash`
or published.

    Engine("smollm2", draft="dflash:build/dflash,tree=16")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from paceline.core.options import option
from paceline.core.request import Request
from paceline.core.segment import Segment
from paceline.core.tree import IntArray
from paceline.draft.likeliest import POWER
from paceline.draft.models import layers as neural
from paceline.draft.models import stop
from paceline.draft.models.block import Block, BlockModel, BlockTree, Filled, Ranked
from paceline.draft.models.draft_model import Draft
from paceline.draft.models.layers import Precision
from paceline.draft.models.model_drafter import ModelDrafter
from paceline.draft.models.states import FeatureConfig, StatesModel, head_of
from paceline.formats.facts import Facts
from paceline.formats.heads.dflash import CONFIDENCE, CONVOLVED, MASK, OUTPUT, SELECT, W1, W2, read
from paceline.formats.heads.files import open_head
from paceline.formats.heads.layout import TABLE, Entries, Tensors, is_copy, table_and_head
from paceline.formats.heads.vocab import MEMBERS, OFFSETS
from paceline.kernels.linear import Linear, linear
from paceline.target.attention import Attention


class DFlashNetwork:
    """A drafter's network, bound to a target.

    head     its output head. columns: tokens of the head's rows; None: all tokens.
    spans    for each layer: how many tokens a position sees (None: all), and whether it sees no later position."""

    def __init__(self, path: str, config: Entries, tensors: Tensors, target: Facts, dtype: Precision = "auto"):
        self.form, self.config, self.columns, tensors = read(path, config, tensors, target)
        (table, head), own = table_and_head(target), tensors.get(TABLE)
        self.table = table if own is None or is_copy(own, table) else own.to(table)
        self.mask = tensors[MASK].to(table) if MASK in tensors else self.table[self.form.mask]
        apart = (W1, W2, SELECT, *CONFIDENCE)  # These stay whole.
        extra = {name: one.to(target.device, target.dtype) for name, one in tensors.items() if name in apart}
        looked_up = (*apart, TABLE, MASK, OFFSETS, MEMBERS)
        here = neural.placed({name: one for name, one in tensors.items() if name not in looked_up}, target, dtype)
        self.layers = neural.rotary_layers(here, self.config, target)
        self.weights, self.cache, self.taps = self.layers.vectors | extra, self.layers.cache, self.form.taps
        causal, windows = self.form.is_causal, [kind.window for kind in self.layers.shape.layers]
        self.spans = [(window, (window is not None) if causal is None else causal) for window in windows]
        self.at = torch.empty(0)
        for number, layer in enumerate(self.layers.layers if self.form.kernel else ()):
            for part, name in CONVOLVED.items():
                start = f"layers.{number}.{name}."
                project = linear([here[f"{start}kernel_projection.weight"]], None, target.dtype)
                base = self.weights[f"{start}base_kernel"]
                setattr(layer, part, Convolved(getattr(layer, part), base, project, self))
        self.fc = linear([here["fc.weight"]], None, target.dtype)
        if OUTPUT in here:
            head = linear([here[OUTPUT]], None, target.dtype)
        self.head = head if OUTPUT in here or self.columns is None else head.rows(self.columns)
        self.nbytes = neural.nbytes(here, OUTPUT) + neural.nbytes(extra, W1)  # A forward reads a row of W1.

    def read(self, states: torch.Tensor, segments: Sequence[Segment]) -> None:
        """Write each layer's keys and values of committed tokens, made of the target's states [N, taps * H]."""
        _, cache = self.layers.begin(segments, states)
        context = self.layers.ops.norm(self.fc(states), self.weights["hidden_norm.weight"])
        for number, layer in enumerate(self.layers.layers):
            assert isinstance(layer.attention, Attention | Convolved)
            layer.attention.write(context, cache, number)

    def fill(self, anchors: Sequence[int], blocks: Sequence[Segment]) -> torch.Tensor:
        """Run blocks of a token, from `anchors`, and masks. Their keys and values are not kept.

        Returns the output head's input at the positions that draft (`Segment.num_logits`)."""
        begins = np.cumsum([0, *(block.num_run for block in blocks)]).tolist()
        x, norm = self.mask.repeat(begins[-1], 1), self.layers.ops.norm
        x[begins[:-1]] = self.table[list(anchors)]
        self.at = torch.cat([torch.arange(block.num_run) for block in blocks]).to(x.device)
        mutual = [replace(block, sees="all") for block in blocks]
        plans = {
            (window, causal): self.layers.begin(blocks if causal else mutual, x, window)
            for window, causal in set(self.spans)
        }
        for number, span in enumerate(self.spans):
            x = self.layers(x, *plans[span], number, number + 1)
        wanted = plans[self.spans[0]][0].wanted
        return norm(x if wanted is None else x[wanted], self.weights["norm.weight"])

    def bias(
        self, before: torch.Tensor, columns: torch.Tensor | None = None, states: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The Markov head's logits [..., K] after the tokens `before` [...]. columns: [..., K]; None: all.

        states  the positions' states [..., H], for DFlash2's selector."""
        after = self.weights[W1][before]
        if self.form.best and states is not None:
            after = after * F.linear(states, self.weights[SELECT])
        if columns is None:
            return F.linear(after, self.weights[W2])
        return after @ self.weights[W2][columns].transpose(-1, -2)

    def confidence(self, states: torch.Tensor, before: torch.Tensor) -> list[float]:
        """For each of `states` [R, H], the chance that its drafted token is accepted after the token `before` [R].

        The chance does not depend on the drafted token, so it may decide where chains end (DSpark, section 3)."""
        read = torch.cat([states, self.weights[W1][before]], -1) if self.form.rank else states
        logits = F.linear(read, *(self.weights[name] for name in CONFIDENCE))[:, 0]
        chances: list[float] = logits.float().sigmoid().tolist()
        return chances


class Convolved:
    """A part of a layer between two convolutions over each block's positions (DFlash2). A position reads itself and the
    positions before it in its block. The kernels are `base` and an addition made of the part's input.

    base  kernels [2, K, H]. project: makes the addition [N, 2 * K * groups] of the input [N, H]."""

    def __init__(self, inner: Any, base: torch.Tensor, project: Linear, network: DFlashNetwork):
        self.inner, self.base, self.project, self.network = inner, base, project, network
        self.write = getattr(inner, "write", None)  # The text's keys and values are not convolved.

    def __call__(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        before, after = kernels(self.base, self.project(x), self.network.form.group)
        return convolved(self.inner(convolved(x, before, self.network.at), *more), after, self.network.at)


def kernels(base: torch.Tensor, added: torch.Tensor, group: int) -> tuple[torch.Tensor, ...]:
    """Make the kernels before and after a part, [N, K, H] each.

    base  [2, K, H]. added: additions of N positions, [N, 2 * K * H / group], each for `group` channels."""
    return (base + added.unflatten(-1, (2, base.shape[1], -1)).repeat_interleave(group, -1)).unbind(1)


def convolved(x: torch.Tensor, kernel: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Sum each of the positions x [N, H] and those before it in its block, weighed by `kernel` [N, K, H].

    at  place of each position in its block, [N]."""
    out = kernel[:, 0] * x
    for back in range(1, kernel.shape[1]):
        is_there = (at >= back)[:, None]
        out = out + torch.where(is_there, kernel[:, back] * F.pad(x, (0, 0, back, 0))[: len(x)], 0)
    return out


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(FeatureConfig):
    """Options of dflash."""

    stop: stop.Name = option("confidence", "when a chain ends; confidence asks a confidence head, if there is one")
    draft: int | None = option(
        15, "most tokens drafted a round, at most those of the block; for a tree, its depth", least=1
    )
    width: int = option(16, "candidates at each position of a tree", least=1)


class DFlashModel(StatesModel, BlockModel):
    """Fills blocks with a `DFlashNetwork`."""

    def __init__(self, network: DFlashNetwork, config: DFlashConfig, target: Facts):
        super().__init__(target, network.taps, network.cache, self.read)
        self.network, self.form = network, network.form
        self.head, self.columns = head_of(network, config, target)
        if config.vocab is not None and self.columns is not None and self.form.rank:
            own, weights = network.columns, network.weights
            weights[W2] = weights[W2][self.columns if own is None else torch.searchsorted(own, self.columns)]
        ids = torch.arange(target.vocab_size) if self.columns is None else self.columns.cpu()
        self.padding = (ids >= (self.form.allowed or target.vocab_size)).nonzero().flatten().to(target.device)
        self.weight_bytes = network.nbytes + self.head.nbytes
        self._max_context = target.max_context

    def room(self, row: Request) -> int:
        known = self.pending.cached(row) + self.pending.count(row)
        return self.form.block - (not self.form.from_anchor) if known == len(row) - 1 else 0

    def read(self, states: torch.Tensor, following: IntArray, segments: Sequence[Segment]) -> torch.Tensor:
        self.network.read(states, segments)
        return states

    @torch.inference_mode()
    def fill(self, drafts: Sequence[Draft]) -> list[Filled]:
        """Run the drafts' blocks. They have their full length, as in training, except at the context's end."""
        rows, blocks = [draft.row for draft in drafts], []
        self.pending.read_waiting(rows)
        for row in rows:
            size = min(self.form.block, self._max_context - len(row) + 1)
            wanted, tokens = size - (not self.form.from_anchor), np.zeros(size, np.int64)
            blocks.append(Segment(self.pending.slot(row), tokens, np.arange(-1, size - 1), num_logits=wanted))
        read = self.network.fill([row.last_token for row in rows], blocks)
        counts = [block.num_logits for block in blocks]
        logits = self.head(read) * self.form.scale
        logits = logits if not self.form.cap else self.form.cap * (logits / self.form.cap).tanh()
        logits[:, self.padding] = -torch.inf
        return [Filled(*each) for each in zip(logits.split(counts), read.split(counts), strict=True)]

    def next(self, drafts: Sequence[Draft], filled: Sequence[Filled]) -> torch.Tensor:
        """Logits [R, K] of each draft's next position, corrected by the Markov head if there is one (DSpark)."""
        logits = super().next(drafts, filled)
        before = _before(drafts, logits)
        if not self.form.best:
            return logits + self.network.bias(before) if self.form.rank else logits
        values, columns = logits.topk(min(self.form.best, logits.shape[-1]))
        chosen = values + self.network.bias(before[:, None], columns, _states(drafts, filled)[:, None])[:, 0]
        return torch.full_like(logits, -torch.inf).scatter(-1, columns, chosen)

    def commit(self, draft: Draft, nodes: Sequence[int]) -> None:
        """Does nothing: `fill` has committed the states that waited, and keeps no block in the cache. `feed` brings the
        target's states of the accepted tokens."""

    def signals(
        self, drafts: Sequence[Draft], filled: Sequence[Filled], logits: torch.Tensor, rule: stop.StopRule
    ) -> list[float]:
        if not self.form.has_confidence or not isinstance(rule, stop.Confidence):
            return super().signals(drafts, filled, logits, rule)
        states = _states(drafts, filled)
        return self.network.confidence(states, _before(drafts, states))

    def candidates(self, draft: Draft, filled: Filled, ranks: int) -> Ranked:
        return super().candidates(draft, filled, min(ranks, self.form.best or ranks))

    def shares(
        self, draft: Draft, filled: Filled, tokens: torch.Tensor, columns: torch.Tensor, logs: torch.Tensor
    ) -> torch.Tensor:
        """As in `BlockModel`. A Markov head corrects the probabilities of the candidates alone."""
        shares = super().shares(draft, filled, tokens, columns, logs)
        if not self.form.rank:
            return shares
        before = torch.cat([tokens.new_full((1, tokens.shape[1]), draft.tokens[-1]), tokens[:-1]])
        others = 0.0 if self.form.best else (1 - shares.sum(-1, keepdim=True)).clamp_min(0)
        assert filled.states is not None
        states = filled.states[: len(tokens), None]
        params = draft.row.params  # At a temperature the bias changes q and the candidate's time.
        weight = 1.0 if params.is_greedy else 2 * POWER / params.temperature
        bias = weight * self.network.bias(before, columns, states).float()
        shares = (logs[:, None] + bias).exp()
        return shares / (shares.sum(-1, keepdim=True) + others)


class DFlash(ModelDrafter):
    """Drafts a block of tokens in one pass over the target's states; trees of the most probable tokens, or chains."""

    name = "dflash"
    paper = "Z Lab 2026, DFlash, arXiv 2602.06036; DSpark, arXiv 2607.05147; DDTree, arXiv 2604.12989"
    Config = DFlashConfig
    config: DFlashConfig
    model: DFlashModel

    def open(self, target: Facts) -> DFlashModel:
        path = self.config.checkpoint
        network = DFlashNetwork(path, *open_head(path, self.name, target), target, self.config.dtype)
        return DFlashModel(network, self.config, target)

    def proposer_of(self, model: DFlashModel) -> Block | BlockTree:  # type: ignore[override]
        if self.config.tree:
            return BlockTree(model, self.config.width, self.config.tree)
        return Block(model, self.rule)


def _states(drafts: Sequence[Draft], filled: Sequence[Filled]) -> torch.Tensor:
    """The states [R, H] of each draft's next position."""
    return torch.stack([one.states[len(draft.drafted)] for draft, one in zip(drafts, filled, strict=True)])  # type: ignore[index]


def _before(drafts: Sequence[Draft], like: torch.Tensor) -> torch.Tensor:
    """The last token of each draft, int64 [R], on the device of `like`."""
    return torch.tensor([draft.tokens[-1] for draft in drafts], device=like.device)
