"""Memory: who joins, who gives way and comes back, what is reused; and that no answer depends on any of it."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.core.request import Row
from paceline.core.rules import parse_bytes
from paceline.core.sampling import SamplingParams
from paceline.draft.base import Drafter
from paceline.draft.fallback import Choice
from paceline.draft.registry import create
from paceline.engine.engine import Engine
from paceline.engine.prefix_cache import BLOCK
from paceline.engine.prefixes import Prefixes, common
from paceline.engine.room import SLACK, Room, _free_in_group
from paceline.engine.scheduler import Ragged
from paceline.engine.seats import Seats
from paceline.errors import PacelineError, PromptError
from paceline.formats.facts import BEFORE_NORM
from paceline.formats.tokenizer import Tokenizer
from paceline.target.base import Needs
from paceline.target.cache import RaggedCache, in_granules
from tests import drafters, models, native

NEW = 80
RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(2, models.VOCAB_SIZE, n).tolist() for n in (30, 3, 61, 12, 1, 25)]


@pytest.fixture(scope="module")
def one_decoder():
    made, _ = native.pair("llama2", max_position_embeddings=1024, **native.TINY)
    made.eos_token_ids = ()
    return made


@pytest.fixture
def decoder(one_decoder):
    one_decoder.cache = one_decoder.new_cache(one_decoder.num_layers)
    return one_decoder


@pytest.fixture
def eager(monkeypatch):
    """Rows reserve hardly more than their prompts, so that they outgrow it."""
    monkeypatch.setattr("paceline.core.request.AHEAD", 4)


def engine(decoder, drafter="none", rows=None, **options):
    """An engine with memory for `rows` rows of 192 tokens."""
    assert not decoder.cache.held
    memory = None if rows is None else rows * 192 * decoder.cache.token_bytes
    return Engine(decoder, drafter, tokenizer=Tokenizer(models.tokenizer()), cache_memory=memory, **options)


def coupled():
    table = torch.randn(models.VOCAB_SIZE, models.VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    return drafters.Coupled(2 * table, (2, 1, 1))


WISHES = [SamplingParams(max_tokens=NEW, temperature=t, seed=i) for i, t in enumerate((0, 1, 0.7, 1, 0.7, 0))]


# Preemption --------------------------------------------------------------------------------------------------------

MAKERS = {"none": lambda: create("none"), "recycling": lambda: create("recycling"), "coupled": coupled}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", MAKERS)
def test_rows_that_gave_way_answer_as_alone(decoder, name):
    wishes = [replace(wish, logprobs=2, stop=("zzzz",)) for wish in WISHES]
    alone = engine(decoder, MAKERS[name](), max_batch=1, reuse=False).generate(PROMPTS, wishes)
    tight = engine(decoder, MAKERS[name](), rows=2, max_batch=6)
    rows = []
    texts = [""] * len(PROMPTS)
    over = set()
    for delta in tight.stream(PROMPTS, wishes):
        rows += [delta.row] if delta.row not in rows else []
        texts[delta.index] += delta.text
        if decoder.cache.nbytes + tight.room.prefixes.nbytes > tight.room.budget:
            over.add(tight.rounds)
    assert len(over) <= ("recycling" in name), "the first of its large trees takes a little more"
    rows.sort(key=lambda row: row.id)
    assert sum(row.preempted for row in rows) >= 1
    assert rows[0].preempted == 0, "the oldest never gives way"
    for row, done, text in zip(rows, alone, texts, strict=True):
        assert row.new_tokens.tolist() == done.tokens
        assert text == row.text == done.text
        assert [entry.token for entry in row.logprobs] == done.tokens
        assert [entry.logprob for entry in row.logprobs] == pytest.approx([e.logprob for e in done.logprobs], abs=1e-4)
        assert sum(row.stats.accepted) == row.stats.rounds
        # What recycling has learnt of other rows decides how many rounds a row takes.
        assert row.stats.rounds == done.rounds or "recycling" in name
    assert not decoder.cache.held


@pytest.mark.usefixtures("eager")
def test_a_draft_models_rows_that_gave_way_draw_as_alone(stories):
    target = Engine(str(stories), dtype="float32").target
    wishes = [replace(wish, max_tokens=80, temperature=1.0) for wish in WISHES[:4]]
    spec = f"model:{stories},stop=heuristic,draft=4"  # which remembers how long a row's drafts were

    def answers(**options):
        return Engine(target, spec, **options).generate(["Once upon", "Tom had a red ball", "The", "Lily"], wishes)

    alone = answers(max_batch=1, reuse=False)
    memory = 2 * 192 * target.cache.token_bytes
    tight = Engine(target, spec, max_batch=4, cache_memory=memory)
    rows = [tight.add(p, w) for p, w in zip(["Once upon", "Tom had a red ball", "The", "Lily"], wishes, strict=True)]
    while tight.has_work:
        tight.step()
    assert [row.new_tokens.tolist() for row in rows] == [done.tokens for done in alone]
    assert sum(row.preempted for row in rows) >= 1
    assert sum(sum(row.stats.accepted[1:]) for row in rows) > 0


@pytest.mark.usefixtures("eager")
def test_who_came_first_goes_first(decoder):
    """Rows end in an order that no row overtakes by luck: equal requests end in the order they came."""
    tight = engine(decoder, rows=2, max_batch=8)
    rows = [tight.add(PROMPTS[1], SamplingParams(max_tokens=NEW)) for _ in range(7)]
    ended = []
    while tight.has_work:
        tight.step()
        ended += [row.id for row in rows if row.finish_reason and row.id not in ended]
        waiting = [row.id for row in tight.waiting]
        assert waiting == sorted(waiting)
        assert not tight.rows or not waiting or max(row.id for row in tight.rows) < min(waiting)
    assert ended == sorted(ended)
    assert sum(row.preempted for row in rows) > 0


@pytest.mark.usefixtures("eager")
def test_a_row_given_up_while_it_waits_to_come_back_leaves_nothing(decoder):
    class Counting(Drafter):
        held: set[int] = set()

        def start(self, row):
            self.held.add(row.id)

        def drop(self, row):
            self.held.remove(row.id)

    tight = engine(decoder, Counting(), rows=2, max_batch=4)
    rows = [tight.add(prompt, SamplingParams(max_tokens=NEW)) for prompt in PROMPTS[:4]]
    while not any(row.preempted for row in rows):
        tight.step()
    gone = next(row for row in rows if row.preempted)
    assert gone in tight.waiting
    text = gone.text
    tight.abort(gone)
    assert (gone.finish_reason, gone.text[: len(text)]) == ("abort", text)
    assert gone.ended >= gone.joined > 0
    while tight.has_work:
        tight.step()
    assert not Counting.held
    assert not decoder.cache.held


def test_an_answer_has_as_many_tokens_as_the_memory_leaves(decoder):
    tight = engine(decoder, rows=1)
    most = 192 - SLACK
    assert tight.longest == most < decoder.max_context
    for asked, reason in ((most - 20, "length"), (most - 19, "context"), (10_000, "context")):
        (done,) = tight.generate([[5] * 20], SamplingParams(max_tokens=asked, ignore_eos=True))
        assert (len(done.tokens), done.finish_reason) == (most - 20, reason)
    tight.add([5] * (most - 1), SamplingParams(max_tokens=10))
    with pytest.raises(PromptError, match=rf"{most} tokens and one new one need .* holds {most}: shorten the prompt"):
        tight.add([5] * most)
    assert len(tight.waiting) == 1


def test_a_context_can_be_shorter_than_the_models(decoder):
    """Which stays as it is for other engines."""
    short = Engine(decoder, context=24)
    assert (short.longest, Engine(decoder, context=10_000).longest) == (24, decoder.max_context)
    (done,) = short.generate([[5] * 20], SamplingParams(max_tokens=100, ignore_eos=True))
    assert (len(done.tokens), done.finish_reason) == (4, "context")
    with pytest.raises(PromptError, match="24 tokens, and this model's context holds 24"):
        short.add([5] * 24)
    (done,) = Engine(decoder).generate([[5] * 24], SamplingParams(max_tokens=8, ignore_eos=True))
    assert len(done.tokens) == 8
    with pytest.raises(PacelineError, match="context is 0; it must be 1 or more"):
        Engine(decoder, context=0)


def test_requests_wait_until_there_is_memory(decoder):
    tight = engine(decoder, rows=2, max_batch=6)
    most = 0
    for _ in tight.stream(PROMPTS, SamplingParams(max_tokens=60)):
        most = max(most, len(tight.rows))
    assert most == 2, "what they reserve is for both of them, and nobody has to give way"


class Allocator:
    """Memory of an accelerator: as in torch, what does not fit is an OutOfMemoryError of several lines."""

    def __init__(self, free):
        self.free = free

    def take(self, size):
        if size > self.free:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size} bytes. GPU 0 has 1 of which 0 is free.\nSee the docs."
            )


def test_requests_wait_where_the_device_has_less_than_the_budget_says(decoder, monkeypatch):
    cache, alone = decoder.cache, Engine(decoder, "none")
    right = [one.tokens for prompt in PROMPTS for one in alone.generate([prompt], SamplingParams(max_tokens=20))]
    allocator, reshape = Allocator(cache.nbytes_of(2, 256)), type(cache).reshape

    def reshaped(cache, slots, capacity):
        allocator.take(cache.nbytes_of(slots, capacity))
        return reshape(cache, slots, capacity)

    cache.reshape(0, 0)
    monkeypatch.setattr(type(cache), "reshape", reshaped)
    wide, most = engine(decoder, rows=6, max_batch=6), 0
    done = {}
    for delta in wide.stream(PROMPTS, SamplingParams(max_tokens=20)):
        most = max(most, len(wide.rows))
        done.setdefault(delta.index, []).extend(delta.tokens)
    assert [done[i] for i in range(len(PROMPTS))] == right
    assert 1 < most < 6


def test_a_forward_without_memory_is_one_line(decoder, monkeypatch):
    monkeypatch.setattr(decoder, "verify", lambda *_: Allocator(0).take(1))
    (done,) = Engine(decoder, "none").generate([[5, 6]], SamplingParams(max_tokens=4))
    assert done.finish_reason == "error"
    start = "there is no memory left (CUDA out of memory); a smaller model, "
    assert str(done.error).startswith(start)


def test_rows_that_join_together_get_their_memory_at_once(decoder, monkeypatch):
    shapes = []
    reshape = type(decoder.cache).reshape
    monkeypatch.setattr(type(decoder.cache), "reshape", lambda cache, *to: shapes.append(to[0]) or reshape(cache, *to))
    engine = Engine(decoder, "none", max_batch=decoder.cache.num_slots + 12)
    engine.generate([[5, 6, n] for n in range(7, 7 + engine.max_batch)], SamplingParams(max_tokens=2))
    assert shapes == [engine.max_batch]


def test_a_long_request_gets_the_memory_of_many_short_ones(decoder):
    wide = engine(decoder, rows=6, max_batch=6)
    wide.generate(PROMPTS, SamplingParams(max_tokens=8))
    slots = decoder.cache.num_slots
    (done,) = wide.generate([[7] * 600], SamplingParams(max_tokens=8))
    assert done.finish_reason == "length"
    assert decoder.cache.nbytes <= wide.room.budget
    assert decoder.cache.capacity > 600
    assert decoder.cache.num_slots < slots
    assert len(wide.generate(PROMPTS, SamplingParams(max_tokens=8))) == 6


def test_rows_of_another_engine_stay_where_they_are(decoder):
    """Only that engine knows their slots, so that a cache which it shares may not be laid out anew below them."""
    params, long = SamplingParams(max_tokens=12), [7, 8, 9] * 100
    alone = [Engine(decoder).generate([one], params)[0].tokens for one in (PROMPTS[0], long)]
    first, second = Engine(decoder, max_batch=4, reuse=False), Engine(decoder, reuse=False)
    short = [first.add(one, SamplingParams(max_tokens=2)) for one in PROMPTS[1:4]]
    first.step()
    other = second.add(PROMPTS[0], params)
    second.step()
    first.finish(short)
    assert decoder.cache.held == [other.slot] == [3]
    first.room.budget = first.room._size(3, 320)  # for two rows of the long prompt's length, and not for four
    row = first.add(long, params)
    first.step()
    assert decoder.cache.held[-1] == other.slot == 3
    second.finish([other])
    first.finish([row])
    assert [one.tokens[one.prompt_length :].tolist() for one in (other, row)] == alone


@pytest.mark.parametrize(
    ("text", "size"), [("2GB", 2 * 10**9), ("1.5 GiB", 3 * 2**29), ("500m", 5 * 10**8), (4096, 4096), ("64kb", 64000)]
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "2 apples", "GB", 0, -5, True, "1e9", "0.1"])
def test_other_sizes_are_refused(text):
    with pytest.raises(PacelineError, match=r"cache_memory is .* such as 2GB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("limit", "used", "cached"),
    [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_files_that_were_read_do_not_count_as_used_in_a_container(tmp_path, limit, used, cached):
    stat = f"anon 700\ninactive_anon 5\n{cached} 200\n"
    for name, text in ((limit, "1000\n"), (used, "950\n"), (str(Path(used).with_name("memory.stat")), stat)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert _free_in_group(tmp_path) == [250]
    (tmp_path / limit).write_text("max\n")
    assert _free_in_group(tmp_path) == []


# Prompts beside each other -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reuse", [True, False])
def test_a_long_prompt_holds_up_neither_rows_nor_short_prompts(decoder, reuse):
    busy = engine(decoder, prefill_chunk=32, max_batch=8, reuse=reuse)
    talking = busy.add(PROMPTS[1], SamplingParams(max_tokens=NEW))
    busy.step()
    long = busy.add([9] * 640, SamplingParams(max_tokens=2))
    busy.step()
    short = busy.add(PROMPTS[3], SamplingParams(max_tokens=2))  # 12 tokens: one round of the other half
    before = talking.num_new
    busy.step()
    assert short.num_new == 1
    assert talking.num_new > before
    late = [busy.add([i + 20] * 30, SamplingParams(max_tokens=2)) for i in range(5)]
    rounds = 1
    while long.num_new == 0:
        busy.step()
        rounds += 1
        late.append(busy.add([rounds + 40] * 30, SamplingParams(max_tokens=2)))  # ever more short ones
    assert rounds <= 2 * 640 / 32
    assert talking.num_new >= rounds, "it gained a token in every round"
    for row in (*late, long, talking):
        busy.abort(row)
    assert not busy.has_work


# Reuse ---------------------------------------------------------------------------------------------------------------


def test_a_prompt_goes_on_from_an_earlier_one(decoder):
    """Turns of a conversation: each prompt is the one before, its answer, and something new."""
    plain, reusing = engine(decoder, max_batch=1, reuse=False), engine(decoder, "sam", max_batch=1)
    prompt, run = PROMPTS[2], []
    verify = decoder.verify

    def count(segments, *rest):
        run.append(sum(len(s.tokens) for s in segments if s.is_prompt))
        return verify(segments, *rest)

    for turn in range(4):
        wish = SamplingParams(max_tokens=20, temperature=turn % 2, seed=turn)
        (wanted,) = plain.generate([prompt], wish)
        decoder.verify = count
        try:
            (done,) = reusing.generate([prompt], wish)
        finally:
            del decoder.verify
        assert done.tokens == wanted.tokens
        assert sum(run) == len(prompt) - done.reused
        assert done.reused == (len(prompt) - 12 - 1 if turn else 0)  # the last token of an answer is never run
        prompt, run = [*prompt, *done.tokens, *PROMPTS[3]], []


@pytest.mark.parametrize("batch", [1, 6])
def test_what_prompts_share_is_computed_once(decoder, batch):
    """Also when they come together."""
    prompts, wishes = [[*PROMPTS[2], *prompt] for prompt in PROMPTS], [replace(wish, max_tokens=24) for wish in WISHES]
    wanted = engine(decoder, max_batch=1, reuse=False).generate(prompts, wishes)
    done = engine(decoder, coupled() if batch == 1 else "none", max_batch=batch).generate(prompts, wishes)
    assert [one.tokens for one in done] == [one.tokens for one in wanted]
    assert done[0].reused == 0
    assert all(61 <= one.reused <= 63 for one in done[1:])


def test_a_row_waits_for_an_older_one_as_long_as_that_is_there(decoder):
    seats = Seats(Room(decoder, "1GB", max_batch=2), reuse=True)
    old, new = (Row(id, PROMPTS[2], SamplingParams(max_tokens=5), max_context=2048) for id in range(2))
    seats.start(old, [])
    seats.start(new, [old])
    assert seats.ready([old, new]) == [old]
    seats.room.release(old)
    seats.release(old)
    seats.start(old, [new])
    assert seats.ready([old, new]) == [old], "which gave way and came back, and does not wait for the other in turn"
    seats.end(old)
    assert seats.ready([new]) == [new]


def test_of_a_prompt_that_is_being_answered_the_last_token_is_run(decoder):
    wish = SamplingParams(max_tokens=8)
    (wanted,) = engine(decoder, reuse=False).generate([PROMPTS[2]], wish)
    twice = engine(decoder)
    rows = [twice.add(PROMPTS[2], wish)]
    for _ in range(3):
        twice.step()
    rows.append(twice.add(PROMPTS[2], wish))
    twice.finish(rows)
    assert [row.new_tokens.tolist() for row in rows] == [wanted.tokens] * 2
    assert [row.reused for row in rows] == [0, len(PROMPTS[2]) - 1]


class Reading(Drafter):
    """Remembers the states of all tokens that were committed, by row."""

    def __init__(self, *layers):
        self.needs, self.read = Needs(hidden_layers=layers), dict[int, torch.Tensor]()

    def start(self, row):
        self.read[row.id] = torch.empty(0, len(self.needs.hidden_layers) * native.TINY["hidden_size"])

    def observe(self, round):
        for i, row in enumerate(round.rows):
            states = [round.committed(i, layer) for layer in self.needs.hidden_layers]
            self.read[row.id] = torch.cat([self.read[row.id], torch.cat(states, -1)])
            assert len(self.read[row.id]) == row.cached


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("rows", [4, 40])
def test_a_drafter_that_reads_states_is_shown_those_of_tokens_that_are_reused(decoder, rows):
    """Of rows that run and have ended, of answers too, of rows that gave way, and of those that reused; within the
    budget."""
    turns = [[PROMPTS[2] + PROMPTS[0]] * 3, [PROMPTS[2] * 2, PROMPTS[2] + PROMPTS[0] + PROMPTS[3]]]
    turns.append([PROMPTS[2] * 2 + PROMPTS[1]])
    read, reused = list[dict[int, torch.Tensor]](), list[list[int]]()
    for reuse in (False, True):
        drafter = Reading(1, 3, BEFORE_NORM)
        made, done = engine(decoder, drafter, rows=rows, max_batch=4, reuse=reuse), []
        for prompts in turns:
            for delta in made.stream(prompts, SamplingParams(max_tokens=60)):
                assert decoder.cache.nbytes + made.room.prefixes.nbytes <= made.room.budget
                if delta.finished:
                    done.append(delta.row)
        read.append(drafter.read)
        reused.append([row.reused for row in sorted(done, key=lambda row: row.id)])
        assert any(row.preempted for row in done) == (rows == 4 and reuse)
        decoder.cache = decoder.new_cache(decoder.num_layers)
    assert not made.seats._of
    assert not any(reused[0])
    assert all(reused[1][1:]) or rows == 4
    for plain, other in zip(read[0].values(), read[1].values(), strict=True):
        torch.testing.assert_close(plain, other, rtol=1e-4, atol=1e-4)


def test_rows_share_with_those_that_have_the_states_they_need(decoder):
    parts = {"none": create("none"), "one": Reading(1), "more": Reading(1, 3)}
    asked = [replace(WISHES[0], max_tokens=2, draft=name) for name in ("none", "one", "more", "none", "one", "more")]
    for batch in (1, 6):
        made = engine(decoder, Choice(parts), max_batch=batch)
        assert [done.reused for done in made.generate([PROMPTS[2]] * 6, asked)] == [0, 0, 0, 60, 60, 60]
        assert len(made.room.prefixes) == 1, "those with fewer states are replaced"


def test_a_drafter_that_is_called_in_the_middle_of_the_forward_sees_all_of_the_prompt(decoder):
    listening = drafters.Listening(Drafter(), Needs(callback_layer=1))
    done = engine(decoder, listening, max_batch=1).generate([PROMPTS[2]] * 2, SamplingParams(max_tokens=4))
    assert [one.reused for one in done] == [0, 0]
    done = engine(decoder, "recycling", max_batch=1).generate([PROMPTS[2]] * 2, SamplingParams(max_tokens=4))
    assert [one.reused for one in done] == [0, 60]


@pytest.mark.parametrize("together", [True, False])
def test_prompts_of_another_salt_are_not_reused(decoder, together, tmp_path):
    """Of rows that run, of those that have ended, and from the disk."""
    prompt, wishes = PROMPTS[2] * 3, [SamplingParams(max_tokens=3, cache_salt=salt) for salt in ("", "a", "b", "a")]
    for there in (0, 2 * BLOCK):  # a new folder, and what the first engine has left in it
        made = engine(decoder, max_batch=4, prefix_cache=tmp_path)
        done = made.generate([prompt] * 4, wishes) if together else [made.generate([prompt], w)[0] for w in wishes]
        assert [one.reused for one in done] == [there, there, there, len(prompt) - 1]
        decoder.cache = decoder.new_cache(decoder.num_layers)


def joined(waiting, **options):
    """Who joins, one after another, where a row ends in every round. waiting: requests, by the round they come in."""
    schedule = Ragged(prefill_chunk=8, **options)
    queue, running, order = deque[Row](), list[Row](), ""
    for turn in range(40):
        for client in waiting.get(turn, ""):
            queue.append(Row(len(order) + len(queue), [1], SamplingParams(), max_context=9))
            queue[-1].client = client
        if turn % 2:
            queue.extendleft(reversed(schedule.admit(queue, running)))  # there was no memory
        for row in schedule.admit(queue, running):
            row.joined, order = turn + 1.0, order + row.client
            running.append(row)
        if turn > 2 and running:
            running.pop(0)
    return order


def test_clients_join_in_turn():
    assert joined({0: "aaaaaa", 1: "bb"}, max_batch=1) == "ababaaaa"
    assert joined({0: "aaaaaabbcc"}, max_batch=3) == "abcabcaaaa"
    assert joined({0: "aaaaaa", 3: "b", 4: "c"}, max_batch=4) == "aaaabcaa"
    assert joined({0: "aaaaaab"}, max_batch=4, most_of_one=2) == "abaaaaa"
    assert joined({0: "aaaa", 9: "aa"}, max_batch=2) == "aaaaaa"


def test_a_client_has_no_more_rows_than_it_may():
    schedule, queue = Ragged(4, prefill_chunk=8, most_of_one=2), deque[Row]()
    for id, client in enumerate("aaaaab"):
        queue.append(Row(id, [1], SamplingParams(), max_context=9))
        queue[-1].client = client
    running = schedule.admit(queue, [])
    assert [row.client for row in running] == ["a", "b", "a"]
    assert not schedule.admit(queue, running)
    assert [row.id for row in schedule.admit(queue, running[1:])] == [2]


@pytest.mark.usefixtures("eager")
def test_where_there_is_no_memory_the_client_with_the_most_rows_gives_way(decoder):
    tight = engine(decoder, rows=2, max_batch=6)
    rows = [tight.add(PROMPTS[1], SamplingParams(max_tokens=100)) for _ in range(4)]
    rows[3].client = "b"
    while tight.has_work:
        tight.step()
    assert sum(row.preempted for row in rows[:3]) > 0
    assert rows[3].preempted == 0


def test_rows_that_failed_are_not_reused(decoder):
    reusing = engine(decoder, drafters.Failing("propose", 2), max_batch=1)
    first, second = reusing.generate([PROMPTS[2]] * 2, SamplingParams(max_tokens=6))
    assert (first.finish_reason, second.finish_reason) == ("error", "length")
    assert second.reused == 0


def test_prefixes_make_room_for_rows_the_least_used_first(decoder):
    tight = engine(decoder, rows=2, max_batch=2)
    wish = SamplingParams(max_tokens=2)
    texts = [[i + 2] * 60 for i in range(8)]
    for text in texts:
        tight.generate([text], wish)
        [done] = tight.generate([texts[0]], wish)
        assert done.reused, "it is in use all the time"
        assert decoder.cache.nbytes + tight.room.prefixes.nbytes <= tight.room.budget
    kept = tight.room.prefixes
    assert 1 < len(kept) < 8
    assert kept.best(np.array(texts[0]))[0] == 60
    assert kept.best(np.array(texts[1]))[0] == 0
    tight.generate([[3] * 120] * 2, wish)  # two rows of 192 take all of it
    assert len(kept) <= 1


def test_a_prefix_has_room_for_its_states_too(decoder):
    budget = decoder.cache.nbytes + 100 * decoder.cache.token_bytes
    room, beside = Room(decoder, budget, max_batch=1), Room(decoder, budget, max_batch=1, state_bytes=1)
    assert room.make_room(100)
    assert not room.make_room(100, 1)
    assert not beside.make_room(100)


def test_prefixes_that_go_on_take_the_place_of_those_they_go_on_from():
    kept = Prefixes(2)
    for n in (30, 50, 40):
        tokens = np.arange(n)
        if kept.common(tokens) < len(tokens):
            kept.add(tokens, torch.zeros(1, 2, 1, n, 1))
    assert (len(kept), kept.best(np.arange(90))[0], kept.nbytes) == (1, 50, 50 * 8)
    kept.add(np.arange(60), torch.zeros(1, 2, 1, 60, 1), hidden={1: torch.zeros(60, 4)})
    kept.add(np.arange(70), torch.zeros(1, 2, 1, 70, 1))
    assert len(kept) == 2, "one with states is not replaced by one without them"
    for first in (10, 20):
        kept.add(np.array([first]), torch.zeros(1, 2, 1, 1, 1))
    assert len(kept) == 2
    assert kept.best(np.arange(90))[0] == 0


def test_common_beginnings():
    assert [common(np.array(a, np.int64), np.array([1, 2, 3])) for a in ([], [2], [1], [1, 2, 4], [1, 2, 3, 4])] == [
        0, 0, 1, 2, 3,
    ]  # fmt: skip


# The cache -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [SLACK // 2 + 1, SLACK, 3 * SLACK])
def test_a_large_draft_has_room_and_some_for_padding(decoder, nodes):
    room, row = Room(decoder, "1GB", max_batch=1), Row(0, [5] * 100, SamplingParams(max_tokens=1), max_context=2048)
    room.enter(row)
    room.note_draft(row, nodes)
    assert decoder.cache.capacity >= len(row) + nodes + SLACK // 2


@torch.inference_mode()
def test_reshaping_keeps_every_row():
    cache = RaggedCache(2, 1, 3, 500, torch.float32, "cpu")
    kv = {}
    for n in (5, 70, 3, 100):
        slot = cache.add_row(n)
        kv[slot] = torch.randn(2, 2, 1, n, 3)
        cache.paste(slot, kv[slot])
    cache.drop_row(0)
    moved = cache.reshape(3, 200)
    assert moved == {1: 0, 2: 1, 3: 2}
    assert (cache.num_slots, cache.capacity) == (3, in_granules(200))
    for old, new in moved.items():
        assert torch.equal(cache.copy(new, cache.length(new)), kv[old])
    assert cache.reshape(5, 10) == {0: 0, 1: 1, 2: 2}
    assert cache.capacity == in_granules(100), "no row is cut"
    assert cache.add_row(10) == 3


@torch.inference_mode()
def test_a_cache_for_whose_new_shape_there_is_no_memory_is_as_before():
    cache = RaggedCache(2, 1, 3, 10**15, torch.float32, "cpu")
    slot = cache.add_row(10)
    kv = torch.randn(2, 2, 1, 7, 3)
    cache.paste(slot, kv)
    with pytest.raises(RuntimeError):
        cache.reshape(1, 10**14)
    assert torch.equal(cache.copy(slot, 7), kv)
    assert cache.capacity == 64
