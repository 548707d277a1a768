"""mirror: while the target verifies a window, the draft model drafts the next window for each likely outcome.

Bhendawade et al. 2025, "Mirror Speculative Decoding" (arXiv 2510.13161). `branches.py` has the algorithm, and the proof
that the output is the target's. The draft model runs in a process with its own cores or device (`draft_worker.py`); in
the engine's process it gains no time, and only serves to try the algorithm. Candidates for the target's next token come
from the draft, which knows them at once, or from a middle layer of the target (the paper): better, but later.

Costs, and when it pays: docs/methods/mirror.md."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from weakref import finalize

import torch

from paceline.core.options import Options, option, quoted
from paceline.draft.base import Ask, Drafter, DraftTree, Facts, Needs, Plan, Request
from paceline.draft.methods.model import Model, check_tokenizer
from paceline.draft.models.branches import SPREAD, Lookahead, Next, Top, Window, top_of
from paceline.draft.models.draft_model import TextModel
from paceline.draft.models.draft_worker import Closed, DraftWorker, Setup, confined, facts_to_send, split_cores
from paceline.draft.spec import parse
from paceline.errors import MethodError
from paceline.target.load import device_named, load_tokenizer

log = logging.getLogger("paceline.mirror")

STATELESS = ("fixed", "svip", "confidence")
"""Stop rules without memory: by them, a window drafted ahead ends where a fresh window would."""


@dataclass(frozen=True, kw_only=True)
class MirrorConfig(Options):
    checkpoint: str = option(help="folder or hub id of the draft model, or a drafter that has one (model:PATH)")
    candidates: int = option(
        4, "windows drafted ahead for a position, on average; 0: plain speculation; paper: 8", least=0
    )
    branches: int | None = option(
        None, "most windows drafted ahead for a row; none: as many as candidates asks for", least=1
    )
    source: Literal["draft", "early_exit", "both"] = option("draft", "where candidates come from; paper: early_exit")
    layer: int | None = option(
        None, "with source=early_exit, layers before the exit; none: half of them, as in the paper", least=1
    )
    vocab: str | None = option(
        None,
        "with source=early_exit, tokens of the head that are read: the K most frequent, or a `train tools vocab` "
        "file",
    )
    miss: Literal["fresh", "empty"] = option(
        "fresh", "what happens if no window was drafted ahead: draft now, or verify no draft"
    )
    where: Literal["process", "line"] = option(
        "process", "where the draft model runs: in its own process, or in line, to try the algorithm"
    )
    threads: int = option(1, "with where=process, CPU threads of the draft model, on cores of their own", least=1)
    device: str | None = option(
        None, "with where=process, the draft model's device, such as cuda:1; none: the target's"
    )
    limit: float = option(
        20.0, "with where=process, seconds to wait for a draft; after that, decode without drafts", least=0
    )
    stop: Literal["fixed", "svip", "confidence"] = option("fixed", "when a window ends; see `model`; paper: fixed")
    draft: int | None = option(
        None, "tokens of a window, or with another stop rule the most of them; none: 5; paper: 7", least=1
    )


@dataclass
class Counts:
    """Counts windows by the number of accepted tokens of the window before.

    hits    windows that were drafted ahead. misses: windows that were not."""

    hits: Counter[int] = field(default_factory=Counter)
    misses: Counter[int] = field(default_factory=Counter)

    @property
    def hit_rate(self) -> float:
        """The share of windows that were drafted ahead, among those that could have been."""
        hits = sum(self.hits.values())
        return hits / max(hits + sum(self.misses.values()), 1)

    def add(self, asked: Sequence[Next], windows: Sequence[Window]) -> None:
        """Count a round's windows."""
        for one, window in zip(asked, windows, strict=False):
            if window.hit is not None:
                (self.hits if window.hit else self.misses)[len(one.new) - 1] += 1


