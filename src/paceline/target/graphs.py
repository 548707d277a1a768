"""CUDA graphs: on a CUDA device a round of decoding is launched as one graph.

A forward is hundreds of kernels, and launching them one by one takes longer than running them (docs/log.md).
A CUDA graph is launched as a whole, but always runs the same kernels over the same memory. So a round is padded to one
of a few forms, in which all rows have the same number of nodes, and attention reads a multiple of `KEYS` keys. A form
runs without a graph the first time, is recorded the second time, and is replayed from then on. Rounds that fit no form
run without graphs: long chunks of prompts, segments with states, rows whose slots have gaps between them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from paceline.core.segment import Segment, Verdict
from paceline.core.tree import IntArray, ancestors
from paceline.formats.facts import Inside
from paceline.target.base import Needs
from paceline.target.cache import Writer
from paceline.target.layout import SHARED_QUERIES, Group, Layout


class Recordable(Inside, Protocol):
    """A decoder whose forwards can be recorded: their beginning, and all that follows (`Decoder.finish`)."""

    def finish(self, x: torch.Tensor, first: int, layout: Layout, cache: Writer, needs: Needs) -> Any: ...

WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, SHARED_QUERIES)
"""The values of `Form.width`: how many nodes each row has."""
KEYS = 256
"""The number of keys that attention reads is a multiple of this, or the whole capacity."""
MOST_NODES = 256
"""Largest number of nodes of a form. With more nodes, launching matters little, and padding more."""
MOST_FORMS = 96
"""Largest number of recorded forms. The least recently used form is dropped."""
Output = tuple[torch.Tensor, dict[int, torch.Tensor]]
"""Logits of all nodes, and hidden states by layer."""


class Form(NamedTuple):
    """The form of a round. Rounds of the same form share a recording.

    first, last  the rows have slots first to last - 1. width: number of nodes of a row.
    keys         number of keys that attention reads.
    layers       layers of the hidden states. cache: the cache's shape and address."""

    first: int
    last: int
    width: int
    keys: int
    layers: tuple[int, ...]
    cache: tuple[int, ...]

    @property
    def nodes(self) -> int:
        """Number of nodes of the forward, with padding."""
        return (self.last - self.first) * self.width


class GraphRecording:
    """The CUDA graph of a form, and the memory of its inputs."""

    def __init__(self, decoder: Recordable, form: Form):
        self._decoder, self._form = decoder, form
        slots, width, device = form.last - form.first, form.width, decoder.device
        self._numbers = torch.zeros(3 * form.nodes + slots, dtype=torch.int64, device=device)
        self._sees = torch.zeros(slots, width, width, dtype=torch.bool, device=device)
        self._slots = torch.arange(form.first, form.last, device=device).repeat_interleave(width)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: Output | None = None

    def fill(self, tokens: IntArray, positions: IntArray, at: IntArray, lengths: IntArray, sees: np.ndarray) -> None:
        """Copy a round's inputs to the device.

        tokens, positions, at  [nodes], as in `Layout`. lengths: committed lengths [slots].
        sees  bool [slots, width, width]: which nodes of its row each node sees."""
        self._numbers.copy_(torch.from_numpy(np.concatenate([tokens, positions, at, lengths])))
        self._sees.copy_(torch.from_numpy(sees))

    def record(self, pool: Any) -> None:
        """Record the forward without running it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self._output = self.forward()
        self._graph = graph

    def run(self) -> Output:
        """Run the graph. Returns the forward's output, which the next recording that runs overwrites."""
        if self._graph is None or self._output is None:
            return self.forward()
        self._graph.replay()
        return self._output

    def forward(self) -> Output:
        """Run the forward without the graph."""
        decoder, form = self._decoder, self._form
        tokens, positions, at = self._numbers[: 3 * form.nodes].view(3, form.nodes)
        mask, shared = self._mask(), decoder.shape.shared
        group = Group(form.first, form.last, form.width, form.keys, 0, form.nodes, None, None, None, mask, shared)
        layout = Layout(tokens, positions, self._slots, at, [(0, form.nodes)], [group], None, form.nodes, {})
        writer = decoder.cache.writer(layout, recorded=True)
        return decoder.finish(decoder.embedded(tokens), 0, layout, writer, Needs(hidden_layers=form.layers))

    def _mask(self) -> torch.Tensor:
        """The additive mask [slots, 1, width * shared, keys]."""
        form = self._form
        after = torch.arange(form.keys, device=self._sees.device) - self._numbers[3 * form.nodes :, None]
        among = after.clamp(0, form.width - 1)[:, None].expand(-1, form.width, -1)
        seen = (after < 0)[:, None] | (self._sees.gather(2, among) & ((after >= 0) & (after < form.width))[:, None])
        mask = torch.zeros(seen.shape, dtype=self._decoder.dtype, device=seen.device).masked_fill(~seen, -torch.inf)
        return mask.repeat_interleave(self._decoder.shape.shared, 1)[:, None]


