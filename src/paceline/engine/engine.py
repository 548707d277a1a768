"""The engine: one loop for every drafter, every temperature and every batch. It knows no method's name.

    draft -> verify -> accept -> commit -> observe

`Engine.step` is one round. A prompt is run by the same forward, in pieces; plain decoding is a drafter without drafts.

    from paceline.engine.engine import Engine
    from paceline.core.sampling import SamplingParams
    engine = Engine("smollm2", draft="sam")
    for delta in engine.stream(["Once upon a time"], SamplingParams(max_tokens=64)):
        print(delta.text, end="")

A failure ends the rows that it concerns, with finish_reason "error". Only failures outside of requests raise
exceptions.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from paceline.core.accept import LOSSLESS, Accepted, Failed, Outcome, Rule, accept, score_prompts
from paceline.core.clock import Clock, Profile
from paceline.core.request import Completion, Delta, Row
from paceline.core.round import Plan, Round
from paceline.core.rules import parse_bytes
from paceline.core.sampling import SamplingParams
from paceline.core.segment import Segment, Verdict
from paceline.core.tree import DraftTree, IntArray
from paceline.draft.base import UNLIMITED, Allowance, Ask, Drafter, rebind, rooted
from paceline.draft.registry import create
from paceline.engine.budget import Budget
from paceline.engine.crowded import Crowded
from paceline.engine.prompt import Prompt, encode, is_chat
from paceline.engine.room import Room
from paceline.engine.scheduler import Pace, Ragged, Schedule, Turn, create_schedule, fitted
from paceline.engine.seats import Seats
from paceline.errors import MethodError, PacelineError, PromptError, RowError, out_of_memory
from paceline.formats.tokenizer import Tokenizer
from paceline.target.base import Target
from paceline.target.threads import Threads

log = logging.getLogger("paceline.engine")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine runs: the fields that `Engine(model, draft, **fields)` takes. PacelineError for a limit below 1."""

    max_batch: int = 8
    """Largest number of rows answered at once; others wait."""
    prefill_chunk: int = 512
    """Largest number of prompt tokens in a forward, so that a long prompt does not hold up other rows."""
    max_slowdown: float | None = None
    """How many times as long a round may take if it runs prompt tokens beside decoding rows, compared with a round
    without prompt tokens. None: there is no bound, and the pieces of a prompt do not depend on measured times."""
    max_rows_per_client: int | None = None
    """Largest number of rows at once for each `Row.client`; None: there is no bound."""
    schedule: str | Schedule | None = None
    """Which rows run when: "ragged" (the default), "equal", "grouped", or a Schedule."""
    rule: Rule | None = None
    """The acceptance rule; None: the lossless rule."""
    budget: bool = True
    """Draft as much as pays, by the time of rounds and the acceptance of drafts; False: as much as the drafter likes.
    """
    cache_memory: int | str | None = None
    """Memory for keys and values, in bytes or as "2GB"; None: half of the free memory. Requests wait until they fit. If
    rows outgrow it, the youngest row is preempted and run again later (docs/batching.md)."""
    context: int | None = None
    """Largest number of tokens of a prompt and its answer; None: as many as the model allows."""
    reuse: bool = True
    """Copy the keys and values of earlier requests whose prompts begin alike."""
    prefix_cache: str | Path | None = None
    """A folder for the keys and values of prompts, which later processes with the same model reuse."""
    prefix_cache_size: int | str = "8GB"
    """Largest size of that folder; the least recently used files are removed."""
    threads: int | None = None
    """Processor threads of a round; None: as many as torch uses, or fewer while other processes want the cores."""
    tokenizer: Tokenizer | None = None
    """Reads prompts and writes answers; None: the target's own. A model that is not loaded yet is loaded with it."""
    exact_profile: bool = False
    """Wait for the accelerator after every part of a round, so that `Engine.profile` is exact; that costs time."""
    dtype: str = "auto"
    """As in `paceline.target.load.load`, for a model that is not loaded yet; so are `device` and `activations`."""
    device: str = "auto"
    exact: bool | None = None
    """Compute the same logits, bit for bit, with any draft and in any batch (docs/exact.md). None: if that costs no
    time. True also applies to a Target that is loaded already."""
    activations: int | None = None

    def __post_init__(self) -> None:
        names = ("max_batch", "prefill_chunk", "max_slowdown", "max_rows_per_client", "context")
        limits = {name: getattr(self, name) for name in names}
        if low := [f"{name} is {limit}" for name, limit in limits.items() if limit is not None and not limit >= 1]:
            raise PacelineError(f"{' and '.join(low)}; it must be 1 or more.")


