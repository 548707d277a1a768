"""Any transformers causal language model as a target, with its keys and values in our ragged cache.

When a model is loaded, a proof compares its logits for a tree on our cache with those of plain forwards. A model that
fails is refused. Only this file uses transformers' caches and masks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer
from transformers.utils import logging

from paceline.core.clock import Clock
from paceline.core.segment import Segment, Verdict
from paceline.core.tree import ancestors
from paceline.errors import ModelError
from paceline.formats.checks import check_shapes
from paceline.formats.facts import BEFORE_NORM
from paceline.formats.folder import fingerprint
from paceline.formats.place import one_line
from paceline.kernels.linear import Linear, aligned
from paceline.target.base import LayerCallback, Needs
from paceline.target.cache import CachedTarget, RaggedCache, Writer
from paceline.target.layout import SHARED_QUERIES, Layout, plan

Results = list[tuple[torch.Tensor, dict[int, torch.Tensor]]]
"""For each segment: logits [num_logits, V], and hidden states [n, H] by layer."""


def load(
    folder: Path, *, name: str, dtype: torch.dtype, device: torch.device, eos_token_ids: Sequence[int] = (),
    trust_remote_code: bool = False,
) -> HFTarget:  # fmt: skip
    """Load the transformers model in `folder`, from safetensors only. ModelError if it cannot be a target."""
    try:
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                ignore_mismatched_sizes=True,  # transformers' own error names no tensor.
                output_loading_info=True,
            )
        model, report = loaded
    except Exception as error:  # The model's own code may raise anything.
        why = f"transformers cannot load it as a causal language model: {one_line(error)}"
        raise ModelError(f"{name}: {why}") from None
    # transformers does not report unexpected weights if the model's own code allows them.
    differing, missing = sorted(report["mismatched_keys"]), dict.fromkeys(sorted(report["missing_keys"]), ())
    wanted = missing | {key: shape for key, _, shape in differing}
    found = dict.fromkeys(report["unexpected_keys"], ()) | {key: shape for key, shape, _ in differing}
    check_shapes(folder, wanted, found, model.config.get_text_config(decoder=True).num_hidden_layers)
    for parameter in model.parameters():
        parameter.data = aligned(parameter.data)
    if getattr(model, "is_quantized", None) is False:  # Loading expanded the weights to the scales' dtype.
        model.to(dtype)
    return HFTarget(model.to(device), name=name, eos_token_ids=eos_token_ids)


@contextmanager
def quiet() -> Iterator[None]:
    """Turn off transformers' progress bar and log lines, because we report errors in one line."""
    bar, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


