"""The native decoder: transformers with rotary attention or the gated delta rule, and gated MLPs or mixtures of
experts, built for decoding.

`formats/shape.py` has the families and describes the layers of a model. Unlike an implementation for training, the
decoder fuses Q, K, V into one matrix, gate and up into another, packs rows of different lengths without padding, and
writes keys and values directly into the ragged cache. On CPUs with bfloat16 units, weights are stored in the order that
is read fastest: oneDNN's, or our own (`kernels/products.py`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from hashlib import sha256
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Self

import torch
import torch.nn.functional as F
from transformers import PretrainedConfig

from paceline import kernels, processor
from paceline.core.clock import Clock
from paceline.core.segment import Segment, Verdict
from paceline.errors import Interrupted, ModelError
from paceline.formats.facts import BEFORE_NORM, Inside
from paceline.formats.folder import fingerprint
from paceline.formats.precision import describe
from paceline.formats.rotary import row_order, turns_of
from paceline.formats.shape import BESIDE, CHOICE, LayerKind, Shape, weight_shapes
from paceline.kernels.blocks import Blocks, WeightsByName, give_back, tensors_of, within
from paceline.kernels.linear import Linear, has_units, linear
from paceline.kernels.ops import ALL_ROWS, TorchOps
from paceline.target.attention import Layer
from paceline.target.base import LayerCallback, Needs
from paceline.target.cache import CachedTarget, RaggedCache, Writer
from paceline.target.layout import SHARED_QUERIES, Layout, padded_size, plan
from paceline.target.recurrent import RecurrentState

if TYPE_CHECKING:
    from paceline.kernels.program import Programs
    from paceline.target.graphs import Recorder


MOST_NUMBERS = 1 << 23
"""About how many numbers of a table in blocks are kept expanded. Expanding a row takes 0.5 ms."""


def computed_with(name: str, weight: torch.Tensor | Blocks, shape: Shape) -> torch.Tensor | Blocks:
    """Reorder or shift a checkpoint's tensor as the decoder needs it."""
    part = name.removesuffix(".weight").removesuffix(".bias")
    order = row_order(shape, part.rpartition(".")[2])
    if order is not None:
        weight = weight.rows(order) if isinstance(weight, Blocks) else weight[order]
    if shape.norm_offset and part.endswith("norm") and not part.endswith("linear_attn.norm"):
        assert isinstance(weight, torch.Tensor)
        return weight.double() + shape.norm_offset  # The sum may not fit into bfloat16.
    return weight


