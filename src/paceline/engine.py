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
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch

from paceline.accept import LOSSLESS, Accepted, Rule, accept
from paceline.clock import Clock, Profile
from paceline.completion import Completion, Delta
from paceline.draft.base import Drafter, stamp
from paceline.draft.registry import create
from paceline.errors import PacelineError, PromptError, RowError
from paceline.failures import Failures
from paceline.prompt import Prompt, encode, is_chat
from paceline.round import Round, Segment
from paceline.row import Row
from paceline.sampling import SamplingParams
from paceline.schedule import Ragged, Schedule, Turn
from paceline.target.base import Target
from paceline.target.load import load, load_tokenizer
from paceline.target.tokenizer import Tokenizer
from paceline.threads import Threads
from paceline.tree import DraftTree, IntArray

log = logging.getLogger("paceline")

PARTS = {
    "draft": "draft", "observe": "draft", "top_k": "draft",
    "prepare": "forward", "layers": "forward", "head": "forward",
    "accept": "accept",
}  # fmt: skip
"""Which part of a row's statistics a part of the clock belongs to; the rest is bookkeeping."""


class Engine:
    """A target, a drafter, and the rows being answered.

    model          a folder, a hub id, or a Target that is already loaded.
    draft          "name[:checkpoint][,key=value...]", joined by "+"; or a Drafter. `paceline methods` lists them.
    max_batch      rows answered at once; more wait their turn.
    prefill_chunk  most prompt tokens in one forward, so that a long prompt does not hold up the other rows.
    tokenizer      another one than the model's own.
    rule           the acceptance rule; every one but the default says whether it is lossless.
    schedule       which rows run when; by default `Ragged(max_batch, prefill_chunk)`.
    threads        processor threads of a round, of this engine and all others of its target; None: torch's number, or
                   fewer while other processes want the cores.
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
        rule: Rule = LOSSLESS,
        schedule: Schedule | None = None,
        threads: int | None = None,
        exact_profile: bool = False,
    ):
        if max_batch < 1 or prefill_chunk < 1:
            raise PacelineError(f"max_batch is {max_batch} and prefill_chunk {prefill_chunk}; both must be 1 or more.")
        self.drafter = create(draft) if isinstance(draft, str) else draft
        if isinstance(model, Target):
            self.target = model
        else:
            self.target = load(model, dtype=dtype, device=device)
            tokenizer = tokenizer or self.target.tokenizer or load_tokenizer(model)  # which says what is missing
        if tokenizer is not None:
            self.target.tokenizer = tokenizer
        self.tokenizer = self.target.tokenizer
        self.max_batch, self.prefill_chunk = max_batch, prefill_chunk
        self.rule, self.schedule = rule, schedule or Ragged(max_batch, prefill_chunk)
        self.drafter.bind(self.target)
        self.target.check(self.drafter.needs)
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
        with self._booked() as round, self._on_threads(round):
            self._admit()
            self._draft(round, self.schedule.select(self.rows))
            self._verify(round)
            self._accept(round)
            self._commit(round)
            deltas = self._extend(round)
            self._observe(round)
        return [*deltas, *self._failures.deltas()]

    def _draft(self, round: Round, turns: Sequence[Turn]) -> None:
        """Lay out the round: a draft for every row that is decoding, a piece of prompt for the others."""
        trees = self._propose([turn.row for turn in turns if not turn.chunk])
        for row, chunk in turns:
            if row.finish_reason is not None:
                continue
            if chunk:
                tokens = row.pending[:chunk]
                tree = DraftTree.root(int(tokens[-1]))
                segment = Segment.chunk(row.slot, tokens, last=chunk == len(row.pending))
            else:
                tree = trees[row.id].clipped(row.max_draft)
                segment = Segment.tree(row.slot, tree)
            round.rows.append(row)
            round.trees.append(tree)
            round.segments.append(segment)
        self.clock.lap("draft")

    def _propose(self, rows: Sequence[Row]) -> dict[int, DraftTree]:
        """A tree by row id; without drafts for rows whose drafter has just failed at another."""
        if rows:
            with self._failures.of(rows):
                trees = stamp(self.drafter.propose(rows), self.drafter)
                return {row.id: _rooted(tree, row, self.drafter) for row, tree in zip(rows, trees, strict=True)}
        return {row.id: DraftTree.root(row.last_token) for row in rows}

    def _verify(self, round: Round) -> None:
        """ONE forward of the target over all segments."""
        if not round.rows:
            return
        watch = self.drafter.needs.callback_layer is not None
        with self._failures.of(round.rows):
            round.verdict = self.target.verify(
                round.segments,
                self.drafter.needs,
                (lambda layer, hidden: self.drafter.on_layer(layer, hidden, round)) if watch else None,
            )
        self._without_failed(round)

    def _accept(self, round: Round) -> None:
        """The acceptance rule over rows that have logits; a piece of a prompt is kept whole."""
        speaking = [i for i, segment in enumerate(round.segments) if segment.num_logits]
        round.accepted = [Accepted(list(range(len(segment.tokens))), []) for segment in round.segments]
        spoken = round if len(speaking) == len(round) else round.only(speaking)
        with self._failures.of(spoken.rows):
            decided = accept(spoken.rows, spoken.trees, [spoken.logits(i) for i in range(len(spoken))], self.rule)
            for i, accepted in zip(speaking, decided, strict=True):
                if accepted.error is not None:
                    self._failures.end(round.rows[i], accepted.error)
                elif round.is_prompt(i):
                    accepted.path = round.accepted[i].path
                round.accepted[i] = accepted
        self._without_failed(round)
        self.clock.lap("accept")

    def _commit(self, round: Round) -> None:
        """Keep the accepted paths in the target's cache."""
        for row, accepted in zip(round.rows, round.accepted, strict=True):
            with self._failures.of([row]):
                self.target.commit(row.slot, accepted.path)
                row.cached += len(accepted.path)
        self._without_failed(round)
        self.clock.lap("commit")

    def _extend(self, round: Round) -> list[Delta]:
        """Give the rows their new tokens and note how their drafts fared."""
        deltas = []
        for row, tree, accepted in zip(round.rows, round.trees, round.accepted, strict=True):
            tokens = accepted.tokens
            if not tokens:
                continue
            with self._failures.of([row]):
                taken = row.extend(tokens, tree.source, accepted.logprobs)
                row.stats.record(tree.max_depth, tree.num_drafted, min(taken, len(tokens) - 1))
                ended, logprobs = row.finish_reason is not None, (accepted.logprobs or [])[:taken]
                draft = tree.num_drafted, tree.max_depth, tree.calls
                deltas.append(Delta(row.id, row, tokens[:taken], row.take_pieces(), ended, *draft, logprobs))
        self._without_failed(round)
        self.clock.lap("rows")
        return deltas

    def _observe(self, round: Round) -> None:
        """Show the drafter what became of its drafts."""
        if round.rows:
            with self._failures.of(round.rows):
                self.drafter.observe(round)
            self.clock.lap("observe")

    def _without_failed(self, round: Round) -> None:
        """Take rows that have failed out of the round."""
        if not self._failures.rows:
            return
        kept = [i for i, row in enumerate(round.rows) if row.finish_reason != "error"]
        if len(kept) < len(round):
            vars(round).update(vars(round.only(kept)))

    # Rows come and go -----------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.rows or self.waiting)

    def add(self, prompt: Prompt, params: SamplingParams = SamplingParams()) -> Row:
        """Queue a request; it joins between rounds, as soon as there is room.

        Raises PromptError for a prompt that is empty or leaves no room in the model's context, PacelineError for
        parameters that this model can never honour."""
        tokens = self.encode(prompt)
        params.check_vocabulary(self.target.vocab_size)
        detokenizer = None
        if self.tokenizer is not None:
            # An answer to messages is a text of its own; otherwise it goes on with the prompt's.
            detokenizer = self.tokenizer.detokenizer(() if is_chat(prompt) else tokens.tolist())
        if params.stop and detokenizer is None:
            raise PromptError("Stop strings need a tokenizer, and this engine has none; use stop_token_ids.")
        row = Row(
            self._next_id,
            tokens,
            params,
            max_context=self.target.max_context,
            eos_token_ids=self.target.eos_token_ids,
            detokenizer=detokenizer,
        )
        self._next_id += 1
        self.waiting.append(row)
        return row

    def encode(self, prompt: Prompt) -> IntArray:
        """Token ids of a prompt, int64, checked against the model's vocabulary and context."""
        return encode(prompt, self.tokenizer, self.target.vocab_size, self.target.max_context)

    def abort(self, row: Row) -> None:
        """End a request where it is; its text so far stays on the row."""
        row.end("abort")
        if row in self.waiting:
            self.waiting.remove(row)
        elif row in self.rows:
            self._drop(row)

    def _admit(self) -> None:
        for row in self.schedule.admit(self.waiting, self.rows):
            with self._failures.of([row]):
                row.slot = self.target.add_row(row.expected_length)
                row.joined = perf_counter()
                self.rows.append(row)
                self.clock.lap("rows")
                self.drafter.start(row)
                self.clock.lap("draft")
        self._drop_ended()

    def _drop_ended(self) -> None:
        for row in [row for row in self.rows if row.finish_reason is not None]:
            self._drop(row)

    def _drop(self, row: Row) -> None:
        self.rows.remove(row)
        self.target.drop_row(row.slot)
        row.ended = perf_counter()
        try:
            self.drafter.drop(row)
        except Exception:  # the row's answer stands, and other rows must not suffer
            log.exception("%s failed to forget request %d", self.drafter.name, row.id)

    # A round's time -------------------------------------------------------------------------------------------

    @contextmanager
    def _booked(self) -> Iterator[Round]:
        """An empty round to fill in. After it ended rows are gone, whatever happened, and every row has its share of
        the time."""
        self.target.clock = self.clock
        self.clock.start()
        before = dict(self.clock.seconds)
        round = Round([], [], [])
        try:
            yield round
        finally:
            self._drop_ended()
            self.clock.lap("rows")
        if not round.rows:
            return
        self.rounds += 1
        for part, seconds in self.clock.seconds.items():
            share = (seconds - before.get(part, 0.0)) / len(round)
            booked = PARTS.get(part, "bookkeeping")
            for row in round.rows:
                row.stats.seconds[booked] = row.stats.seconds.get(booked, 0.0) + share

    @contextmanager
    def _on_threads(self, round: Round) -> Iterator[None]:
        """Run a round on as many processor threads as pay now. The number changes in the middle of an answer only where
        that cannot change its tokens."""
        threads, may_change = self.target.threads, not self.rows or self.target.same_on_any_threads
        self._threads = threads.begin(keep=None if may_change else self._threads)
        try:
            yield
        finally:
            nodes = sum(segment.num_run for segment in round.segments)
            has_prompts = any(segment.is_prompt for segment in round.segments)
            threads.end(None if has_prompts or not nodes else (self.drafter.name, len(round), nodes.bit_length()))

    @property
    def profile(self) -> Profile:
        """Where the time of all rounds so far went."""
        return Profile(self.rounds, dict(self.clock.seconds), dict(self.clock.parallel))

    def reset_profile(self) -> None:
        """Forget the time spent so far, such as a warm-up's."""
        self.clock.seconds.clear()
        self.clock.parallel.clear()
        self.rounds = 0

    # Whole answers --------------------------------------------------------------------------------------------

    def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = SamplingParams()
    ) -> Generator[Delta]:
        """Answer `prompts` together, yielding what each round adds; `Delta.index` counts the prompts from 0.

        Closing the iterator gives up what is unfinished. One stream at a time: other rows run along, but what they
        gain meanwhile is on the rows alone."""
        if isinstance(prompts, str):
            raise PromptError("Give a list of prompts; for one prompt, a list that holds it.")
        every = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        if len(every) != len(prompts):
            raise PacelineError(f"{len(prompts)} prompts with {len(every)} params; give one for all, or one for each.")
        rows: list[Row] = []
        with ExitStack() as leaving:
            for prompt, wish in zip(prompts, every, strict=True):
                rows.append(self.add(prompt, wish))
                leaving.callback(self.abort, rows[-1])
            yield from self.follow(rows)

    def follow(self, rows: Sequence[Row], until: Callable[[], bool] = lambda: False) -> Generator[Delta]:
        """Run until requests that were added have ended, yielding what each round adds; `Delta.index` counts `rows`.

        until  is called before every round; no more are run once it is true."""
        index = {row.id: i for i, row in enumerate(rows)}
        while any(row.finish_reason is None for row in rows) and not until():
            for delta in self.step():
                if delta.row.id in index:
                    yield replace(delta, index=index[delta.row.id])

    def finish(self, rows: Sequence[Row]) -> None:
        """Run until requests that were added have ended. Raises PacelineError if one of them failed."""
        for delta in self.follow(rows):
            if delta.row.error:
                raise PacelineError(delta.row.error)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        progress: Callable[[Delta], None] | None = None,
    ) -> list[Completion]:
        """Answer `prompts`; completions in their order. `progress` is called with every delta.

        A request that failed has finish_reason "error" and says why in `error`; the others are unharmed."""
        rows: dict[int, Row] = {}
        with closing(self.stream(prompts, params)) as deltas:
            for delta in deltas:
                rows[delta.index] = delta.row
                if progress is not None:
                    progress(delta)
        return [Completion.of(i, rows[i]) for i in range(len(prompts))]


def _rooted(tree: DraftTree, row: Row, drafter: Drafter) -> DraftTree:
    """`tree`, if its root is the row's last token."""
    if tree.tokens[0] != row.last_token:
        raise RowError(row.id) from ValueError(f"{drafter.name} proposed a tree whose root is not the row's last token")
    return tree