class HFTarget(CachedTarget):
    """A transformers model as a target.

    model  any AutoModelForCausalLM; it is put into evaluation mode.
    prove  run the proof (`Example`, a few forwards of a few tokens); ModelError if the model fails it."""

    def __init__(self, model: Any, *, name: str = "a model", eos_token_ids: Sequence[int] = (), prove: bool = True):
        config = model.config.get_text_config(decoder=True)
        _refuse(name, model, config)
        self.model = model.eval()
        self.name, self.dtype, self.device = name, model.dtype, model.device
        self.num_layers, self.hidden_size = config.num_hidden_layers, config.hidden_size
        self.max_context = config.max_position_embeddings
        self.eos_token_ids = tuple(eos_token_ids)
        if self.device.type == "cpu":  # This copies no keys for heads that share them, and gives the same bits.
            os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        own = embedding is not None and (head is None or head.weight is not embedding.weight)
        self.weight_bytes = sum(w.nbytes for w in model.parameters()) - (embedding.weight.nbytes if own else 0)
        self.masks_itself = True
        """Whether the model's own mask is right at the beginning of a prompt. The proof sets it."""
        self.weights_fingerprint = fingerprint(dict(model.named_parameters()))
        plain = Example(self)
        self.vocab_size = plain.logits.shape[-1]
        self.cache = RaggedCache(
            self.num_layers, plain.kv_heads, plain.head_dim, self.max_context, plain.kv_dtype, self.device
        )
        if prove:
            plain.compare(self)

    @property
    def prefix_key(self) -> str:
        """As `Target.prefix_key`, with the configuration but not its path or transformers' version."""
        config = self.model.config.to_dict()
        own = {key: config[key] for key in sorted(config) if key not in ("_name_or_path", "transformers_version")}
        return f"{super().prefix_key} {own}"

    @property
    def ends(self) -> tuple[torch.Tensor, Linear] | None:
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        if not isinstance(embedding, torch.nn.Embedding) or not isinstance(head, torch.nn.Linear):
            return None
        bias = None if head.bias is None else head.bias.detach()
        return embedding.weight.detach(), Linear(head.weight.detach(), bias)

    @torch.no_grad()
    def trim_head(self, ids: torch.Tensor) -> None:
        head = self.model.get_output_embeddings()
        if not isinstance(head, torch.nn.Linear):
            super().trim_head(ids)
        bias = None if head.bias is None else head.bias[ids]
        few = torch.nn.Linear(head.in_features, len(ids), bias is not None, head.weight.device, head.weight.dtype)
        few.load_state_dict({"weight": head.weight[ids]} | ({} if bias is None else {"bias": bias}))
        self.model.set_output_embeddings(few.requires_grad_(False))
        row = head.weight[0].nbytes + (0 if head.bias is None else head.bias.element_size())
        self.weight_bytes -= (len(head.weight) - len(ids)) * row

    def check(self, needs: Needs) -> None:
        """Raise ModelError for needs that only the native decoder can meet."""
        inside = BEFORE_NORM in needs.all_layers  # transformers only gives the states after the norm.
        if inside or needs.resume_layer is not None or needs.callback_layer is not None:
            raise ModelError(
                f"{self.name} runs through transformers, whose forward cannot be entered or left in the middle; "
                "this drafter needs the native decoder (docs/models.md)"
            )

    @torch.inference_mode()
    def verify(
        self, segments: Sequence[Segment], needs: Needs = Needs(), on_layer: LayerCallback | None = None,
        clock: Clock | None = None,
    ) -> Verdict:  # fmt: skip
        """As `Target.verify`, but each long chunk of a prompt runs in its own forward."""
        self.check(needs)
        if any(s.hidden is not None for s in segments):
            raise ModelError(f"{self.name} runs through transformers and cannot resume from a drafter's states")
        clock, results = clock or Clock(), dict[int, Any]()
        for members in self._forwards(segments):
            ran = self._forward([segments[s] for s in members], needs.all_layers, clock)
            results |= zip(members, ran, strict=True)
        logits, hidden = zip(*(results[s] for s in range(len(segments))), strict=True)
        packed = torch.cat(logits)
        clock.lap("head")
        states = {layer: torch.cat([h[layer] for h in hidden]) for layer in needs.all_layers}
        return Verdict.on(segments, packed, states, self._best(packed, needs, clock))

    def _forwards(self, segments: Sequence[Segment]) -> Iterator[list[int]]:
        """Numbers of the segments of each forward: all short segments by slot, then each long segment alone."""
        short = [s for s, segment in enumerate(segments) if segment.num_run <= SHARED_QUERIES]
        if short:
            yield sorted(short, key=lambda s: segments[s].slot)
        yield from ([s] for s, segment in enumerate(segments) if segment.num_run > SHARED_QUERIES)

    def _forward(self, segments: Sequence[Segment], hidden_layers: Sequence[int], clock: Clock) -> Results:
        lengths = [self.cache.length(s.slot) for s in segments]
        spare = self._spare(segments, lengths)
        layout = plan(segments, lengths, dtype=self.dtype, device=self.device, padding=spare)
        padding = Padding([s.num_run for s in segments], self.device, spare)
        mask = self._mask(segments, lengths, padding, layout)
        rows = _RowsCache(self.cache.writer(layout), layout, padding, segments, whole=mask is not None)
        clock.lap("prepare")
        return self._run(segments, padding, layout.tokens, layout.positions, mask, rows, hidden_layers, clock)

    def _spare(self, segments: Sequence[Segment], lengths: Sequence[int]) -> int:
        """How many nodes to add to a single draft on a CPU, where 3 rows take as long as 4 (docs/log.md)."""
        count = segments[0].num_run
        if len(segments) > 1 or segments[0].is_prompt or self.device.type != "cpu" or not 1 < count <= SHARED_QUERIES:
            return 0
        spare = max(4 - count, count % 2)
        return spare if lengths[0] + len(segments[0].tokens) + spare <= self.max_context else 0

    def _run(
        self, segments: Sequence[Segment], padding: Padding, tokens: torch.Tensor, positions: torch.Tensor,
        mask: torch.Tensor | None, cache: Cache, hidden_layers: Sequence[int], clock: Clock,
    ) -> Results:  # fmt: skip
        """Run the model over packed `tokens` and `positions`, int64 [N]."""
        keep = max(1, *(s.num_logits for s in segments)) + padding.spare  # 0 would keep all logits.
        out = self.model(
            input_ids=padding.pad(tokens),
            position_ids=padding.pad(positions),
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
            output_hidden_states=bool(hidden_layers),
        )
        clock.lap("layers")
        results = []
        for row, segment in enumerate(segments):
            begin, end = padding.queries - padding.spare - segment.num_run, padding.queries - padding.spare
            last = out.logits.shape[1] - padding.spare
            logits = out.logits[row, last - segment.num_logits : last]
            results.append((logits, {layer: out.hidden_states[layer][row, begin:end] for layer in hidden_layers}))
        return results

    def _mask(
        self, segments: Sequence[Segment], lengths: Sequence[int], padding: Padding, layout: Layout
    ) -> torch.Tensor | None:
        """Make the attention mask; None if the model's own mask is right, as at the start of a prompt, and cheaper."""
        (group,) = layout.groups
        begins = segments[0].is_prompt and not lengths[0]
        if len(segments) == 1 and self.masks_itself and (group.mask is None or begins):
            return None
        if len(segments) == 1 and group.mask is not None:
            return group.mask[:, :, : padding.queries].clamp(min=torch.finfo(self.dtype).min)
        places = [(0, length, length) for length in lengths]
        return self._additive(visible(segments, places, padding.queries, group.keys))

    def _additive(self, visible: NDArray[np.bool_]) -> torch.Tensor:
        """Turn `visible` into a mask to add, for transformers' eager attention: 0 or the dtype's minimum, [rows, 1,
        queries, keys]."""
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=self.device)
        mask.masked_fill_(torch.from_numpy(~visible).to(self.device), torch.finfo(self.dtype).min)
        return mask.unsqueeze(1)


