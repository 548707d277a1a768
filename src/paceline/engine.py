"""The engine: one loop for every drafter, every temperature and every batch. It knows no method's name.

    draft -> verify -> accept -> commit -> observe

`Engine.step` is that loop's body; everything else is rows coming and going. A prompt is run by the same forward, in
chunks; plain decoding is the drafter that proposes nothing.

    from paceline import Engine, SamplingParams
    engine = Engine("models/demo", draft="sam")
    for delta in engine.stream(["Once upon a time"], SamplingParams(max_tokens=64)):
        print(delta.text, end="")
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np

from paceline.accept import Accepted, accept
from paceline.clock import Clock, Profile
from paceline.draft.base import Drafter
from paceline.draft.registry import create
from paceline.errors import PacelineError, PromptError
from paceline.row import FinishReason, Row, RowStats
from paceline.sampling import SamplingParams
from paceline.target.base import Segment, Target, Verdict
from paceline.target.load import load, load_tokenizer
from paceline.target.tokenizer import Tokenizer
from paceline.tree import DraftTree, IntArray

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text as it is, token ids, or chat messages with "role" and "content"."""

PARTS = {"draft": "draft", "observe": "draft", "prepare": "forward", "layers": "forward", "head": "forward"}
"""Which part of a row's statistics a part of the clock belongs to; accept is its own, the rest is bookkeeping."""


@dataclass
class Delta:
    """What one round added to one request.

    index   the request's number among the prompts of this call; pieces (source, text), source "" for the target's
            own tokens and the drafter's name for accepted ones. Text may lag behind tokens inside a character or
            before what may become a stop string.
    nodes   drafted tokens that were verified in this round, depth the longest path among them, calls the forwards of
            a draft model that they took."""

    index: int
    row: Row
    tokens: list[int]
    pieces: list[tuple[str, str]]
    finished: bool
    nodes: int = 0
    depth: int = 0
    calls: int = 0

    @property
    def text(self) -> str:
        """The new text."""
        return "".join(text for _, text in self.pieces)


