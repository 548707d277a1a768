"""DFlash, DSpark and DFlash2: a block of masks learns to be the target's next tokens.

Blocks begin at tokens drawn at random among the target's own, anew for every batch. Their positions see each other, and
the text strictly before the block's first token, whose states do not exist when a drafter drafts. A position of a block
learns the target's distribution after the text up to it, and weighs less than the one before it (DFlash, arXiv
2602.06036, section 4). With `--markov` a bias by the token before is learnt with the block, and with `--confidence` the
chance that a drafted token is accepted, the overlap of both distributions (DSpark, arXiv 2607.05147, sections 3 and 4).

    paceline train dflash smollm2 --data answers.jsonl --markov 64 --confidence --out build/dflash

DFlash2 (Z Lab's code, 2026) begins as DFlash: its convolutions as the identity, and its selector as one that adds
nothing. The selector learns to tell the text's token from a position's other best ones by the text's token before (so
NeMo Automodel).

    paceline train dflash2 smollm2 --data answers.jsonl --out build/dflash2
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.draft.methods.dflash import DFlash, convolved, kernels
from paceline.draft.spec import option
from paceline.formats.heads.dflash import CONVOLVED, LARGEST, MASK
from paceline.formats.rotary import rotary_tables
from paceline.formats.shape import Shape
from paceline.train.eagle import TapsConfig, TapsLoss, layer_config
from paceline.train.loss import CHUNK, overlaps
from paceline.train.options import DrafterOptions
from paceline.train.student import Student, known_depths
from paceline.train.trainer import Trainer, train_head
from paceline.train.unrolled import UnrolledLayer, begin_as_last

SURE_OF = 256  # Most positions of a batch for the confidence head: each costs both distributions once more.
KERNEL, GROUP = 2, 16  # DFlash2's convolutions: positions, and channels that share the kernel's addend.


@dataclass(frozen=True, kw_only=True)
class BlockConfig(TapsConfig):
    """What drafters that fill blocks have in common."""

    block: int = option(8, "Number of tokens of a draft.", least=2, most=LARGEST)
    layers: int = option(2, "Number of layers of the drafter.", least=1)
    anchors: int = option(64, "Number of blocks in a row of text.", least=1)
    decay: float = option(0.8, "Weight of a position in the loss relative to the position before.", least=0)


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(BlockConfig):
    """What DFlash adds: a Markov head and a confidence head."""

    markov: int = option(0, "Rank of the Markov head; 0: no Markov head.", least=0)
    confidence: bool = option(False, "Train a confidence head.", names=("--confidence",))

    def student(self, trainer: Trainer) -> Student:
        keep, share = self.drafted(trainer, DFlash.name)
        return DFlashLoss(trainer.teacher, keep, self, coverage=share)


@dataclass(frozen=True, kw_only=True)
class DFlash2Config(BlockConfig):
    """The selector and the window of DFlash2."""

    whole = True
    vocab: int | None = option(
        None,
        "Size of the draft vocabulary; only paceline reads a smaller one than all tokens. [default: all tokens]",
        least=1,
    )
    block: int = option(7, "Number of tokens of a draft.", least=2, most=LARGEST - 1)
    rank: int = option(64, "Rank of the selector.", least=1)
    best: int = option(16, "Number of best tokens of a position among which the selector chooses.", least=2)
    window: int = option(0, "Number of tokens that a position sees, itself included; 0: as many as a row has.", least=0)

    def student(self, trainer: Trainer) -> Student:
        keep, share = self.drafted(trainer, DFlash.name)
        return DFlash2Loss(trainer.teacher, keep, self, coverage=share)


class Convolution(nn.Module):
    """DFlash2's convolutions over blocks of `block` positions before and after a part of a layer. They begin as the
    identity."""

    def __init__(self, hidden: int, block: int) -> None:
        super().__init__()
        self.block, self.group = block, gcd(GROUP, hidden)
        self.base_kernel = nn.Parameter(torch.eye(KERNEL)[:1, :, None].repeat(2, 1, hidden))  # [2, KERNEL, H]
        self.kernel_projection = nn.Linear(hidden, 2 * KERNEL * hidden // self.group, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, x: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """x [B, N, H], of whole blocks; [B, N, H]."""
        flat = x.flatten(0, 1)
        at = torch.arange(len(flat), device=x.device) % self.block
        before, after = kernels(self.base_kernel, self.kernel_projection(flat), self.group)
        out = part(convolved(flat, before, at).view_as(x))
        return convolved(out.flatten(0, 1), after, at).view_as(x)


class BlockLayer(UnrolledLayer):
    """A decoder layer over blocks, which read a context too; queries and keys are normed.

    block  number of positions of a block, over which the layer's parts are convolved; 0: they are not."""

    def __init__(self, shape: Shape, block: int = 0) -> None:
        super().__init__(shape, shape.hidden_size, ("input_layernorm",))
        for name in ("q_norm", "k_norm"):
            self.self_attn.add_module(name, nn.RMSNorm(shape.head_dim, shape.eps))
        for name in CONVOLVED.values() if block else ():
            self.add_module(name, Convolution(shape.hidden_size, block))

    def over(self, x: Tensor, context: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """x [B, N, H], which reads context [B, T, H] and itself where mask [B, 1, N, T + N] says; [B, N, H].

        cos, sin  of the context's positions, then of x's, [B, 1, T + N, head_dim]."""
        own: Any = self.input_layernorm
        x = x + self._part("attention", own(x), lambda y: self._attention(y, context, cos, sin, mask))
        return x + self._part("mlp", self.post_attention_layernorm(x), self.mlp)

    def _part(self, name: str, x: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        around: Any = getattr(self, CONVOLVED[name], None)
        y: Tensor = part(x) if around is None else around(x, part)
        return y

    def _attention(self, y: Tensor, context: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        part: Any = self.self_attn
        both = torch.cat([context.to(y.dtype), y], 1)
        q, k, v = (
            project(given).unflatten(-1, (-1, part.shape.head_dim)).transpose(1, 2)
            for project, given in ((part.q_proj, y), (part.k_proj, both), (part.v_proj, both))
        )
        cos, sin, last, half = cos.to(v), sin.to(v), slice(-y.shape[1], None), part.shape.head_dim // 2
        q, k = part.q_norm(q).to(v.dtype), part.k_norm(k).to(v.dtype)
        q = q * cos[:, :, last] + q.roll(half, -1) * sin[:, :, last]
        k, shared = k * cos + k.roll(half, -1) * sin, q.shape[1] // k.shape[1]
        k, v = (one.repeat_interleave(shared, 1) for one in (k, v))
        out: Tensor = part.o_proj(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        return out


class Selector(nn.Module):
    """DFlash2's choice among a position's best tokens by the token before. At first it adds nothing.

    tokens  number of the target's tokens. drafted: number of those that are drafted."""

    def __init__(self, hidden: int, rank: int, tokens: int, drafted: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(tokens, rank) * rank**-0.5)
        self.successor_codebook = nn.Parameter(torch.zeros(drafted, rank))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)


class BlockModule(nn.Module):
    """The drafter in training. Parameters are named as in published files."""

    cos: Tensor
    sin: Tensor

    def __init__(self, teacher: Any, config: BlockConfig, taps: int) -> None:
        super().__init__()
        shape, table = Shape.of(teacher.config), teacher.get_input_embeddings().weight
        for name, turn in zip(("cos", "sin"), rotary_tables(teacher.config, shape), strict=True):
            self.register_buffer(name, turn, persistent=False)
        hidden, second = shape.hidden_size, config if isinstance(config, DFlash2Config) else None
        self.block, self.window = (config.block + 1, second.window) if second else (config.block, 0)
        self.fc = nn.Linear(taps * hidden, hidden, bias=False)
        begin_as_last(self.fc)
        self.hidden_norm, self.norm = (nn.RMSNorm(hidden, shape.eps) for _ in range(2))
        self.layers = nn.ModuleList(BlockLayer(shape, self.block if second else 0) for _ in range(config.layers))
        if second:  # published files name a token
            self.register_buffer(MASK, table[-1].detach().clone(), persistent=False)
        else:
            self.register_parameter(MASK, nn.Parameter(torch.randn(hidden) * float(table.std())))

    def context(self, taps: Tensor) -> Tensor:
        """What layers read of the text, [B, T, H], from the target's states [B, T, taps * H]."""
        context: Tensor = self.hidden_norm(self.fc(taps))
        return context

    def fill(self, context: Tensor, first: Tensor, at: Tensor) -> Tensor:
        """Inputs of the output head, [B, A, block, H], of blocks at the places `at` [B, A].

        first [B, A, H]: embeddings of their first tokens."""
        batch, count, hidden = first.shape
        text, number = (torch.arange(size, device=at.device) for size in (context.shape[1], count))
        places = (at[..., None] + torch.arange(self.block, device=at.device)).flatten(1)
        positions = torch.cat([text.expand(batch, -1), places.clamp_max(len(self.cos) - 1)], 1)
        number = number.repeat_interleave(self.block)
        before = text < at.repeat_interleave(self.block, 1)[..., None]  # The first token has no states yet.
        if self.window:
            before = before & (places[..., None] - text < self.window)
        mask = torch.cat([before, (number[:, None] == number).expand(batch, -1, -1)], -1)[:, None]
        masks: Tensor = getattr(self, MASK).expand(batch, count, self.block - 1, hidden)
        x, layers = torch.cat([first[:, :, None], masks.to(first.dtype)], 2).flatten(1, 2), list[Any](self.layers)
        for layer in layers:
            x = layer.over(x, context, self.cos[positions][:, None], self.sin[positions][:, None], mask)
        read: Tensor = self.norm(x).unflatten(1, (count, self.block))
        return read


class BlockLoss(TapsLoss):
    """A drafter whose forward is its loss: a weighted mean over the positions of blocks, over the draft vocabulary."""

    kind = DFlash.name
    at_once = True
    config: Any

    def __init__(self, teacher: Any, keep: Tensor, config: BlockConfig, of_trainer: dict[str, Any]) -> None:
        super().__init__(teacher, keep, config, of_trainer)
        self.config, self.depths = config, config.block
        self.module = BlockModule(teacher, config, len(self.reads))
        with torch.no_grad():  # Begin with logits near 0: the target's norm would make an untrained block sure.
            self.module.norm.weight.fill_(0.25 / self.of_target.norm(dim=1).mean())

    def inputs(self, read: Tensor, before: Tensor) -> Tensor:
        """What the distributions after the tokens `before` [...] follow from, [..., D]; read [..., H]: outputs of the
        block."""
        raise NotImplementedError

    def of_drafts(self, hidden: Tensor, target: Tensor, text: Tensor, where: Tensor, weights: Tensor) -> Tensor:
        """The loss at the positions of `where` [...], given `inputs` [..., D], the target's last states [..., H], the
        text's tokens [...] and the positions' weights [...]."""
        raise NotImplementedError

    def states(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(the context that blocks read, [B, T, H]; the target's last states after the final norm, [B, T, H])."""
        taps, last = self.taps(input_ids)
        return self.module.context(taps), last

    def filled(self, context: Tensor, input_ids: Tensor, at: Tensor) -> Tensor:
        """`BlockModule.fill` for drafts at positions `at` [B, A]: their blocks begin with the token after it. Only the
        positions that draft, [B, A, depths, H]."""
        first = self.teacher.get_input_embeddings()(input_ids.gather(1, at + 1))
        read: Tensor = self.module.fill(context, first, at + 1)
        return read[:, :, -self.depths :]

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        context, last = self.states(input_ids)
        known, steps = known_depths(labels, self.depths), torch.arange(self.depths, device=last.device)
        at, chosen = self._anchors(known[:, :-1, 0])
        rows = torch.arange(len(at), device=at.device)[:, None, None]
        there = (at[..., None] + 1 + steps).clamp_max(input_ids.shape[1] - 1)  # Before the predicted token.
        where, weights = known[rows[..., 0], at] & chosen[..., None], (self.config.decay**steps).expand_as(there)
        hidden = self.inputs(self.filled(context, input_ids, at), input_ids[rows, there])
        return self.of_drafts(hidden, last[rows, there], labels[rows, there], where, weights)

    def _anchors(self, known: Tensor) -> tuple[Tensor, Tensor]:
        """Positions at which drafts begin, [B, A], and which of them exist: of the `known` ones [B, T], random in
        training, else spread."""
        even = (torch.arange(known.shape[1], device=known.device) * 0.618034 % 1).expand_as(known)
        order = torch.rand(known.shape).to(known.device) if self.training else even
        score, at = torch.where(known, order, -1.0).topk(min(self.config.anchors, known.shape[1]), 1)
        return at, score >= 0

    def drafts(self, input_ids: Tensor, depths: int) -> tuple[Tensor, Iterator[Tensor]]:
        (context, last), length = self.states(input_ids), input_ids.shape[1]
        every = torch.arange(length - 1, device=input_ids.device).expand(len(input_ids), -1)
        read = torch.cat([self.filled(context, input_ids, at) for at in every.split(self.config.anchors, 1)], 1)
        return last, (self.inputs(read[:, : length - 1 - k, k], input_ids[:, 1 + k :]) for k in range(depths))

    def facts(self) -> dict[str, Any]:
        return layer_config(self.teacher.config) | {
            "model_type": "qwen3",
            "num_hidden_layers": self.config.layers,
            "num_target_layers": self.teacher.config.num_hidden_layers,
            **self.of_trainer,
        }


class DFlashLoss(BlockLoss):
    """DFlash, or DSpark with a Markov head or a confidence head."""

    def __init__(self, teacher: Any, keep: Tensor, config: DFlashConfig = DFlashConfig(), **of_trainer: Any) -> None:
        super().__init__(teacher, keep, config, of_trainer)
        hidden, rank = self.of_target.shape[1], config.markov
        if rank:
            before, after = nn.Embedding(self.vocab_size, rank), nn.Linear(rank, len(keep), bias=False)
            nn.init.normal_(before.weight, std=rank**-0.5)
            nn.init.zeros_(after.weight)
            self.module.markov_head = nn.ModuleDict({"markov_w1": before, "markov_w2": after})
        if config.confidence:
            self.module.confidence_head = nn.ModuleDict({"proj": nn.Linear(hidden + rank, 1)})

    def table(self, depth: int = 0) -> Tensor:
        """The output head [D, H], with a Markov head's second matrix beside it, [D, H + rank]: logits are then one
        product with the states and the embeddings of the tokens before (`inputs`)."""
        own = (self.module.get_parameter("markov_head.markov_w2.weight"),) if self.config.markov else ()
        return torch.cat([self.of_target, *own], 1) if own else self.of_target

    def inputs(self, read: Tensor, before: Tensor) -> Tensor:
        """What `table` is multiplied with, after the tokens `before` [...]: [..., H], or [..., H + rank]."""
        if not self.config.markov:
            return read
        return torch.cat([read, F.embedding(before, self.module.get_parameter("markov_head.markov_w1.weight"))], -1)

    def of_drafts(self, hidden: Tensor, target: Tensor, text: Tensor, where: Tensor, weights: Tensor) -> Tensor:
        loss = self.compared(hidden, self.table(), target, where, weights)
        return loss + self._unsure(hidden[where], target[where], weights[where]) if self.config.confidence else loss

    def _unsure(self, hidden: Tensor, target: Tensor, weights: Tensor) -> Tensor:
        """Cross-entropy of the confidence head with the overlaps of both distributions.
        Its gradient does not reach the blocks."""
        some = torch.linspace(0, len(hidden) - 1, min(len(hidden), SURE_OF), device=hidden.device).long()
        hidden, weights, head = hidden[some].detach(), weights[some], self.module.confidence_head["proj"]
        accepted = overlaps(hidden, self.table(), target[some], self.of_target)
        each = F.binary_cross_entropy_with_logits(head(hidden)[:, 0].float(), accepted, reduction="none")
        return (weights * each).sum() / weights.sum().clamp_min(1e-20)

    def facts(self) -> dict[str, Any]:
        return super().facts() | {
            "architectures": ["DFlashDraftModel"],
            "draft_vocab_size": len(self.of_target),
            "block_size": self.config.block,
            "sample_from_anchor": True,
            "dflash_config": {"target_layer_ids": [layer - 1 for layer in self.reads]},
            "markov_rank": self.config.markov,
            "enable_confidence_head": self.config.confidence,
        }


class DFlash2Loss(BlockLoss):
    """DFlash2: the distance of the positions' distributions, and the selector's cross-entropy."""

    def __init__(self, teacher: Any, keep: Tensor, config: DFlash2Config = DFlash2Config(), **of_trainer: Any) -> None:
        config = config if config.window else replace(config, window=config.length)
        super().__init__(teacher, keep, config, of_trainer)
        selector = Selector(self.of_target.shape[1], config.rank, self.vocab_size, len(keep))
        self.module.candidate_selector = selector

    def inputs(self, read: Tensor, before: Tensor) -> Tensor:
        """[..., H + rank]: the states, and what successors of the tokens `before` [...] are multiplied with there."""
        selector = self.module.candidate_selector
        edges = F.embedding(before, selector.predecessor_codebook) * selector.hidden_projection(read)
        return torch.cat([read, edges], -1)

    def candidates(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The best tokens of N positions, as columns [N, best], and the selector's logits of them, given `inputs`
        [N, H + rank]. The positions' own logits do not learn of the choice."""
        read, edges = hidden.split([self.of_target.shape[1], self.config.rank], -1)
        count, selector = min(self.config.best, len(self.of_target)), self.module.candidate_selector
        with torch.no_grad():  # In chunks, so that not all logits are held at once.
            pairs = [(part @ self.of_target.T).topk(count) for part in read.split(CHUNK)]
        values, columns = (torch.cat([pair[n] for pair in pairs]) for n in (0, 1))
        after = F.embedding(columns, selector.successor_codebook)
        return columns, (values + (after @ edges[..., None])[..., 0]).float()

    def probs(self, hidden: Tensor, depth: int) -> Tensor:
        columns, logits = self.candidates(hidden)
        shares = logits.softmax(-1)
        return shares.new_zeros(len(shares), self.vocab_size).scatter(-1, self.tokens[columns], shares)

    def of_drafts(self, hidden: Tensor, target: Tensor, text: Tensor, where: Tensor, weights: Tensor) -> Tensor:
        read = hidden[..., : self.of_target.shape[1]]
        loss = self.compared(read, self.of_target, target, where, weights)
        columns, logits = self.candidates(hidden[where])
        is_text = self.tokens[columns] == text[where][:, None]
        shares = weights[where] * is_text.any(-1)  # Learn only if the text's token is a candidate.
        each = F.cross_entropy(logits, is_text.int().argmax(-1), reduction="none")
        return loss + (shares * each).sum() / shares.sum().clamp_min(1e-20)

    def facts(self) -> dict[str, Any]:
        config, module = self.config, self.module
        own = {
            "block_size": module.block,
            "conv_kernel_size": KERNEL,
            "conv_group_size": module.layers[0].mlp_conv.group,
            "mask_token_id": self.vocab_size - 1,
            "selector_rank": config.rank,
            "selector_top_k": config.best,
            "target_layer_ids": [layer - 1 for layer in self.reads],
        }
        drafted = {} if len(self.tokens) == self.vocab_size else {"draft_vocab_size": len(self.tokens)}
        sight = {"layer_types": ["sliding_attention"] * config.layers, "sliding_window": config.window}
        kind = {"architectures": ["DFlash2DraftModel"], "is_causal": False, "dflash_config": own}
        return super().facts() | kind | sight | drafted


def command(setup: DrafterOptions, config: DFlashConfig) -> bool:
    """Train layers that fill a block of tokens in one pass, for `--draft dflash:OUT`.

    paceline train dflash MODEL --prompts mine=prompts.jsonl --generate 5000 --markov 64 --confidence --out build/dflash

    At the end acceptance is measured by depth on held-out answers."""
    return train_head(setup.training(config), config)


def second_command(setup: DrafterOptions, config: DFlash2Config) -> bool:
    """Train DFlash2's layers, which convolve a block and choose among its best tokens, for `--draft dflash:OUT`.

    paceline train dflash2 MODEL --prompts mine=prompts.jsonl --generate 5000 --out build/dflash2

    At the end acceptance is measured by depth on held-out answers, of the tokens that the selector chooses. OUT is in
    the published layout."""
    return train_head(setup.training(config), config)