class Padding:
    """Converts between the packed nodes [N, ...] of segments and the padded [rows, queries, ...].

    counts  number of nodes of each segment.
    spare   number of unused nodes after those of a single segment.

    Rows are padded on the left, because then the wanted logits are the last of each row, and because architectures with
    a built-in causal mask count a query's place from the end."""

    def __init__(self, counts: Sequence[int], device: torch.device, spare: int = 0):
        self.rows, self.queries, self.spare = len(counts), max(counts) + spare, spare
        if self.rows == 1:
            return
        row = np.repeat(np.arange(self.rows), counts)
        column = np.concatenate([np.arange(self.queries - n, self.queries) for n in counts])
        self.at = (torch.from_numpy(row).to(device), torch.from_numpy(column).to(device))

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        """Turn [N, ...] into [rows, queries, ...], padded with zeros."""
        if self.rows == 1:
            return packed.unsqueeze(0)
        padded = packed.new_zeros(self.rows, self.queries, *packed.shape[1:])
        padded[self.at] = packed
        return padded

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """Turn [rows, queries, ...] into [N, ...]."""
        return padded[0] if self.rows == 1 else padded[self.at]


def visible(
    segments: Sequence[Segment], places: Sequence[tuple[int, int, int]], queries: int, keys: int
) -> NDArray[np.bool_]:
    """Make the mask of keys that each query sees, bool [rows, queries, keys]: its row's committed tokens, its ancestors
    and itself. Padding sees the first key, because otherwise its softmax would be NaN.

    places  for each row, begin and end of its committed tokens, and the key of its segment's first node."""
    seen = np.zeros((len(segments), queries, keys), np.bool_)
    for row, (segment, (begin, end, node)) in enumerate(zip(segments, places, strict=True)):
        first = queries - segment.num_run
        seen[row, :first, 0] = True
        seen[row, first:, begin:end] = True
        seen[row, first:, node : node + len(segment.tokens)] = ancestors(segment.parent)[segment.start :]
    return seen


