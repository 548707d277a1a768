"""The engine: one loop for every drafter, every temperature and every batch. It knows no method's name.

    draft -> verify -> accept -> commit -> observe

`Engine.step` is that loop's body; everything else is rows coming and going. A prompt is run by the same forward, in
pieces; plain decoding is the drafter that proposes nothing.

    from paceline import Engine, SamplingParams
    engine = Engine("models/demo", draft="sam")
    for delta in engine.stream(["Once upon a time"], SamplingParams(max_tokens=64)):
        print(delta.text, end="")

Where something fails, the rows that it concerns end with finish_reason "error" and the others go on. Only what fails
outside a request, such as a wrong option, is raised.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

from paceline.draft.base import Drafter, rooted, stamp
from paceline.draft.registry import create
from paceline.engine.accept import LOSSLESS, Accepted, Rule, accept
from paceline.engine.answers import WholeAnswers
from paceline.engine.clock import Clock, Profile
from paceline.engine.failures import Failures
from paceline.engine.memory import Memory
from paceline.engine.prompt import Prompt, encode, is_chat
from paceline.engine.request import Delta, Row
from paceline.engine.round import Round, Segment, Verdict
from paceline.engine.sampling import SamplingParams
from paceline.engine.scheduler import Ragged, Schedule, Turn
from paceline.engine.scoring import count_wanted, score_prompts
from paceline.engine.tree import DraftTree, IntArray
from paceline.errors import MethodError, PacelineError, PromptError
from paceline.target.base import Target
from paceline.target.threads import Threads
from paceline.target.tokenizer import Tokenizer

log = logging.getLogger("paceline")


class Engine(WholeAnswers):
    """A target, a drafter, and the rows being answered.

    model          a folder, a hub id, or a Target that is already loaded.
    draft          "name[:checkpoint][,key=value...]", joined by "+"; or a Drafter. `paceline methods` lists them.
    max_batch      rows answered at once; more wait their turn.
    prefill_chunk  most prompt tokens in one forward, so that a long prompt does not hold up the other rows.
    tokenizer      another one than the model's own.
    rule           the acceptance rule, which says whether it is lossless; None: the drafter's, else the lossless one.
    cache_memory   most memory for keys and values, in bytes or as "2GB"; None: half of what is free. Requests wait for
                   it, and where rows outgrow it the youngest gives way and is run again later (docs/batching.md).
    reuse          start from the keys and values of earlier requests whose prompts begin alike.
    schedule       which rows run when: "ragged" (the default), "equal", "grouped", or a Schedule.
    threads        processor threads of a round, of this engine and all others of its target; None: torch's number, or
                   fewer while other processes want the cores.
    exact          make the target exact: the same logits, bit for bit, in any draft and batch (docs/exact.md). None:
                   a model loaded here is, where that costs no time; False: it is not.
    exact_profile  wait for the accelerator after every part of a round, so that `profile` is right; that costs time.
    """

    def __init__(
        self,
        model: str | Path | Target,
        draft: str | Drafter = "none",
        *,
        dtype: str = "auto",
        device: str = "auto",
        max_batch: int = 8,
        prefill_chunk: int = 512,
        tokenizer: Tokenizer | None = None,
        rule: Rule | None = None,
        cache_memory: int | str | None = None,
        reuse: bool = True,
        schedule: str | Schedule | None = None,
        threads: int | None = None,
        exact: bool | None = None,
        exact_profile: bool = False,
    ):
        if max_batch < 1 or prefill_chunk < 1:
            raise PacelineError(f"max_batch is {max_batch} and prefill_chunk {prefill_chunk}; both must be 1 or more.")
        self.drafter = create(draft) if isinstance(draft, str) else draft
        self.schedule: Schedule = Ragged(max_batch, prefill_chunk)
        if isinstance(model, Target) and schedule is None:
            self.target = model
            if exact:
                self.target.make_exact()
        else:  # what reads models and knows the published schedules is imported only here
            from paceline.engine.opening import opened

            self.target, self.schedule = opened(
                model, schedule, max_batch, prefill_chunk, dtype=dtype, device=device, exact=exact, tokenizer=tokenizer
            )
        if tokenizer is not None:
            self.target.tokenizer = tokenizer
        self.tokenizer = self.target.tokenizer
        self.max_batch, self.prefill_chunk = max_batch, prefill_chunk
        self.rule = rule or self.drafter.acceptance or LOSSLESS
        self.drafter.bind(self.target)
        self.target.check(self.drafter.needs)
        reuse = reuse and not self.drafter.needs.whole_prompt
        self.memory = Memory(self.target, cache_memory, max_batch=max_batch, reuse=reuse)
        self.rows: list[Row] = []
        self.waiting: deque[Row] = deque()
        self.clock = Clock(exact_profile)
        self.drafter.clock = self.clock
        if threads is not None:
            self.target.threads = Threads(threads)
        self._threads = torch.get_num_threads()
        self.rounds = 0
        self._next_id = 0
        self._failures = Failures()

    # The loop ------------------------------------------------------------------------------------------------

    def step(self) -> list[Delta]:
        """One round: what each row gained. Rows that ended have left when it returns."""
        plan, deltas = Round([], [], []), list[Delta]()
        before = self._begin()
        try:
            self._admit()
            plan = self._plan(self.schedule.select(self.memory.ready(self.rows)))
            verdict = self._verify(plan)
            outcomes = self._accept(plan, verdict)
            deltas = self._apply(plan, outcomes)
            self._observe(plan, verdict, outcomes)
        finally:
            self._end(plan, before)
        return [*deltas, *self._failures.deltas()]

    def _plan(self, turns: Sequence[Turn]) -> Round:
        """What runs in this round: a draft for every row that is decoding, a piece of prompt for the others."""
        self.drafter.beside = sum(turn.chunk for turn in turns)
        trees = self._propose([turn.row for turn in turns if not turn.chunk])
        plan = Round([], [], [])
        for row, chunk in turns:
            if row.finish_reason is not None:
                continue
            if chunk:
                tokens = row.pending[:chunk]
                tree = DraftTree.root(int(tokens[-1]))
                segment = Segment.chunk(row.slot, tokens, last=not row.num_new and chunk == len(row.pending))
                segment.num_logits = max(segment.num_logits, count_wanted(row, chunk))
            else:
                tree = trees[row.id].clipped(row.max_draft)
                segment = Segment.tree(row.slot, tree)
                self.memory.saw(len(tree))
            plan.rows.append(row)
            plan.trees.append(tree)
            plan.segments.append(segment)
        self.clock.lap("draft")
        return plan

    def _propose(self, rows: Sequence[Row]) -> dict[int, DraftTree]:
        """A tree by row id. Where the drafter fails at a row, it is asked again for the others, whose drafts must not
        depend on that."""
        while rows := [row for row in rows if row.finish_reason is None]:
            for row in rows:
                row.random.free.begin(row.num_new)
            with self._failures.of(rows):
                trees = stamp(self.drafter.propose(rows), self.drafter)
                return {row.id: rooted(tree, row, self.drafter) for row, tree in zip(rows, trees, strict=True)}
        return {}

    def _verify(self, plan: Round) -> Verdict | None:
        """ONE forward of the target over all segments. Where it fails all rows end, and there is no verdict."""
        if not plan.rows:
            return None
        needs = self.drafter.needs
        watch = None if needs.callback_layer is None else partial(self.drafter.on_layer, round=plan)
        with self._failures.of(plan.rows):
            verdict = self.target.verify(plan.segments, needs, watch)
            score_prompts(plan, verdict)
            return verdict
        for row in plan.rows:
            if row.finish_reason is None:  # the error named another row
                self._failures.end(row, MethodError("the forward of its round failed at another request"))
        return None

    def _accept(self, plan: Round, verdict: Verdict | None) -> list[Accepted]:
        """What became of each row's tree, by the acceptance rule. A piece of a prompt is kept whole."""
        outcomes = [Accepted(list(range(len(segment.tokens))), []) for segment in plan.segments]
        speaking = [i for i, segment in enumerate(plan.segments) if verdict and segment.num_logits]
        rows, trees = [plan.rows[i] for i in speaking], [plan.trees[i] for i in speaking]
        with self._failures.of(rows):
            decided = accept(rows, trees, [verdict.of(i) for i in speaking], self.rule) if verdict else []
            for i, accepted in zip(speaking, decided, strict=True):
                if accepted.error is not None:
                    self._failures.end(plan.rows[i], accepted.error)
                elif plan.is_prompt(i):
                    accepted.path = outcomes[i].path
                outcomes[i] = accepted
        self.clock.lap("accept")
        return outcomes

    def _apply(self, plan: Round, outcomes: Sequence[Accepted]) -> list[Delta]:
        """Keep the accepted paths in the target's cache and give the rows their new tokens."""
        for row, outcome in zip(plan.rows, outcomes, strict=True):
            if row.finish_reason != "error":
                with self._failures.of([row]):
                    self.target.commit(row.slot, outcome.path)
                    row.cached += len(outcome.path)
        self.clock.lap("commit")
        deltas = []
        for row, tree, outcome in zip(plan.rows, plan.trees, outcomes, strict=True):
            if outcome.tokens and row.finish_reason != "error":
                with self._failures.of([row]):
                    deltas.append(_extended(row, tree, outcome))
        self.clock.lap("rows")
        return deltas

    def _observe(self, plan: Round, verdict: Verdict | None, outcomes: list[Accepted]) -> None:
        """Show the drafter what became of the drafts of all rows but those that failed."""
        alive = [i for i, row in enumerate(plan.rows) if row.finish_reason != "error"]
        if alive:
            round = replace(plan, verdict=verdict, accepted=outcomes)
            round = round if len(alive) == len(plan) else round.only(alive)
            with self._failures.of(round.rows):
                self.drafter.observe(round)
            self.clock.lap("observe")

    # Rows come and go -----------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.rows or self.waiting)

    def add(self, prompt: Prompt, params: SamplingParams = SamplingParams()) -> Row:
        """Queue a request; it joins between rounds, as soon as there is room.

        Raises PromptError for a prompt that is empty, leaves no room in the model's context or can never fit into the
        cache's memory, PacelineError for parameters that this model can never honour."""
        row = self.check(prompt, params)
        self._next_id += 1
        self.waiting.append(row)
        return row

    def check(self, prompt: Prompt, params: SamplingParams) -> Row:
        """The row that `add` would queue, or the error that it would raise. Changes nothing, and any thread may ask."""
        tokens = self.encode(prompt)
        params.check_vocabulary(self.target.vocab_size)
        detokenizer = None
        if self.tokenizer is not None:
            # An answer to messages is a text of its own; otherwise it goes on with the prompt's.
            detokenizer = self.tokenizer.detokenizer(() if is_chat(prompt) else tokens.tolist())
        if params.stop and detokenizer is None:
            raise PromptError("Stop strings need a tokenizer, and this engine has none; use stop_token_ids.")
        room, ends = self.target.max_context, self.target.eos_token_ids
        row = Row(self._next_id, tokens, params, max_context=room, eos_token_ids=ends, detokenizer=detokenizer)
        self.memory.check(row)
        return row

    def with_weights_of(self, target: Target) -> None:
        """Go on with a target whose weights are new, between requests, and forget what was kept of earlier prompts."""
        self.target = target
        self.memory = Memory(target, self.memory.budget, max_batch=self.max_batch, reuse=self.memory.reuse)

    def encode(self, prompt: Prompt) -> IntArray:
        """Token ids of a prompt, int64, checked against the model's vocabulary and context."""
        return encode(prompt, self.tokenizer, self.target.vocab_size, self.target.max_context)

    def abort(self, row: Row) -> None:
        """End a request where it is; its text so far stays on the row."""
        row.end("abort")
        if row in self.waiting:
            self.waiting.remove(row)
            self._leave(row)
        elif row in self.rows:
            self._drop(row)

    def _admit(self) -> None:
        """Take back what rows have outgrown, then let requests join as far as there is room, in their order."""
        for row in self.memory.give_way(self.rows):
            self.rows.remove(row)
            self.waiting.appendleft(row)
        joining = self.schedule.admit(self.waiting, self.rows)
        while joining and self.memory.has_room(joining[0], self.rows):
            self._join(joining.pop(0))
        self.waiting.extendleft(reversed(joining))
        self._drop_ended()

    def _join(self, row: Row) -> None:
        with self._failures.of([row]):
            self.memory.start(row, self.rows)
            row.joined = row.joined or perf_counter()
            self.rows.append(row)
            self.clock.lap("rows")
            (self.drafter.restart if row.preempted else self.drafter.start)(row)
            self.clock.lap("draft")
        if row.slot < 0:
            self._leave(row)

    def _drop_ended(self) -> None:
        for row in [row for row in self.rows if row.finish_reason is not None]:
            self._drop(row)

    def _drop(self, row: Row) -> None:
        self.rows.remove(row)
        self.memory.end(row)
        self._leave(row)

    def _leave(self, row: Row) -> None:
        """Let the drafter forget a row, if it has met it."""
        if not row.joined:
            return
        row.ended = perf_counter()
        row.random.free.forget()  # callers may keep rows
        try:
            self.drafter.drop(row)
        except Exception:  # the row's answer stands, and other rows must not suffer
            log.exception("%s failed to forget request %d", self.drafter.name, row.id)

    # A round's time -------------------------------------------------------------------------------------------

    def _begin(self) -> dict[str, float]:
        """Start the clock, and take as many processor threads as pay now; what the clock had booked so far. The number
        of threads changes in the middle of an answer only where that cannot change its tokens."""
        self.target.clock = self.clock
        self.clock.start()
        may_change = not self.rows or self.target.same_on_any_threads
        self._threads = self.target.threads.begin(keep=None if may_change else self._threads)
        return dict(self.clock.seconds)

    def _end(self, plan: Round, before: Mapping[str, float]) -> None:
        """Give the threads back, let ended rows leave, and give every row its share of the round's time."""
        nodes = sum(segment.num_run for segment in plan.segments)
        has_prompts = any(segment.is_prompt for segment in plan.segments)
        kind = None if has_prompts or not nodes else (self.drafter.name, len(plan), nodes.bit_length())
        self.target.threads.end(kind)
        self._drop_ended()
        self.clock.lap("rows")
        if not plan.rows:
            return
        self.rounds += 1
        for part, share in self.clock.shares(before, len(plan)).items():
            for row in plan.rows:
                row.stats.seconds[part] = row.stats.seconds.get(part, 0.0) + share

    @property
    def profile(self) -> Profile:
        """Where the time of all rounds so far went."""
        return Profile(self.rounds, dict(self.clock.seconds), dict(self.clock.parallel))

    def reset_profile(self) -> None:
        """Forget the time spent so far, such as a warm-up's."""
        self.clock.seconds.clear()
        self.clock.parallel.clear()
        self.rounds = 0


def _extended(row: Row, tree: DraftTree, outcome: Accepted) -> Delta:
    """Give a row its new tokens and note how its draft fared; what it gained."""
    tokens = outcome.tokens
    taken = row.extend(tokens, tree.source, outcome.logprobs)
    row.stats.record(tree.max_depth, tree.num_drafted, min(taken, len(tokens) - 1))
    ended, logprobs = row.finish_reason is not None, (outcome.logprobs or [])[:taken]
    draft = tree.num_drafted, tree.max_depth, tree.calls
    return Delta(row.id, row, tokens[:taken], row.take_pieces(), ended, *draft, logprobs)