class Recorder:
    """A decoder's recordings. record: False runs forms without graphs, for tests without a CUDA device."""

    def __init__(self, decoder: Recordable, record: bool = True):
        self._decoder, self._record = decoder, record
        self._recordings: OrderedDict[Form, GraphRecording] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle() if record else None

    def verify(self, segments: Sequence[Segment], needs: Needs) -> Verdict | None:
        """As `Target.verify`; None if the round has no form."""
        form = self._form(segments, needs)
        if form is None:
            return None
        recording, known = self._recordings.get(form), form in self._recordings
        if recording is None:
            recording = self._recordings[form] = GraphRecording(self._decoder, form)
            while len(self._recordings) > MOST_FORMS:
                self._recordings.popitem(last=False)
        self._recordings.move_to_end(form)
        recording.fill(*self._inputs(segments, form))
        if self._record and known and recording._graph is None:
            recording.record(self._pool)
        return self._verdict(segments, form, recording.run())

    def _form(self, segments: Sequence[Segment], needs: Needs) -> Form | None:
        decoder, cache = self._decoder, self._decoder.cache
        slots = sorted(segment.slot for segment in segments)
        first, last = slots[0], slots[-1] + 1
        most = max(segment.num_run for segment in segments)
        usual = all(segment.start == 0 and segment.hidden is None for segment in segments)
        # A recording cannot know which experts will run, where the rows' states will be, or look up more of a token.
        usual = usual and decoder.shape.experts is None and decoder.shape.delta is None and not decoder.shape.beside
        if not usual or most > SHARED_QUERIES or slots != list(range(first, last)):
            return None
        width = next(width for width in WIDTHS if width >= most)
        reach = max(cache.length(slot) for slot in slots) + width
        window = decoder.shape.window
        if (last - first) * width > MOST_NODES or reach > min(decoder.max_context, window or reach):
            return None
        cache.reserve(reach)
        decoder.reach(reach)
        keys = min(-(-reach // KEYS) * KEYS, cache.capacity)
        return Form(first, last, width, keys, needs.all_layers, (*cache.kv.shape, cache.kv.data_ptr()))

    def _inputs(self, segments: Sequence[Segment], form: Form) -> tuple[IntArray, ...]:
        """The arguments of `GraphRecording.fill`."""
        slots, width = form.last - form.first, form.width
        tokens, positions, at = (np.zeros((slots, width), np.int64) for _ in range(3))
        lengths, sees = np.zeros(slots, np.int64), np.zeros((slots, width, width), bool)
        for segment in segments:
            s, length = segment.slot - form.first, self._decoder.cache.length(segment.slot)
            wide = segment.longer(width - segment.num_run) if segment.num_run < width else segment
            tokens[s], positions[s], at[s] = wide.tokens, length + wide.depth, length + np.arange(width)
            lengths[s], sees[s] = length, ancestors(wide.parent)
        return tokens.ravel(), positions.ravel(), at.ravel(), lengths, sees

    def _verdict(self, segments: Sequence[Segment], form: Form, output: Output) -> Verdict:
        """Copy the results of the segments' nodes, without padding, from the recording's memory."""
        begins = [(segment.slot - form.first) * form.width for segment in segments]
        nodes = [begin + np.arange(s.num_run) for begin, s in zip(begins, segments, strict=True)]
        wanted = [at[len(at) - s.num_logits :] for at, s in zip(nodes, segments, strict=True)]
        logits, taps = output
        logits = logits.index_select(0, self._on_device(wanted))
        own = self._on_device(nodes) if taps else None
        taps = {layer: states[own] for layer, states in taps.items()}
        return Verdict.on(segments, logits, taps)

    def _on_device(self, numbers: Sequence[IntArray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(numbers)).to(self._decoder.device)
