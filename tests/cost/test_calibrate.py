"""Calibration and prediction: against a simulator whose forwards take a known time, and on the demo model."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np
import pytest
from tests.fakes import TableTarget

from paceline.bench import metrics
from paceline.bench.record import Answer, Reply
from paceline.completion import Delta
from paceline.cost.calibrate import Calibrator, calibrate
from paceline.cost.calibration import Calibration
from paceline.cost.model import DEVICES, Machine, Size, predict
from paceline.cost.predict import pace, predict_run, recorded_rounds
from paceline.draft.base import Drafter
from paceline.draft.registry import create
from paceline.engine import Engine
from paceline.errors import PacelineError
from paceline.round import Segment, Verdict
from paceline.row import Row
from paceline.sampling import SamplingParams
from paceline.tree import DraftTree

SIZES = (1, 2, 4, 8, 16)
CLOCKED = ("paceline.clock", "paceline.engine", "paceline.cost.calibrate", __name__)
"""Modules that look at the time."""

Wait = Callable[[float], None]


class Clock:
    """Time that passes only when somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Wait:
    """Waits on a clock of its own, which everything here goes by."""
    clock = Clock()
    for module in CLOCKED:
        monkeypatch.setattr(f"{module}.perf_counter", clock)
    return clock.wait


class Simulator(TableTarget):
    """A forward takes 3 ms, 0.2 ms for every node and 2 us for every token behind a row."""

    def __init__(self, wait: Wait):
        super().__init__(vocab_size=16, order=2, seed=3, scale=6.0, max_context=1024)
        self.wait, self.weights = wait, 3e-3

    def verify(self, segments: Sequence[Segment], *rest: Any) -> Verdict:
        nodes, behind = sum(len(s.tokens) for s in segments), sum(self.length(s.slot) for s in segments)
        self.wait(self.weights + 2e-4 * nodes + 2e-6 * behind)
        return super().verify(segments, *rest)


def slowed(drafter: Drafter, wait: Wait) -> Drafter:
    """Takes half a millisecond to propose."""
    propose = drafter.propose

    def slow(rows: Sequence[Row]) -> list[DraftTree]:
        wait(5e-4)
        return propose(rows)

    drafter.propose = slow  # type: ignore[method-assign]
    return drafter


def turn_of(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> list[Reply]:
    """Answers to prompts given together, recorded as a benchmark does."""
    began = perf_counter()
    rows = [engine.add(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True)) for prompt in prompts]
    arrived: list[tuple[float, Delta]] = []
    while engine.has_work:
        deltas = engine.step()
        arrived += [(perf_counter() - began, delta) for delta in deltas]
    seconds = perf_counter() - began
    return [
        Reply(
            row.prompt_length,
            row.new_tokens.tolist(),
            "",
            seconds,
            lengths=[len(d.tokens) for _, d in arrived if d.row is row],
            times=[when for when, d in arrived if d.row is row],
            nodes=[d.nodes for _, d in arrived if d.row is row],
            depths=[d.depth for _, d in arrived if d.row is row],
            parts=dict(row.stats.seconds),
        )
        for row in rows
    ]


def run(
    wait: Wait, methods: Sequence[str], prompts: int = 4, batch: int = 1, target: Simulator | None = None
) -> list[Answer]:
    """Every method's answers to random prompts of two tasks."""
    random = np.random.default_rng(1)
    texts = [random.integers(16, size=30 + 10 * i).tolist() for i in range(prompts)]
    target = target or Simulator(wait)
    engines = {
        method: Engine(target, create(method) if method == "none" else slowed(create(method), wait), max_batch=batch)
        for method in methods
    }
    answers = []
    for group in range(0, prompts, batch):
        for method, engine in engines.items():
            task = "even" if group // batch % 2 == 0 else "odd"
            turns = turn_of(engine, texts[group : group + batch], 60)
            answers += [Answer(method, 0, f"q{group + i}", "c", task, group, [turn]) for i, turn in enumerate(turns)]
    return answers


def measured(answers: Sequence[Answer], method: str, task: str | None = None) -> float:
    mine, plain = ([a for a in answers if a.method == m and task in (None, a.task)] for m in (method, "none"))
    found = metrics.speedup(mine, plain)
    assert found is not None
    return found


