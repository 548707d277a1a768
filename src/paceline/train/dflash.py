"""DFlash and DSpark: a block of masks learns to be the target's next tokens.

Blocks begin at tokens drawn at random among the target's own, anew for every batch. Their positions see each other, and
the text strictly before the block's first token: its own states do not exist when a drafter drafts. A position of a block
learns the target's distribution after the text up to it, and weighs less than the one before it (DFlash, arXiv
2602.06036, section 4). With `--markov` a bias by the token before is learnt with the block, and with `--confidence` the
chance that a drafted token is accepted, the overlap of both distributions (DSpark, arXiv 2607.05147, sections 3 and 4).

    paceline train dflash smollm2 --data answers.jsonl --markov 64 --confidence --out build/dflash
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.draft.dflash import LARGEST, MASK, DFlash, default_taps
from paceline.draft.neural.vocab import to_offsets
from paceline.draft.spec import option
from paceline.target.shape import Shape, rotary_tables
from paceline.train.eagle import TapsConfig, layer_config
from paceline.train.loss import distance, overlaps
from paceline.train.options import DrafterOptions, drafter_command
from paceline.train.student import Student, known_depths, spread
from paceline.train.trainer import Trainer, train_head
from paceline.train.unrolled import UnrolledAttention, UnrolledLayer, begin_as_last

SURE_OF = 256
"""Most positions of a batch by which the confidence head learns: each costs both distributions once more."""


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(TapsConfig):
    """The drafter and its training."""

    usual = staticmethod(default_taps)

    block: int = option(8, "Tokens of a draft.", least=2, most=LARGEST)
    layers: int = option(2, "Layers of its own.", least=1)
    anchors: int = option(64, "Blocks in a row of text.", least=1)
    decay: float = option(0.8, "Weight of a position relative to the one before.", least=0)
    markov: int = option(0, "Rank of the Markov head; 0: none.", least=0)
    confidence: bool = option(False, "A confidence head.", names=("--confidence",))

    def student(self, trainer: Trainer) -> Student:
        keep, share = self.drafted(trainer)
        return DFlashLoss(trainer.teacher, keep, self, coverage=share)


class BlockAttention(UnrolledAttention):
    """Attention with norms of queries and keys, in which blocks read a context too."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, shape.hidden_size)
        self.q_norm, self.k_norm = (nn.RMSNorm(shape.head_dim, shape.eps) for _ in "qk")

    def over(self, x: Tensor, context: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """x [B, N, H], which reads context [B, T, H] and itself where mask [B, 1, N, T + N] says; [B, N, H].

        turns  cos and sin of the context's positions, then of x's, [B, 1, T + N, head_dim] each."""
        both = torch.cat([context.to(x.dtype), x], 1)
        q, k, v = (
            part(given).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
            for part, given in ((self.q_proj, x), (self.k_proj, both), (self.v_proj, both))
        )
        cos, sin = (part.to(v) for part in turns)
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        half, last = self.shape.head_dim // 2, slice(-x.shape[1], None)
        q = q * cos[:, :, last] + q.roll(half, -1) * sin[:, :, last]
        k = k * cos + k.roll(half, -1) * sin
        shared = q.shape[1] // k.shape[1]
        seen = F.scaled_dot_product_attention(
            q, k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1), attn_mask=mask
        )
        y: Tensor = self.o_proj(seen.transpose(1, 2).flatten(2))
        return y


