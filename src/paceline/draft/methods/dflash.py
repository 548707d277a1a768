"""dflash: one forward over a block of masks drafts all of its tokens, from the target's states of the text before it.

Z Lab 2026, "DFlash" (arXiv 2602.06036). The block is the last token and masks. Its positions see each other, and in
every layer the text before them: keys and values made of several of the target's states. DSpark (arXiv 2607.05147) adds
two heads: Markov, a low-rank bias by the token before, so that what is drawn hangs together; and confidence, the chance
that a token is accepted, by which a chain ends. DDTree (Ringel and Romano 2026, arXiv 2604.12989) grows a tree over the
positions' distributions. Folders are those of `paceline train dflash`, or published ones.

    Engine("smollm2", draft="dflash:models/smollm2-dflash,tree=16")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F

from paceline.core.request import Request
from paceline.core.segment import Segment
from paceline.core.tree import DraftTree, IntArray
from paceline.draft.cost import SIZES
from paceline.draft.models import layers as neural
from paceline.draft.models import stop
from paceline.draft.models.checkpoint import check_all
from paceline.draft.models.drafts import Draft, best_tokens
from paceline.draft.models.features import FeatureConfig, FeatureDrafter
from paceline.draft.models.layers import TABLE, Entries, Precision, Tensors
from paceline.draft.models.vocab import MEMBERS, OFFSETS, columns_of
from paceline.draft.shapes import RankPath, best_first
from paceline.draft.spec import option
from paceline.errors import MethodError
from paceline.target.attention import Attention
from paceline.target.base import Facts
from paceline.target.linear import linear
from paceline.target.quantised.blocks import tensors_of
from paceline.target.shape import Shape

MASK, OUTPUT = "mask_embedding", "lm_head.weight"
W1, W2 = (f"markov_head.markov_w{n}.weight" for n in (1, 2))
SURE = ("confidence_head.proj.weight", "confidence_head.proj.bias")
LARGEST = 64  # most positions of a block, and most layers
KINDS = {"full_attention", "sliding_attention"}
NEUTRAL = {"output_multiplier": 1, "final_logit_softcapping": 0, "input_embedding_scale": 1, "use_swa": False}
"""Options of published drafters that nothing here applies, with the values that ask for nothing."""


@dataclass(frozen=True)
class Form:
    """What config.json says of a drafter.

    taps         layers whose inputs it reads. block: positions of a block, the last token's included.
    from_anchor  every position drafts the token after it; else its own, and the first, the last token's, drafts none.
    mask         token whose embedding is the mask; None: the file has a vector for it.
    sights       of each layer: most tokens that a position sees (None: all), and whether it sees no later one.
    rank         of the Markov head; 0: there is none. sure: whether there is a confidence head."""

    taps: tuple[int, ...]
    block: int
    from_anchor: bool
    mask: int | None
    sights: tuple[tuple[int | None, bool], ...]
    rank: int
    sure: bool

    @classmethod
    def read(cls, path: str, config: Entries, target: Facts) -> Form:
        """From config.json in any of the published layouts. MethodError for a drafter that cannot be read here."""
        nested = [config.get(key) or {} for key in ("transformer_layer_config", "dflash_config")]
        if not all(isinstance(part, dict) for part in nested):
            raise MethodError(f"{path}: transformer_layer_config or dflash_config is no group of named entries")
        given = {**nested[0], **config, **nested[1]}
        inputs = given.get("aux_hidden_state_layer_ids") or given.get("eagle_aux_hidden_state_layer_ids")
        ids = inputs or given.get("target_layer_ids") or ()
        ids = ids if isinstance(ids, list | tuple) else [ids]
        taps = tuple(layer if inputs else layer + 1 for layer in ids if type(layer) is int)  # ids count outputs
        layers, rank = given.get("num_target_layers"), given.get("markov_rank") or 0
        known = [0 <= tap < target.num_layers for tap in taps]
        if not taps or len(taps) < len(ids) or not all(known) or (layers or target.num_layers) != target.num_layers:
            raise MethodError(
                f"{path} reads states of layers {', '.join(map(str, ids)) or 'none'} of {layers or 'some'}, and "
                f"{target.name} has {target.num_layers}, whose last output is not read: it is for another target"
            )
        neural.check_numbers(path, {"block_size": given.get("block_size")}, 2, LARGEST)
        neural.check_numbers(path, {"markov_rank": rank}, 0)
        said, names = given.get("sample_from_anchor"), str(given.get("architectures"))
        if said is None and given.get("speculators_model_type") != "dspark":  # readers disagree: the file must say
            is_dspark = "DSpark" in names or given.get("projector_type") == "dspark"
            said = is_dspark or (False if "DFlash" in names else None)
        if not isinstance(said, bool):
            raise MethodError(f"{path} does not say sample_from_anchor: whether a position drafts the token after it")
        asked = [key for key, neutral in NEUTRAL.items() if (given.get(key) or neutral) != neutral]
        if rank and given.get("markov_head_type", "vanilla") != "vanilla":
            asked.append(f"a {given['markov_head_type']} Markov head")
        if asked:
            raise MethodError(f"{path} asks for {', '.join(asked)}, which nothing here applies: it would draft badly")
        count = given.get("num_hidden_layers") or 1
        neural.check_numbers(path, {"num_hidden_layers": count}, 1, LARGEST)
        kinds, window = given.get("layer_types") or ["full_attention"] * count, given.get("sliding_window")
        if not isinstance(kinds, list) or len(kinds) != count or not {*map(str, kinds)} <= KINDS:
            raise MethodError(f"{path}: layer_types is {kinds!r}; {count} of {' and '.join(sorted(KINDS))} are wanted")
        if "sliding_attention" in kinds:
            neural.check_numbers(path, {"sliding_window": window})
        causal = False if given.get("sliding_window_non_causal") else given.get("is_causal", given.get("causal"))
        slides = [kind == "sliding_attention" for kind in kinds]
        sights = ((window if one else None, one if causal is None else causal) for one in slides)
        sure = bool(given.get("enable_confidence_head"))
        return cls(taps, given["block_size"], said, given.get("mask_token_id"), tuple(sights), rank, sure)

    def shapes(self, shape: Shape, vocab: int, drafted: int) -> dict[str, tuple[int, ...]]:
        """Name and shape of its tensors, without optional ones. vocab: tokens; drafted: those that it drafts."""
        h = shape.hidden_size
        shapes = {"fc.weight": (h, len(self.taps) * h), "hidden_norm.weight": (h,), "norm.weight": (h,)}
        for number in range(shape.num_layers):
            of_layer = neural.head_shapes(shape, h, ("input_layernorm",))
            shapes |= {f"layers.{number}.{name}": of for name, of in of_layer.items()}
        markov = {W1: (vocab, self.rank), W2: (drafted, self.rank)} if self.rank else {}
        return shapes | markov | (dict(zip(SURE, ((1, h + self.rank), (1,)), strict=True)) if self.sure else {})


class DFlashNetwork:
    """The drafter, bound to a target. head: its output head; columns: tokens of the head's rows, None for all."""

    def __init__(self, path: str, config: Entries, tensors: Tensors, target: Facts, dtype: Precision = "auto"):
        form = self.form = Form.read(path, config, target)
        vocab, described = target.vocab_size, config.get("transformer_layer_config") or config
        described = {"vocab_size": vocab, **described, "model_type": "qwen3"}
        layers = self.config = neural.layer_config(path, described, target)
        shape = Shape.of(layers)
        h, drafted = shape.hidden_size, config.get("draft_vocab_size") or vocab
        neural.check_width(path, h, target)
        shapes = form.shapes(shape, vocab, drafted)
        optional = {TABLE: (vocab, h), OUTPUT: (drafted, h), MASK: (h,), OFFSETS: (drafted,), MEMBERS: (vocab,)}
        check_all(path, tensors, shapes | {name: of for name, of in optional.items() if name in tensors})
        extra = tensors_of(neural.placed({name: tensors[name] for name in shapes if name in (W1, W2, *SURE)}, target))
        here = neural.placed(
            {name: tensors[name] for name in (*shapes, OUTPUT) if name in tensors.keys() - extra}, target, dtype
        )
        self.layers = neural.rotary_layers(here, layers, target)
        self.weights, self.cache, self.taps = self.layers.vectors | extra, self.layers.cache, form.taps
        self.fc = linear([here["fc.weight"]], None, target.dtype)
        table, head = neural.table_and_head(target)
        own = tensors.get(TABLE, table).to(table)
        self.table = table if torch.equal(own, table) else own
        if MASK not in tensors and not (type(form.mask) is int and 0 <= form.mask < vocab):
            raise MethodError(f"{path} has neither a tensor {MASK} nor a mask_token_id that is a token of the target")
        self.mask = tensors[MASK].to(table) if MASK in tensors else self.table[form.mask]
        self.columns = columns_of(path, tensors, drafted, target)
        if OUTPUT in here:
            head = linear([here[OUTPUT]], None, target.dtype)
        self.head = head if OUTPUT in here or self.columns is None else head.rows(self.columns)
        self.nbytes = neural.nbytes(here, OUTPUT) + neural.nbytes(extra, W1)  # of W1 a row is read

    def read(self, states: torch.Tensor, segments: Sequence[Segment]) -> None:
        """Write every layer's keys and values of committed tokens, from the target's states [N, taps * H]."""
        _, cache = self.layers.begin(segments, states)
        context = self.layers.ops.norm(self.fc(states), self.weights["hidden_norm.weight"])
        for number, layer in enumerate(self.layers.layers):
            assert isinstance(layer.attention, Attention)
            layer.attention.write(context, cache, number)

    def fill(self, anchors: Sequence[int], blocks: Sequence[Segment]) -> torch.Tensor:
        """What the output head reads at the positions that draft (`Segment.num_logits`), from blocks that begin with
        the tokens `anchors` and are masks otherwise. Their keys and values are not kept."""
        begins = np.cumsum([0, *(block.num_run for block in blocks)]).tolist()
        x, norm = self.mask.repeat(begins[-1], 1), self.layers.ops.norm
        x[begins[:-1]] = self.table[list(anchors)]
        plans = {
            (window, causal): self.layers.begin([replace(one, mutual=not causal) for one in blocks], x, window)
            for window, causal in set(self.form.sights)
        }
        for number, sight in enumerate(self.form.sights):
            x = self.layers(x, *plans[sight], number, number + 1)
        wanted = plans[self.form.sights[0]][0].wanted
        return norm(x if wanted is None else x[wanted], self.weights["norm.weight"])

    def bias(self, before: torch.Tensor, columns: torch.Tensor | None = None) -> torch.Tensor:
        """The Markov head's logits [..., K] after the tokens `before` [...], of all columns or `columns` [..., K]."""
        after = self.weights[W1][before]
        if columns is None:
            return F.linear(after, self.weights[W2])
        return after @ self.weights[W2][columns].transpose(-1, -2)

    def confidence(self, states: torch.Tensor, before: torch.Tensor) -> list[float]:
        """The chance that the token drafted from each of `states` [R, H], after the token `before` [R], is accepted.

        It does not depend on that token, so that a chain may end by it (DSpark, section 3)."""
        read = torch.cat([states, self.weights[W1][before]], -1) if self.form.rank else states
        chances: list[float] = F.linear(read, *(self.weights[name] for name in SURE))[:, 0].float().sigmoid().tolist()
        return chances


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(FeatureConfig):
    """Options of dflash."""

    stop: stop.Name = option("confidence", "when a chain ends; confidence asks a confidence head, if there is one")
    draft: int | None = option(
        15, "most tokens drafted a round, as far as the block goes; of a tree: its depth", least=1
    )
    width: int = option(16, "of a tree: candidates at each position", least=1)
    sample: Literal["auto", "draw", "best"] = option(  # type: ignore[assignment]
        "auto", "at a temperature: draw drafted tokens, or take the most probable ones; auto: draw with a Markov head"
    )


