"""mirror: while the target verifies a window, the draft model drafts what comes after it, for every likely outcome.

Bhendawade et al. 2025, "Mirror Speculative Decoding" (arXiv 2510.13161). Plain speculation is serial: draft, verify,
draft. Here the next window is there when the target has finished, if its outcome (how many drafted tokens stand, and
which token the target adds) is among those that were drafted ahead; if not, it is drafted as usual. `branches.py` has
the algorithm. Candidates for the token that the target adds come from

    source=draft       the draft's own probabilities: drafting ahead can begin as soon as the window is out
    source=early_exit  the target's layer `layer`, read by its own head (the paper): better candidates, less time
    source=both

Where it runs: in a process beside the target's, with cores or a device of its own (`beside.py`), or in line, which
gains no time and is there to try the algorithm. What is verified has the law of a freshly drafted window, so the answer
is plain decoding's. What it costs and when it pays: docs/methods/mirror.md.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Literal

import torch

from paceline.draft.base import Drafter
from paceline.draft.model import check_tokenizer
from paceline.draft.neural.beside import Beside, Print, Setup, TargetLike
from paceline.draft.neural.branches import Ahead, Ask, Layout, Top, Window, most_candidates
from paceline.draft.neural.ring import Closed
from paceline.draft.neural.stepping import Stepping
from paceline.draft.neural.vocab import kept_tokens
from paceline.draft.spec import Options, option
from paceline.engine.logits import top_tokens
from paceline.engine.request import Request
from paceline.engine.round import Round
from paceline.engine.tree import DraftTree
from paceline.errors import MethodError
from paceline.target.base import Facts, Needs, Target
from paceline.target.decoder import Decoder
from paceline.target.load import device_named, load_tokenizer
from paceline.target.threads import Threads

log = logging.getLogger("paceline")

OVERLAPS = 1 / 0.9
"""How many times faster two pieces of work must be at once than one after the other, for a process to pay."""
STATELESS = ("fixed", "svip", "confidence")
"""Stop rules that look at one distribution alone, so that a window drafted ahead ends where a fresh one would."""


@dataclass(frozen=True, kw_only=True)
class MirrorConfig(Options):
    """Options of mirror."""

    checkpoint: str = option(help="folder or hub id of the draft model, or a drafter that has one (model:PATH)")
    kappa: int = option(
        4, "windows drafted ahead for each position, on average; 0: plain speculation; paper: 8", least=0
    )
    branches: int | None = option(None, "most windows drafted ahead for a row; none: kappa a position", least=1)
    layout: Layout = option(
        "measured", "give positions windows by how often verification ends there, or all as many; paper: uniform"
    )
    source: Literal["draft", "early_exit", "both"] = option(
        "draft", "where candidates come from: the draft itself, the target's middle layer, or both; paper: early_exit"
    )
    layer: int | None = option(None, "of early_exit: layers before the exit; none: half of them, the paper's", least=1)
    vocab: str | None = option(
        None, "of early_exit: read only these tokens of the head: the K most frequent, or a file of `train vocab`"
    )
    miss: Literal["fresh", "empty"] = option(
        "fresh", "a window that was not drafted ahead: draft it now, or leave it out and look ahead meanwhile"
    )
    where: Literal["process", "line"] = option(
        "process", "the draft runs in a process beside the target, or in line, which saves no time"
    )
    threads: int = option(1, "of process: the draft's processor threads, on cores of their own", least=1)
    device: str | None = option(None, "of process: the draft's device, such as cuda:1; none: the target's")
    check: bool = option(True, "of process: measure at the start whether the two really overlap; if not, draft in line")
    limit: float = option(20.0, "of process: seconds to wait for a draft before decoding goes on without", least=0)
    stop: Literal["fixed", "svip", "confidence"] = option("fixed", "when a window ends; see `model`; paper: fixed")
    draft: int | None = option(None, "tokens of a window, or the most of them; none: 5; paper: 7", least=1)
    streams: int = option(0, "of a draft model with streams: tokens a forward says beside the next one", least=0)


@dataclass
class Counts:
    """What became of windows. hits, misses: by how many tokens of the window before were accepted; waited: seconds that
    the target's side waited for windows; exposed: of them, those in rounds with a miss."""

    hits: Counter[int] = field(default_factory=Counter)
    misses: Counter[int] = field(default_factory=Counter)
    waited: float = 0.0
    exposed: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Share of windows that had been drafted ahead, of those that could have been."""
        hits = sum(self.hits.values())
        return hits / max(hits + sum(self.misses.values()), 1)


class Mirror(Drafter):
    """Drafts the next window for every likely outcome while the target verifies this one, in a process of its own."""

    name = "mirror"
    lossless = "yes"
    paper = "Bhendawade et al. 2025, Mirror Speculative Decoding, arXiv 2510.13161"
    Config = MirrorConfig

    def __init__(self, config: MirrorConfig):
        self.config = config
        self.counts = Counts()
        self._known: dict[int, int] = {}
        self._accepted: dict[int, int] = {}
        self._windows: dict[int, list[int]] = {}
        self._side: Ahead | Beside | None = None
        self._give_back: Callable[[], None] = lambda: None

    # Start ----------------------------------------------------------------------------------------------------

    def bind(self, target: Facts) -> None:
        """Load the draft here or in its process. MethodError if it does not fit the target or cannot draft ahead."""
        super().bind(target)
        c = self.config
        self._vocab_size, self._max_context = target.vocab_size, target.max_context
        own = c.source == "draft"
        if not own:
            self._bind_exit(target)
        spec = self._spec()
        options: dict[str, Any] = {"kappa": c.kappa, "branches": c.branches, "layout": c.layout}
        options["fresh"] = c.miss == "fresh"
        self._side = self._beside(target, spec, options) if c.where == "process" else None
        if self._side is None:
            self._side = self._in_line(target, spec, options)
        self._close: Callable[[], None] = self._side.close if isinstance(self._side, Beside) else (lambda: None)

    def _spec(self) -> str:
        """The drafter that is to draft ahead; MethodError for one that cannot."""
        from paceline.draft.registry import create
        from paceline.draft.spec import parse

        path = self.config.checkpoint
        name, _, rest = path.partition(":")
        spec = path if rest and name.replace("-", "").isalnum() and len(name) > 1 else f"model:{path}"
        given = parse(spec).options
        for key in ("stop", "draft", "streams"):
            value = getattr(self.config, key)
            if key not in given and value:
                spec += f",{key}={value}"
        drafter = create(spec)
        if not isinstance(drafter, Stepping) or not drafter.drafts_ahead:
            raise MethodError(
                f"mirror:{path}: {drafter.name} cannot draft ahead, for it copies text or needs the target's states; "
                "write mirror:PATH or mirror:model:PATH with a draft model"
            )
        if drafter.options.stop not in STATELESS or drafter.options.tree:
            raise MethodError(
                f"mirror: stop is {drafter.options.stop!r} and tree {drafter.options.tree}; "
                f"it drafts chains, and its stop rule is {', '.join(STATELESS)}"
            )
        return spec

    def _bind_exit(self, target: Facts) -> None:
        if not isinstance(target, Decoder):
            raise MethodError(
                f"mirror: source={self.config.source} reads a middle layer, and {target.name} runs in transformers: "
                "it needs a model of a family that the native decoder runs, or source=draft"
            )
        layer = target.num_layers // 2 if self.config.layer is None else self.config.layer
        if not 0 < layer < target.num_layers:
            last = target.num_layers - 1
            raise MethodError(f"mirror: layer is {layer}, and {target.name} has {last + 1}: it is 1 to {last}")
        self.needs = Needs(callback_layer=layer)
        self._target = target
        self._columns, self._head = None, target.head
        if self.config.vocab is not None:
            path = self.config.checkpoint.partition(":")[2] or self.config.checkpoint
            self._columns = kept_tokens(self.config.vocab, path, target)
            self._head = target.head.rows(self._columns)

    def _in_line(self, target: Facts, spec: str, options: dict[str, Any]) -> Ahead:
        from paceline.draft.registry import create

        drafter = create(spec)
        assert isinstance(drafter, Stepping)
        drafter.bind(target)
        self.weight_bytes = drafter.weight_bytes
        return Ahead(drafter, **options)

    def _beside(self, target: Facts, spec: str, options: dict[str, Any]) -> Beside | None:
        """The process; None, and a line that says why, where it does not run beside the target."""
        c = self.config
        path = spec.partition(":")[2].partition(",")[0]
        if target.tokenizer is not None:
            check_tokenizer(path, load_tokenizer(path), target.tokenizer)
        ours, others = _cores(c.threads) if target.device.type == "cpu" else (frozenset(), frozenset())
        device = device_named(c.device) if c.device else target.device
        tokenizer = target.tokenizer and Print(target.tokenizer.fingerprint, target.tokenizer.name)
        facts = TargetLike(
            target.name, target.vocab_size, target.max_context, tuple(target.eos_token_ids), target.weights_fingerprint,
            tokenizer, target.num_layers, target.hidden_size, target.dtype, device,
        )  # fmt: skip
        own, joined = c.source == "draft", c.source == "both"
        try:
            beside = Beside(Setup(spec, facts, options, own, joined, c.threads, others, c.limit))
        except Closed as error:
            raise MethodError(f"mirror: the draft's process did not start: {error or 'it ended'}") from None
        if ours:
            self._give_back = _confine(target, ours)
        gain = beside.overlap() if c.check else OVERLAPS
        if gain < OVERLAPS:
            log.warning(
                "mirror: the draft's process does not run beside the target here (work on both sides at once goes %.2f "
                "times as fast as in turn): drafting in line. check=false skips this test", gain,
            )  # fmt: skip
            beside.close()
            self._give_back()
            return None
        return beside

    @property
    def side(self) -> Ahead | Beside | None:
        """What drafts ahead, here or in its process; None after it is closed or lost."""
        return self._side

    # Rows -----------------------------------------------------------------------------------------------------

    def start(self, row: Request) -> None:
        # A row that is run again has an answer already: the draft's side gets it with the first question.
        self._known[row.id] = row.prompt_length
        # Draws of the draft must not be those of the acceptance test.
        own_seed = (row.random.seed * 2862933555777941757 + 3037000493) % 2**63
        params = replace(row.params, seed=own_seed, stop=(), grammar=None, prediction=())
        self._tell(lambda side: side.open(row.id, row.tokens[: row.prompt_length], params, self._max_context))

    def drop(self, row: Request) -> None:
        self._known.pop(row.id, None)
        self._windows.pop(row.id, None)
        self._tell(lambda side: side.drop(row.id))

    def close(self) -> None:
        """End the process, if there is one, and give its cores back; after it rows decode plainly."""
        self._side, close = None, self._close
        close()
        self._give_back()

    def _tell(self, act: Callable[[Ahead | Beside], None]) -> None:
        """Do something with the draft's side; without it, from then on, where it has died or hangs."""
        if self._side is not None:
            try:
                act(self._side)
            except Closed as error:
                why = str(error) or "no answer"
                log.warning("mirror: the draft's process is gone (%s); decoding goes on without drafts", why)
                self.close()

    # The round ------------------------------------------------------------------------------------------------

    def propose(self, rows: Sequence[Request]) -> list[DraftTree]:
        able = [row for row in rows if row.max_draft > 0]
        asks = [Ask(row.id, row.tokens[self._known[row.id] :].tolist()) for row in able]
        windows: list[Window] = []
        began = perf_counter()
        if asks:
            self._tell(lambda side: windows.extend(side.windows(asks)))
        waited = perf_counter() - began
        self._windows = {window.id: window.tokens for window in windows}
        self._count(asks, windows, waited)
        made = {}
        for row, window in zip(able, windows, strict=False):
            self._known[row.id] = len(row)
            made[row.id] = self._tree(row, window)
        if self.config.source == "draft" and isinstance(self._side, Ahead):
            self._side.look_ahead()
        return [made.get(row.id) or DraftTree.root(row.last_token) for row in rows]

    def _tree(self, row: Request, window: Window) -> DraftTree:
        tree = DraftTree.chain(row.last_token, window.tokens, calls=window.calls)
        tree.source = self.name if window.tokens else ""
        if window.probs:
            tree.draft_probs = torch.stack([*window.probs, torch.zeros_like(window.probs[0])])
        return tree

    def _count(self, asks: Sequence[Ask], windows: Sequence[Window], waited: float) -> None:
        counts = self.counts
        for ask, window in zip(asks, windows, strict=False):
            if window.hit is not None:
                (counts.hits if window.hit else counts.misses)[len(ask.new) - 1] += 1
        counts.waited += waited
        counts.exposed += waited if any(not window.hit for window in windows) else 0.0

    def on_layer(self, layer: int, hidden: torch.Tensor, round: Round) -> None:
        """The proxy: what the target's head says of the states in the middle of the forward, after every node."""
        spans = round.spans()
        mine = [
            i
            for i, (row, tree) in enumerate(zip(round.rows, round.trees, strict=True))
            if not round.is_prompt(i) and row.id in self._windows and (round.is_from(i, self) or len(tree) == 1)
        ]
        if not mine or not self.config.kappa:
            return
        states = torch.cat([hidden[spans[i]] for i in mine])
        logits = self._head(self._target.ops.norm(states, self._target.norm))[: len(states)]
        count = most_candidates(self.config.kappa, self.config.layout) + 1
        values, columns = top_tokens(logits, min(count, logits.shape[-1]))
        shares = (values.float() - logits.float().logsumexp(-1, keepdim=True)).exp().tolist()
        tokens = columns if self._columns is None else self._columns[columns]
        tops: list[Top] = [list(zip(ids, ps, strict=True)) for ids, ps in zip(tokens.tolist(), shares, strict=True)]
        ends = torch.tensor([len(round.trees[i]) for i in mine]).cumsum(0).tolist()
        given = {round.rows[i].id: tops[end - len(round.trees[i]) : end] for i, end in zip(mine, ends, strict=True)}
        joined = self.config.source == "both"
        self._tell(lambda side: side.look_ahead(given, joined))

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()


def _confine(target: Facts, cores: frozenset[int]) -> Callable[[], None]:
    """Leave only these cores to the target; returns what gives it the others back."""
    before, ours = os.sched_getaffinity(0), Threads(len(cores))
    os.sched_setaffinity(0, cores)
    if not isinstance(target, Target):
        return lambda: os.sched_setaffinity(0, before)
    threads, target.threads = target.threads, ours

    def give_back() -> None:
        os.sched_setaffinity(0, before)
        if target.threads is ours:
            target.threads = threads

    return give_back


def _cores(threads: int) -> tuple[frozenset[int], frozenset[int]]:
    """Cores for the target and for the draft; both empty where they cannot be split."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) <= threads:
        return frozenset(), frozenset()
    return frozenset(cores[:-threads]), frozenset(cores[-threads:])
