"""Fakes without weights: a target whose logits come from a table, a detokenizer that spells tokens out, and a clock.

    target = TableTarget(vocab_size=8, order=2, seed=1)
    engine = Engine(target, draft=...)
    target.plain(prompt, SamplingParams(max_tokens=20))      # what the engine must answer, whatever it drafts

The target checks its caller: every breach of the contract of `paceline.target.base.Target` is an AssertionError.
"""

import codecs
from itertools import pairwise

import numpy as np
import torch

from paceline.core.request import Row
from paceline.core.sampling import probabilities, warp
from paceline.core.segment import Verdict
from paceline.core.tree import depths
from paceline.target.base import Needs, Target

Prefix = tuple[int, ...]


class TableTarget(Target):
    """A target whose next-token logits are a fixed function of the tokens before, on float64.

    order   how many of the last tokens decide; None: all of them. Low orders make text that repeats itself.
    scale   how far logits spread: the larger, the surer the target.
    zeros   share of tokens that cannot follow a given prefix (logit -inf); one always can.
    logits  the function itself, from the tokens before to float64 [V], instead of random numbers.

    forwards counts calls of `verify`, nodes the nodes they ran; rows(slot) are the committed tokens.
    Hidden states are not supported: asking for them raises NotImplementedError.
    """

    def __init__(self, vocab_size=8, *, order=2, seed=0, scale=2.0, zeros=0.0, eos=(), max_context=4096, logits=None):
        self.vocab_size = vocab_size
        self.num_layers = 1
        self.hidden_size = 1
        self.max_context = max_context
        self.eos_token_ids = tuple(eos)
        self.name = "table"
        self.dtype = torch.float64
        self.device = torch.device("cpu")
        self.order, self.seed, self.scale, self.zeros = order, seed, scale, zeros
        self.forwards = 0
        self.nodes = 0
        self._logits = logits or self._random_logits
        self._table = {}
        self._rows = {}
        self._running = {}
        self._next_slot = 0

    # What it says ---------------------------------------------------------------------------------------------

    def logits_after(self, tokens):
        """Next-token logits behind `tokens`, float64 [V]."""
        prefix = tuple(int(t) for t in tokens)
        if self.order is not None:
            prefix = prefix[max(0, len(prefix) - self.order) :]
        if prefix not in self._table:
            self._table[prefix] = torch.from_numpy(np.asarray(self._logits(prefix), np.float64))
        return self._table[prefix]

    def _random_logits(self, prefix):
        random = np.random.default_rng([self.seed, len(prefix), *prefix])
        logits = random.normal(size=self.vocab_size) * self.scale
        logits[(random.random(self.vocab_size) < self.zeros) & (logits < logits.max())] = -np.inf
        return logits

    def probabilities_after(self, tokens, params):
        """The distribution plain decoding draws from behind `tokens`, float64 [V]."""
        return probabilities(self.logits_after(tokens).unsqueeze(0), params, [np.asarray(tokens, np.int64)])[0]

    def plain(self, prompt, params, detokenizer=None):
        """`prompt` answered by plain decoding, token by token and without an engine: what every drafter must give
        for the same seed."""
        eos = self.eos_token_ids
        row = Row(0, prompt, params, max_context=self.max_context, eos_token_ids=eos, detokenizer=detokenizer)
        params = row.params
        while row.finish_reason is None:
            if params.is_greedy:
                scores = warp(self.logits_after(row.tokens).unsqueeze(0), params, [row.tokens])
                token = int(scores[0].argmax())
            else:
                token = row.noise.choose(self.probabilities_after(row.tokens, params), row.num_new)
            row.extend([token])
        return row

    # The interface --------------------------------------------------------------------------------------------

    def rows(self, slot):
        """Committed tokens of a row."""
        return list(self._rows[slot])

    @property
    def num_rows(self):
        """Rows that were added and not dropped."""
        return len(self._rows)

    def add_row(self, expected_length):
        assert 0 < expected_length <= self.max_context, f"expected_length is {expected_length}"
        slot, self._next_slot = self._next_slot, self._next_slot + 1
        self._rows[slot] = []
        return slot

    def drop_row(self, slot):
        del self._rows[slot]
        self._running.pop(slot, None)

    def length(self, slot):
        return len(self._rows[slot])

    def verify(self, segments, needs=Needs(), on_layer=None, clock=None):  # fmt: skip
        if needs.hidden_layers or needs.resume_layer is not None or needs.callback_layer is not None:
            raise NotImplementedError("a table has no layers")
        assert segments, "a forward over nothing"
        assert len({segment.slot for segment in segments}) == len(segments), "a row is in the forward twice"
        self._running = {}
        logits = []
        logits_at = [0]
        for segment in segments:
            self._check(segment)
            paths = self._paths(segment)
            first = len(segment.tokens) - segment.num_logits
            logits += [self.logits_after(path) for path in paths[first:]]
            logits_at.append(len(logits))
            self._running[segment.slot] = segment
            self.nodes += len(segment.tokens)
        self.forwards += 1
        packed = torch.stack(logits) if logits else torch.empty(0, self.vocab_size, dtype=self.dtype)
        top_k = packed.topk(needs.top_k) if needs.top_k else None
        return Verdict(packed, logits_at, top_k=None if top_k is None else (top_k.values, top_k.indices))

    def _check(self, segment):
        """Everything a segment must be."""
        tokens, parent = segment.tokens, segment.parent
        assert segment.slot in self._rows, f"no row in slot {segment.slot}"
        assert segment.start == 0, "nothing but this target can have put nodes behind the row"
        assert segment.hidden is None, "a table has no hidden states"
        assert tokens.dtype == np.int64, f"tokens are {tokens.dtype}"
        assert len(tokens) == len(parent) > 0, f"{len(tokens)} tokens, {len(parent)} parents"
        assert (tokens >= 0).all(), f"tokens {tokens}"
        assert (tokens < self.vocab_size).all(), f"tokens {tokens}"
        assert parent[0] == -1, "node 0 is the root"
        assert (parent[1:] >= 0).all(), f"more than one root: {parent}"
        assert (parent[1:] < np.arange(1, len(parent))).all(), f"a node comes before its parent: {parent}"
        assert 0 <= segment.num_logits <= len(tokens), f"{segment.num_logits} logits of {len(tokens)} nodes"
        reach = self.length(segment.slot) + int(depths(parent).max()) + 1
        assert reach <= self.max_context, f"the row would hold {reach} tokens"

    def _paths(self, segment):
        """Every node's tokens from the beginning of the row to itself."""
        row = self._rows[segment.slot]
        paths = []
        for token, above in zip(segment.tokens.tolist(), segment.parent.tolist(), strict=True):
            paths.append([*(paths[above] if above >= 0 else row), token])
        return paths

    def truncate(self, slot, length):
        assert length <= len(self._rows[slot])
        del self._rows[slot][length:]

    def commit(self, slot, path):
        segment = self._running.pop(slot, None)
        assert segment is not None, f"slot {slot} was not in the last forward, or is committed already"
        assert len(path) > 0, "the root is always kept"
        assert path[0] == 0, "a path begins at the root"
        for above, node in pairwise(path):
            assert segment.parent[node] == above, f"{path} is no path of {segment.parent}"
        self._rows[slot] += [int(segment.tokens[node]) for node in path]


class Spelling:
    """A `paceline.core.request.Detokenizer` for made-up vocabularies: token t says pieces[t], bytes of UTF-8.

    Text comes out character by character as bytes complete it; what never completes becomes U+FFFD at the end."""

    def __init__(self, pieces):
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token):
        return self._utf8.decode(self._pieces[token])

    def flush(self):
        return self._utf8.decode(b"", final=True)


class Restless:
    """A clock whose seconds are random: prices that change all the time."""

    def __init__(self):
        self._rng, self._now = np.random.default_rng(0), 0.0

    def __call__(self):
        self._now += float(self._rng.choice([1e-4, 1e-3, 0.1]) * self._rng.random())
        return self._now