def test_a_simulator_is_timed_as_it_is(wait: Wait) -> None:
    found = calibrate(Simulator(wait), sizes=SIZES, context=64, rounds=5)
    assert found.nodes == SIZES
    # The context is around 64, and 256, tokens when a round is timed.
    assert found.ms == pytest.approx([3 + 0.2 * n + 2e-3 * 64 for n in SIZES], abs=0.05)
    assert found.tree_nodes == (8,)
    assert found.tree_ms == pytest.approx([3 + 1.6 + 0.128], abs=0.05)
    assert (found.context, found.long_context) == (64, 256)
    # Up to some 20 tokens beside the context that is meant, of 192 between the two.
    assert found.round_ms(1, context=564) - found.round_ms(1, context=64) == pytest.approx(1, rel=0.25)
    assert found.token_ms == 0
    (short, long), (short_ms, long_ms) = found.prompt_tokens, found.prompt_ms
    assert short_ms == pytest.approx(3 + 0.2 * short, rel=0.01)
    assert long_ms == pytest.approx(3 + 0.2 * long, rel=0.01)


def test_rounds_are_timed_when_they_have_settled(wait: Wait) -> None:
    """Behind another size, five rounds take twice as long."""
    sizes = [0]

    class Settling(Simulator):
        def verify(self, segments: Sequence[Segment], *rest: Any) -> Verdict:
            sizes.append(sum(len(segment.tokens) for segment in segments))
            if len(set(sizes[-5:])) > 1:
                self.wait(3e-3)
            return super().verify(segments, *rest)

    found = calibrate(Settling(wait), sizes=SIZES, context=64, rounds=5)
    assert found.ms == pytest.approx([3 + 0.2 * n + 2e-3 * 64 for n in SIZES], abs=0.05)


def test_a_simulated_run_is_predicted(wait: Wait) -> None:
    calibration = calibrate(Simulator(wait), sizes=SIZES, context=64, rounds=5)
    methods = ["none", "prompt-lookup", "sam"]
    answers = run(wait, methods)
    predicted = predict_run(answers, calibration)
    assert set(predicted) == {(m, c) for m in methods for c in ("overall", "even", "odd")}
    for method, category in predicted:
        found = measured(answers, method, None if category == "overall" else category)
        assert predicted[method, category] == pytest.approx(found, rel=0.02), (method, category)
    assert predicted["sam", "overall"] > predicted["prompt-lookup", "overall"] > 1.2


def test_rows_answered_together_are_predicted(wait: Wait) -> None:
    calibration = calibrate(Simulator(wait), sizes=SIZES, context=64, rounds=5, batch=2)
    assert calibration.nodes == tuple(2 * n for n in SIZES)
    answers = run(wait, ["none", "prompt-lookup"], batch=2)
    predicted = predict_run(answers, calibration)
    assert predicted["prompt-lookup", "overall"] == pytest.approx(measured(answers, "prompt-lookup"), rel=0.03)
    assert predicted["prompt-lookup", "overall"] > 1.1


@pytest.mark.slow
def test_a_run_that_sleeps_is_predicted() -> None:
    """As above on the real clock, where everything else takes its time too."""
    calibration = calibrate(Simulator(sleep), sizes=SIZES, context=64, rounds=9)
    methods = ["none", "prompt-lookup", "sam"]
    answers = run(sleep, methods)
    predicted = predict_run(answers, calibration)
    found = {method: measured(answers, method) for method in methods}
    print(found, predicted)
    for method in methods:
        assert predicted[method, "overall"] == pytest.approx(found[method], rel=0.05)