class _Table:
    """A table that is looked up by tokens, perhaps in blocks."""

    def __init__(self, weight: torch.Tensor | Blocks, dtype: torch.dtype):
        self.weight, self.dtype = weight, dtype
        self._rows: dict[int, torch.Tensor] = {}

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows [N, width] of tokens [N]."""
        if isinstance(self.weight, torch.Tensor):
            return F.embedding(tokens, self.weight)
        if len(tokens) > SHARED_QUERIES:
            return self.weight.rows(tokens).dense(self.dtype)
        if len(self._rows) * self.weight.shape[1] > MOST_NUMBERS:
            self._rows.clear()
        ids = tokens.tolist()
        if missing := sorted({*ids} - self._rows.keys()):
            expanded = self.weight.rows(torch.tensor(missing)).dense(self.dtype)
            self._rows.update(zip(missing, expanded, strict=True))
        return torch.stack([self._rows[token] for token in ids])


class _BesideTable:
    """The vectors that layers get of tokens beside their states: of a table, and of the tokens' embedding.

    weights  "model.embed_tokens_per_layer.weight", "model.per_layer_model_projection.weight" and
             "model.per_layer_projection_norm.weight". ops: elementwise steps, to set before the first call."""

    ops: TorchOps

    def __init__(self, weights: WeightsByName, dtype: torch.dtype, shape: Shape):
        self.table, self.size = _Table(weights[f"{BESIDE}.weight"], dtype), shape.beside
        self.projection = linear([weights["model.per_layer_model_projection.weight"]], None, dtype)
        self.norm = tensors_of(weights)["model.per_layer_projection_norm.weight"]

    def __call__(self, tokens: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """The vectors [layers, N, P] of tokens [N], whose embedding is [N, H]."""
        projected = self.projection(embedded) * embedded.shape[1] ** -0.5
        normed = self.ops.norm(projected.view(-1, self.size), self.norm)
        made = (normed + self.table.rows(tokens).view(-1, self.size) * self.size**0.5) * 0.5**0.5
        return made.view(len(tokens), -1, self.size).transpose(0, 1).contiguous()


class Decoder(CachedTarget):
    """A target of a family in `formats/shape.py`.

    weights              checkpoint tensors by name (`weight_shapes`), cast to `dtype` on `device`. Matrices in blocks
                         stay in blocks; `dtype` is then the dtype of all else.
    expand               cast blocks to `dtype`, too, so that products do not round their inputs.
    weights_fingerprint  fingerprint of the weights before they were quantised; None: the fingerprint of `weights`.
    made_of              description of the blocks from which `weights` were quantised; None: they were not in blocks.
    inverse_frequencies  [head_dim / 2]; None: the frequencies of `config`.
    remarks              lines on weights in blocks, to add to `notes`.
    spend                empty `weights`, and give back what was read of files (`give_back`), as the kernels' forms are
                         made. So nothing is twice in memory."""

    def __init__(
        self, config: PretrainedConfig, weights: WeightsByName, *, name: str = "decoder",
        dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", eos_token_ids: Sequence[int] = (),
        weights_fingerprint: str | None = None, made_of: str | None = None,
        inverse_frequencies: torch.Tensor | None = None, expand: bool = False, remarks: Sequence[str] = (),
        spend: bool = False,
    ):  # fmt: skip
        s = self.shape = Shape.of(config)
        self.name, self.dtype, self.device = name, dtype, torch.device(device)
        self.vocab_size, self.hidden_size, self.num_layers = s.vocab_size, s.hidden_size, s.num_layers
        self.max_context, self.eos_token_ids = s.max_context, tuple(eos_token_ids)
        self.quantised = f"{describe(weights)}, made of {made_of}" if made_of else describe(weights)
        self.weights_fingerprint = weights_fingerprint or fingerprint(
            {key: weights[key] for key in weight_shapes(config)}
        )
        stored = sum(w.nbytes for w in weights.values())
        if expand:
            weights = {key: w.dense(dtype) if isinstance(w, Blocks) else w for key, w in weights.items()}
        given, weights = weights, {key: computed_with(key, w, s) for key, w in weights.items()}
        if spend and isinstance(given, dict):
            given.clear()
        del given
        wide = torch.promote_types(dtype, torch.float32)
        weights = {
            key: w if isinstance(w, Blocks) else w.to(self.device, wide if key.endswith(CHOICE) else dtype)
            for key, w in weights.items()
        }
        table, self.norm = weights["model.embed_tokens.weight"], tensors_of(weights)["model.norm.weight"]
        read = sum(w.nbytes for w in weights.values())
        if expand and self.quantised:
            dtype_name, kinds = str(dtype).removeprefix("torch."), self.quantised
            self.expanded = f"{dtype_name}, expanded from {kinds} ({read / 1e6:,.1f} MB instead of {stored / 1e6:,.1f})"
            self.quantised = None
        if s.experts is not None:
            self.expert_share = s.experts.chosen / s.experts.count
            read -= round((1 - self.expert_share) * sum(w.nbytes for key, w in weights.items() if ".experts." in key))
        self.weight_bytes = read if s.tied else read - table.nbytes
        self._beside = None
        if s.beside:
            self._beside = _BesideTable(weights, dtype, s)
            self.weight_bytes -= weights[f"{BESIDE}.weight"].nbytes
        self.activations = next((w.activations for w in weights.values() if isinstance(w, Blocks)), None)
        head = table if s.tied else weights["lm_head.weight"]
        if spend:
            give_back(weights.values())  # The fingerprint has read a page here and there, and Linux those around it.
        self.head, self.head_bytes = linear([head], None, dtype, s.logit_divisor, wide=True), head.nbytes
        self.head.cap = s.logit_cap
        self._table = _Table(table, dtype)
        self._embedding_scale = torch.tensor(s.embedding_scale, dtype=dtype, device=self.device)
        self._ops: dict[str | None, TorchOps] = {}
        for rope, kind in {"": LayerKind(), **{kind.rope: kind for kind in s.layers}}.items():
            own = s.of_layer(kind)
            self._ops[rope] = TorchOps(turns_of(config, own, inverse_frequencies, rope, dtype, self.device), s.eps)
        self.ops = self._ops[""]
        self._programs: Programs | None = None
        if self.head.in_units:
            self._compile()
        if self._beside is not None:
            self._beside.ops = self.ops
        self.layers: list[Layer] = []
        done = [head]
        for number, kind in enumerate(s.layers):
            if spend:
                give_back(done)
            inner = within(weights, start := f"model.layers.{number}.")
            self.layers.append(Layer(inner, s, self._ops[kind.rope], kind, number))
            done = [weights.pop(f"{start}{name}") for name in inner]
        if spend:
            give_back(done)
        self._count_own_nodes()
        states, keys = [kind.recurrent for kind in s.layers], [kind.has_keys for kind in s.layers]
        self._places = {True: [*accumulate(states, initial=0)], False: [*accumulate(keys, initial=0)]}
        """Numbers of layers before each layer, counted apart for layers with states (True), and with own keys
        (False)."""
        self.recurrent = any(states)
        self.cache = self.new_cache(s.num_layers, 0)
        self.recorder: Recorder | None = None
        if self.device.type == "cuda":
            from paceline.target.graphs import Recorder

            self.recorder = Recorder(self)
        self.notes = self._notes(remarks)

    def _notes(self, remarks: Sequence[str]) -> list[str]:
        if self.quantised is None:
            notes = [f"{self.name} has its weights in {self.expanded}"] if self.expanded else []
            if self.device.type == "cpu" and self.dtype.itemsize == 2 and not has_units(self.dtype):
                kind = str(self.dtype).removeprefix("torch.")
                notes.append(f"this CPU has no units for {kind}, so it is many times as slow as --dtype float32")
            return notes
        from paceline.kernels import integer

        note = (
            f"{self.name} has its weights in {self.quantised}: it may answer otherwise than in 16 bits, with drafts or "
            f"without; inputs of products are rounded to {self.activations} bits"
        )
        return [note, *(f"{self.name}: {remark}" for remark in remarks), *integer.warnings()]

    @cached_property
    def embedding(self) -> torch.Tensor:
        """The input embedding [V, H], for drafters; a copy if the weights are in blocks."""
        table = self._table.weight
        return table if isinstance(table, torch.Tensor) else table.dense().to(self.dtype)

    @property
    def ends(self) -> tuple[torch.Tensor, Linear]:
        return self.embedding, self.head

    @property
    def inside(self) -> Inside:
        return self

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows [N, H] of the input embedding, without its factor."""
        return self._table.rows(tokens)

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """States [N, H] of tokens before the first layer."""
        rows = self.rows(tokens)
        return rows if self.shape.embedding_scale == 1.0 else rows * self._embedding_scale

    @property
    def prefix_key(self) -> str:
        """As `Target.prefix_key`. For exact targets it also names processor and torch, which may round differently."""
        tables = sha256()
        for ops in self._ops.values():
            tables.update(ops.turns.key)
        where = f"{processor.name()} {processor.level()} {torch.__version__}" if self.exact else ""
        return f"{super().prefix_key} {self.shape} {tables.hexdigest()} {where}"

    def _compile(self) -> None:
        """Switch to compiled steps, which compute all but the products. They are compiled now, before the first answer,
        because that takes seconds."""
        from paceline.kernels import attention  # noqa: F401
        from paceline.kernels.program import Programs
        from paceline.kernels.steps import FusedOps

        self._ops = {rope: FusedOps(ops.turns, ops.eps) for rope, ops in self._ops.items()}
        self.ops, self._programs = self._ops[""], Programs()

    def _count_own_nodes(self) -> None:
        """Find up to how many nodes a forward multiplies by our kernels alone. The order of sums in oneDNN and
        MKL depends on the number of threads; in our products and attention it does not."""
        self._own_nodes = min(linear.product.own_rows for linear in self.products)
        self.same_on_any_threads = self._own_nodes == ALL_ROWS

    @property
    def products(self) -> list[Linear]:
        """All matrix products, the head first."""
        of_tokens = [] if self._beside is None else [self._beside.projection]
        return [self.head, *of_tokens, *(product for layer in self.layers for product in layer.products)]

    @property
    def exact_is_free(self) -> bool:
        """Whether `make_exact` costs no time: all products are ours, and for lack of others (blocks in float32) or
        because they are faster here."""
        fits = self.device.type == "cpu" and self.dtype in (torch.bfloat16, torch.float32)
        alone = self.quantised is not None and self.dtype == torch.float32
        return fits and (alone or kernels.preferred(self.dtype)) and self._own_nodes == ALL_ROWS

    def make_exact(self) -> None:
        """As `Target.make_exact`: attention follows paths, and all else is computed row by row."""
        if self.exact:
            return
        if self.device.type != "cpu":
            raise ModelError(
                f"exact: {self.name} runs on {self.device}, where the number of tokens decides in which order sums are "
                "added; it needs a CPU (--device cpu)"
            )
        if self.dtype not in (torch.bfloat16, torch.float32):
            raise ModelError(f"exact: {self.name} runs in {self.dtype}; it needs bfloat16 or float32 (--dtype)")
        self._compile()
        for layer, kind in zip(self.layers, self.shape.layers, strict=True):
            layer.make_exact(self._ops[kind.rope])
        self.head.make_exact()
        if self._beside is not None:
            self._beside.projection.make_exact()
            self._beside.ops = self.ops
        self.exact = True
        self._count_own_nodes()
        self.same_on_any_processor = self.same_on_any_threads and self.dtype == torch.float32
        if not self.same_on_any_threads:
            self.threads.fix(torch.get_num_threads())

    @torch.inference_mode()
    def verify(
        self, segments: Sequence[Segment], needs: Needs = Needs(), on_layer: LayerCallback | None = None,
        clock: Clock | None = None,
    ) -> Verdict:  # fmt: skip
        """As `Target.verify`, in one forward of the layers."""
        clock = clock or Clock()
        if self.recorder is not None and on_layer is None:
            verdict = self.recorder.verify(segments, needs)
            if verdict is not None:
                clock.lap("layers")
                verdict.top_k = self._best(verdict.logits, needs, clock)
                return verdict
        layout = self._plan(segments)
        clock.lap("prepare")
        x, first = self._resume(segments, layout, needs)
        logits, taps = self.finish(x, first, layout, self.cache.writer(layout), needs, on_layer, clock)
        return Verdict.on(segments, logits, taps, self._best(logits, needs, clock))

    def finish(
        self, x: torch.Tensor, first: int, layout: Layout, cache: Writer, needs: Needs,
        on_layer: LayerCallback | None = None, clock: Clock | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:  # fmt: skip
        """Run the layers from `first` on over states x [N, H]. Returns the wanted logits [M, V] and the states that
        `needs` names, by layer."""
        taps: dict[int, torch.Tensor] = {}
        clock = clock or Clock()
        tapped = needs.all_layers
        seam = needs.callback_layer if on_layer is not None else None
        stops = {first, self.num_layers} | ({max(seam, first)} if seam is not None else set())
        for layer, end in pairwise(sorted(stops)):
            if on_layer is not None and layer == seam:
                on_layer(layer, x[: layout.num_nodes])
            x = self._run(x, range(layer, end), layout, cache, taps=taps, tapped=tapped)
        clock.lap("layers")
        if BEFORE_NORM in tapped:
            taps[BEFORE_NORM] = x[: layout.num_nodes]
        if self.num_layers in tapped:
            x = self.ops.norm(x, self.norm)
            taps[self.num_layers] = x[: layout.num_nodes]
            x = x if layout.wanted is None else x[layout.wanted]
        else:
            x = self.ops.norm(x if layout.wanted is None else x[layout.wanted], self.norm)
        logits = self.head(x)[: layout.num_wanted]
        clock.lap("head")
        return logits, taps

    def apart(self) -> Self:
        made = super().apart()
        made.recorder = None  # The graphs read this cache.
        return made

    def new_cache(self, layers: int, first: int | None = None) -> RaggedCache:
        """Make an empty cache for `layers` layers of this decoder, from `first` on. first: None: all have attention."""
        s = self.shape
        kinds = () if first is None else s.layers[first : first + layers]
        states = sum(kind.recurrent for kind in kinds)
        if any(kind.source is not None and kind.source < (first or 0) for kind in kinds):
            raise ModelError(f"{self.name}: layers from {first} on read keys of layers before, and cannot run alone")
        own = sum(kind.has_keys for kind in kinds) if kinds else layers
        cache = RaggedCache(own, *s.places, s.max_context, self.dtype, self.device)
        if states and s.delta is not None:
            cache.recurrent = RecurrentState(s.delta, states, self.dtype, self.device)
        return cache

    @torch.inference_mode()
    def run_layers(
        self, segments: Sequence[Segment], last: int, *, first: int = 0, cache: RaggedCache | None = None
    ) -> torch.Tensor:
        """Run layers `first` to `last` - 1 over the segments' nodes, for drafters that use the target's layers. Returns
        states [N, H].

        These layers' keys and values are written after the rows. `verify` goes on at layer `last` if the states are in
        `Segment.hidden`. If `first` is above 0, each segment's `hidden` has the states before that layer.

        cache  a separate cache of `last - first` layers (`new_cache`), with its own row lengths."""
        layout = self._plan(segments, cache)
        writer = (cache or self.cache).writer(layout)
        if first:
            given = [segment.hidden for segment in segments if segment.hidden is not None]
            x = _padded(torch.cat(given).to(self.dtype), layout)
        else:
            x = self.embedded(layout.tokens)
        return self._run(x, range(first, last), layout, writer, 0 if cache is None else first)[: layout.num_nodes]

    def _run(
        self, x: torch.Tensor, layers: range, layout: Layout, cache: Writer, cache_begins: int = 0,
        tapped: Collection[int] = (), taps: dict[int, torch.Tensor] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Run `layers` over states x [N, H]. Returns states [N, H].

        cache_begins  number of the cache's first layer.
        tapped, taps  `taps` gets the states of the layout's nodes before each layer in `tapped`."""

        def summed(x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
            return x if delta is None else self.ops.add_norm(x, delta, None, self.shape.residual_scale)[0]

        def step(layer: int, x: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
            if layer < 0:
                return summed(x, delta), None
            kind = self.shape.layers[layer]
            places, at = self._places[kind.recurrent], layer if kind.source is None else kind.source
            return self.layers[layer](x, delta, layout, cache, places[at] - places[cache_begins])

        recorded, found = None, {} if taps is None else taps
        steps = [number for layer in layers for number in ((~layer, layer) if layer in tapped else (layer,))]
        ends_early = self.is_interrupted is not None  # A recorded forward runs all layers in one call.
        if self._programs is not None and layers and not layout.groups and not self.recurrent and not ends_early:
            recorded = self._programs.run(step, tuple(steps), cache_begins, x, cache)
        delta: torch.Tensor | None = None
        if recorded is not None:
            (x, delta), states = recorded
            found |= {layer: state[: layout.num_nodes].clone() for layer, state in states.items()}
        for number in steps if recorded is None else ():
            if self.is_interrupted is not None and self.is_interrupted():
                raise Interrupted
            x, delta = step(number, x, delta)
            if number < 0:
                found[~number] = x[: layout.num_nodes]
        return summed(x, delta)

    def logits(self, hidden: torch.Tensor, normalise: bool = True) -> torch.Tensor:
        """The head's logits [N, V] for hidden states [N, H]. normalise: apply the final norm first."""
        hidden = hidden.to(self.dtype)
        return self.head(self.ops.norm(hidden, self.norm) if normalise else hidden)

    def trim_head(self, ids: torch.Tensor) -> None:
        trimmed = self.head_bytes * len(ids) // self.vocab_size
        self.head = self.head.rows(ids)
        self.weight_bytes -= self.head_bytes - trimmed
        self.head_bytes = trimmed

    def _plan(self, segments: Sequence[Segment], cache: RaggedCache | None = None) -> Layout:
        s, cache = self.shape, cache or self.cache
        lengths = [cache.length(segment.slot) for segment in segments]
        layout = plan(
            segments,
            lengths,
            padding=self._padding(segments, lengths[-1]),
            shared=s.shared,
            windows=[kind.window for kind in s.layers],
            dtype=self.dtype,
            device=self.device,
            most_on_paths=1 << 62 if self.exact else SHARED_QUERIES if self._programs is not None else 0,
            pieces=True,
        )
        self.reach(max(layout.reach.values()))
        if self._beside is not None:
            layout.beside = self._beside(layout.tokens, self.embedded(layout.tokens))
        return layout

    def reach(self, count: int) -> None:
        """Prepare a forward over positions below `count`."""
        for ops in self._ops.values():
            ops.turns.reach(count)

    def _padding(self, segments: Sequence[Segment], last: int) -> int:
        """How many nodes to add to the last segment, whose row has `last` tokens, to reach a padded size.

        Padding saves compiling: oneDNN takes one or two milliseconds for a kernel for each number of rows of a product,
        and so does torch for each number of queries and keys (docs/log.md). Rows without drafts need no padding."""
        nodes = sum(segment.num_run for segment in segments)
        padding = padded_size(nodes) - nodes
        by_library = self.head.in_units and not self.exact and nodes > self._own_nodes
        if not by_library or nodes == len(segments):
            return 0
        return padding if last + len(segments[-1].tokens) + padding <= self.max_context else 0

    def _resume(self, segments: Sequence[Segment], layout: Layout, needs: Needs) -> tuple[torch.Tensor, int]:
        """The states [N, H] from which the forward starts, and its first layer.

        If some segments have states before `resume_layer`, only the other segments run the layers below it. But if a
        drafter needs states of a layer below, all segments run all layers, and their states are not used."""
        given, seam = [s.hidden for s in segments], needs.resume_layer
        wanted = {*needs.all_layers, needs.callback_layer} - {BEFORE_NORM}
        watched = [layer for layer in wanted if layer is not None]
        if seam is None or all(hidden is None for hidden in given) or min(watched, default=seam) < seam:
            return self.embedded(layout.tokens), 0
        fresh = [s for s in segments if s.hidden is None]
        made = iter(())
        if fresh:
            states = self.run_layers(fresh, seam)
            made = iter(states.split([s.num_run for s in fresh]))
        states = torch.cat([next(made) if hidden is None else hidden for hidden in given])
        return _padded(states.to(self.dtype), layout), seam


def _padded(states: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Append zeros for the padding to the nodes' states [N, H]."""
    return F.pad(states, (0, 0, 0, layout.padding)) if layout.padding else states
