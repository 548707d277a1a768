"""dflash: one forward over a block of masks drafts all of its tokens, from the target's states of the text before it.

Z Lab 2026, "DFlash" (arXiv 2602.06036). The block is the last token and masks. Its positions see each other, and in
every layer the text before them: keys and values made of several of the target's states. DSpark (arXiv 2607.05147) adds
two heads: Markov, a low-rank bias by the token before, so that what is drawn hangs together; and confidence, the chance
that a token is accepted, which says where a chain ends. DDTree (Ringel and Romano 2026, arXiv 2604.12989) grows a tree
over the positions' distributions. Folders are those of `paceline train dflash`, or published ones.

    Engine("smollm2", draft="dflash:models/smollm2-dflash,tree=16")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F

from paceline.draft.cost import SIZES
from paceline.draft.neural import stop
from paceline.draft.neural.checkpoint import check_all, open_head
from paceline.draft.neural.drafts import Draft, best_tokens
from paceline.draft.neural.layers import (
    PRECISION,
    TABLE,
    Precision,
    check_width,
    head_shapes,
    layer_config,
    nbytes,
    placed,
    rotary_layers,
    table_and_head,
)
from paceline.draft.neural.pending import Pending, StateReader
from paceline.draft.neural.stepping import TREE, Stepping, SteppingConfig
from paceline.draft.neural.vocab import MEMBERS, OFFSETS, columns_of, kept_rows
from paceline.draft.shapes import RankPath, best_first
from paceline.draft.spec import option
from paceline.engine.request import Request
from paceline.engine.round import Segment
from paceline.engine.tree import DraftTree
from paceline.errors import MethodError
from paceline.target.base import Facts, Needs
from paceline.target.linear import linear
from paceline.target.shape import Shape

MASK, OUTPUT, W1, W2 = "mask_embedding", "lm_head.weight", "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
CONFIDENCE = "confidence_head.proj."
LARGEST = 64
"""Most positions of a block."""
NEUTRAL = {"output_multiplier": 1, "final_logit_softcapping": 0, "input_embedding_scale": 1, "use_swa": False}
"""Options of published drafters that nothing here applies, with the values that ask for nothing."""


def default_taps(num_layers: int, count: int = 3) -> tuple[int, ...]:
    """Layers whose inputs a drafter reads: the outputs of layers spread from the second to the third from the end."""
    if num_layers < 4 or count < 2:
        return tuple(range(num_layers))[-count:]
    return tuple(round(1 + i * (num_layers - 4) / (count - 1)) + 1 for i in range(count))


# What a drafter is ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """What config.json says of a drafter.

    taps         layers whose inputs it reads. block: positions of a block, the last token's included.
    from_anchor  every position drafts the token after it; else its own, and the first, the last token's, drafts none.
    mask         token whose embedding is the mask; None: the file has a vector for it.
    sights       of each layer: most tokens that a position sees (None: all), and whether it sees no later one.
    rank         of the Markov head; 0: there is none. sure: whether there is a confidence head, and what it reads."""

    taps: tuple[int, ...]
    block: int
    from_anchor: bool
    mask: int | None
    sights: tuple[tuple[int | None, bool], ...]
    rank: int
    sure: Literal["", "state", "state and token"]

    @classmethod
    def read(cls, path: str, config: Mapping[str, Any], target: Facts) -> Form:
        """From config.json in any of the published layouts. MethodError for a drafter that cannot be read here."""
        given = {**(config.get("transformer_layer_config") or {}), **config, **(config.get("dflash_config") or {})}
        taps, block, rank = _taps(path, given, target), given.get("block_size"), given.get("markov_rank") or 0
        if not isinstance(block, int) or not 2 <= block <= LARGEST:
            raise MethodError(f"{path}: block_size is {block!r}; a block has 2 to {LARGEST} positions")
        asked = [key for key, neutral in NEUTRAL.items() if (given.get(key) or neutral) != neutral]
        if rank and given.get("markov_head_type", "vanilla") != "vanilla":
            asked.append(f"a {given['markov_head_type']} Markov head")
        if asked:
            raise MethodError(f"{path} asks for {', '.join(asked)}, which nothing here applies: it would draft badly")
        kinds = given.get("layer_types") or ["full_attention"] * int(given.get("num_hidden_layers") or 1)
        causal = False if given.get("sliding_window_non_causal") else given.get("is_causal", given.get("causal"))
        sliding = [kind == "sliding_attention" for kind in kinds]
        sights = [(given.get("sliding_window") if one else None, one if causal is None else causal) for one in sliding]
        reads: Literal["state", "state and token"] = "state and token"
        if not (rank and given.get("confidence_head_with_markov", True)):
            reads = "state"
        sure = reads if given.get("enable_confidence_head") else ""
        return cls(taps, block, _from_anchor(path, given), given.get("mask_token_id"), tuple(sights), rank, sure)

    @property
    def depth(self) -> int:
        """Most tokens of a draft."""
        return self.block if self.from_anchor else self.block - 1


def _taps(path: str, given: Mapping[str, Any], target: Facts) -> tuple[int, ...]:
    """As `Form.taps`. Ids in `target_layer_ids` count outputs, those in the other two inputs."""
    inputs = given.get("aux_hidden_state_layer_ids") or given.get("eagle_aux_hidden_state_layer_ids")
    outputs = given.get("target_layer_ids") or ()
    ids = inputs or outputs
    layers = given.get("num_target_layers") or target.num_layers
    taps = tuple(layer if inputs else layer + 1 for layer in ids if isinstance(layer, int))
    if not taps or len(taps) < len(ids) or layers != target.num_layers or not 0 <= min(taps) <= max(taps) < layers:
        named = ", ".join(map(str, ids)) or "none"
        raise MethodError(
            f"{path} reads states of layers {named} of {layers}, and {target.name} has {target.num_layers} layers, "
            "whose last output is not read: it is a drafter for another target"
        )
    return taps


def _from_anchor(path: str, given: Mapping[str, Any]) -> bool:
    """As `Form.from_anchor`. Where a file may be meant either way, it must say."""
    said, names = given.get("sample_from_anchor"), " ".join(given.get("architectures") or ())
    if isinstance(said, bool):
        return said
    if given.get("speculators_model_type") != "dspark":
        if "DSpark" in names or given.get("projector_type") == "dspark":
            return True
        if "DFlash" in names:
            return False
    raise MethodError(f"{path} does not say sample_from_anchor: true if a position drafts the token after it, or false")


def block_shapes(shape: Shape, form: Form, vocab: int, drafted: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of a drafter's tensors, without optional ones. vocab: tokens; drafted: those that it drafts."""
    h = shape.hidden_size
    shapes = {"fc.weight": (h, len(form.taps) * h), "hidden_norm.weight": (h,), "norm.weight": (h,)}
    for number in range(shape.num_layers):
        of_layer = head_shapes(shape, h, ("input_layernorm",))
        shapes |= {f"layers.{number}.{name}": of for name, of in of_layer.items()}
    if form.rank:
        shapes |= {W1: (vocab, form.rank), W2: (drafted, form.rank)}
    if form.sure:
        width = h + form.rank if form.sure == "state and token" else h
        shapes |= {f"{CONFIDENCE}weight": (1, width), f"{CONFIDENCE}bias": (1,)}
    return shapes