def test_a_machine_that_is_slow_now_and_then(wait: Wait) -> None:
    """Half the time it takes twice as long, in stretches that do not begin and end with a sweep."""
    passed = 0

    def uneven(seconds: float) -> None:
        nonlocal passed
        passed += 1
        wait(seconds * (2 if passed // 51 % 2 else 1))

    found = calibrate(Simulator(uneven), sizes=SIZES, context=64, rounds=15)
    relative = np.array(found.ms) / found.ms[0]
    assert relative == pytest.approx([(3.128 + 0.2 * n) / 3.328 for n in SIZES], rel=0.1)


def test_a_run_whose_memory_gets_slow_is_predicted_by_sweeps_all_through_it(wait: Wait) -> None:
    """For half the questions, reading the weights takes three times as long, and computing as long as ever."""
    target = Simulator(wait)
    calibrator = Calibrator(target, sizes=SIZES, context=64)
    answers, methods = [], ["none", "prompt-lookup", "sam"]
    for group in range(4):
        target.weights = 3e-3 if group < 2 else 9e-3
        calibrator.sweep()
        calibrator.sweep()
        told = run(wait, methods, prompts=1, target=target)
        answers += [replace(answer, group=group, question=f"q{group}") for answer in told]
    early = Calibrator(Simulator(wait), sizes=SIZES, context=64)
    early.sweep()
    off = []
    for calibration in (calibrator.result(), early.result()):
        predicted = predict_run(answers, calibration)
        off.append([abs(predicted[m, "overall"] / measured(answers, m) - 1) for m in methods[1:]])
    assert max(off[0]) < 0.04
    assert min(off[1]) > 0.1


def test_accepted_tokens_cost_what_keeping_them_costs(wait: Wait, monkeypatch: pytest.MonkeyPatch) -> None:
    extend = Row.extend

    def slow(row: Row, tokens: Sequence[int], *rest: Any) -> int:
        wait(1e-4 * len(tokens))
        return extend(row, tokens, *rest)

    monkeypatch.setattr(Row, "extend", slow)
    found = calibrate(Simulator(wait), sizes=SIZES, context=64, rounds=3)
    assert found.token_ms == pytest.approx(0.1, rel=0.05)  # now and then a random token is right
    rounds = found.rounds_ms([5, 5], 64, accepted=[0, 4])
    assert rounds[1] - rounds[0] == pytest.approx(4 * found.token_ms)


# Answers made up: 10 ms a plain round, 100 tokens after a first one that takes 50 ms.
TABLE = Calibration("paceline", 1, 100, (1, 11, 21), (10.0, 12.0, 16.0), (100, 300), (50.0, 90.0))


def made_up(method: str, rounds: int, tokens: int, nodes: int, seconds: float, **kw: Any) -> Answer:
    turn = Reply(
        100,
        [7] * (1 + rounds * tokens),
        "",
        seconds,
        lengths=[1] + [tokens] * rounds,
        times=list(np.linspace(0.05, seconds, rounds + 1)),
        nodes=[0] + [nodes] * rounds,
        depths=[0] + [nodes] * rounds,
        **kw,
    )
    return Answer(method, 0, "q", "c", "task", 0, [turn])


PLAIN = made_up("none", 100, 1, 0, 1.05)


def test_a_prediction_by_hand() -> None:
    mine = made_up("x", 50, 2, 10, 123.0, parts={"draft": 0.1, "forward": 99.0})
    predicted = predict_run([PLAIN, mine], TABLE)
    assert predicted == pytest.approx(
        {
            ("none", "overall"): 1.0,
            ("none", "task"): 1.0,
            ("x", "overall"): 1.05 / (0.05 + 50 * 0.012 + 0.1),
            ("x", "task"): 1.05 / (0.05 + 50 * 0.012 + 0.1),
        }
    )


def test_a_machine_that_was_slower_during_the_run() -> None:
    """Twice as slow in every round: the time to the first token is taken from the run, so the rest scales."""
    slow = made_up("none", 100, 1, 0, 2.05)
    mine = made_up("x", 50, 2, 10, 9.9)
    predicted = predict_run([slow, mine], TABLE)
    assert predicted["x", "overall"] == pytest.approx(2.05 / (0.05 + 50 * 0.024))


def test_what_else_the_machine_did_is_in_both_totals() -> None:
    """Every other plain answer took three times as long; drafted ones would have been hit alike."""
    took = [1.0, 3.0, 1.0, 3.0]
    plain = [replace(made_up("none", 100, 1, 0, 0.05 + s), question=f"q{i}", group=i) for i, s in enumerate(took)]
    mine = [replace(made_up("x", 50, 2, 10, 9.9), question=f"q{i}", group=i) for i in range(4)]
    predicted = predict_run([*plain, *mine], TABLE)
    assert predicted["none", "overall"] == pytest.approx(1)
    assert predicted["x", "overall"] == pytest.approx(2.05 / (0.05 + 50 * 0.024))


def test_what_cannot_be_predicted_is_left_out() -> None:
    silent = made_up("x", 50, 2, 10, 9.9)
    silent.turns[0].lengths = silent.turns[0].nodes = None
    broken = replace(made_up("y", 50, 2, 10, 9.9), failed="out of memory")
    assert {method for method, _ in predict_run([PLAIN, silent, broken], TABLE)} == {"none"}
    assert predict_run([made_up("x", 50, 2, 10, 9.9)], TABLE) == {}
    assert predict_run([], TABLE) == {}
    assert recorded_rounds([silent]) is None


def test_rounds_for_other_machines() -> None:
    rounds = recorded_rounds([made_up("x", 50, 2, 10, 9.9, parts={"draft": 0.1}), PLAIN])
    assert rounds is not None
    assert (rounds.tokens, rounds.sizes, rounds.draft_seconds) == (200, {11: 50, 1: 100}, 0.1)
    size = Size(7e9, layers=32, width=4096, cache_bytes=131072)
    found = predict(rounds, size, Machine(DEVICES["H100-SXM"]))
    assert 1 < found.speedup < 200 / 150


def test_a_table_is_read_with_trees_and_contexts() -> None:
    table = replace(
        TABLE,
        tree_nodes=(11,),
        tree_ms=(13.0,),
        long_context=300,
        long_nodes=(1, 11),
        long_ms=(12.0, 18.0),
    )
    assert [table.round_ms(n) for n in (1, 6, 11, 21, 31)] == pytest.approx([10, 11, 12, 16, 20])
    assert [table.round_ms(n, tree=True) for n in (1, 6, 11, 21)] == pytest.approx([10, 11.5, 13, 17])
    assert table.round_ms(1, context=200) == pytest.approx(11)
    assert table.round_ms(21, context=200) == pytest.approx(16 + 3)


def test_no_round_takes_less_than_nothing() -> None:
    """A round on a long context that took a hundred times too long, once, says little of short ones."""
    table = replace(TABLE, long_context=300, long_nodes=(1, 11), long_ms=(1000.0, 12.0))
    assert table.context == 100
    assert [table.round_ms(n, context=10) for n in (1, 11)] == pytest.approx([1, 12])
    assert table.round_ms(6, context=1) > 0


def test_the_pace_of_a_run() -> None:
    slow = replace(PLAIN.turns[0], seconds=2.05, times=list(np.linspace(0.05, 2.05, 101)))
    assert pace([[slow]], TABLE) == pytest.approx(2 * (pace([PLAIN.turns], TABLE) or 0))
    assert pace([], TABLE) is None


def test_peers_are_not_predicted() -> None:
    lookup = made_up("peer:transformers-lookup", 50, 2, 10, 9.9)
    assert {method for method, _ in predict_run([PLAIN, lookup], TABLE)} == {"none"}


def test_the_engine_it_came_with_is_left_as_it_was() -> None:
    engine = Engine(TableTarget(vocab_size=16, max_context=200))
    found = calibrate(engine, sizes=(4, 60), rounds=2)
    assert found.nodes == (1, 4)  # 60 nodes do not fit
    assert found.context == 50
    assert engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))[0].new_tokens == 4


