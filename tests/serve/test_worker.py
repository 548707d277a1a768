"""The engine's thread, with an engine that is a few lines: who hears what, in which order, and when."""

import asyncio
from threading import Event, current_thread
from time import perf_counter

import pytest

from paceline.core.request import Delta, Row
from paceline.core.sampling import SamplingParams
from paceline.errors import PacelineError
from paceline.serve.worker import FAILED_ROUNDS, Busy, EngineFailed, Unavailable, Worker, in_passing

THREE = SamplingParams(max_tokens=3)


class Fake:
    """Every row gets one token a round. open: rows join the batch; broken: rounds that are to fail."""

    def __init__(self, max_batch=4, open=True):
        self.rows = []
        self.waiting = []
        self.max_batch, self.open, self.broken, self.made = max_batch, open, 0, 0

    @property
    def has_work(self):
        return bool(self.rows or (self.waiting and self.open))

    def add(self, prompt, params):
        if not prompt:
            raise PacelineError("no prompt")
        row = Row(self.made, prompt, params, max_context=100)
        self.made += 1
        self.waiting.append(row)
        return row

    def step(self):
        if self.broken:
            self.broken -= 1
            raise RuntimeError("broken")
        while self.waiting and len(self.rows) < self.max_batch:
            self.rows.append(self.waiting.pop(0))
        deltas = []
        for row in list(self.rows):
            row.extend([7])
            deltas.append(Delta(row.id, row, [7], [("", "x")], row.finish_reason is not None))
            if row.finish_reason is not None:
                self.rows.remove(row)
        return deltas

    def abort(self, row):
        row.end("abort")
        for rows in (self.rows, self.waiting):
            if row in rows:
                rows.remove(row)


def run(test, made=None, **options):
    """A test with a worker, which must not take long: whoever is forgotten waits for ever."""
    made = made or Fake()
    worker = Worker(made, **options)
    try:
        asyncio.run(asyncio.wait_for(test(worker, made), 10))
    finally:
        worker.stop()


def ask(worker, prompt=(5, 6), params=THREE):
    return worker.submit(list(prompt), params, asyncio.get_running_loop())


async def heard(job):
    return [token async for delta in job for token in delta.tokens]


async def until(what):
    while not what():
        await asyncio.sleep(0.001)


def test_what_is_done_in_passing_leaves_no_thread_and_no_helpers_of_openmp():
    def fail():
        raise PacelineError("no model")

    thread = in_passing(current_thread)
    assert thread is not current_thread()
    assert not thread.is_alive()
    with pytest.raises(PacelineError, match="no model"):
        in_passing(fail)


def test_every_token_is_heard_and_then_the_end():
    async def test(worker, made):
        ended = []
        worker.on_end = lambda job: ended.append((len(job.completion.tokens), job in worker.open))
        for _ in range(20):  # each time the engine has nothing to do afterwards
            assert await heard(ask(worker)) == [7, 7, 7]
        jobs = [ask(worker) for _ in range(9)]
        assert [await heard(job) for job in jobs] == [[7, 7, 7]] * 9
        assert ended == [(3, True)] * 29  # counted before anybody hears of it
        assert not worker.open
        assert not worker.jobs
        assert (worker.running, worker.waiting) == (0, 0)

    run(test)


def test_an_end_is_heard_before_the_next_round():
    async def test(worker, made):
        next_round, step = Event(), made.step
        made.step = lambda: (made.rows and next_round.wait(5), step())[1]
        made.open = False
        short, long = ask(worker, params=SamplingParams(max_tokens=1)), ask(worker)
        await until(lambda: len(made.waiting) == 2)
        made.open = True
        third = ask(worker)  # which wakes the engine
        assert await asyncio.wait_for(heard(short), 3) == [7]
        next_round.set()
        assert await heard(long) == await heard(third) == [7, 7, 7]

    run(test)


def test_a_request_that_is_refused_hears_of_it_and_waits_no_more():
    async def test(worker, made):
        for _ in range(3):
            with pytest.raises(PacelineError, match="no prompt"):
                await heard(ask(worker, ()))
        assert worker.waiting == 0
        assert not worker.open

    run(test, most_waiting=1)


@pytest.mark.parametrize("most", [1, 3])
def test_as_many_wait_as_may(most):
    async def test(worker, made):
        jobs = [ask(worker) for _ in range(most)]
        with pytest.raises(Busy, match=f"{most} requests are waiting"):
            ask(worker)
        await until(lambda: len(made.waiting) == most)
        with pytest.raises(Busy):
            ask(worker)
        worker.abort(jobs[0])
        await until(lambda: worker.waiting < most)
        ask(worker)

    run(test, Fake(open=False), most_waiting=most)


@pytest.mark.parametrize("joined", [False, True])
def test_an_abort_ends_the_job_and_its_row(joined):
    async def test(worker, made):
        long = ask(worker, params=SamplingParams(max_tokens=90))
        made.step = lambda step=made.step: step() if not made.rows else []  # one token, and then none
        await until(lambda: bool(made.rows if joined else made.waiting))
        worker.abort(long)
        assert len(await heard(long)) == joined
        await until(lambda: not made.rows and not made.waiting)
        assert long.completion.finish_reason == "abort"
        assert not worker.open
        worker.abort(long)  # which changes nothing
        made.open = True
        del made.step
        assert await heard(ask(worker)) == [7, 7, 7]

    run(test, Fake(open=joined))


def test_the_deadline_is_that_of_each_job():
    async def test(worker, made):
        made.step = lambda: []  # nobody gets a token
        began = perf_counter()
        first = ask(worker)
        await asyncio.sleep(0.1)
        second = ask(worker)
        assert await heard(first) == []
        assert perf_counter() - began >= 0.2
        assert second in worker.open
        assert await heard(second) == []
        assert perf_counter() - began >= 0.3

    run(test, deadline_s=0.2)


def test_rounds_that_fail_now_and_then():
    async def test(worker, made):
        for _ in range(FAILED_ROUNDS):
            made.broken = 1
            with pytest.raises(EngineFailed):
                await heard(ask(worker))
            assert await heard(ask(worker)) == [7, 7, 7]
        assert worker.closed is None
        for _ in range(FAILED_ROUNDS):
            made.broken = 1
            with pytest.raises(PacelineError, match="the engine failed"):
                await heard(ask(worker))
        await until(lambda: worker.closed is not None)
        assert isinstance(worker.error, RuntimeError)
        with pytest.raises(Unavailable):
            ask(worker)

    run(test)


def test_a_job_that_comes_while_the_thread_ends():
    """It is noted before the worker looks whether it is closed; otherwise nobody would know of it."""

    async def test(worker, made):
        check = worker.check

        def late():
            check()
            worker._inbox.put((broken, ask))
            worker._thread.join()

        worker.check = late
        with pytest.raises(Unavailable) as ended:
            await heard(ask(worker))
        assert ended.value.code == "engine_failed"

    run(test)


def broken(*_):
    raise RuntimeError("broken")


def test_stopping_ends_what_is_open():
    async def test(worker, made):
        job = ask(worker)
        await until(lambda: bool(made.waiting))
        assert await asyncio.to_thread(worker.stop)
        assert not made.waiting
        with pytest.raises(Unavailable, match="shutting down"):
            await heard(job)
        with pytest.raises(Unavailable, match="shutting down"):
            ask(worker)

    run(test, Fake(open=False))