class Engine:
    """A target, a drafter, and the rows being answered.

    model   a folder, a hub id, or a loaded Target.
    draft   `name[:checkpoint][,key=value...]`, several joined by +; or a Drafter. `paceline methods` lists them.
    fields  fields of an `EngineConfig`, such as `max_batch=16`."""

    def __init__(self, model: str | Path | Target, draft: str | Drafter = "none", **fields: Any):
        config = self.config = EngineConfig(**fields)
        self.drafter = create(draft) if isinstance(draft, str) else draft
        self._pace = Pace(config.max_slowdown)
        self.schedule: Schedule = Ragged(
            config.max_batch, config.prefill_chunk, self._pace, config.max_rows_per_client
        )  # fmt: skip
        if config.schedule is not None:
            self.schedule = create_schedule(config.schedule, config.max_batch, config.prefill_chunk)
        self.target = _target(model, self.schedule, config)
        self.tokenizer = config.tokenizer or self.target.tokenizer
        self.rule: Rule = config.rule or LOSSLESS
        self.drafter.bind(self.target)
        self.target.check(self.drafter.needs)
        limited = config.budget and self.drafter.drafts  # Plain decoding needs no budget.
        self.budget = Budget(self.drafter.price_table) if limited else UNLIMITED
        self._allowance = Allowance()
        self.room, self.seats = self._make_room(config.cache_memory)
        self.rows: list[Row] = []
        self.waiting: deque[Row] = deque()
        self.clock = Clock(config.exact_profile)
        self.threads = self.target.threads if config.threads is None else Threads(config.threads)
        self._num_threads = torch.get_num_threads()
        self._crowded = Crowded(self.threads)
        self.rounds = 0
        self.prompt_profile = Profile(0, {})
        """The part of `profile` in rounds that ran a piece of a prompt, perhaps beside decoding rows."""
        self._next_id = 0

    def _can_reuse(self) -> bool:
        """Whether any rows can reuse keys and values of earlier rows, given what their drafters read."""
        return self.config.reuse and any(one.needs.callback_layer is None for one in self.drafter.choices)

    # The loop ------------------------------------------------------------------------------------------------

    def step(self) -> list[Delta]:
        """Run one round. Returns a delta for each row that gained tokens or ended. Ended rows have left the batch."""
        before, plan = self._begin(), Plan([], [], [])
        try:
            failed = self._admit()
            ready = self.seats.ready(self.rows)
            self._recall()
            plan = self._plan(self.schedule.select(ready))
            began = self.budget.now()
            verdict = self._verify(plan)
            outcomes = self._accept(plan, verdict)
            seconds = self.budget.now() - began
            deltas = self._apply(plan, outcomes)
            self._observe(plan, Round.of(plan, verdict, outcomes), seconds)
        finally:
            ended = self._end(plan, before)
        return deltas + [Delta.end(row) for row in failed + ended if row.finish_reason == "error"]

    def _plan(self, turns: Sequence[Turn]) -> Plan:
        """Plan the round: decoding rows run a draft, the others a piece of their prompt."""
        trees = self._propose([turn.row for turn in turns if not turn.chunk])
        plan = Plan([], [], [])
        for row, chunk in turns:
            if chunk:
                tokens = row.pending[:chunk]
                tree = DraftTree.root(int(tokens[-1]))
                last = not row.num_new and chunk == len(row.pending)
                segment = Segment.chunk(row.slot, tokens, last, row.count_unscored(chunk))
            elif row.id in trees:
                tree = trees[row.id].clipped(row.max_draft)
                segment = Segment.tree(row.slot, tree)
                self.room.note_draft(row, len(tree))
            else:  # The drafter failed at this row.
                continue
            plan.rows.append(row)
            plan.trees.append(tree)
            plan.segments.append(segment)
        self.clock.lap("draft")
        return plan

    def _propose(self, rows: Sequence[Row]) -> dict[int, DraftTree]:
        """Ask the drafter for a tree for each row. If it fails at a row, it is asked again for the others.

        Returns trees by row id."""
        while True:
            self._allowance = self.budget.open(rows)
            self.drafter.begin_round(self._allowance)
            if not rows:
                return {}
            with _Guard(rows) as guard:
                asks = [Ask(row, row.max_draft) for row in rows]
                trees = self._allowance.cut(self._allowance.ask(self.drafter, asks))
                return {row.id: rooted(tree, row, self.drafter) for row, tree in zip(rows, trees, strict=True)}
            rows = [row for row in rows if row not in guard.failed]

    def _verify(self, plan: Plan) -> Verdict | None:
        """Run ONE forward of the target over all segments. If it fails, all rows end, and the verdict is None."""
        if not plan.rows:
            return None
        needs = self.drafter.needs
        callback = None if needs.callback_layer is None else partial(self.drafter.on_layer, round=plan)
        with _Guard(plan.rows) as guard:
            verdict = self.target.verify(plan.segments, needs, callback, self.clock)
            wants_scores = any(row.params.prompt_logprobs is not None for row in plan.rows)
            return score_prompts(plan, verdict) if wants_scores else verdict
        for row in plan.rows:
            if row not in guard.failed:  # The error named another row.
                _fail(row, MethodError("the forward of its round failed at another request"))
        return None

    def _accept(self, plan: Plan, verdict: Verdict | None) -> list[Outcome]:
        """Apply the acceptance rule to each row's tree. A piece of a prompt is accepted whole."""
        if verdict is None:
            return [Failed(MethodError("its forward failed"))] * len(plan)
        outcomes: list[Outcome] = [Accepted([0], []) for _ in plan.segments]
        deciding = [i for i in range(len(plan)) if verdict.count(i)]
        rows, trees = [plan.rows[i] for i in deciding], [plan.trees[i] for i in deciding]
        decided: Sequence[Outcome] = []
        with _Guard(rows) as guard:
            decided = accept(rows, trees, [verdict.of(i) for i in deciding], self.rule)
        for i, outcome in zip(deciding, decided or map(guard.outcome, rows), strict=True):
            if isinstance(outcome, Failed):
                _fail(plan.rows[i], outcome.error)
            outcomes[i] = outcome
        self.clock.lap("accept")
        return outcomes

    def _apply(self, plan: Plan, outcomes: list[Outcome]) -> list[Delta]:
        """Commit the accepted paths to the target's cache, and give the rows their new tokens. Failures of rows go into
        `outcomes`."""
        for i, (row, outcome) in enumerate(zip(plan.rows, outcomes, strict=True)):
            if isinstance(outcome, Accepted):
                with _Guard([row]) as guard:
                    kept = plan.kept(i, outcome)
                    self.target.commit(row.slot, kept)
                    row.cached += len(kept)
                outcomes[i] = guard.outcome(row, outcome)
        self.clock.lap("commit")
        deltas = []
        for i, (row, tree, outcome) in enumerate(zip(plan.rows, plan.trees, outcomes, strict=True)):
            if isinstance(outcome, Accepted) and outcome.tokens:
                with _Guard([row]) as guard:
                    deltas.append(_extended(row, tree, outcome))
                outcomes[i] = guard.outcome(row, outcome)
        self.clock.lap("rows")
        return deltas

    def _observe(self, plan: Plan, round: Round, seconds: float) -> None:
        """Show a round to the budget and the drafter. seconds: time of the forward and of acceptance."""
        if len(round):
            with _Guard(round.rows):
                self.seats.keep_states(round)
                decoding = round.only(round.drafts())
                alone = seconds if len(decoding) == len(plan) else None
                if alone is not None and self.target.device.type == "cpu":
                    nodes, context = sum(tree.num_drafted for tree in decoding.trees), sum(map(len, decoding.rows))
                    self._crowded.note(len(decoding), nodes, context, alone)
                if len(decoding):
                    self._allowance.close(decoding.rows, decoding.trees, decoding.accepted, alone)
                self.drafter.observe(round)
            self.clock.lap("observe")

    # Rows come and go -----------------------------------------------------------------------------------------

    @property
    def max_batch(self) -> int:
        """Largest number of rows answered at once."""
        return self.config.max_batch

    @property
    def longest(self) -> int:
        """Largest number of tokens of a prompt and its answer, by context and memory. Answers end there."""
        return self.room.longest

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.rows or self.waiting)

    def add(self, prompt: Prompt, params: SamplingParams = SamplingParams()) -> Row:
        """Queue a request. It joins the batch between rounds, as soon as there is a slot and memory.

        Raises PromptError for a prompt that is empty or leaves no room for an answer in the context or the cache, and
        PacelineError for parameters that this model can never honour."""
        row = self.check(prompt, params)
        self._next_id += 1
        self.waiting.append(row)
        return row

    def check(self, prompt: Prompt, params: SamplingParams) -> Row:
        """Make the row that `add` would queue, or raise its error. Changes nothing; any thread may call it."""
        tokens = self.encode(prompt)
        params.check_vocabulary(self.target.vocab_size)
        detokenizer = None
        if self.tokenizer is not None:
            # An answer to messages begins a new text; any other answer continues the prompt's text.
            detokenizer = self.tokenizer.detokenizer(() if is_chat(prompt) else tokens.tolist())
        if params.stop and detokenizer is None:
            raise PromptError("Stop strings need a tokenizer, and this engine has none; use stop_token_ids.")
        self.room.check(len(tokens))
        most, ends = self.longest, self.target.eos_token_ids
        return Row(self._next_id, tokens, params, max_context=most, eos_token_ids=ends, detokenizer=detokenizer)

    def encode(self, prompt: Prompt) -> IntArray:
        """Turn a prompt into token ids, int64 [n]. PromptError if they do not fit the vocabulary or the context."""
        return encode(prompt, self.tokenizer, self.target.vocab_size, self.target.max_context)

    def reusable(self, row: Row) -> int:
        """How many tokens of a prompt `add` would take over from earlier requests. row: of `check`."""
        needs = self.drafter.of(row).needs
        return 0 if needs.callback_layer is not None else self.seats.reusable(row, needs.hidden_layers)

    def abort(self, row: Row) -> None:
        """End a request where it is. The row keeps its text so far."""
        row.end("abort")
        for rows in (self.waiting, self.rows):
            if row in rows:
                rows.remove(row)
                self._leave(row)

    def with_weights_of(self, target: Target) -> None:
        """Replace the target by a target with new weights, between requests, and forget earlier prefixes.

        Drafters that read its states or run its layers are bound to it; MethodError if a drafter does not fit. The
        memory of keys and values is kept, because new memory may take longer than answers do."""
        unnamed = copy(target)
        unnamed.weights_fingerprint = ""  # Heads for earlier weights must be accepted.
        rebind(self.drafter, unnamed)
        self.target, before = target, self.room
        self.room, self.seats = self._make_room(before.budget)
        if before.cache is not None and self.room.cache is not None:
            self.room.cache.take_memory(before.cache)

    def _make_room(self, budget: int | str | None) -> tuple[Room, Seats]:
        config, reuse, disk = self.config, self._can_reuse(), None
        if config.prefix_cache is not None:
            disk = config.prefix_cache, parse_bytes(config.prefix_cache_size, "prefix_cache_size")
        layers = max(len(drafter.needs.hidden_layers) for drafter in self.drafter.choices) if reuse else 0
        state = layers * self.target.hidden_size * self.target.dtype.itemsize
        room = Room(self.target, budget, max_batch=config.max_batch, state_bytes=state)
        return room, Seats(room, reuse=reuse, disk=disk)

    @contextmanager
    def using(self, *, rule: Rule | None = None, schedule: Schedule | None = None) -> Iterator[None]:
        """Use another acceptance rule or schedule inside a context. None: no change."""
        before = self.rule, self.schedule
        self.rule, self.schedule = rule or self.rule, schedule or self.schedule
        try:
            yield
        finally:
            self.rule, self.schedule = before

    def _admit(self) -> list[Row]:
        """Preempt rows if they outgrow the memory, and let requests join while they fit. Returns requests that
        failed."""
        for row in self.room.preempt(self.rows):
            self.seats.release(row)
            self.rows.remove(row)
            self.waiting.appendleft(row)
        joining, failed = self.schedule.admit(self.waiting, self.rows), list[Row]()
        while joining and self.room.has_room(joining[0], self.rows, len(joining)):
            self._join(joining.pop(0))
            failed += self._drop_ended()
        self.waiting.extendleft(reversed(joining))
        return failed

    def _join(self, row: Row) -> None:
        self.rows.append(row)
        with _Guard([row]):
            needs = self.drafter.of(row).needs
            self.seats.start(row, self.rows, None if needs.callback_layer is not None else needs.hidden_layers)
            row.joined = row.joined or perf_counter()
            self.clock.lap("rows")
            (self.drafter.restart if row.preempted else self.drafter.start)(row)
            self.clock.lap("draft")

    def _recall(self) -> None:
        """Show the states of reused tokens, like a piece of the prompt, to drafters that read all tokens' states."""
        for row, states in self.seats.recalled():
            none = torch.empty(0, self.target.vocab_size, device=self.target.device)
            segment = Segment.chunk(row.slot, row.tokens[: row.cached], last=False)
            verdict = Verdict.on([segment], none, dict(states), (none, none.long()))
            tree = DraftTree.root(int(segment.tokens[-1]))
            with _Guard([row]):
                self.drafter.of(row).observe(Round([row], [tree], [segment], verdict, [Accepted([0], [])]))

    def _drop_ended(self) -> list[Row]:
        """Remove the rows that have ended from the batch. Returns them."""
        ended = [row for row in self.rows if row.finish_reason is not None]
        for row in ended:
            self.rows.remove(row)
            self._leave(row)
        return ended

    def _leave(self, row: Row) -> None:
        """Free the row's slot, if any, and let the drafter forget the row, if it knows it."""
        if row.slot >= 0:
            self.seats.end(row)
        if not row.joined:
            return
        row.ended = perf_counter()
        self.budget.drop(row)
        try:
            self.drafter.drop(row)
        except Exception:  # The row's answer stands, and other rows must not suffer.
            log.exception("%s failed to forget request %d", self.drafter.name, row.id)

    # Whole answers --------------------------------------------------------------------------------------------

    def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = SamplingParams()
    ) -> Generator[Delta]:
        """Answer `prompts` together and yield the deltas of each round. `Delta.index` counts the prompts from 0.

        Closing the iterator aborts unfinished requests. Deltas of other callers' rows are not yielded."""
        if isinstance(prompts, str):
            raise PromptError("Give a list of prompts; for one prompt, a list that holds it.")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        if len(each) != len(prompts):
            raise PacelineError(f"{len(prompts)} prompts with {len(each)} params; give one for all, or one for each.")
        rows: list[Row] = []
        with ExitStack() as leaving:
            for prompt, of_prompt in zip(prompts, each, strict=True):
                rows.append(self.add(prompt, of_prompt))
                leaving.callback(self.abort, rows[-1])
            yield from self.follow(rows)

    def follow(self, rows: Sequence[Row], until: Callable[[], bool] = lambda: False) -> Generator[Delta]:
        """Run until `rows`, from `add`, have ended, and yield their deltas. `Delta.index` counts `rows`.

        until  function that is called before each round; if it returns True, the loop stops."""
        index = {row.id: i for i, row in enumerate(rows)}
        while any(row.finish_reason is None for row in rows) and not until():
            for delta in self.step():
                if delta.row.id in index:
                    yield replace(delta, index=index[delta.row.id])

    def finish(self, rows: Sequence[Row]) -> None:
        """Run until `rows`, from `add`, have ended. Raises PacelineError if any of them failed."""
        for delta in self.follow(rows):
            if delta.row.error:
                raise PacelineError(delta.row.error)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        progress: Callable[[Delta], None] | None = None,
    ) -> list[Completion]:
        """Answer `prompts`. Returns completions in their order. `progress` is called with each delta.

        A request that fails has finish_reason "error" and a message in `error`; the others go on."""
        rows: dict[int, Row] = {}
        with closing(self.stream(prompts, params)) as deltas:
            for delta in deltas:
                rows[delta.index] = delta.row
                if progress is not None:
                    progress(delta)
        return [Completion.of(i, rows[i]) for i in range(len(prompts))]

    # A round's time -------------------------------------------------------------------------------------------

    def _begin(self) -> dict[str, float]:
        """Start the clock, and set the number of processor threads. Returns the seconds booked so far, by part.

        While rows run, the number of threads changes only if it cannot change their tokens."""
        self.clock.start()
        may_change = not self.rows or self.target.same_on_any_threads
        self._num_threads = self.threads.begin(keep=None if may_change else self._num_threads)
        return dict(self.clock.seconds)

    def _end(self, plan: Plan, before: Mapping[str, float]) -> list[Row]:
        """Give the threads back, drop the rows that ended, and book each row's share of the round's time. Returns the
        rows that ended."""
        nodes = sum(segment.num_run for segment in plan.segments)
        prompt_tokens = sum(segment.num_run for segment in plan.segments if segment.is_prompt)
        kind = None if prompt_tokens or not nodes else (self.drafter.name, len(plan), nodes.bit_length())
        self.threads.end(kind)
        ended = self._drop_ended()
        self.clock.lap("rows")
        if plan.rows:
            self.rounds += 1
            self._pace.note(prompt_tokens, sum(self.clock.seconds.values()) - sum(before.values()))
            if prompt_tokens:
                self.prompt_profile = self.prompt_profile.plus(self.clock.seconds, before)
            for part, share in self.clock.shares(before, len(plan)).items():
                for row in plan.rows:
                    row.stats.seconds[part] = row.stats.seconds.get(part, 0.0) + share
        return ended

    @property
    def profile(self) -> Profile:
        """The time of all rounds so far, by part."""
        return Profile(self.rounds, dict(self.clock.seconds))

    def reset_profile(self) -> None:
        """Forget the time so far, such as that of a warm-up."""
        self.clock.seconds.clear()
        self.rounds, self.prompt_profile = 0, Profile(0, {})