class Mirror(Drafter):
    """Drafts the next window for every likely outcome while the target verifies this one, in a process of its own.

    side  runs the draft model, in this process or its own; None before `bind`, and once that is closed or lost."""

    name = "mirror"
    lossless = "yes"
    paper = "Bhendawade et al. 2025, Mirror Speculative Decoding, arXiv 2510.13161"
    Config = MirrorConfig

    def __init__(self, config: MirrorConfig):
        self.config = config
        self.counts = Counts()
        self._known: dict[int, int] = {}  # by row id: number of tokens that the draft's side knows
        self._has_window: set[int] = set()
        self.side: Lookahead | DraftWorker | None = None
        self._resources = ExitStack()
        finalize(self, self._resources.close)

    def bind(self, target: Facts) -> None:
        """Load the draft, here or in its process. MethodError if it does not fit the target or cannot draft ahead."""
        super().bind(target)
        self._max_context = target.max_context
        if self.config.source != "draft":
            self._exit = EarlyExit(self.config, target)
            self.needs = Needs(callback_layer=self._exit.layer)
        if self.side is not None:
            return  # A second call changes nothing: the draft's side does not read the target.
        spec, drafter = stateless_drafter(self.config)
        c = self.config
        options: dict[str, Any] = {"num_candidates": c.candidates, "branches": c.branches}
        options |= {"fresh": c.miss == "fresh", "joined": c.source == "both"}
        if c.where == "process":
            self.side = self._start_worker(target, spec, options)
        else:
            drafter.bind(target)
            if not isinstance(drafter.model, TextModel):
                raise MethodError("mirror: a draft model with a tokenizer of its own cannot draft ahead")
            self.weight_bytes = drafter.weight_bytes
            self.side = Lookahead(drafter, **options)

    def _start_worker(self, target: Facts, spec: str, options: dict[str, Any]) -> DraftWorker:
        """Start the draft's process, with its own cores if there are enough."""
        c = self.config
        path = parse(spec).checkpoint or ""
        if target.tokenizer is not None:
            check_tokenizer(path, load_tokenizer(path), target.tokenizer)
        device = torch.device(target.device)
        ours, others = split_cores(c.threads) if device.type == "cpu" else (frozenset(), frozenset())
        facts = facts_to_send(target, device_named(c.device) if c.device else device)
        setup = Setup(spec, facts, options, c.source == "draft", c.threads, others, c.limit)
        try:
            worker = DraftWorker(setup)
        except Closed as error:
            raise MethodError(f"mirror: the draft's process did not start: {error}") from None
        self._resources.callback(worker.close)
        if ours:
            self._resources.enter_context(confined(target, ours))
        return worker

    def start(self, row: Request) -> None:
        # A row that is run again has output, which the draft's side gets with the first request.
        self._known[row.id] = row.prompt_length
        params = replace(row.params, seed=row.noise.seed, stop=(), grammar=None, prediction=())
        self._tell(lambda side: side.open(row.id, row.tokens[: row.prompt_length], params, self._max_context))

    def drop(self, row: Request) -> None:
        self._known.pop(row.id, None)
        self._has_window.discard(row.id)
        self._tell(lambda side: side.drop(row.id))

    def close(self) -> None:
        """End the process, if there is any, and take its cores back. From then on, rows decode plainly."""
        self.side = None
        self._resources.close()

    def _tell(self, act: Callable[[Lookahead | DraftWorker], None]) -> None:
        """Call the draft's side. If it has died or hangs, warn and go on without it."""
        if self.side is not None:
            try:
                act(self.side)
            except Closed as error:
                why = str(error) or "no answer"
                log.warning("mirror: the draft's process is gone (%s); decoding goes on without drafts", why)
                self.close()

    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        able = [row for row, most in asks if most > 0]
        asked = [Next(row.id, row.tokens[self._known[row.id] :].tolist()) for row in able]
        windows: list[Window] = []
        if asked:
            self._tell(lambda side: windows.extend(side.windows(asked)))
        self.counts.add(asked, windows)
        self._has_window = {window.id for window in windows}
        self._known |= {row.id: len(row) for row, _ in zip(able, windows, strict=False)}
        trees = {}
        for row, window in zip(able, windows, strict=False):
            tree = trees[row.id] = DraftTree.chain(row.last_token, window.tokens, calls=window.calls)
            tree.source = self.name if window.tokens else ""
        if self.config.source == "draft" and isinstance(self.side, Lookahead):
            self.side.look_ahead()
        return [trees.get(row.id) or DraftTree.root(row.last_token) for row, _ in asks]

    def on_layer(self, layer: int, hidden: torch.Tensor, round: Plan) -> None:
        """Look ahead, with the early exit's candidates after each node of the windows."""
        own = [
            i
            for i, (row, tree) in enumerate(zip(round.rows, round.trees, strict=True))
            if not round.is_prompt(i) and row.id in self._has_window and (round.is_from(i, self) or len(tree) == 1)
        ]
        if own and self.config.candidates:
            spans = round.spans()
            tops = iter(self._exit.candidates(torch.cat([hidden[spans[i]] for i in own])))
            given = {round.rows[i].id: [next(tops) for _ in range(len(round.trees[i]))] for i in own}
            self._tell(lambda side: side.look_ahead(given))