class DFlashNetwork:
    """The drafter, bound to a target. head: its output head; columns: tokens of the head's rows, None for all."""

    def __init__(
        self,
        path: str,
        config: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        target: Facts,
        dtype: Precision = "auto",
    ):
        form = self.form = Form.read(path, config, target)
        described = config.get("transformer_layer_config") or config
        layers = layer_config(path, {"vocab_size": target.vocab_size, **described, "model_type": "qwen3"}, target)
        shape = Shape.of(layers)
        check_width(path, shape.hidden_size, target)
        drafted, of_token = config.get("draft_vocab_size") or target.vocab_size, shape.hidden_size
        shapes = block_shapes(shape, form, target.vocab_size, drafted)
        optional = {
            TABLE: (target.vocab_size, of_token), OUTPUT: (drafted, of_token), MASK: (of_token,),
            OFFSETS: (drafted,), MEMBERS: (target.vocab_size,),
        }  # fmt: skip
        check_all(path, tensors, shapes | {name: of for name, of in optional.items() if name in tensors})
        self.columns = columns_of(path, tensors, drafted, target)
        extra = [name for name in shapes if name.startswith(("markov_head.", CONFIDENCE))]
        here = placed({name: tensors[name] for name in shapes if name not in extra}, target, dtype)
        self.extra = placed({name: tensors[name] for name in extra}, target)
        self.layers = rotary_layers(here, layers, target)
        self.weights, self.norms = self.layers.vectors, []
        self.norms = [self.weights[f"layers.{n}.input_layernorm.weight"] for n in range(shape.num_layers)]
        self.fc = linear([here["fc.weight"]], None, target.dtype)
        table, head = table_and_head(target)
        own = tensors.get(TABLE, table).to(table)
        self.table = table if torch.equal(own, table) else own
        self.mask = self._mask(path, tensors)
        if OUTPUT in tensors:
            head = linear([placed({OUTPUT: tensors[OUTPUT]}, target, dtype)[OUTPUT]], None, target.dtype)
        elif self.columns is not None:
            head = head.rows(self.columns)
        self.head = head
        self.nbytes = nbytes(here) + nbytes(self.extra, W1)  # of W1 a row is read

    def _mask(self, path: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if MASK in tensors:
            return tensors[MASK].to(self.table)
        if self.form.mask is None or not 0 <= self.form.mask < len(self.table):
            raise MethodError(f"{path} has neither a tensor {MASK} nor a mask_token_id that is a token of the target")
        return self.table[self.form.mask]

    def trim(self, rows: torch.Tensor, columns: torch.Tensor) -> None:
        """Reduce the output head to the tokens `columns`, which are its `rows`."""
        self.head, self.columns = self.head.rows(rows), columns
        if self.form.rank:
            self.extra[W2] = self.extra[W2][rows]

    def read(self, states: torch.Tensor, segments: Sequence[Segment]) -> None:
        """Write every layer's keys and values of committed tokens, from the target's states [N, taps * H]."""
        _, cache = self.layers.begin(segments, states)
        context = self.layers.ops.norm(self.fc(states), self.weights["hidden_norm.weight"])
        for number, layer in enumerate(self.layers.layers):
            layer.attention.write(context, cache, number)

    def fill(self, anchors: Sequence[int], blocks: Sequence[Segment]) -> torch.Tensor:
        """What the output head reads at the positions that draft (`Segment.num_logits`), from blocks that begin with
        the tokens `anchors` and are masks otherwise. Their keys and values are not kept."""
        begins = [sum(block.num_run for block in blocks[:n]) for n in range(len(blocks) + 1)]
        x = self.mask.repeat(begins[-1], 1)
        x[begins[:-1]] = self.table[list(anchors)]
        plans = {
            (window, causal): self.layers.begin([replace(one, mutual=not causal) for one in blocks], x, window)
            for window, causal in set(self.form.sights)
        }
        for number, (layer, norm, sight) in enumerate(
            zip(self.layers.layers, self.norms, self.form.sights, strict=True)
        ):
            residual, delta = layer(self.layers.ops.norm(x, norm), x, *plans[sight], number)
            x = residual + delta
        x = self.layers.ops.norm(x, self.weights["norm.weight"])
        layout, _ = plans[self.form.sights[0]]
        return x if layout.wanted is None else x[layout.wanted]

    def bias(self, before: torch.Tensor, columns: torch.Tensor | None = None) -> torch.Tensor:
        """The Markov head's logits [..., K] after the tokens `before` [...], of all columns or of `columns` [..., K]."""
        after = self.extra[W1][before]
        if columns is None:
            return F.linear(after, self.extra[W2])
        return after @ self.extra[W2][columns].transpose(-1, -2)

    def confidence(self, states: torch.Tensor, before: torch.Tensor) -> list[float]:
        """The chance that the token drafted from each of `states` [R, H], after the token `before` [R], is accepted.

        It does not depend on that token, so that a chain may end by it (DSpark, section 3)."""
        if self.form.sure == "state and token":
            states = torch.cat([states, self.extra[W1][before]], -1)
        logits = F.linear(states, self.extra[f"{CONFIDENCE}weight"], self.extra[f"{CONFIDENCE}bias"])
        chances: list[float] = logits[:, 0].float().sigmoid().tolist()
        return chances


# The drafter ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(SteppingConfig):
    """Options of dflash."""

    checkpoint: str = option(help="folder of the drafter, ours or a published one; or its file of weights")
    stop: stop.Name = option(
        "confidence", "when a chain ends; confidence and adaptive ask the confidence head, if there is one"
    )
    draft: int | None = option(15, "most tokens drafted a round, as far as the block goes; of a tree: its depth", least=1)
    tree: int | Literal["auto"] = option(16, TREE, least=0)
    width: int = option(16, "of a tree: candidates at each position", least=1)
    sample: Literal["auto", "draw", "best"] = option(  # type: ignore[assignment]
        "auto", "at a temperature: draw drafted tokens, or take the most probable ones; auto: draw with a Markov head"
    )
    dtype: Precision = option("auto", PRECISION)


class DFlash(StateReader, Stepping):
    """Drafts a block of tokens in one pass over the target's states; trees of the most probable tokens, or chains.

    A draft's `features` are the states [D, H] and the logits [D, K] of the block's positions, without the Markov
    head's."""

    name = "dflash"
    lossless = "yes"
    paper = "Z Lab 2026, DFlash, arXiv 2602.06036; DSpark, arXiv 2607.05147; DDTree, arXiv 2604.12989"
    Config = DFlashConfig

    def __init__(self, config: DFlashConfig):
        super().__init__(config)
        self.config = config

    def bind(self, target: Facts) -> None:
        """Load the drafter. MethodError if it is not for the target."""
        super().bind(target)
        path, vocab = self.config.checkpoint, self.config.vocab
        config, tensors = open_head(path, self.name, target)
        network = self.network = DFlashNetwork(path, config, tensors, target, self.config.dtype)
        if vocab is not None:
            network.trim(*kept_rows(network.columns, vocab, path, target))
        if self.config.sample == "auto":
            self.options = replace(self.config, sample="draw" if network.form.rank else "best")
        self.columns, self._most = network.columns, target.max_context
        self.pending = Pending(target, network.form.taps, network.layers.cache)
        self.needs = Needs(hidden_layers=tuple(sorted(set(network.form.taps))))
        self.weight_bytes = network.nbytes + network.head.nbytes

    # Committed tokens -----------------------------------------------------------------------------------------

    def cached(self, row: Request) -> int:
        return self.pending.cached(row)

    def draft_limit(self, row: Request) -> int:
        known = self.pending.cached(row) + self.pending.count(row)
        return min(row.max_draft, self.network.form.depth) if known == len(row) - 1 else 0

    def keep(self, draft: Draft, nodes: Sequence[int]) -> None:
        pass  # a block is never kept: the target's states of what was accepted come to `pending`

    def read_chunk(self, row: Request, states: torch.Tensor) -> None:
        self._read([row], [states])

    @torch.inference_mode()
    def _read(self, rows: Sequence[Request], states: Sequence[torch.Tensor]) -> None:
        """Read the rows' next states, [n, taps * H] each, and commit them."""
        nothing = [np.zeros(len(of_row), np.int64) for of_row in states]  # states are read, and no tokens
        slots = [self.pending.slot(row) for row in rows]
        chunks = [Segment.chunk(slot, tokens, last=False) for slot, tokens in zip(slots, nothing, strict=True)]
        self.network.read(torch.cat(list(states)), chunks)
        for slot, of_row in zip(slots, states, strict=True):
            self.pending.cache.commit(slot, range(len(of_row)))

    # Blocks ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def fill(self, drafts: Sequence[Draft]) -> None:
        """Run the drafts' blocks. They have their full length, which positions were trained in, but for a context's
        end."""
        rows = [draft.row for draft in drafts]
        if waiting := [row for row in rows if self.pending.count(row)]:
            self._read(waiting, [self.pending.of(row) for row in waiting])
            for row in waiting:
                self.pending.read(row, self.pending.count(row))
        form, blocks = self.network.form, []
        for row in rows:
            size = min(form.block, self._most - len(row) + 1)
            wanted = size if form.from_anchor else size - 1
            tokens, parents = np.zeros(size, np.int64), np.arange(-1, size - 1)
            blocks.append(Segment(self.pending.slot(row), tokens, parents, num_logits=wanted))
        read = self.network.fill([row.last_token for row in rows], blocks)
        counts, logits = [block.num_logits for block in blocks], self.network.head(read)
        for draft, *features in zip(drafts, read.split(counts), logits.split(counts), strict=True):
            draft.features = features

    def run(self, drafts: Sequence[Draft], num_logits: Sequence[int]) -> torch.Tensor:
        if empty := [draft for draft in drafts if not draft.features]:
            self.fill(empty)
        logits = torch.stack([draft.features[1][len(draft.drafted)] for draft in drafts])
        return logits + self.network.bias(_before(drafts, logits)) if self.network.form.rank else logits

    def run_nodes(self, drafts: Sequence[Draft], num_logits: Sequence[int]) -> torch.Tensor:
        logits = super().run_nodes(drafts, num_logits)
        for draft in drafts:
            draft.calls = 1  # all of a block's tokens come from one forward
        return logits

    def signals(self, drafts: Sequence[Draft], logits: torch.Tensor) -> list[float]:
        signals = super().signals(drafts, logits)
        if not self.network.form.sure or not isinstance(self.rule, stop.Confidence | stop.Adaptive):
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
        auto = self.options.tree == "auto"
        count = SIZES[-1] - 1 if auto else int(self.options.tree)
        grown = [self._grown(draft, count) for draft in drafts]
        sizes = self.fitting([[*chances.values()] for chances, _ in grown]) if auto else [count] * len(drafts)
        return [_tree(draft, *one, size, self.name) for draft, one, size in zip(drafts, grown, sizes, strict=True)]

    def _grown(self, draft: Draft, count: int) -> tuple[dict[RankPath, float], dict[RankPath, int]]:
        """The `count` most probable paths, in falling order: their probabilities, and the last token of each."""
        depth = min(self.most(draft), len(draft.features[1]))
        tokens, order, chances = self._candidates(draft, depth, min(count, self.options.width))
        place: dict[RankPath, int] = {(): 0}  # of a path's last token among its position's candidates

        def given(path: RankPath) -> int:
            return place[path] if order.shape[1] > 1 else 0

        def below(path: RankPath) -> list[float]:
            if path:
                place[path] = int(order[len(path) - 1, given(path[:-1]), path[-1]])
                if len(path) == depth or int(tokens[len(path) - 1, place[path]]) in draft.ends:
                    return []
            shares: list[float] = chances[len(path), given(path)].tolist()
            return [share for share in shares if share > 0]  # which no NaN is

        best = best_first(below, count)
        return best, {path: int(tokens[len(path) - 1, place[path]]) for path in best}

    def _candidates(self, draft: Draft, depth: int, ranks: int) -> tuple[Any, Any, Any]:
        """The best `ranks` tokens of the first `depth` positions: tokens int64 [depth, ranks]; and, after each candidate
        of the position before, or one row whatever comes before: their order, best first, and probabilities in it,
        [depth, ranks or 1, ranks].

        With a Markov head the probabilities are over the candidates, corrected, and all other tokens as they were."""
        columns, logs = best_tokens(draft.features[1][:depth].contiguous(), ranks, None)
        tokens = columns if self.columns is None else self.columns[columns]
        shares = logs.exp()[:, None]
        if self.network.form.rank:
            root = tokens.new_full((1, tokens.shape[1]), draft.tokens[-1])
            bias = self.network.bias(torch.cat([root, tokens[:-1]]), columns).float()
            others = (1 - shares.sum(-1, keepdim=True)).clamp_min(0)
            shares = (logs[:, None] + bias).exp()
            shares = shares / (shares.sum(-1, keepdim=True) + others)
        shares, order = shares.sort(-1, descending=True)
        return tokens.cpu().numpy(), order.cpu().numpy(), shares.cpu().numpy()


def _before(drafts: Sequence[Draft], like: torch.Tensor) -> torch.Tensor:
    """The last token of every draft, int64 [R], on the device of `like`."""
    return torch.tensor([draft.tokens[-1] for draft in drafts], device=like.device)


def _tree(
    draft: Draft, chances: Mapping[RankPath, float], tokens: Mapping[RankPath, int], size: int, source: str
) -> DraftTree:
    """The tree of the first `size` paths."""
    chosen = list(chances)[:size]
    number = {(): 0} | {path: n for n, path in enumerate(chosen, 1)}
    draft.numbers = [None] * len(number)
    parents = [number[path[:-1]] for path in chosen]
    likely = np.array([1.0, *(chances[path] for path in chosen)])
    root = draft.row.last_token
    return DraftTree.of(root, [tokens[path] for path in chosen], parents, chances=likely, source=source, calls=1)
