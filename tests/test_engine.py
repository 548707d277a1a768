"""The engine: rows come and go, end where plain decoding ends, and everything it counts adds up."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.accept import Accepted, Lossless, follow
from paceline.core.request import Completion, Delta, Row
from paceline.core.round import Round
from paceline.core.sampling import SamplingParams
from paceline.core.segment import Segment
from paceline.core.tree import DraftTree
from paceline.draft.base import Drafter
from paceline.engine.engine import Engine
from paceline.engine.scheduler import Ragged
from paceline.errors import PacelineError, PromptError
from paceline.formats.tokenizer import Tokenizer
from paceline.target.base import Needs
from tests import drafters, models, native, plain
from tests.fakes import Spelling, TableTarget

NEW = 16


class World:
    """A small random model, some prompts of different lengths, and their plain answers."""

    def __init__(self):
        self.decoder, self.model = native.pair("llama2")
        self.decoder.eos_token_ids = ()
        self.tokenizer = Tokenizer(models.tokenizer())
        rng = np.random.default_rng(0)
        self.prompts = [rng.integers(2, models.VOCAB_SIZE, n).tolist() for n in (1, 9, 30, 2, 17, 5, 64, 3, 12)]
        self._answers = {}

    def answer(self, prompt, params, eos=()):
        key = (tuple(prompt), repr(params), tuple(eos))
        if key not in self._answers:
            self._answers[key] = plain.decode(self.model, prompt, params, eos=eos, tokenizer=self.tokenizer)
        return self._answers[key]

    def text(self, i):
        """Prompt i and the longest answer there is room for."""
        return self.prompts[i] + self.answer(self.prompts[i], SamplingParams(max_tokens=60)).tokens

    def oracle(self, **kw):
        known = {tuple(p): self.text(i) for i, p in enumerate(self.prompts)}
        return drafters.Oracle(known, **kw)

    def drafter(self, name):
        return drafters.by_name(name, self.oracle().answers)

    def engine(self, drafter=None, **kw):
        assert not self.taken, "an earlier test left rows behind"
        return Engine(self.decoder, drafter or Drafter(), tokenizer=self.tokenizer, **kw)

    @property
    def taken(self):
        """Slots that hold a row."""
        return self.decoder.cache.held


@pytest.fixture(scope="module")
def shared_world():
    return World()


@pytest.fixture
def world(shared_world):
    for slot in shared_world.taken:  # of a test that failed
        shared_world.decoder.drop_row(slot)
    return shared_world


def listening(inner):
    return drafters.Listening(inner, Needs(hidden_layers=(0, 2, 3), top_k=3, callback_layer=1))


NAMES = ("none", "random tree", "oracle chain", "oracle tree", "probes", "early exit")


# Rows come and go -------------------------------------------------------------------------------------------------


def test_two_engines_of_one_target_leave_it_and_each_other_alone(world):
    """Each has a tokenizer, a number of threads, a limit of memory and a clock of its own."""
    known = {name: id(value) for name, value in vars(world.decoder).items()}
    engines = [
        world.engine(world.oracle(error=0.2), cache_memory="2MB", threads=1),
        Engine(world.decoder, "recycling", cache_memory="1MB", max_batch=2),
    ]
    params = SamplingParams(max_tokens=NEW)
    rows = [(engine, engine.add(prompt, params), prompt) for prompt in world.prompts[:4] for engine in engines]
    while any(engine.has_work for engine in engines):
        for engine in engines:
            engine.step()
    for _, row, prompt in rows:
        assert row.new_tokens.tolist() == world.answer(prompt, params).tokens
    assert [engine.tokenizer for engine in engines] == [world.tokenizer, None]
    assert [engine.threads.fixed for engine in engines] == [1, world.decoder.threads.fixed]
    assert all(engine.clock.seconds["layers"] > 0 for engine in engines)
    assert {name: id(vars(world.decoder)[name]) for name in known} == known


@pytest.mark.parametrize(("name", "batch"), [*zip(NAMES, (1, 3) * 3, strict=True)])
def test_rows_join_and_leave_between_rounds(world, name, batch):
    drafter = listening(world.drafter(name))
    engine = world.engine(drafter, max_batch=batch, prefill_chunk=20)
    often = world.text(2)[len(world.prompts[2])]
    own = [
        {}, {"temperature": 1.0, "seed": 1}, {"repetition_penalty": 1.5},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 2}, {"logit_bias": {7: 50.0}},
        {"temperature": 3.0, "min_p": 0.1, "seed": 3}, {"bad_words": [[often], [7, 8]]},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 4},
        {"temperature": 0.7, "repetition_penalty": 0.8, "bad_words": [[4]], "seed": 5},
    ]  # fmt: skip
    lengths = [3, NEW, 10, 1, 17, NEW, 12, 8, 5]
    params = [SamplingParams(max_tokens=n, **more) for n, more in zip(lengths, own, strict=True)]
    rows = []
    rounds = 0
    while engine.has_work or len(rows) < len(lengths):
        if rounds % 3 == 0 and len(rows) < len(lengths):  # they come one after another, while others are running
            rows.append(engine.add(world.prompts[len(rows)], params[len(rows)]))
        engine.step()
        rounds += 1
        assert len(engine.rows) <= batch
        assert len(world.taken) == len(engine.rows)
        assert all(row.finish_reason is None for row in engine.rows)
    for prompt, wish, row in zip(world.prompts, params, rows, strict=True):
        assert row.new_tokens.tolist() == world.answer(prompt, wish).tokens
        assert row.text == world.answer(prompt, wish).text
        assert row.finish_reason == "length"
        assert drafter.rows[row.id] == "dropped"
    joined = [row.joined for row in rows]
    assert min(joined) > 0
    assert joined == sorted(joined), "in the order in which they came"
    assert not world.taken
    assert engine.step() == []


def test_closing_a_stream_gives_up_its_rows_only(world):
    engine = world.engine(max_batch=3)
    other = engine.add(world.prompts[0], SamplingParams(max_tokens=NEW))
    stream = engine.stream(world.prompts[1:6], SamplingParams(max_tokens=NEW))
    deltas = [next(stream) for _ in range(5)]
    stream.close()
    assert {d.row.finish_reason for d in deltas} == {"abort"}
    assert engine.rows == [other]
    assert not engine.waiting
    while engine.has_work:
        engine.step()
    assert other.new_tokens.tolist() == world.answer(world.prompts[0], other.params).tokens


def test_an_exception_in_progress_leaves_nothing_behind(world):
    engine = world.engine()

    def stop(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        engine.generate(world.prompts, progress=stop)
    assert not engine.has_work
    assert not world.taken
    del caught


@pytest.mark.parametrize("time", [1, 4])
@pytest.mark.parametrize("method", ["start", "propose", "observe", "drop"])
def test_a_drafter_that_fails_leaves_nothing_behind(world, method, time):
    engine = world.engine(drafters.Failing(method, time), max_batch=3)
    params = [SamplingParams(max_tokens=n) for n in (2, 6, 9, 1, 5, 5, 5, 5, 5)]
    right = [world.answer(p, w).tokens for p, w in zip(world.prompts, params, strict=True)]
    out = engine.generate(world.prompts, params)
    failed = [o for o in out if o.finish_reason == "error"]
    assert all(o.error == f"RuntimeError: {method} failed" for o in failed)
    assert len(failed) == (0 if method == "drop" else 1) or method in ("propose", "observe")
    assert len(failed) <= 3, "of a round that cannot be pinned to a row all rows end, and no others"
    assert all(o.tokens == tokens[: len(o.tokens)] for o, tokens in zip(out, right, strict=True))
    assert [o.tokens for o in out if o not in failed] == [t for o, t in zip(out, right, strict=True) if o not in failed]
    assert not engine.has_work
    assert not world.taken
    assert [o.tokens for o in engine.generate(world.prompts, params)] == right


def test_a_drafter_that_fails_at_one_row_ends_that_row_alone(world):
    class OneByOne(Drafter):
        def draft(self, row, most):
            if row.id == 2 and row.num_new >= 3:
                raise RuntimeError("no idea")
            return DraftTree.chain(row.last_token, [row.last_token][:most])

    out = world.engine(OneByOne(), max_batch=4).generate(world.prompts, SamplingParams(max_tokens=NEW))
    assert [i for i, o in enumerate(out) if o.finish_reason == "error"] == [2]
    assert out[2].error == "RuntimeError: no idea"
    for i, o in enumerate(out):
        expected = world.answer(world.prompts[i], SamplingParams(max_tokens=NEW)).tokens
        assert o.tokens == (expected if i != 2 else expected[: len(o.tokens)])
    assert not world.taken


def test_a_drafter_that_roots_a_tree_elsewhere_ends_that_row_alone(world):
    class Astray(Drafter):
        name = "astray"

        def draft(self, row, most):
            return DraftTree.root(row.last_token + (row.id == 1))

    out = world.engine(Astray()).generate(world.prompts[:3], SamplingParams(max_tokens=4))
    assert [o.finish_reason == "error" for o in out] == [False, True, False]
    assert "root is not the row's last token" in out[1].error


def test_rows_that_ended_leave_even_if_the_drafter_fails_to_observe_it(world):
    engine = world.engine(drafters.Failing("observe", 1))
    short = engine.add(world.prompts[1], SamplingParams(max_tokens=1))
    long = engine.add(world.prompts[2], SamplingParams(max_tokens=9))
    deltas = engine.step()
    assert short.finish_reason == "length", "its answer is whole"
    assert (long.finish_reason, long.error) == ("error", "RuntimeError: observe failed")
    assert [(delta.row, delta.finished) for delta in deltas] == [(short, True), (long, False), (long, True)]
    assert not engine.has_work
    for row, i in ((short, 1), (long, 2)):
        assert row.new_tokens.tolist() == world.answer(world.prompts[i], row.params).tokens[: row.num_new]


def test_rows_for_which_there_is_no_memory_end_and_the_others_go_on(world, monkeypatch):
    engine = world.engine()
    add_row = world.decoder.add_row

    def full(length):
        if len(engine.rows) == 3:  # with the one that joins
            raise MemoryError
        return add_row(length)

    rows = [engine.add(prompt, SamplingParams(max_tokens=4)) for prompt in world.prompts[:4]]
    with monkeypatch.context() as patch:
        patch.setattr(world.decoder, "add_row", full)
        deltas = engine.step()
    assert engine.rows == rows[:2]
    assert [row.finish_reason for row in rows] == [None, None, "error", "error"]
    assert [delta.row for delta in deltas if delta.finished] == rows[2:]
    assert len(world.taken) == 2
    engine.finish(rows[:2])
    for prompt, row in zip(world.prompts, rows[:2], strict=False):
        assert row.new_tokens.tolist() == world.answer(prompt, row.params).tokens
    assert not world.taken


def test_broken_weights_are_said_to_be_broken(world):
    decoder, _ = native.pair("llama2")
    decoder.norm.fill_(float("nan"))
    engine = Engine(decoder, Drafter())
    out = engine.generate(world.prompts)
    assert {o.finish_reason for o in out} == {"error"}
    assert all("NaN or infinite" in o.error for o in out)
    assert not engine.has_work


@pytest.mark.parametrize("name", NAMES)
def test_a_row_whose_logits_are_not_numbers_ends_alone(world, name, monkeypatch):
    params = [SamplingParams(max_tokens=NEW, temperature=0.9 * (i % 2), seed=i) for i in range(len(world.prompts))]
    engine = world.engine(world.drafter(name), max_batch=4)
    expected = [world.answer(prompt, of_row).tokens for prompt, of_row in zip(world.prompts, params, strict=True)]
    verify, bad = engine.target.verify, (1, 4)  # a sampled one and a greedy one

    def broken(segments, *rest):
        verdict = verify(segments, *rest)
        verdict.logits = verdict.logits.clone()
        for i, row in enumerate(engine.rows):
            if row.id in bad and row.num_new >= 4:
                verdict.of(i).fill_(float("nan"))
        return verdict

    monkeypatch.setattr(engine.target, "verify", broken)
    out = engine.generate(world.prompts, params)
    for i, (done, tokens) in enumerate(zip(out, expected, strict=True)):
        assert done.tokens == (tokens[: len(done.tokens)] if i in bad else tokens)
        assert ("NaN or infinite" in done.error) == (done.finish_reason == "error") == (i in bad)
    assert not world.taken
    assert not engine.has_work


def test_a_forward_that_fails_ends_its_rows_and_the_engine_serves_the_next(world, monkeypatch):
    engine = world.engine(max_batch=2)
    verify, calls = engine.target.verify, iter(range(10**6))

    def broken(*given):
        if next(calls) == 2:
            raise RuntimeError("out of memory")
        return verify(*given)

    monkeypatch.setattr(engine.target, "verify", broken)
    out = engine.generate(world.prompts[:4], SamplingParams(max_tokens=5))
    assert [o.finish_reason for o in out] == ["error", "error", "length", "length"]
    assert [o.tokens for o in out] == [
        world.answer(p, SamplingParams(max_tokens=5)).tokens[: len(o.tokens)]
        for p, o in zip(world.prompts, out, strict=False)
    ]
    assert not world.taken


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"logit_bias": {10**6: 1.0}}, "logit_bias names token 1000000"),
        ({"bad_words": [[10**6]]}, "bad_words names token 1000000"),
        ({"logit_bias": dict.fromkeys(range(1000), -np.inf)}, "names token|ban every token"),
        ({"bad_words": [[i] for i in range(models.VOCAB_SIZE)]}, "ban every token"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_when_they_come(world, wish, words):
    with pytest.raises(PacelineError, match=words):
        world.engine().add([5], SamplingParams(**wish))


@dataclass
class Wish:
    """A request, the round it comes in, and the round it is given up in."""

    prompt: list[int]
    params: SamplingParams
    comes: int
    goes: int


PIECES = [b"a", b"b", b" ", b"ab", b"ba", b"\xc3", b"\xa9", b"b a"]
"""What tokens of the table say; 5 and 6 make é together."""


class Spelled:
    """A tokenizer for prompts of token ids, whose answers are texts."""

    def detokenizer(self, before):
        return Spelling(PIECES)


def rarely(usual, *others):
    return st.sampled_from([usual, usual, usual, *others])


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.3]), top_k=rarely(0, 3), top_p=rarely(1.0, 0.8),
    min_p=rarely(0.0, 0.2), repetition_penalty=rarely(1.0, 1.6), presence_penalty=rarely(0.0, 0.9),
    logit_bias=rarely({}, {3: 2.0}), bad_words=rarely((), ([2],), ([1, 4], [5])), max_tokens=st.integers(1, 14),
    seed=st.integers(0, 9), stop=rarely((), ("a",), ("bb", "é"), ("ab a",)), stop_token_ids=rarely((), (3,), (0, 5)),
    ignore_eos=st.booleans(),
)  # fmt: skip
prompts = st.lists(st.integers(0, 7), min_size=1, max_size=29)
wishes = st.builds(Wish, prompts, params, st.integers(0, 12), rarely(1000, 3, 9, 14))


@given(
    st.lists(wishes, min_size=1, max_size=9),
    st.sampled_from(["none", "random chain", "random tree", "oracle chain", "oracle tree", "probes"]),
    st.integers(1, 5),
    st.sampled_from([1, 3, 16, 512]),
    st.integers(0, 5),
)
@settings(max_examples=80)
def test_any_requests_in_any_company(every, kind, batch, chunk, seed):
    """On a table as the target, which checks everything the engine asks of it. Rows join in the order in which they
    came, gain a token in every round once their prompt is through, and end where plain decoding ends; what is told and
    counted of them adds up."""
    target = TableTarget(8, order=2, seed=seed, eos=(7,), max_context=30)
    rows = [target.plain(wish.prompt, wish.params, Spelling(PIECES)) for wish in every]
    known = {tuple(w.prompt): row.tokens.tolist() + [0] * 9 for w, row in zip(every, rows, strict=True)}
    drafter = Watched(drafters.by_name(kind, known), Needs(top_k=2))
    engine = Engine(target, drafter, max_batch=batch, prefill_chunk=chunk, tokenizer=Spelled())
    verify = target.verify

    def counted(segments, *rest):
        assert sum(len(one.tokens) for one in segments if one.is_prompt) <= chunk
        return verify(segments, *rest)

    target.verify = counted
    got, deltas, step = dict[int, Row](), list[Delta](), 0
    while engine.has_work or len(got) < len(every):
        for i, wish in enumerate(every):
            if wish.comes == step:
                got[i] = engine.add(wish.prompt, wish.params)
            if wish.goes == step and i in got:
                engine.abort(got[i])
        before = [(row, row.num_new) for row in engine.rows if row.num_new]
        deltas += engine.step()
        assert all(row.num_new > count for row, count in before)
        assert target.num_rows == len(engine.rows) <= batch
        step += 1
    for i, (wish, plainly) in enumerate(zip(every, rows, strict=True)):
        row, tokens = got[i], got[i].new_tokens.tolist()
        own = [delta for delta in deltas if delta.row is row]
        if row.finish_reason == "abort":
            assert step > wish.goes
            assert plainly.new_tokens.tolist()[: len(tokens)] == tokens
            spelled = Spelling(PIECES)
            assert row.text == "".join(map(spelled.push, tokens)) + spelled.flush()
            assert (row.id in drafter.rows) == (row.joined > 0), "a row that never joined is nothing to a drafter"
        else:
            assert (tokens, row.text) == (plainly.new_tokens.tolist(), plainly.text)
            assert row.finish_reason == plainly.finish_reason
            assert "".join(delta.text for delta in own) == row.text
            assert [delta.finished for delta in own] == [False] * (len(own) - 1) + [True]
        assert [token for delta in own for token in delta.tokens] == tokens
        adds_up(Completion.of(i, row), own, drafter.verified.get(row.id, []))
    joined = [row.joined for row in sorted(got.values(), key=lambda row: row.id) if row.joined]
    assert joined == sorted(joined)
    assert set(drafter.rows.values()) <= {"dropped"}


class Watched(drafters.Listening):
    """Notes how many drafted tokens, and how many levels, were verified of each row in each round that ran one."""

    def __init__(self, inner, needs):
        super().__init__(inner, needs)
        self.verified = {}
        self.room = {}

    def propose(self, asks):
        assert all(row.num_new for row, _ in asks), "nothing is drafted before the prompt is through"
        self.room = {row.id: row.params.max_tokens - row.num_new - 1 for row, _ in asks}
        return super().propose(asks)

    def observe(self, round):
        for row, tree, done in zip(round.rows, round.trees, round.accepted, strict=True):
            if done.tokens:
                assert tree.max_depth <= self.room.get(row.id, 0)
                self.verified.setdefault(row.id, []).append((tree.num_drafted, tree.max_depth))
        super().observe(round)


def adds_up(done, deltas, verified):
    """What is counted of an answer, against its deltas and what was verified of its drafts."""
    stats, depths = done.stats, [depth for _, depth in verified]
    assert stats.rounds == done.rounds == len(deltas) == sum(stats.accepted)
    kept = sum(depth * count for depth, count in enumerate(stats.accepted))
    own = sum(count for who, count in done.runs if who == "")
    assert kept + own == done.new_tokens == len(done.tokens) == sum(count for _, count in done.runs)
    assert own in (stats.rounds, stats.rounds - 1), "each round adds one token, the last may end inside its draft"
    assert stats.draft_tokens == sum(nodes for nodes, _ in verified)
    assert stats.draft_rounds == sum(nodes > 0 for nodes, _ in verified)
    assert [sum(each) for each in zip((0, 0), *stats.drafters.values(), strict=True)] == [stats.draft_tokens, kept]
    assert stats.drafted[1:] == [sum(depth >= d for depth in depths) for d in range(1, max(depths, default=0) + 1)]
    assert all(0 <= share <= 1 for share in stats.acceptance_by_depth())
    if deltas:
        assert done.seconds > 0
        assert done.mean_accepted_tokens == done.new_tokens / done.rounds
        assert done.tokens_per_second == done.new_tokens / done.seconds


# Prompts -----------------------------------------------------------------------------------------------------------


BAD_PROMPTS = {
    "empty text": ("", "empty"),
    "no tokens": ([], "empty"),
    "no tokens, numpy": (np.array([], np.int64), "empty"),
    "negative": ([5, -1], "outside"),
    "too large": ([models.VOCAB_SIZE], "outside"),
    "floats": ([1.5, 2.0], "whole numbers"),
    "nested": ([[1, 2], [3, 4]], "whole numbers"),
    "full context": ([5] * models.MAX_CONTEXT, "context"),
    "long text": ("the cat " * 200, "context"),
    "one message": ({"role": "user", "content": "hello"}, "list of messages"),
    "a number": (5, "not int"),
}


@pytest.mark.parametrize(("prompt", "words"), BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_a_bad_prompt_is_refused_and_nothing_stays_queued(world, prompt, words):
    engine = world.engine()
    with pytest.raises(PromptError, match=rf"^.*({words}).*\Z"):  # one line
        engine.generate([world.prompts[0], prompt])
    assert not engine.has_work


def test_prompts_come_as_text_tokens_arrays_or_messages(world):
    engine = world.engine()
    ids = world.tokenizer.encode("the cat")
    chat = [{"role": "user", "content": "the cat"}]
    prompts = ["the cat", ids, np.array(ids), torch.tensor(ids), chat]
    out = engine.generate(prompts, SamplingParams(max_tokens=5))
    assert all(o.tokens == out[0].tokens for o in out[:4])
    assert out[0].tokens == world.answer(ids, SamplingParams(max_tokens=5)).tokens
    assert out[4].tokens == world.answer(world.tokenizer.encode_chat(chat), SamplingParams(max_tokens=5)).tokens
    assert out[4].prompt_tokens == len(world.tokenizer.encode_chat(chat))


def test_a_folder_without_a_tokenizer_takes_token_ids(world, tmp_path):
    folder = models.make("llama2", tmp_path / "m")
    right = Engine(folder).generate([[5, 6, 7]], SamplingParams(max_tokens=5))
    (folder / "tokenizer.json").unlink()
    engine = Engine(folder)
    assert engine.generate([[5, 6, 7]], SamplingParams(max_tokens=5))[0].tokens == right[0].tokens
    with pytest.raises(PromptError, match=r"no tokenizer: give .* token ids"):
        engine.add("the cat")


def test_without_a_tokenizer_text_and_stop_strings_are_refused(world):
    decoder, _ = native.pair("llama2")
    engine = Engine(decoder, Drafter())
    for prompt in ("the cat", [{"role": "user", "content": "hi"}]):
        with pytest.raises(PromptError, match="no tokenizer"):
            engine.add(prompt)
    with pytest.raises(PromptError, match="tokenizer"):
        engine.add([5], SamplingParams(stop=["x"]))
    (out,) = engine.generate([world.prompts[1]], SamplingParams(max_tokens=5, ignore_eos=True))
    assert out.tokens == world.answer(world.prompts[1], SamplingParams(max_tokens=5)).tokens
    assert out.text == ""


def test_one_string_is_not_a_list_of_prompts(world):
    with pytest.raises(PromptError, match="list of prompts"):
        world.engine().generate("the cat")
    with pytest.raises(PacelineError, match="3 prompts with 2 params"):
        world.engine().generate(["a", "b", "c"], [SamplingParams()] * 2)
    assert world.engine().generate([]) == []


def test_an_engine_without_room_is_refused(world):
    for wrong in ({"max_batch": 0}, {"prefill_chunk": 0}, {"max_slowdown": 0.5}):
        with pytest.raises(PacelineError, match="1 or more"):
            world.engine(**wrong)


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_are_those_of_plain_decoding(world, name):
    params = SamplingParams(max_tokens=9, logprobs=3)
    seen = {}
    engine = world.engine(world.drafter(name), max_batch=3)
    out = engine.generate(world.prompts, params, lambda d: seen.setdefault(d.index, []).extend(d.logprobs))
    for i, (prompt, done) in enumerate(zip(world.prompts, out, strict=True)):
        with torch.no_grad():
            logits = world.model(torch.tensor([prompt + done.tokens[:-1]])).logits[0, len(prompt) - 1 :]
        expected = logits.double().log_softmax(-1)
        assert seen[i] == done.logprobs
        assert [entry.token for entry in done.logprobs] == done.tokens
        for entry, of_place in zip(done.logprobs, expected, strict=True):
            assert entry.logprob == pytest.approx(float(of_place[entry.token]), abs=1e-4)
            assert [p for _, p in entry.top] == pytest.approx(of_place.topk(3).values.tolist(), abs=1e-4)


def test_a_schedule_decides_who_joins_and_who_runs(world):
    class OneAtATime(Ragged):
        """Rows take turns: each runs alone in its round."""

        def select(self, running):
            turns = super().select(running)
            return [min(turns, key=lambda turn: turn.row.num_new)]

    engine = Engine(world.decoder, "none", schedule=OneAtATime(3, 8))
    rows = [engine.add(prompt, SamplingParams(max_tokens=4)) for prompt in world.prompts[:5]]
    while engine.has_work:
        assert len(engine.step()) <= 1
        assert len(engine.rows) <= 3
    for row, prompt in zip(rows, world.prompts, strict=False):
        assert row.new_tokens.tolist() == world.answer(prompt, row.params).tokens


def test_a_rule_and_a_schedule_hold_for_as_long_as_a_context(world):
    class Seven(Lossless):
        def decide(self, cursors):
            return [cursor for cursor in cursors if follow(cursor, 7)]

    engine = world.engine(max_batch=3)
    before = engine.rule, engine.schedule
    with engine.using(rule=Seven(), schedule=Ragged(1, 64)):
        rows = [engine.add(prompt, SamplingParams(max_tokens=3)) for prompt in world.prompts[:3]]
        engine.step()
        assert len(engine.rows) == 1
        engine.finish(rows)
    assert [row.new_tokens.tolist() for row in rows] == [[7] * 3] * 3
    with suppress(KeyError), engine.using(rule=Seven()):
        raise KeyError
    assert (engine.rule, engine.schedule) == before


def test_a_parameter_that_there_is_not_is_refused(world, tmp_path):
    for model in (world.decoder, tmp_path):
        with pytest.raises(TypeError, match=r"unexpected keyword argument .max_batches"):
            Engine(model, max_batches=3)


def test_a_round_without_some_of_its_rows_says_the_same_of_the_others():
    target = TableTarget(8, order=1, seed=0)
    rows = [Row(i, [i + 1], SamplingParams(), max_context=30) for i in range(3)]
    trees = [DraftTree.chain(row.last_token, [3] * row.id) for row in rows]
    for row in rows:
        row.slot = target.add_row(8)
    segments = [Segment.tree(row.slot, tree) for row, tree in zip(rows, trees, strict=True)]
    verdict = target.verify(segments, Needs(top_k=2))
    ends = [0, 1, 3, 6]
    verdict.hidden, verdict.hidden_at = {2: torch.arange(6.0).unsqueeze(-1)}, ends
    whole = Round(rows, trees, segments, verdict, [Accepted(list(range(i + 1)), [3]) for i in range(3)])
    for part, left in ((whole.only([0, 2]), (0, 2)), (whole.only([1, 2]).only([1]), (2,))):
        assert part.rows == [rows[j] for j in left]
        for i, j in enumerate(left):
            assert torch.equal(part.logits(i), whole.logits(j))
            assert torch.equal(part.top_k(i), whole.top_k(j))
            assert torch.equal(part.hidden(i, 2), whole.hidden(j, 2))
            assert part.committed(i, 2)[:, 0].tolist() == list(range(ends[j], ends[j + 1]))


# Parameters and ends ------------------------------------------------------------------------------------------------


def test_probes_are_never_accepted(world):
    known = world.oracle().answers
    probing = drafters.Probing(drafters.Random(), known)
    out = world.engine(probing).generate(world.prompts, SamplingParams(max_tokens=NEW))
    assert probing.seen > 50, "probes carried the right token and could have been taken"
    assert sum(o.stats.draft_tokens for o in out) > 100
    assert np.mean([o.mean_accepted_tokens for o in out]) < 1.2


# What is counted ----------------------------------------------------------------------------------------------------


def test_seconds_by_part_are_the_wall_time_of_the_rounds(world):
    class Slow(drafters.Oracle):
        """Takes its time wherever a drafter can."""

        calls = 0

        def _wait(self, *_):
            self.calls += 1
            until = perf_counter() + 0.002
            while perf_counter() < until:
                pass

        start = observe = _wait

        def propose(self, asks):
            self._wait()
            return super().propose(asks)

    drafter = Slow(world.oracle().answers)
    engine = world.engine(drafter, max_batch=3)
    for i, prompt in enumerate(world.prompts):
        engine.add(prompt, SamplingParams(max_tokens=10 + i))
    rows = [*engine.waiting]
    begin = perf_counter()
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
    wall = perf_counter() - begin
    by_row = sum(sum(row.stats.seconds.values()) for row in rows)
    assert engine.rounds == engine.profile.rounds == steps
    assert engine.profile.seconds == pytest.approx(wall, rel=0.05)
    assert by_row == pytest.approx(engine.profile.seconds, rel=1e-6)
    assert set(rows[0].stats.seconds) == {"draft", "forward", "accept", "bookkeeping"}
    spent = sum(row.stats.seconds["draft"] for row in rows)
    assert drafter.calls > 2 * steps
    assert spent >= 0.002 * drafter.calls, "start, propose and observe are the drafter's time"
    assert sum(share for _, _, share in engine.profile.table()) == pytest.approx(1)


def test_a_hint_of_the_prompts_length_makes_room_once(world):
    decoder = native.pair("llama2", max_position_embeddings=4096)[0]
    engine = Engine(decoder, Drafter(), prefill_chunk=64)
    capacities = {decoder.cache.capacity}
    for _ in engine.stream([[5] * 300], SamplingParams(max_tokens=200)):
        capacities.add(decoder.cache.capacity)
    assert len(capacities) == 2


def test_the_same_seed_gives_the_same_answer_and_no_seed_another(world):
    engine = world.engine()
    wish = SamplingParams(max_tokens=NEW, temperature=1.5, seed=11)
    first, second = (engine.generate([world.prompts[1]], wish)[0].tokens for _ in range(2))
    assert first == second
    wish = replace(wish, seed=None)
    first, second = (engine.generate([world.prompts[1]], wish)[0].tokens for _ in range(2))
    assert first != second