class OneForward(Cache):
    """A transformers cache for a forward. The model's layers call `update`, which returns `keys` keys and values; the
    last `queries` are those of the forward's queries."""

    def __init__(self, keys: int, queries: int):
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self._keys, self._queries = keys, queries

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of keys before this forward. Models that get positions and a mask do not use it."""
        return self._keys - self._queries

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Number and offset of the keys that `update` returns."""
        return self._keys, 0


class _RowsCache(OneForward):
    """Our ragged cache as a transformers cache.

    whole  whether layers attend to all keys of the mask; False: only to the forward's own tokens."""

    def __init__(self, writer: Writer, layout: Layout, padding: Padding, segments: Sequence[Segment], whole: bool):
        (group,) = layout.groups
        super().__init__(group.keys if whole else padding.queries, padding.queries)
        self._writer, self._padding = writer, padding
        slots = [s.slot - group.first for s in segments]
        consecutive = slots == list(range(group.last - group.first))
        self._slots = None if consecutive else torch.tensor(slots, device=layout.tokens.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values [rows, kv_heads, queries, head_dim]. Returns all [rows, kv_heads, keys, head_dim]."""
        pack = self._padding.pack
        self._writer.write(layer_idx, pack(key_states.transpose(1, 2)), pack(value_states.transpose(1, 2)))
        keys, values = (read[:, :, : self._keys] for read in self._writer.read(layer_idx, 0))
        # Slots between ours belong to rows outside this forward.
        return (keys, values) if self._slots is None else (keys[self._slots], values[self._slots])


# Which models can be targets -----------------------------------------------------------------------------------------

ALIBI = ("build_alibi_tensor", "build_mpt_alibi_tensor")
"""Methods of BLOOM and MPT, whose configurations do not mention ALiBi."""


def _refuse(name: str, model: Any, config: PretrainedConfig) -> None:
    """Raise ModelError if the configuration shows that the model cannot be a target."""
    odd = {_other_attention(type(layer)) for layer in DynamicCache(config=model.config).layers} - {""}
    if getattr(config, "model_type", "") == "gpt_neo" and "local" in config.attention_layers:
        odd.add("a sliding window")  # GPT-Neo has its own name for it.
    why = ""
    if odd:
        why = f"some layers have {' and '.join(sorted(odd))}, and cannot forget a rejected draft"
    elif getattr(model.config, "is_encoder_decoder", False):
        why = "it has an encoder"
    elif getattr(config, "alibi", False) or any(hasattr(model.base_model, make) for make in ALIBI):
        why = "its attention counts distances in the cache (ALiBi), which in a tree of drafts are not those in the text"
    if why:
        rule = "a target is a decoder whose layers all have full attention, over positions that it is given"
        raise ModelError(f"{name} ({model.config.model_type}) cannot be a target: {why}; {rule}")
    if getattr(config, "max_position_embeddings", None) is None:
        raise ModelError(f"{name} ({model.config.model_type}): its configuration does not say how long a text may be")


def _other_attention(layer: type) -> str:
    """Name what a layer has instead of full attention, by its kind of cache; "" for full attention."""
    if layer is DynamicLayer:
        return ""
    if "LinearAttention" in layer.__name__:
        return "a running state instead of attention over the text"
    return "a sliding window" if "SlidingWindow" in layer.__name__ else "attention of an unknown kind"


TOLERANCE, ROUNDING, NOISE, LIMIT = 1e-3, 8.0, 4.0, 0.2
"""The proof allows errors up to the maximum of TOLERANCE, ROUNDING times the dtype's precision, and NOISE times the
difference of two plain forwards, but never above LIMIT. All are relative to the effect of seeing wrong tokens."""


class Example:
    """The proof: compares plain forwards of short texts with the same texts on our cache.

    Row 0 is a longer prefix and a single node. Row 1 is a shorter prefix and a wide tree: a root, siblings, and below
    the last sibling a leaf, whose place in the cache is far from its position in the text. In the third text the leaf
    sees all siblings, which shows the effect of a wrong mask. Two plain forwards show the effect of rounding."""

    SIBLINGS = 12

    @torch.inference_mode()
    def __init__(self, target: HFTarget):
        self.model, self.name = target.model, f"{target.name} ({target.model.config.model_type})"
        vocab = self.model.config.get_text_config(decoder=True).vocab_size
        some = np.arange(1, 100) * 7919 % vocab
        self.prefix, self.tree, self.after = some[:3], some[3 : 5 + self.SIBLINGS], some[40]
        self.parent = np.array([-1, *[0] * self.SIBLINGS, self.SIBLINGS])
        self.path = [0, self.SIBLINGS, self.SIBLINGS + 1]
        wrong = [*self.prefix, *self.tree]
        right = [*self.prefix, *self.tree[self.path], self.after]
        self.long = some[50 : 50 + len(wrong)]
        texts = np.array([self.long, [*right, *some[60 : 60 + len(wrong) - len(right)]], wrong])
        self.text = torch.from_numpy(texts).to(target.device)
        cache: Any = DynamicCache(config=self.model.config)
        try:
            self.logits = self._plain(self.text, cache)
        except Exception as error:  # The model's own code may raise anything.
            raise self._refused(f"a plain forward with transformers' own cache fails: {one_line(error)}") from None
        if self.logits.isnan().any():
            raise self._refused("its logits are NaN: its weights or dtype are broken")
        if any(getattr(layer, "keys", None) is None for layer in cache.layers):
            raise self._refused("it does not keep its keys and values in a cache")
        shapes = {(*layer.keys.shape[1::2], *layer.values.shape[1::2]) for layer in cache.layers}
        if len(shapes) != 1 or len(cache.layers) != target.num_layers:
            raise self._refused("its layers keep keys and values of different shapes")
        ((self.kv_heads, self.head_dim, *values),) = shapes
        if values != [self.kv_heads, self.head_dim]:
            raise self._refused("its keys and values have different shapes")
        self.kv_dtype = cache.layers[0].keys.dtype

    def _refused(self, why: str) -> ModelError:
        return ModelError(f"{self.name} cannot be a target: {why}")

    def _plain(self, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        return self.model(input_ids=ids, past_key_values=cache, use_cache=True).logits.float()

    def compare(self, target: HFTarget) -> None:
        """Run the proof, and set `target.masks_itself`. ModelError if logits differ from those of plain forwards."""
        for target.masks_itself in (True, False):
            slots = [target.add_row(0) for _ in range(2)]
            try:
                error, noise = self._errors(target, slots)
            except ModelError:
                raise
            except Exception as failure:  # The model's own code may raise anything.
                why = "its code does not run on a cache, positions and a mask from outside"
                raise self._refused(why) from failure
            finally:
                for slot in slots:
                    target.drop_row(slot)
            if error <= min(max(TOLERANCE, ROUNDING * torch.finfo(target.dtype).eps, NOISE * noise), LIMIT):
                return
        raise self._refused(
            f"verified as a tree its logits are wrong, by {error:.2g} times the effect of a wrong context; it makes "
            "its mask or positions itself and ignores those given"
        )

    @torch.inference_mode()
    def _errors(self, target: HFTarget, slots: Sequence[int]) -> tuple[float, float]:
        """RMS errors of our worst node and of a second plain forward, relative to the effect of wrong tokens."""
        a, b = slots
        for slot, tokens in ((a, self.long[:-1]), (b, self.prefix)):
            target.verify([Segment.chunk(slot, tokens, False)])
            target.commit(slot, range(len(tokens)))
        tree = Segment(b, self.tree, self.parent, num_logits=len(self.tree))
        verdict = target.verify([Segment.chunk(a, self.long[-1:], True), tree])
        target.commit(b, self.path)
        last = target.verify([Segment.chunk(b, np.array([self.after]), True)])
        ours = torch.cat([verdict.of(0), verdict.of(1)[self.path], last.of(0)]).float()
        plain = torch.cat([self.logits[0, -1:], self.logits[1, 3:7]])
        cache = DynamicCache(config=self.model.config)
        again = torch.cat([self._plain(self.text[1:2, :3], cache), self._plain(self.text[1:2, 3:7], cache)], 1)[0]
        effect = _rms(self.logits[2, -1] - self.logits[1, 5]).clamp(min=1e-9)
        noise = _rms(again - self.logits[1, :7]).max()
        return float(_rms(ours - plain).max() / effect), float(noise / effect)


def _rms(difference: torch.Tensor) -> torch.Tensor:
    return difference.square().mean(-1).sqrt()
