"""The engine: rows come and go, end where plain decoding ends, and everything it counts adds up."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.accept import Accepted, Cursor, Lossless, follow
from paceline.core.request import Completion, Row
from paceline.core.round import Round
from paceline.core.sampling import SamplingParams
from paceline.core.segment import Segment, Verdict
from paceline.core.tree import DraftTree
from paceline.draft.base import Ask, Drafter
from paceline.engine.engine import Engine
from paceline.engine.scheduler import Ragged, Turn
from paceline.errors import PacelineError, PromptError
from paceline.formats.tokenizer import Tokenizer
from paceline.target.base import Needs
from paceline.target.decoder import Decoder
from tests import drafters, models, native, plain
from tests.fakes import TableTarget
from tests.pairs import paired

NEW = 16


class World:
    """A small random model, some prompts of different lengths, and their plain answers."""

    def __init__(self) -> None:
        self.decoder, self.model = native.pair("llama2")
        self.decoder.eos_token_ids = ()
        self.tokenizer = Tokenizer(models.tokenizer())
        rng = np.random.default_rng(0)
        self.prompts = [rng.integers(2, models.VOCAB_SIZE, n).tolist() for n in (1, 9, 30, 2, 17, 5, 64, 3, 12)]
        self._answers: dict[Any, plain.Answer] = {}

    def answer(self, prompt: Sequence[int], params: SamplingParams, eos: Sequence[int] = ()) -> plain.Answer:
        key = (tuple(prompt), repr(params), tuple(eos))
        if key not in self._answers:
            self._answers[key] = plain.decode(self.model, prompt, params, eos=eos, tokenizer=self.tokenizer)
        return self._answers[key]

    def text(self, i: int) -> list[int]:
        """Prompt i and the longest answer there is room for."""
        return self.prompts[i] + self.answer(self.prompts[i], SamplingParams(max_tokens=60)).tokens

    def oracle(self, **kw: Any) -> drafters.Oracle:
        known = {tuple(p): self.text(i) for i, p in enumerate(self.prompts)}
        return drafters.Oracle(known, **kw)

    def drafter(self, name: str) -> Drafter:
        return drafters.by_name(name, self.oracle().answers)

    def engine(self, drafter: Drafter | None = None, **kw: Any) -> Engine:
        assert not self.taken, "an earlier test left rows behind"
        return Engine(self.decoder, drafter or Drafter(), tokenizer=self.tokenizer, **kw)

    @property
    def taken(self) -> list[int]:
        """Slots that hold a row."""
        return self.decoder.cache.held


@pytest.fixture(scope="module")
def shared_world() -> World:
    return World()


@pytest.fixture
def world(shared_world: World) -> World:
    for slot in shared_world.taken:  # of a test that failed
        shared_world.decoder.drop_row(slot)
    return shared_world


def listening(inner: Drafter) -> drafters.Listening:
    return drafters.Listening(inner, Needs(hidden_layers=(0, 2, 3), top_k=3, callback_layer=1))


NAMES = ("none", "random tree", "oracle chain", "oracle tree", "probes", "early exit")


# Rows come and go -------------------------------------------------------------------------------------------------


def test_two_engines_of_one_target_leave_it_and_each_other_alone(world: World) -> None:
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
def test_rows_join_and_leave_between_rounds(world: World, name: str, batch: int) -> None:
    drafter = listening(world.drafter(name))
    engine = world.engine(drafter, max_batch=batch, prefill_chunk=20)
    lengths = [3, NEW, 10, 1, 17, NEW, 2, 8, 5]
    params = [SamplingParams(max_tokens=n) for n in lengths]
    rows: list[Row] = []
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


def test_abort_ends_a_row_and_leaves_the_others_alone(world: World) -> None:
    drafter = listening(world.oracle())
    engine = world.engine(drafter, max_batch=2)
    rows = [engine.add(prompt, SamplingParams(max_tokens=NEW)) for prompt in world.prompts[:4]]
    engine.step()
    engine.step()
    engine.abort(rows[1])  # running
    engine.abort(rows[3])  # still waiting
    assert rows[1].finish_reason == rows[3].finish_reason == "abort"
    assert len(world.taken) == 1
    while engine.has_work:
        engine.step()
    for i in (0, 2):
        assert rows[i].new_tokens.tolist() == world.answer(world.prompts[i], rows[i].params).tokens
    kept = rows[1].new_tokens.tolist()
    assert 0 < len(kept) < NEW
    assert kept == world.text(1)[len(world.prompts[1]) :][: len(kept)]
    assert rows[1].text == world.tokenizer.decode(kept)
    assert rows[3].num_new == 0
    assert rows[3].id not in drafter.rows, "a row that never joined is nothing to a drafter"
    assert Completion.of(3, rows[3]).seconds == 0
    assert Completion.of(3, rows[3]).finish_reason == "abort"
    engine.abort(rows[0])  # already over: nothing happens
    assert rows[0].finish_reason == "length"
    assert not world.taken


def test_closing_a_stream_gives_up_its_rows_only(world: World) -> None:
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


def test_an_exception_in_progress_leaves_nothing_behind(world: World) -> None:
    engine = world.engine()

    def stop(_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        engine.generate(world.prompts, progress=stop)
    assert not engine.has_work
    assert not world.taken
    del caught


@pytest.mark.parametrize("time", [1, 4])
@pytest.mark.parametrize("method", ["start", "propose", "observe", "drop"])
def test_a_drafter_that_fails_leaves_nothing_behind(world: World, method: str, time: int) -> None:
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


def test_a_drafter_that_fails_at_one_row_ends_that_row_alone(world: World) -> None:
    class OneByOne(Drafter):
        def draft(self, row: Row, most: int) -> DraftTree:
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


def test_a_drafter_that_roots_a_tree_elsewhere_ends_that_row_alone(world: World) -> None:
    class Astray(Drafter):
        name = "astray"

        def draft(self, row: Row, most: int) -> DraftTree:
            return DraftTree.root(row.last_token + (row.id == 1))

    out = world.engine(Astray()).generate(world.prompts[:3], SamplingParams(max_tokens=4))
    assert [o.finish_reason == "error" for o in out] == [False, True, False]
    assert "root is not the row's last token" in out[1].error


def test_rows_that_ended_leave_even_if_the_drafter_fails_to_observe_it(world: World) -> None:
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


def test_rows_for_which_there_is_no_memory_end_and_the_others_go_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = world.engine()
    add_row = world.decoder.add_row

    def full(length: int) -> int:
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


def test_broken_weights_are_said_to_be_broken(world: World) -> None:
    decoder, _ = native.pair("llama2")
    decoder.norm.fill_(float("nan"))
    engine = Engine(decoder, Drafter())
    out = engine.generate(world.prompts)
    assert {o.finish_reason for o in out} == {"error"}
    assert all("NaN or infinite" in o.error for o in out)
    assert not engine.has_work


@pytest.mark.parametrize("name", NAMES)
def test_a_row_whose_logits_are_not_numbers_ends_alone(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [SamplingParams(max_tokens=NEW, temperature=0.9 * (i % 2), seed=i) for i in range(len(world.prompts))]
    engine = world.engine(world.drafter(name), max_batch=4)
    expected = [world.answer(prompt, of_row).tokens for prompt, of_row in zip(world.prompts, params, strict=True)]
    verify, bad = engine.target.verify, (1, 4)  # a sampled one and a greedy one

    def broken(segments: Sequence[Segment], *rest: Any) -> Verdict:
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


def test_a_forward_that_fails_ends_its_rows_and_the_engine_serves_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = world.engine(max_batch=2)
    verify, calls = engine.target.verify, iter(range(10**6))

    def broken(*given: Any) -> Verdict:
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
def test_requests_that_cannot_be_served_are_refused_when_they_come(world: World, wish: Any, words: str) -> None:
    with pytest.raises(PacelineError, match=words):
        world.engine().add([5], SamplingParams(**wish))


@pytest.mark.parametrize("chunk", [3, 5, 16])
def test_a_seeded_answer_does_not_depend_on_how_its_prompt_is_cut(world: World, chunk: int) -> None:
    """Nothing is drafted before the prompt is through, even where one token of it is left."""

    class Uniform(Drafter):
        def draft(self, row: Row, most: int) -> DraftTree:
            assert row.num_new
            q = torch.full((models.VOCAB_SIZE,), 1 / models.VOCAB_SIZE)
            return self.chain_after(row, row.noise.guess(q, row.num_new)[0])

    params = SamplingParams(max_tokens=8, temperature=1.0, seed=3)
    alone = [world.engine(Uniform()).generate([prompt], params)[0].tokens for prompt in world.prompts]
    together = world.engine(Uniform(), max_batch=3, prefill_chunk=chunk).generate(world.prompts, params)
    assert [o.tokens for o in together] == alone


@dataclass
class Wish:
    """A request, the round it comes in, and the round it is given up in."""

    prompt: list[int]
    params: SamplingParams
    comes: int
    goes: int


@st.composite
def wishes(draw: st.DrawFn) -> Wish:
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 0.7, 1.3])),
        top_k=draw(st.sampled_from([0, 3])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.6])),
        max_tokens=draw(st.integers(1, 14)),
        seed=draw(st.integers(0, 9)),
        stop_token_ids=draw(st.sampled_from([(), (), (3,), (0, 5)])),
        ignore_eos=draw(st.booleans()),
    )
    prompt = draw(st.lists(st.integers(0, 7), min_size=1, max_size=29))
    return Wish(prompt, params, draw(st.integers(0, 12)), draw(st.sampled_from([1000, 1000, 1000, 3, 9, 14])))


@given(
    st.lists(wishes(), min_size=1, max_size=9),
    st.sampled_from(["none", "random chain", "random tree", "oracle chain", "oracle tree", "probes"]),
    st.integers(1, 5),
    st.sampled_from([1, 3, 16, 512]),
    st.integers(0, 5),
)
@settings(deadline=None, max_examples=80)
def test_any_requests_in_any_company(every: list[Wish], kind: str, batch: int, chunk: int, seed: int) -> None:
    """On a table as the target, which checks everything the engine asks of it."""
    target = TableTarget(8, order=2, seed=seed, eos=(7,), max_context=30)
    rows = [target.plain(wish.prompt, wish.params) for wish in every]
    known = {tuple(w.prompt): row.tokens.tolist() + [0] * 9 for w, row in zip(every, rows, strict=True)}
    listening = drafters.Listening(drafters.by_name(kind, known), Needs(top_k=2))
    engine = Engine(target, listening, max_batch=batch, prefill_chunk=chunk)
    got: dict[int, Row] = {}
    step = 0
    while engine.has_work or len(got) < len(every):
        for i, wish in enumerate(every):
            if wish.comes == step:
                got[i] = engine.add(wish.prompt, wish.params)
            if wish.goes == step and i in got:
                engine.abort(got[i])
        engine.step()
        assert target.num_rows == len(engine.rows) <= batch
        step += 1
    for i, (wish, plainly) in enumerate(zip(every, rows, strict=True)):
        tokens = got[i].new_tokens.tolist()
        if got[i].finish_reason == "abort":
            assert step > wish.goes
            assert plainly.new_tokens.tolist()[: len(tokens)] == tokens
        else:
            assert tokens == plainly.new_tokens.tolist()
            assert got[i].finish_reason == plainly.finish_reason
    assert set(listening.rows.values()) <= {"dropped"}


# Prompts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 2, 7, 31, 512])
def test_prompts_run_in_chunks_between_the_rounds_of_others(
    world: World, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = listening(world.oracle(error=0.3, branches=1))
    engine = world.engine(drafter, prefill_chunk=chunk, max_batch=8)
    sizes: list[int] = []
    verify = world.decoder.verify

    def spy(segments: Sequence[Segment], *rest: Any) -> Verdict:
        reading = {row.slot for row in engine.rows if len(row.pending) > 1}
        sizes.append(sum(len(s.tokens) for s in segments if s.slot in reading))
        return verify(segments, *rest)

    monkeypatch.setattr(world.decoder, "verify", spy)
    first = engine.add(world.prompts[0], SamplingParams(max_tokens=NEW))
    engine.step()
    rows = [first] + [engine.add(p, SamplingParams(max_tokens=NEW)) for p in world.prompts[1:]]
    while engine.has_work:
        before = [(row, row.num_new) for row in engine.rows if row.num_new]
        engine.step()
        assert all(row.num_new > n for row, n in before), "a row past its prompt gains a token every round"
    for prompt, row in zip(world.prompts, rows, strict=True):
        assert row.new_tokens.tolist() == world.answer(prompt, row.params).tokens
    assert max(sizes) <= chunk


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
def test_a_bad_prompt_is_refused_and_nothing_stays_queued(world: World, prompt: Any, words: str) -> None:
    engine = world.engine()
    with pytest.raises(PromptError, match=rf"^.*({words}).*\Z"):  # one line
        engine.generate([world.prompts[0], prompt])
    assert not engine.has_work


def test_prompts_come_as_text_tokens_arrays_or_messages(world: World) -> None:
    engine = world.engine()
    ids = world.tokenizer.encode("the cat")
    chat = [{"role": "user", "content": "the cat"}]
    prompts = ["the cat", ids, np.array(ids), torch.tensor(ids), chat]
    out = engine.generate(prompts, SamplingParams(max_tokens=5))  # type: ignore[arg-type]
    assert all(o.tokens == out[0].tokens for o in out[:4])
    assert out[0].tokens == world.answer(ids, SamplingParams(max_tokens=5)).tokens
    assert out[4].tokens == world.answer(world.tokenizer.encode_chat(chat), SamplingParams(max_tokens=5)).tokens
    assert out[4].prompt_tokens == len(world.tokenizer.encode_chat(chat))


def test_a_folder_without_a_tokenizer_takes_token_ids(world: World, tmp_path: Path) -> None:
    folder = models.make("llama2", tmp_path / "m")
    right = Engine(folder).generate([[5, 6, 7]], SamplingParams(max_tokens=5))
    (folder / "tokenizer.json").unlink()
    engine = Engine(folder)
    assert engine.generate([[5, 6, 7]], SamplingParams(max_tokens=5))[0].tokens == right[0].tokens
    with pytest.raises(PromptError, match=r"no tokenizer: give .* token ids"):
        engine.add("the cat")


def test_without_a_tokenizer_text_and_stop_strings_are_refused(world: World) -> None:
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


def test_one_string_is_not_a_list_of_prompts(world: World) -> None:
    with pytest.raises(PromptError, match="list of prompts"):
        world.engine().generate("the cat")
    with pytest.raises(PacelineError, match="3 prompts with 2 params"):
        world.engine().generate(["a", "b", "c"], [SamplingParams()] * 2)
    assert world.engine().generate([]) == []


def test_an_engine_without_room_is_refused(world: World) -> None:
    for wrong in ({"max_batch": 0}, {"prefill_chunk": 0}, {"max_slowdown": 0.5}):
        with pytest.raises(PacelineError, match="1 or more"):
            world.engine(**wrong)


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_are_those_of_plain_decoding(world: World, name: str) -> None:
    params = SamplingParams(max_tokens=9, logprobs=3)
    seen: dict[int, list[Any]] = {}
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


def test_a_schedule_decides_who_joins_and_who_runs(world: World) -> None:
    class OneAtATime(Ragged):
        """Rows take turns: each runs alone in its round."""

        def select(self, running: Sequence[Row]) -> list[Turn]:
            turns = super().select(running)
            return [min(turns, key=lambda turn: turn.row.num_new)]

    engine = Engine(world.decoder, "none", schedule=OneAtATime(3, 8))
    rows = [engine.add(prompt, SamplingParams(max_tokens=4)) for prompt in world.prompts[:5]]
    while engine.has_work:
        assert len(engine.step()) <= 1
        assert len(engine.rows) <= 3
    for row, prompt in zip(rows, world.prompts, strict=False):
        assert row.new_tokens.tolist() == world.answer(prompt, row.params).tokens


def test_a_rule_and_a_schedule_hold_for_as_long_as_a_context(world: World) -> None:
    class Seven(Lossless):
        def decide(self, cursors: Sequence[Cursor]) -> list[Cursor]:
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


def test_a_parameter_that_there_is_not_is_refused(world: World, tmp_path: Path) -> None:
    for model in (world.decoder, tmp_path):
        with pytest.raises(TypeError, match=r"unexpected keyword argument .max_batches"):
            Engine(model, max_batches=3)  # type: ignore[call-arg]


def test_a_round_without_some_of_its_rows_says_the_same_of_the_others() -> None:
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


@pytest.mark.parametrize("name", NAMES)
def test_every_row_has_its_own_parameters(world: World, name: str) -> None:
    often = world.text(2)[len(world.prompts[2])]
    params = [
        SamplingParams(max_tokens=NEW),
        SamplingParams(max_tokens=NEW, temperature=1.0, seed=1),
        SamplingParams(max_tokens=NEW, repetition_penalty=1.5),
        SamplingParams(max_tokens=NEW, temperature=0.8, top_k=20, top_p=0.9, seed=2),
        SamplingParams(max_tokens=5, logit_bias={7: 50.0}),
        SamplingParams(max_tokens=NEW, temperature=3.0, min_p=0.1, seed=3),
        SamplingParams(max_tokens=NEW, bad_words=[[often], [7, 8]]),
        SamplingParams(max_tokens=NEW, temperature=0.8, top_k=20, top_p=0.9, seed=4),
        SamplingParams(max_tokens=9, temperature=0.7, repetition_penalty=0.8, bad_words=[[4]], seed=5),
    ]
    engine = world.engine(listening(world.drafter(name)), max_batch=8)
    out = engine.generate(world.prompts, params)
    for prompt, wish, done in zip(world.prompts, params, out, strict=True):
        assert done.tokens == world.answer(prompt, wish).tokens, wish
        assert done.text == world.answer(prompt, wish).text
    assert out[4].tokens == [7] * 5
    assert len({tuple(o.tokens) for o in out}) == len(out)


def _first_occurrence(tokens: list[int], after: int) -> int:
    """Where, at `after` or later, a token stands for the first time."""
    return next(i for i in range(after, len(tokens)) if tokens[i] not in tokens[:i])


@pytest.mark.parametrize(
    ("after", "branches"), [(8, 0), (3, 2), *(pytest.param(0, n, marks=pytest.mark.slow) for n in (0, 2))]
)
def test_rows_end_inside_drafts_exactly_where_plain_decoding_ends(world: World, after: int, branches: int) -> None:
    prompts = world.prompts[1:6]
    whole = [world.text(i)[len(world.prompts[i]) :] for i in range(1, 6)]
    ends = [_first_occurrence(tokens, after) for tokens in whole]
    wishes: list[tuple[SamplingParams, tuple[int, ...]]] = []
    for tokens, end in zip(whole, ends, strict=True):
        stop_text = next((c for c in world.tokenizer.decode(tokens[end:]) if c != "\ufffd"), "x")
        wishes += [
            (SamplingParams(max_tokens=40), (tokens[end],)),  # end of sequence
            (SamplingParams(max_tokens=40, ignore_eos=True), (tokens[end],)),
            (SamplingParams(max_tokens=40, stop_token_ids=[tokens[end]]), ()),
            (SamplingParams(max_tokens=40, stop=[stop_text, "not there"]), ()),
            (SamplingParams(max_tokens=end + 1), ()),
            (SamplingParams(max_tokens=end + 1), (tokens[end],)),  # both at once
        ]
    inside = 0
    try:
        for i, (wish, eos) in enumerate(wishes):
            prompt = prompts[i // 6]
            world.decoder.eos_token_ids = eos
            (done,) = world.engine(world.oracle(error=0.0, branches=branches)).generate([prompt], wish)
            expected = world.answer(prompt, wish, eos)
            assert done.tokens == expected.tokens, wish
            assert done.finish_reason == expected.finish_reason
            assert done.text == expected.text
            inside += sum(n for who, n in done.runs if who == "") < done.rounds
    finally:
        world.decoder.eos_token_ids = ()
    assert inside or after < 3, "no answer ended inside a draft"


@pytest.mark.parametrize(("room", "name"), paired([1, 2, 8, 20], NAMES))
def test_the_context_fills_to_the_last_token(world: World, name: str, room: int) -> None:
    prompt = world.text(2)[: models.MAX_CONTEXT - room]
    prompt = (prompt + [9] * models.MAX_CONTEXT)[: models.MAX_CONTEXT - room]
    params = SamplingParams(max_tokens=100)
    expected = world.answer(prompt, params)
    drafter = world.drafter(name)
    for oracle in (drafter, getattr(drafter, "inner", None)):
        if isinstance(oracle, drafters.Oracle | drafters.Probing):
            oracle.answers = {tuple(prompt): prompt + expected.tokens + [3] * 9}
    (done,) = world.engine(drafter).generate([prompt], params)
    assert done.tokens == expected.tokens
    assert len(done.tokens) == room
    assert done.finish_reason == expected.finish_reason == "context"


def test_no_tree_is_verified_deeper_than_the_row_has_room_for(world: World) -> None:
    class Deep(drafters.Oracle):
        room: ClassVar[dict[int, int]] = {}

        def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
            rows = [row for row, _ in asks]
            trees = super().propose(asks)
            # The target adds one token behind the draft.
            self.room = {row.id: row.params.max_tokens - row.num_new - 1 for row in rows}
            assert [row.max_draft for row in rows] == list(self.room.values())
            self.offered = {row.id: int(tree.depth.max()) for row, tree in zip(rows, trees, strict=True)}
            return trees

        def observe(self, round: Round) -> None:
            for row, tree in zip(round.rows, round.trees, strict=True):
                if row.id in self.room:
                    assert tree.depth.max() <= self.room[row.id]
                    clipped.append(self.offered[row.id] > tree.depth.max())
            self.room = {}

    clipped: list[bool] = []
    known = world.oracle().answers
    for branches in (0, 1):
        engine = world.engine(Deep(known, error=0.0, branches=branches, deep=30))
        out = engine.generate(world.prompts, [SamplingParams(max_tokens=n) for n in range(1, 10)])
        assert [o.tokens for o in out] == [world.text(i)[len(p) :][: i + 1] for i, p in enumerate(world.prompts)]
    assert any(clipped)


def test_probes_are_never_accepted(world: World) -> None:
    known = world.oracle().answers
    probing = drafters.Probing(drafters.Random(), known)
    out = world.engine(probing).generate(world.prompts, SamplingParams(max_tokens=NEW))
    assert probing.seen > 50, "probes carried the right token and could have been taken"
    assert sum(o.stats.draft_tokens for o in out) > 100
    assert np.mean([o.mean_accepted_tokens for o in out]) < 1.2


# What is counted ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "batch"), [*zip(NAMES, (4, 1) * 3, strict=True)])
def test_statistics_add_up(world: World, name: str, batch: int) -> None:
    drafter = world.drafter(name)
    verified: dict[int, list[tuple[int, int]]] = {}
    observe = drafter.observe

    def watch(round: Round) -> None:
        for row, tree, done in zip(round.rows, round.trees, round.accepted, strict=True):
            if done.tokens:
                verified.setdefault(row.id, []).append((tree.num_drafted, int(tree.depth.max())))
        observe(round)

    drafter.observe = watch  # type: ignore[method-assign]
    engine = world.engine(drafter, max_batch=batch, prefill_chunk=16)
    deltas: dict[int, list[Any]] = {}
    params = [SamplingParams(max_tokens=5 + 2 * i) for i in range(9)]
    out = engine.generate(world.prompts, params, progress=lambda d: deltas.setdefault(d.index, []).append(d))
    for i, done in enumerate(out):
        stats, mine = done.stats, deltas[i]
        assert done.index == i
        assert stats.rounds == done.rounds == len(mine) == sum(stats.accepted)
        kept = sum(d * count for d, count in enumerate(stats.accepted))
        own = sum(n for who, n in done.runs if who == "")
        assert kept + own == done.new_tokens == len(done.tokens) == sum(n for _, n in done.runs)
        assert own in (stats.rounds, stats.rounds - 1), "each round adds one token, the last may end inside its draft"
        assert sum(n for who, n in done.runs if who) == kept
        nodes, depths = zip(*verified[mine[0].row.id], strict=True)
        assert stats.draft_tokens == sum(nodes)
        assert stats.draft_rounds == sum(n > 0 for n in nodes)
        assert [sum(each) for each in zip((0, 0), *stats.drafters.values(), strict=True)] == [stats.draft_tokens, kept]
        assert stats.drafted[1:] == [sum(depth >= d for depth in depths) for d in range(1, max(depths, default=0) + 1)]
        assert all(0 <= share <= 1 for share in stats.acceptance_by_depth())
        assert done.mean_accepted_tokens == done.new_tokens / done.rounds
        assert done.seconds > 0
        assert done.tokens_per_second == done.new_tokens / done.seconds


def test_seconds_by_part_are_the_wall_time_of_the_rounds(world: World) -> None:
    class Slow(drafters.Oracle):
        """Takes its time wherever a drafter can."""

        calls = 0

        def _wait(self, *_: Any) -> None:
            self.calls += 1
            until = perf_counter() + 0.002
            while perf_counter() < until:
                pass

        start = observe = _wait

        def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
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


def test_deltas_come_in_order_and_join_to_the_completion(world: World) -> None:
    engine = world.engine(world.oracle(error=0.3), max_batch=4)
    params = [SamplingParams(max_tokens=30, stop=["qqq"]) if i % 2 else SamplingParams(max_tokens=9) for i in range(9)]
    deltas = list(engine.stream(world.prompts, params))
    for i, prompt in enumerate(world.prompts):
        mine = [d for d in deltas if d.index == i]
        expected = world.answer(prompt, params[i])
        assert [token for d in mine for token in d.tokens] == expected.tokens
        assert "".join(d.text for d in mine) == expected.text
        assert [d.finished for d in mine] == [False] * (len(mine) - 1) + [True]
        assert all(d.tokens for d in mine)
        assert {who for d in mine for who, _ in d.pieces} <= {"", "oracle"}
    first = [d.index for d in deltas]
    assert first[:4] == [0, 1, 2, 3], "rows of a round in the order they came"


def test_a_hint_of_the_prompts_length_makes_room_once(world: World) -> None:
    decoder: Decoder = native.pair("llama2", max_position_embeddings=4096)[0]
    engine = Engine(decoder, Drafter(), prefill_chunk=64)
    capacities = {decoder.cache.capacity}
    for _ in engine.stream([[5] * 300], SamplingParams(max_tokens=200)):
        capacities.add(decoder.cache.capacity)
    assert len(capacities) == 2


def test_the_same_seed_gives_the_same_answer_and_no_seed_another(world: World) -> None:
    engine = world.engine()
    wish = SamplingParams(max_tokens=NEW, temperature=1.5, seed=11)
    first, second = (engine.generate([world.prompts[1]], wish)[0].tokens for _ in range(2))
    assert first == second
    wish = replace(wish, seed=None)
    first, second = (engine.generate([world.prompts[1]], wish)[0].tokens for _ in range(2))
    assert first != second