class EarlyExit:
    """Reads the target's states after `layer` layers by its final norm and head (the paper's proxy). MethodError for a
    layer that the target lacks."""

    def __init__(self, config: MirrorConfig, target: Facts):
        from paceline.draft.models.layers import native

        inside = native(target, f"mirror: source={config.source} reads a middle layer", "source=draft")
        layer = target.num_layers // 2 if config.layer is None else config.layer
        last = target.num_layers - 1
        if not 0 < layer <= last:
            raise MethodError(f"mirror: layer is {layer}, and {target.name} has {last + 1}: it is 1 to {last}")
        self.layer, self._target = layer, inside
        self._columns, self._head = None, inside.head
        if config.vocab is not None:
            from paceline.formats.heads.vocab import kept_tokens

            self._columns = kept_tokens(config.vocab, parse(_draft_spec(config)).checkpoint or "", target)
            self._head = inside.head.rows(self._columns)
        self._count = SPREAD * config.candidates + 1

    def candidates(self, states: torch.Tensor) -> list[Top]:
        """The best tokens after each of the states [N, H], with their probabilities."""
        logits = self._head(self._target.ops.norm(states, self._target.norm))[: len(states)]
        return top_of(logits, self._count, self._columns)


def stateless_drafter(config: MirrorConfig) -> tuple[str, Model]:
    """Make the drafter that drafts ahead. Returns its spec and the drafter. MethodError if it cannot draft ahead."""
    from paceline.draft.registry import create

    path, spec = config.checkpoint, _draft_spec(config)
    given = parse(spec).options
    for key in ("stop", "draft"):
        value = getattr(config, key)
        if key not in given and value:
            spec += f",{key}={value}"
    drafter = create(spec)
    if not isinstance(drafter, Model):
        why = f"{drafter.name} cannot draft ahead, for it copies text or needs the target's states"
        raise MethodError(f"mirror:{path}: {why}; write mirror:PATH or mirror:model:PATH with a draft model")
    if drafter.config.stop not in STATELESS or drafter.config.tree:
        chosen = f"stop is {drafter.config.stop!r} and tree {drafter.config.tree}"
        raise MethodError(f"mirror: {chosen}; it drafts chains, and its stop rule is {', '.join(STATELESS)}")
    return spec, drafter


def _draft_spec(config: MirrorConfig) -> str:
    """The spec that the checkpoint holds, without the options of `mirror`."""
    name, _, rest = config.checkpoint.partition(":")
    is_spec = rest and name.replace("-", "").isalnum() and len(name) > 1
    return config.checkpoint if is_spec else f"model:{quoted(config.checkpoint)}"