class BlockLayer(UnrolledLayer):
    """A decoder layer over blocks and their context."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, shape.hidden_size, ("input_layernorm",))
        self.self_attn = BlockAttention(shape)

    def over(self, x: Tensor, context: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """As `BlockAttention.over`."""
        norm: Any = self.input_layernorm
        x = x + self.self_attn.over(norm(x), context, turns, mask)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class BlockModule(nn.Module):
    """The drafter in training. Parameters are named as in published files."""

    cos: Tensor
    sin: Tensor

    def __init__(self, teacher: Any, config: DFlashConfig, taps: int, drafted: int) -> None:
        super().__init__()
        shape, table = Shape.of(teacher.config), teacher.get_input_embeddings().weight
        for name, turn in zip(("cos", "sin"), rotary_tables(teacher.config, shape), strict=True):
            self.register_buffer(name, turn, persistent=False)
        self.block, hidden = config.block, shape.hidden_size
        self.fc = nn.Linear(taps * hidden, hidden, bias=False)
        begin_as_last(self.fc)
        self.hidden_norm, self.norm = (nn.RMSNorm(hidden, shape.eps) for _ in range(2))
        self.layers = nn.ModuleList(BlockLayer(shape) for _ in range(config.layers))
        self.register_parameter(MASK, nn.Parameter(table.detach().mean(0)))
        with torch.no_grad():
            self.norm.weight.copy_(teacher.model.norm.weight)
        if config.markov:
            after = nn.Linear(config.markov, drafted, bias=False)
            nn.init.zeros_(after.weight)
            before = nn.Embedding(len(table), config.markov)
            nn.init.normal_(before.weight, std=config.markov**-0.5)
            self.markov_head = nn.ModuleDict({"markov_w1": before, "markov_w2": after})
        if config.confidence:
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(hidden + config.markov, 1)})

    def context(self, taps: Tensor) -> Tensor:
        """What layers read of the text, [B, T, H], from the target's states [B, T, taps * H]."""
        context: Tensor = self.hidden_norm(self.fc(taps))
        return context

    def fill(self, context: Tensor, first: Tensor, at: Tensor) -> Tensor:
        """Inputs of the output head, [B, A, block, H], of blocks at the places `at` [B, A].

        first [B, A, H]: embeddings of their first tokens."""
        batch, count, hidden = first.shape
        text = torch.arange(context.shape[1], device=at.device)
        places = (at[..., None] + torch.arange(self.block, device=at.device)).flatten(1)
        positions = torch.cat([text.expand(batch, -1), places.clamp_max(len(self.cos) - 1)], 1)
        number = torch.arange(count, device=at.device).repeat_interleave(self.block)
        before = text < at.repeat_interleave(self.block, 1)[..., None]
        own = (number[:, None] == number).expand(batch, -1, -1)
        masks: Tensor = self.get_parameter(MASK).expand(batch, count, self.block - 1, hidden)
        x = torch.cat([first[:, :, None].to(masks.dtype), masks], 2).flatten(1, 2)
        turns = self.cos[positions][:, None], self.sin[positions][:, None]
        for layer in self.layers:
            x = layer.over(x, context, turns, torch.cat([before, own], -1)[:, None])  # type: ignore[operator]
        read: Tensor = self.norm(x).unflatten(1, (count, self.block))
        return read