def test_what_cannot_be_calibrated() -> None:
    with pytest.raises(PacelineError, match="context holds 32 tokens; 64 are needed"):
        calibrate(TableTarget(max_context=32))
    for wrong in ({"sizes": ()}, {"sizes": (0, 4)}, {"rounds": 0}, {"batch": 0}):
        with pytest.raises(PacelineError, match="must be 1 or more"):
            calibrate(TableTarget(), **wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_demo_model_is_predicted(demo: Path) -> None:
    """Three methods on this machine, which should have nothing else to do: a measurement takes part of a second."""
    from paceline.bench.contestant import Ask
    from paceline.bench.ours import Ours
    from paceline.target.load import load, load_tokenizer

    target, tokenizer = load(demo), load_tokenizer(demo)
    asked = ["Write a story about a dog.", "List ten fruits, then list them again.", "Repeat after me: one two three."]
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in asked]
    methods = ["none", "prompt-lookup", "sam", "recycling,tree=16"]
    contestants = [Ours(method, target, tokenizer, batch=1) for method in methods]
    calibration = calibrate(Engine(target, tokenizer=tokenizer))
    answers = []
    for contestant in contestants:
        contestant.open()
        contestant.answer([prompts[0]], Ask(16))
    for repeat in range(5):
        for q, prompt in enumerate(prompts):
            for contestant in contestants:
                turns = contestant.answer([prompt], Ask(128))
                answers.append(Answer(contestant.name, repeat, f"q{q}", "c", "t", q, turns))
    predicted = predict_run(answers, calibration)
    pairs = {method: (measured(answers, method), predicted[method, "overall"]) for method in methods}
    print(json.dumps({m: [round(x, 3) for x in pair] for m, pair in pairs.items()}), calibration)
    for method, (found, said) in pairs.items():
        assert said == pytest.approx(found, rel=0.15), method