def _target(model: str | Path | Target, schedule: Schedule, config: EngineConfig) -> Target:
    """Load `model`, or take a Target as it is, and give it the cache that `schedule` needs.

    Raises PacelineError, with a message of one line, for a model that cannot be found, read or used."""
    if isinstance(model, Target):
        target = fitted(_shortened(copy(model), config.context) if config.context else model, schedule)
        if config.exact:
            target.make_exact()
        return target
    from paceline.target.load import load  # imported on demand, like rectangular caches

    how = {name: getattr(config, name) for name in ("dtype", "device", "exact", "activations", "tokenizer")}
    native = False if getattr(schedule, "is_rectangular", False) else None
    return fitted(_shortened(load(model, native=native, **how), config.context), schedule)


def _shortened(target: Target, context: int | None) -> Target:
    """Limit the context of `target`."""
    if context is not None:
        target.max_context = min(target.max_context, context)
    return target


def _extended(row: Row, tree: DraftTree, outcome: Accepted) -> Delta:
    """Give a row its new tokens, and count them in its statistics. Returns the delta."""
    tokens = outcome.tokens
    taken = row.extend(tokens, tree.source, outcome.logprobs)
    accepted = min(taken, len(tokens) - 1)
    row.stats.record(tree.max_depth, tree.num_drafted, accepted, tree.source)
    ended, logprobs = row.finish_reason is not None, (outcome.logprobs or [])[:taken]
    draft = tree.num_drafted, tree.max_depth, tree.calls, accepted
    return Delta(row.id, row, tokens[:taken], row.take_pieces(), ended, *draft, logprobs)