class DFlashLoss(Student):
    """A drafter whose forward is its loss: a weighted mean over the positions of blocks, over the draft vocabulary.

    keep        int64 [D]: the draft vocabulary, ascending.
    of_trainer  further entries of config.json."""

    kind = DFlash.name
    of_target: Tensor

    def __init__(self, teacher: Any, keep: Tensor, config: DFlashConfig = DFlashConfig(), **of_trainer: Any) -> None:
        super().__init__(teacher, config.loss)
        self.config, self.of_trainer, self.tokens, self.depths = config, of_trainer, keep, config.block
        self.reads = config.taps_of(teacher.config.num_hidden_layers)
        self.module = BlockModule(teacher, config, len(self.reads), len(keep))
        self.register_buffer("of_target", teacher.lm_head.weight[keep].detach().clone(), persistent=False)

    def states(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(the states that the drafter reads, side by side [B, T, taps * H]; the last ones after the final norm)."""
        states, last = self.target_states(input_ids)
        return states[..., :-1, :].flatten(-2), last

    def table(self, depth: int = 0) -> Tensor:
        """The output head [D, H], with a Markov head's second matrix beside it, [D, H + rank]: logits are then one
        product with the states and the embeddings of the tokens before (`inputs`)."""
        if not self.config.markov:
            return self.of_target
        return torch.cat([self.of_target, self.module.get_parameter("markov_head.markov_w2.weight")], 1)

    def inputs(self, read: Tensor, before: Tensor) -> Tensor:
        """What `table` is multiplied with, after the tokens `before` [...]: [..., H], or [..., H + rank]."""
        if not self.config.markov:
            return read
        return torch.cat([read, F.embedding(before, self.module.get_parameter("markov_head.markov_w1.weight"))], -1)

    def filled(self, context: Tensor, input_ids: Tensor, at: Tensor) -> Tensor:
        """`BlockModule.fill` below drafts at positions `at` [B, A]: their blocks begin with the token after it."""
        first = self.teacher.get_input_embeddings()(input_ids.gather(1, at + 1))
        return self.module.fill(context, first, at + 1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        taps, last = self.states(input_ids)
        known = known_depths(labels, self.depths)
        at, chosen = self._anchors(known[:, :-1, 0])
        read = self.filled(self.module.context(taps), input_ids, at)
        step = torch.arange(self.depths, device=at.device)
        rows, there = torch.arange(len(at), device=at.device)[:, None, None], at[..., None] + 1 + step
        there = there.clamp_max(input_ids.shape[1] - 1)
        where, weights = known[rows[..., 0], at] & chosen[..., None], (self.config.decay**step).expand_as(there)
        hidden, target = self.inputs(read, input_ids[rows, there]), last[rows, there]
        loss = distance(self.loss, hidden, self.table(), target, self.of_target, where, weights=weights)
        return loss + self._unsure(hidden[where], target[where], weights[where]) if self.config.confidence else loss

    def _unsure(self, hidden: Tensor, target: Tensor, weights: Tensor) -> Tensor:
        """Cross-entropy of the confidence head with the overlaps of both distributions. It learns nothing to the block.
        """
        some = torch.linspace(0, len(hidden) - 1, min(len(hidden), SURE_OF), device=hidden.device).long()
        hidden, weights = hidden[some].detach(), weights[some]
        accepted = overlaps(hidden, self.table().detach(), target[some], self.of_target)
        logits = self.module.confidence_head["proj"](hidden)[:, 0].float()  # type: ignore[operator]
        each = F.binary_cross_entropy_with_logits(logits, accepted, reduction="none")
        return (weights * each).sum() / weights.sum().clamp_min(1e-20)

    def _anchors(self, known: Tensor) -> tuple[Tensor, Tensor]:
        """Positions at which drafts begin, [B, A], and which of them exist: of the `known` ones [B, T], random in
        training, else spread."""
        spots = torch.arange(known.shape[1], device=known.device)
        order = torch.rand(known.shape).to(known.device) if self.training else (spots * 0.618034 % 1).expand_as(known)
        score, at = torch.where(known, order, -1.0).topk(min(self.config.anchors, known.shape[1]), 1)
        return at, score >= 0

    def drafts(self, input_ids: Tensor, depths: int) -> tuple[Tensor, Iterator[Tensor]]:
        taps, last = self.states(input_ids)
        context, length = self.module.context(taps), input_ids.shape[1]
        every = torch.arange(length - 1, device=input_ids.device).expand(len(input_ids), -1)
        read = torch.cat([self.filled(context, input_ids, at) for at in every.split(self.config.anchors, 1)], 1)
        return last, (self.inputs(read[:, : length - 1 - k, k], input_ids[:, 1 + k :]) for k in range(depths))

    def probs(self, hidden: Tensor, depth: int) -> Tensor:
        return spread((hidden @ self.table().T).float().softmax(-1), self.tokens, self.teacher.config.vocab_size)

    def saved(self) -> dict[str, Tensor]:
        assert self.tokens is not None
        return dict(self.module.named_parameters()) | to_offsets(self.tokens, self.teacher.config.vocab_size)

    def facts(self) -> dict[str, Any]:
        config, own = self.config, layer_config(self.teacher.config)
        return own | {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "num_hidden_layers": config.layers,
            "num_target_layers": self.teacher.config.num_hidden_layers,
            "draft_vocab_size": len(self.of_target),
            "block_size": config.block,
            "sample_from_anchor": True,
            "dflash_config": {"target_layer_ids": [layer - 1 for layer in self.reads]},
            "markov_rank": config.markov,
            "enable_confidence_head": config.confidence,
            "confidence_head_with_markov": config.markov > 0,
            **self.of_trainer,
        }


@drafter_command
def command(setup: DrafterOptions, config: DFlashConfig) -> bool:
    """Train layers that fill a block of tokens in one pass, for `--draft dflash:OUT`.

    paceline train dflash MODEL --prompts mine=prompts.jsonl --generate 5000 --markov 64 --confidence --out build/dflash

    At the end acceptance is measured by depth on held-out answers.
    """
    return train_head(setup.training(config), config)