@dataclass
class Completion:
    """A finished request. seconds: from the moment it joined the batch to its last token, prompt included."""

    index: int
    text: str
    tokens: list[int]
    prompt_tokens: int
    finish_reason: FinishReason
    seconds: float
    stats: RowStats = field(repr=False)
    runs: list[tuple[str, int]] = field(repr=False)

    @property
    def new_tokens(self) -> int:
        """Tokens of the answer, an end-of-sequence token included."""
        return len(self.tokens)

    @property
    def rounds(self) -> int:
        """Forwards of the target that yielded tokens, the one that finished the prompt included."""
        return self.stats.rounds

    @property
    def mean_accepted_tokens(self) -> float:
        """Tokens per round, the target's own included; plain decoding is 1."""
        return self.new_tokens / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens over `seconds`."""
        return self.new_tokens / self.seconds if self.seconds else 0.0


class Engine:
    """A target, a drafter, and the rows being answered.

    model          a folder, a hub id, or a Target that is already loaded.
    draft          "name[:checkpoint][,key=value...]", joined by "+"; or a Drafter. `paceline methods` lists them.
    max_batch      rows answered at once; more wait their turn.
    prefill_chunk  most prompt tokens in one forward, so that a long prompt does not hold up the other rows.
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
    ):
        if max_batch < 1 or prefill_chunk < 1:
            raise PacelineError(f"max_batch is {max_batch} and prefill_chunk {prefill_chunk}; both must be 1 or more.")
        self.drafter = create(draft) if isinstance(draft, str) else draft
        self.target = model if isinstance(model, Target) else load(model, dtype=dtype, device=device)
        self.tokenizer = tokenizer
        if tokenizer is None and not isinstance(model, Target):
            self.tokenizer = load_tokenizer(model)
        self.target.tokenizer = self.tokenizer
        self.max_batch, self.prefill_chunk = max_batch, prefill_chunk
        self.drafter.bind(self.target)
        self.target.check(self.drafter.needs)
        self.rows: list[Row] = []
        self.waiting: deque[Row] = deque()
        self.clock = Clock()
        self.rounds = 0
        self._next_id = 0

    # The loop ------------------------------------------------------------------------------------------------

    def step(self) -> list[Delta]:
        """One round for every active row: what each gained. Rows that ended have left when it returns."""
        clock, before = self._start_round()
        self._admit()
        if not self.rows:
            return []
        rows, trees, segments = self._lay_out(self._propose())
        clock.lap("draft")
        on_layer = self.drafter.on_layer if self.drafter.needs.callback_layer is not None else None
        verdict = self.target.verify(segments, self.drafter.needs, on_layer)
        accepted = self._accept(rows, trees, segments, verdict)
        clock.lap("accept")
        for row, done in zip(rows, accepted, strict=True):
            self.target.commit(row.slot, done.path)
            row.cached += len(done.path)
        clock.lap("commit")
        deltas = [self._extend(*of_row) for of_row in zip(rows, trees, accepted, strict=True)]
        clock.lap("rows")
        try:
            self.drafter.observe(rows, trees, verdict, accepted)
            clock.lap("observe")
        finally:  # a drafter that fails must not keep ended rows in the batch
            self._end_round(rows, before)
        return [delta for delta in deltas if delta.tokens]

    def _propose(self) -> dict[int, DraftTree]:
        """A tree, by row id, for every row that is past its prompt."""
        drafting = [row for row in self.rows if len(row.pending) == 1]
        drafts = self.drafter.propose(drafting) if drafting else []
        return dict(zip((row.id for row in drafting), drafts, strict=True))

    def _lay_out(self, drafts: Mapping[int, DraftTree]) -> tuple[list[Row], list[DraftTree], list[Segment]]:
        """The rows of this round with their trees and segments; prompts get chunks as far as the budget goes."""
        rows, trees, segments = [], [], []
        room = self.prefill_chunk
        for row in self.rows:
            if row.id in drafts:
                tree = drafts[row.id].clipped(row.max_draft)
                tree.source = tree.source or self.drafter.name
                segment = Segment.tree(row.slot, tree)
            elif room > 0:
                chunk = row.pending[:room]
                room -= len(chunk)
                tree = DraftTree.root(int(chunk[-1]))
                segment = Segment.chunk(row.slot, chunk, last=len(chunk) == len(row.pending))
            else:
                continue
            rows.append(row)
            trees.append(tree)
            segments.append(segment)
        return rows, trees, segments

    def _accept(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], segments: Sequence[Segment], verdict: Verdict
    ) -> list[Accepted]:
        """The acceptance rule over rows that have logits; a prompt's chunk is kept whole."""
        speaking = [i for i, segment in enumerate(segments) if segment.num_logits]
        decided = accept([rows[i] for i in speaking], [trees[i] for i in speaking], [verdict.of(i) for i in speaking])
        accepted = [Accepted(list(range(len(segment.tokens))), []) for segment in segments]
        for i, done in zip(speaking, decided, strict=True):
            chunk = len(segments[i].tokens) > len(trees[i])
            accepted[i] = Accepted(accepted[i].path, done.tokens) if chunk else done
        return accepted

    def _extend(self, row: Row, tree: DraftTree, accepted: Accepted) -> Delta:
        """Give a row its new tokens and note how its draft fared."""
        taken = 0
        if accepted.tokens:
            taken = row.extend(accepted.tokens, tree.source)
            row.stats.record(tree.max_depth, tree.num_drafted, min(taken, len(accepted.tokens) - 1))
        tokens = accepted.tokens[:taken]
        ended = row.finish_reason is not None
        return Delta(row.id, row, tokens, row.take_pieces(), ended, tree.num_drafted, tree.max_depth, tree.calls)

    # Rows come and go -----------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.rows or self.waiting)

    def add(self, prompt: Prompt, params: SamplingParams = SamplingParams()) -> Row:
        """Queue a request; it joins between rounds, as soon as there is room.

        Raises PromptError for a prompt that is empty or leaves no room in the model's context."""
        tokens = self.encode(prompt)
        decoder = None
        if self.tokenizer is not None:
            # An answer to messages is a text of its own; otherwise it goes on with the prompt's.
            decoder = self.tokenizer.decoder(() if _is_chat(prompt) else tokens.tolist())
        if params.stop and decoder is None:
            raise PromptError("Stop strings need a tokenizer, and this engine has none; use stop_token_ids.")
        row = Row(
            self._next_id,
            tokens,
            params,
            max_context=self.target.max_context,
            eos_token_ids=self.target.eos_token_ids,
            decoder=decoder,
        )
        self._next_id += 1
        self.waiting.append(row)
        return row

    def encode(self, prompt: Prompt) -> IntArray:
        """Token ids of a prompt, int64, checked against the model's vocabulary and context."""
        ids = np.asarray(self._encode(prompt))
        if not ids.size:
            raise PromptError("The prompt is empty; give it at least one token.")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise PromptError("The prompt's token ids must be one list of whole numbers.")
        tokens = ids.astype(np.int64)
        if tokens.min() < 0 or tokens.max() >= self.target.vocab_size:
            raise PromptError(f"The prompt has a token id outside the model's 0..{self.target.vocab_size - 1}.")
        if len(tokens) >= self.target.max_context:
            raise PromptError(
                f"The prompt has {len(tokens)} tokens, and this model's context holds {self.target.max_context} "
                "with the answer; shorten it."
            )
        return tokens

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, Mapping) or not hasattr(prompt, "__len__"):
            raise PromptError(
                f"A prompt is text, a list of token ids or a list of messages, not {type(prompt).__name__}; "
                "for one prompt, give a list that holds it."
            )
        if len(prompt) == 0:
            return []
        if not isinstance(prompt, str) and not _is_chat(prompt):
            return prompt  # type: ignore[return-value]
        if self.tokenizer is None:
            raise PromptError("This engine has no tokenizer; give the prompt as token ids.")
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else self.tokenizer.encode_chat(prompt)  # type: ignore[arg-type]

    def abort(self, row: Row) -> None:
        """End a request where it is; its text so far stays on the row."""
        if row.finish_reason is None:
            row.finish_reason = "abort"
            row.finish_text()
        if row in self.waiting:
            self.waiting.remove(row)
        elif row in self.rows:
            self._drop(row)

    def _admit(self) -> None:
        while self.waiting and len(self.rows) < self.max_batch:
            row = self.waiting[0]
            row.slot = self.target.add_row(row.expected_length)
            row.joined = perf_counter()
            self.rows.append(self.waiting.popleft())
            self.clock.lap("rows")
            self.drafter.start(row)
            self.clock.lap("draft")

    def _drop(self, row: Row) -> None:
        self.rows.remove(row)
        self.target.drop_row(row.slot)
        self.drafter.drop(row)
        row.ended = perf_counter()

    # A round's time -------------------------------------------------------------------------------------------

    def _start_round(self) -> tuple[Clock, dict[str, float]]:
        self.target.clock = self.clock
        self.clock.start()
        return self.clock, dict(self.clock.seconds)

    def _end_round(self, rows: Sequence[Row], before: Mapping[str, float]) -> None:
        """Let ended rows go, and book every row's share of the round."""
        for row in rows:
            if row.finish_reason is not None:
                self._drop(row)
        self.clock.lap("rows")
        self.rounds += 1
        for part, seconds in self.clock.seconds.items():
            share = (seconds - before.get(part, 0.0)) / len(rows)
            booked = part if part == "accept" else PARTS.get(part, "bookkeeping")
            for row in rows:
                row.stats.seconds[booked] = row.stats.seconds.get(booked, 0.0) + share

    @property
    def profile(self) -> Profile:
        """Where the time of all rounds so far went."""
        return Profile(self.rounds, dict(self.clock.seconds))

    def reset_profile(self) -> None:
        """Forget the time spent so far, a warm-up's say."""
        self.clock.seconds.clear()
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
            index = {row.id: i for i, row in enumerate(rows)}
            while any(row.finish_reason is None for row in rows):
                for delta in self.step():
                    if delta.row.id in index:
                        delta.index = index[delta.row.id]
                        yield delta

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        progress: Callable[[Delta], None] | None = None,
    ) -> list[Completion]:
        """Answer `prompts`; completions in their order. `progress` is called with every delta."""
        rows: dict[int, Row] = {}
        with closing(self.stream(prompts, params)) as deltas:
            for delta in deltas:
                rows[delta.index] = delta.row
                if progress is not None:
                    progress(delta)
        return [completion(i, rows[i]) for i in range(len(prompts))]


def _is_chat(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def completion(index: int, row: Row) -> Completion:
    """A row's answer, as it stands."""
    return Completion(
        index,
        row.text,
        row.new_tokens.tolist(),
        row.prompt_length,
        row.finish_reason or "abort",
        (row.ended or perf_counter()) - row.joined if row.joined else 0.0,
        row.stats,
        row.runs,
    )