class _Guard:
    """A context in which an error ends the row that it names, or all of `rows`.

    failed  rows that the error ended. error: the error, if any.

    It is a class because a generator takes five times as long, several times a round."""

    __slots__ = ("error", "failed", "rows")

    def __init__(self, rows: Sequence[Row]):
        self.rows = rows
        self.failed: Sequence[Row] = ()
        self.error: BaseException | None = None

    def __enter__(self) -> _Guard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False  # Ctrl-C, for example, goes on.
        named = [row for row in self.rows if isinstance(error, RowError) and row.id == error.row_id]
        cause = (error.__cause__ if isinstance(error, RowError) else None) or error
        # Other errors are bugs, so their traceback is logged.
        if not isinstance(cause, PacelineError) and out_of_memory(cause) is None:
            log.error("a round failed", exc_info=cause)
        self.failed, self.error = named or self.rows, cause
        for row in self.failed:
            _fail(row, cause)
        return True

    def outcome(self, row: Row, otherwise: Outcome | None = None) -> Outcome:
        """Return the row's failure, or `otherwise` if it did not fail."""
        if self.error is not None and (row in self.failed or otherwise is None):
            return Failed(self.error)
        assert otherwise is not None
        return otherwise


def _fail(row: Row, error: BaseException) -> None:
    """End a row with an error, unless it has ended."""
    message = str(error) if isinstance(error, PacelineError) else out_of_memory(error)
    message = message or f"{type(error).__name__}: {error}"
    log.error("request %d ended with an error: %s", row.id, message)
    row.end("error", message)