class DFlash(FeatureDrafter):
    """Drafts a block of tokens in one pass over the target's states; trees of the most probable tokens, or chains.

    A draft's `features` are the states [D, H] and the logits [D, K] of its block's positions, before any bias."""

    name = "dflash"
    paper = "Z Lab 2026, DFlash, arXiv 2602.06036; DSpark, arXiv 2607.05147; DDTree, arXiv 2604.12989"
    Config, Head = DFlashConfig, DFlashNetwork
    config: DFlashConfig
    network: DFlashNetwork  # type: ignore[assignment]

    def bind(self, target: Facts) -> None:
        super().bind(target)
        own, form, weights = self.network.columns, self.network.form, self.network.weights
        if self.config.vocab is not None and self.columns is not None and form.rank:
            weights[W2] = weights[W2][self.columns if own is None else torch.searchsorted(own, self.columns)]
        if self.config.sample == "auto":
            self.config = replace(self.config, sample="draw" if form.rank else "best")
        self._length = target.max_context

    def cached(self, row: Request) -> int:
        return self.pending.cached(row)

    def draft_limit(self, row: Request) -> int:
        form, known = self.network.form, self.pending.cached(row) + self.pending.count(row)
        return min(row.max_draft, form.block - (not form.from_anchor)) if known == len(row) - 1 else 0

    def keep(self, draft: Draft, nodes: Sequence[int]) -> None:
        """Nothing is left to commit: `fill` has read the states that waited, and writes no block to the cache. The
        states of accepted tokens come to `pending` from the target."""

    def through(self, states: torch.Tensor, following: IntArray, segments: Sequence[Segment]) -> torch.Tensor:
        self.network.read(states, segments)
        return states

    # Blocks ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def fill(self, drafts: Sequence[Draft]) -> None:
        """Run the drafts' blocks. They have their full length, as in training, but at the context's end."""
        form, rows, blocks = self.network.form, [draft.row for draft in drafts], []
        self.read_waiting(rows)
        for row in rows:
            size = min(form.block, self._length - len(row) + 1)
            wanted, tokens = size - (not form.from_anchor), np.zeros(size, np.int64)
            blocks.append(Segment(self.pending.slot(row), tokens, np.arange(-1, size - 1), num_logits=wanted))
        read = self.network.fill([row.last_token for row in rows], blocks)
        counts = [block.num_logits for block in blocks]
        for draft, *features in zip(drafts, read.split(counts), self.head(read).split(counts), strict=True):
            draft.features = features

    def run(self, drafts: Sequence[Draft], num_logits: Sequence[int]) -> torch.Tensor:
        if not drafts[0].features:
            self.fill(drafts)
        logits = torch.stack([draft.features[1][len(draft.drafted)] for draft in drafts])
        return logits + self.network.bias(_before(drafts, logits)) if self.network.form.rank else logits

    def run_nodes(self, drafts: Sequence[Draft], num_logits: Sequence[int]) -> torch.Tensor:
        logits = super().run_nodes(drafts, num_logits)
        for draft in drafts:
            draft.calls = 1  # all of a block's tokens come from one forward
        return logits

    def signals(self, drafts: Sequence[Draft], logits: torch.Tensor) -> list[float]:
        signals = super().signals(drafts, logits)
        if not self.network.form.sure or not isinstance(self.rule, stop.Confidence):
            return signals
        states = torch.stack([draft.features[0][len(draft.drafted)] for draft in drafts])
        return self.network.confidence(states, _before(drafts, states))

    # Trees ----------------------------------------------------------------------------------------------------

    def _trees(self, drafts: Sequence[Draft]) -> list[DraftTree]:
        """The paths that are most probable by the positions' distributions (DDTree, algorithm 1). No token is drawn, so
        at a temperature a tree counts as a set of point masses."""
        if not drafts:
            return []
        self.fill(drafts)
        auto = self.config.tree == "auto"
        count = SIZES[-1] - 1 if auto else int(self.config.tree)
        grown = [self.grow_tree(draft, count) for draft in drafts]
        sizes = self.fitting([[*chances.values()] for chances, _ in grown]) if auto else [count] * len(drafts)
        trees = []
        for draft, (chances, tokens), size in zip(drafts, grown, sizes, strict=True):
            number = {(): 0} | {path: n for n, path in enumerate(list(chances)[:size], 1)}
            above = [number[path[:-1]] for path in number if path]
            likely = np.array([chances.get(path, 1.0) for path in number])
            drafted = [tokens[path] for path in number if path]
            trees.append(DraftTree.of(draft.tokens[-1], drafted, above, chances=likely, source=self.name, calls=1))
            draft.numbers = [None] * len(number)
        return trees

    def grow_tree(self, draft: Draft, count: int) -> tuple[dict[RankPath, float], dict[RankPath, int]]:
        """The `count` most probable paths, in falling order: their probabilities, and the last token of each."""
        depth = min(self.most(draft), len(draft.features[1]))
        tokens, order, shares = self._candidates(draft, depth, min(count, self.config.width))
        place: dict[RankPath, int] = {(): 0}  # of a path's last token among its position's candidates
        token: dict[RankPath, int] = {}

        def given(path: RankPath) -> int:
            return place[path] if order.shape[1] > 1 else 0

        def below(path: RankPath) -> list[float]:
            at = len(path)
            if path:
                place[path] = int(order[at - 1, given(path[:-1]), path[-1]])
                token[path] = int(tokens[at - 1, place[path]])
            if at == depth or token.get(path) in draft.ends:
                return []
            return [share for share in shares[at, given(path)].tolist() if share > 0]  # which no NaN is

        return best_first(below, count), token

    def _candidates(self, draft: Draft, depth: int, ranks: int) -> tuple[Any, Any, Any]:
        """The best `ranks` tokens of the first `depth` positions, int64 [depth, ranks]; and, after each candidate of
        the position before (one row: after any), their order, best first, and probabilities, [depth, rows, ranks].

        With a Markov head, probabilities are corrected over the candidates; other tokens weigh what they did."""
        columns, logs = best_tokens(draft.features[1][:depth].contiguous(), ranks, None)
        tokens, shares = columns if self.columns is None else self.columns[columns], logs.exp()[:, None]
        if self.network.form.rank:
            before = torch.cat([tokens.new_full((1, tokens.shape[1]), draft.tokens[-1]), tokens[:-1]])
            others = (1 - shares.sum(-1, keepdim=True)).clamp_min(0)
            shares = (logs[:, None] + self.network.bias(before, columns).float()).exp()
            shares = shares / (shares.sum(-1, keepdim=True) + others)
        shares, order = shares.sort(-1, descending=True)
        return tokens.cpu().numpy(), order.cpu().numpy(), shares.cpu().numpy()


def _before(drafts: Sequence[Draft], like: torch.Tensor) -> torch.Tensor:
    """The last token of every draft, int64 [R], on the device of `like`."""
    return torch.tensor([draft.tokens[-1] for draft in drafts], device=like.device)
