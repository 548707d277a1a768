"""Metrics on answers made by hand: every figure worked out beside it, intervals that cover, partial and failed runs."""

import json
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from tests.bench.turns import reply

from paceline.bench.metrics import (
    accepted_by_depth,
    batch_speedups,
    block_efficiency,
    calls_per_round,
    draft_share,
    drafted_per_round,
    first_divergence,
    identical,
    length_histogram,
    looping,
    mbsu,
    mean_accepted_tokens,
    parts_ms,
    peak_bytes,
    speedup,
    speedup_interval,
    speedup_spec_bench,
    speedup_without_loops,
    summarize,
    tokens_per_second,
    tokens_per_second_spec_bench,
    too_short,
)
from paceline.bench.pairs import Pairs
from paceline.bench.record import Answer


def turn(tokens, seconds=1.0, **told):
    ids = list(range(tokens)) if isinstance(tokens, int) else list(tokens)
    return reply(prompt_tokens=5, tokens=ids, text="", seconds=seconds, plain_tokens=len(ids) - 1, **told)


def answer(*turns, method="sam", question="1", task="qa", **told):
    told.setdefault("group", int(question))
    return Answer(method, told.pop("repeat", 0), question, task, task, turns=list(turns), **told)


def plain(*turns, **told):
    return answer(*turns, method="none", **told)


# Tokens a round

ROUNDS = [
    answer(turn(8, lengths=[1, 4, 3], nodes=[0, 5, 4], depths=[0, 5, 4], calls=9), turn(1, lengths=[1], nodes=[0])),
    answer(turn(3, lengths=[1, 1, 1], nodes=[0, 0, 7], depths=[0, 0, 3], calls=3), question="2"),
    answer(turn(50, lengths=[1, 49], nodes=[0, 90], depths=[0, 90]), question="3", failed="fell over"),
]


PLAIN_ROUNDS = [plain(turn(4, lengths=[1] * 4, nodes=[0] * 4, depths=[0] * 4))]


@pytest.mark.parametrize(("figure", "of_rounds", "of_plain"), [
    (mean_accepted_tokens, 12 / 7, 1),  # 8 + 1 + 3 tokens in 3 + 1 + 3 rounds
    (block_efficiency, 9 / 4, 1),  # 4 + 3 + 1 + 1
    (length_histogram, [0, 5, 0, 1, 1], [0, 4]),
    (drafted_per_round, 16 / 4, 0),
    (calls_per_round, 12 / 4, 0),
])
def test_tokens_a_round(figure, of_rounds, of_plain):
    assert figure(ROUNDS) == pytest.approx(of_rounds)
    assert (figure(PLAIN_ROUNDS), accepted_by_depth(PLAIN_ROUNDS)) == (of_plain, [])


def test_accepted_by_depth_is_a_share_of_the_rounds_that_reach_it():
    told = {"nodes": [0, 4, 4, 2], "depths": [0, 4, 4, 2]}
    # 3, 1 and 0 drafted tokens stood.
    answers = [answer(turn(7, lengths=[1, 4, 2, 1], **told))]
    assert accepted_by_depth(answers) == pytest.approx([2 / 3, 1 / 3, 1 / 2, 0])


def test_an_answer_that_ends_inside_a_draft_has_all_of_its_last_round_accepted():
    told = {"lengths": [1, 2], "nodes": [0, 3], "depths": [0, 3]}
    inside = answer(turn(3, **told, runs=[("", "a", 1), ("sam", "bc", 2)]))
    behind = answer(turn(3, **told, runs=[("", "a", 1), ("sam", "b", 1), ("", "c", 1)]))
    assert (accepted_by_depth([inside]), accepted_by_depth([behind])) == ([1, 1, 0], [1, 0, 0])


def test_accepted_by_depth_is_the_engine_s_own():
    """On a whole answer of the engine, the same as its rows' statistics."""
    from tests.fakes import TableTarget

    from paceline.core.sampling import SamplingParams
    from paceline.engine.engine import Engine

    engine = Engine(TableTarget(6, order=1, seed=3, scale=3.0, eos=(5,)), "sam")
    answers, accepted, drafted = [], np.zeros(200), np.zeros(200)
    for seed in range(20):
        row = engine.add([1, 2, 3, 4] * 8, SamplingParams(max_tokens=40, temperature=0.8, seed=seed))
        deltas = [delta for _ in iter(lambda: engine.has_work, False) for delta in engine.step()]
        told = turn(
            row.new_tokens.tolist(), lengths=[len(delta.tokens) for delta in deltas],
            depths=[delta.depth for delta in deltas], runs=[(who, "", count) for who, count in row.runs],
        )
        answers.append(answer(told, question=str(seed)))
        for d in range(1, 200):
            accepted[d] += sum(row.stats.accepted[d:])
            drafted[d] += sum(row.stats.drafted[d : d + 1])
    shares = accepted_by_depth(answers)
    assert shares
    assert shares == pytest.approx((accepted[1:] / np.maximum(drafted[1:], 1))[: len(shares)])
    assert 0 < shares[0] < 1


def test_memory_bound_speedup():
    assert mbsu(2.5, 0, 0, 10) == 2.5  # nothing is drafted by a model
    assert mbsu(6, 5, 10, 10) == 1  # a draft model as large as the target, all accepted
    assert mbsu(3, 5, 1, 20) == pytest.approx(3 / 1.25)
    with pytest.raises(ValueError, match="must weigh something"):
        mbsu(3, 5, 0, 20)


# Time


def test_tokens_per_second_are_totals_of_medians():
    seconds = {"1": [1.0, 9.0, 1.2], "2": [4.0, 3.0, 8.0]}
    tokens = {"1": 10, "2": 100}
    answers = [answer(turn(tokens[q], seconds[q][r]), question=q, repeat=r) for q in "12" for r in range(3)]
    assert tokens_per_second(answers) == pytest.approx(110 / (1.2 + 4.0))
    assert tokens_per_second(answers[:2]) == pytest.approx(10 / 5)  # the mean of the two in the middle


def test_medians_are_taken_turn_by_turn():
    answers = [answer(turn(10, a), turn(20, b), repeat=r) for r, (a, b) in enumerate([(1, 9), (2, 3), (9, 1)])]
    assert tokens_per_second(answers) == pytest.approx(30 / (2 + 3))


def test_a_group_counts_its_seconds_once():
    answers = [answer(turn(10, 2.0), turn(5, 1.0), question="1", group=0), answer(turn(30, 2.0), question="2", group=0)]
    assert tokens_per_second(answers) == pytest.approx(45 / 3)


def test_speedup_is_a_ratio_of_totals_and_spec_bench_s_one_of_means():
    none = [plain(turn(11, 1.0)), plain(turn(101, 20.0), question="2")]
    sam = [answer(turn(11, 0.5)), answer(turn(101, 5.0), question="2")]
    assert speedup(sam, none) == pytest.approx(21 / 5.5)
    # Plain decoding's tokens are recounted: one less each.
    assert tokens_per_second_spec_bench(none) == pytest.approx((10 / 1 + 100 / 20) / 2)
    assert tokens_per_second_spec_bench(sam) == pytest.approx((11 / 0.5 + 101 / 5) / 2)
    assert speedup_spec_bench(sam, none) == pytest.approx((22 + 20.2) / 15)
    assert speedup_spec_bench(none, none) == 1


def test_spec_bench_s_mean_is_over_repeats_last():
    none = [plain(turn(11, s), repeat=r) for r, s in enumerate([1.0, 2.0])]
    sam = [answer(turn(11, s), repeat=r) for r, s in enumerate([0.5, 0.25])]
    assert tokens_per_second_spec_bench(sam) == pytest.approx((22 + 44) / 2)
    assert speedup_spec_bench(sam, none) == pytest.approx((22 / 10 + 44 / 5) / 2)


def test_only_what_both_answered_counts():
    none = [plain(turn(10, 1.0), question=q, failed="out of memory" if q == "2" else None) for q in "123"]
    sam = [answer(turn(10, 0.5)), answer(turn(10, 0.1), question="2"), answer(turn(4, 1.0), question="3", failed="x")]
    assert speedup(sam, none) == pytest.approx(2)
    assert tokens_per_second(sam) == pytest.approx(20 / 0.6)
    assert speedup_spec_bench(sam, none) == pytest.approx(20 / 9)
    assert speedup(sam[1:], none) is speedup_interval(sam[1:], none) is speedup_spec_bench(sam[1:], none) is None


def test_a_group_that_was_cut_in_two_does_not_count():
    none = [plain(turn(10, 1.0), question=q, group=0) for q in "12"] + [plain(turn(10, 1.0), question="3")]
    sam = [answer(turn(10, 0.9), question="1", group=0), answer(turn(10, 0.5), question="3")]
    assert speedup(sam, none) == pytest.approx(2)


def test_decoding_alone_leaves_the_prompt_out():
    none = [plain(turn(5, 3.0, lengths=[1] * 5, times=[1.0, 1.5, 2.0, 2.5, 3.0]))]
    sam = [answer(turn(5, 2.0, lengths=[1, 4], times=[1.0, 2.0]))]
    assert tokens_per_second(none, decode=True) == pytest.approx(4 / 2)
    assert speedup(sam, none, decode=True) == pytest.approx(2)
    assert speedup(sam, none) == pytest.approx(1.5)
    silent = [answer(turn(5, 2.0, lengths=[1, 4]))]
    assert tokens_per_second(silent, decode=True) is speedup(silent, none, decode=True) is None


def test_decoding_of_a_group_begins_with_its_last_row():
    first = answer(turn(5, 4.0, lengths=[1, 2, 2], times=[1.0, 2.0, 4.0]), group=0)
    last = answer(turn(3, 4.0, lengths=[1, 2], times=[2.0, 3.0]), group=0, question="2")
    assert tokens_per_second([first, last], decode=True) == pytest.approx(4 / 2)


def test_latency():
    answers = [
        answer(turn(3, times=[0.1, 0.2, 0.5], lengths=[1, 1, 1]), turn(2, times=[0.3, 0.4], lengths=[1, 1])),
        answer(turn(9, times=[0.2], lengths=[9]), turn(1), question="2"),
    ]
    found = told_by(summarize(answers, {}), "sam")
    assert found["first_token_ms"] == pytest.approx(200)
    assert found["inter_token_ms_p50"] == pytest.approx(100)
    assert found["inter_token_ms_p99"] == pytest.approx(np.percentile([100, 300, 100], 99))
    assert told_by(summarize(answers[1:], {}), "sam")["inter_token_ms_p50"] is None
    assert told_by(summarize([answer(turn(1))], {}), "sam")["first_token_ms"] is None


def test_parts_and_memory():
    answers = [
        answer(turn(4, lengths=[1, 3], parts={"draft": 0.01, "forward": 0.05}, peak_bytes=5)),
        answer(turn(4, lengths=[1, 1, 2], parts={"forward": 0.03, "accept": 0.01}, peak_bytes=7), question="2"),
    ]
    assert draft_share(answers) == pytest.approx(0.1)
    assert parts_ms(answers) == pytest.approx({"draft": 2, "forward": 16, "accept": 2})
    assert peak_bytes(answers) == 7
    silent = [answer(turn(4))]
    assert draft_share(silent) is parts_ms(silent) is peak_bytes(silent) is None


# Intervals


def runs(questions, repeats, spread, seed):
    """A method twice as fast as plain decoding, by log-normal factors of question and run."""
    random = np.random.default_rng(seed)
    none, sam = [], []
    for q in range(questions):
        length, gain = int(random.integers(10, 100)), 2 * np.exp(spread * random.standard_normal())
        for r in range(repeats):
            noise = np.exp(0.05 * random.standard_normal(2))
            told = {"question": str(q), "task": "ab"[q % 2], "repeat": r}
            none.append(plain(turn(length, length * noise[0]), **told))
            sam.append(answer(turn(length, length / gain * noise[1]), **told))
    return none, sam


def test_the_interval_covers_what_it_estimates():
    inside = 0
    for seed in range(60):
        none, sam = runs(30, 2, 0.3, seed)
        interval = speedup_interval(sam, none, resamples=200, seed=seed)
        # Time is length / gain: the ratio of totals estimates the harmonic mean of the gains.
        inside += interval[0] <= 2 * np.exp(-(0.3**2) / 2) <= interval[1]
    assert 51 <= inside <= 60


def test_the_interval_narrows_with_questions_and_is_seeded():
    none, sam = runs(100, 1, 0.3, 1)
    wide = speedup_interval(sam[:20], none[:20])
    narrow = speedup_interval(sam, none)
    assert narrow[0] < (speedup(sam, none) or 0) < narrow[1]
    assert narrow[1] - narrow[0] < 0.7 * (wide[1] - wide[0])
    assert speedup_interval(sam, none) == narrow != speedup_interval(sam, none, seed=1)
    assert speedup_interval(none, none) == (1, 1)
    assert speedup_interval(sam[:5], none[:5]) is speedup_interval(sam[:1], none[:1]) is None
    assert speedup_interval(sam[:6], none[:6]) is not None


def test_repeats_that_differ_widen_the_interval():
    none = [plain(turn(10, 1.0), question=str(q), repeat=r) for q in range(8) for r in range(3)]
    steady = [answer(turn(10, 0.5), question=str(q), repeat=r) for q in range(8) for r in range(3)]
    shaky = [answer(turn(10, [0.3, 0.5, 0.9][r]), question=str(q), repeat=r) for q in range(8) for r in range(3)]
    assert speedup(shaky, none) == speedup(steady, none) == 2
    assert speedup_interval(steady, none) == (2, 2)
    low, high = speedup_interval(shaky, none) or (0, 0)
    assert low < 1.9
    assert high > 2.1


def test_groups_are_drawn_within_their_task():
    """Two tasks, each without spread but far apart: stratified, every resample is the same."""
    none = [plain(turn(10, 1.0), question=str(q), task="ab"[q % 2]) for q in range(10)]
    sam = [answer(turn(10, [1.0, 0.1][q % 2]), question=str(q), task="ab"[q % 2]) for q in range(10)]
    assert speedup_interval(sam, none) == pytest.approx((10 / 5.5, 10 / 5.5))


def test_resamples_agree_with_a_plain_loop():
    none, sam = runs(6, 3, 0.3, 5)
    none, sam = none[:-2], sam[:-1]  # the last question has one repeat
    pairs = Pairs.of(sam, none)
    assert pairs.counts.tolist() == [3, 3, 3, 3, 3, 1]
    found = pairs.resampled(4000, np.random.default_rng(0))
    random = np.random.default_rng(1)

    def once():
        totals = np.zeros((2, 2))
        for members in pairs.members:
            for g in random.choice(members, len(members)):
                which = random.integers(pairs.counts[g], size=pairs.counts[g])
                for side, stack in enumerate((pairs.mine, pairs.plain)):
                    totals[side] += [median(stack[g, which, 0, column]) for column in (0, 1)]
        return float(totals[0, 0] / totals[0, 1] * totals[1, 1] / totals[1, 0])

    slow = [once() for _ in range(1500)]
    assert np.percentile(found, [10, 50, 90]) == pytest.approx(np.percentile(slow, [10, 50, 90]), rel=0.02)


# What was said


@pytest.mark.parametrize(("turns", "where"), [
    ([[1, 2, 3], [4, 5]], None), ([[1, 9, 3], [4, 5]], (0, 1)), ([[1, 2, 3], [4, 5, 6]], (1, 2)),
    ([[1, 2], [4, 5]], (0, 2)), ([[1, 2, 3]], (1, 0)),
])
def test_first_divergence(turns, where):
    assert first_divergence(answer(*map(turn, turns)), plain(turn([1, 2, 3]), turn([4, 5]))) == where


def test_identical_compares_question_and_repeat():
    none = [plain(turn([r, 7])) for r in range(1)] + [plain(turn([1, 7]), repeat=1), plain(turn([3]), question="2")]
    sam = [answer(turn([0, 7])), answer(turn([0, 7]), repeat=1), answer(turn([5]), question="3")]
    assert (identical(sam, none), identical(none, none)) == (0.5, 1)
    assert identical(sam[2:], none) is None


def test_looping_is_any_turn():
    loop, text = turn([1, 2] * 40), turn(80)
    assert looping([answer(text, loop), answer(text, question="2"), answer(loop, question="3", failed="x")]) == 0.5
    assert looping([]) is None


def test_an_answer_that_was_cut_off_early_may_have_become_a_loop():
    early, late = turn([1, 2] * 31, finish="length"), turn([1, 2] * 32, finish="length")
    assert (too_short([answer(early)]), too_short([answer(early), answer(late, question="2")])) == (1, 0.5)
    assert too_short([answer(late, early)]) == 0, "it loops"
    assert too_short([answer(turn([1, 2] * 31, finish="stop"))]) == 0
    assert looping([answer(late), answer(early, question="2")]) == 0.5
    assert too_short([]) is None


def test_speed_up_without_the_questions_that_loop():
    loop = [1, 2] * 40
    none = [plain(turn(loop, 8.0)), plain(turn(80, 8.0), question="2"), plain(turn(80, 8.0), question="3")]
    sam = [answer(turn(loop, 1.0)), answer(turn(80, 4.0), question="2"), answer(turn(loop, 2.0), question="3")]
    assert speedup(sam, none) == pytest.approx(24 / 7)
    assert speedup_without_loops(sam, none) == pytest.approx(16 / 6), "what counts is plain decoding's answer"
    assert speedup_without_loops(sam[1:], none[1:]) == speedup(sam[1:], none[1:])
    assert speedup_without_loops(sam[:1], none[:1]) is None
    together = [replace(one, group=0) for one in none]
    assert speedup_without_loops([replace(one, group=0) for one in sam], together) is None, "one of the group loops"


# All of them

KEYS = """
    method category answers failed speedup speedup_low speedup_high speedup_decode speedup_spec_bench
    tokens_per_second tokens_per_second_spec_bench mean_accepted_tokens block_efficiency round_cost mbsu
    accepted_by_depth drafted_per_round draft_share parts_ms lengths rounds new_tokens seconds peak_bytes
    first_token_ms inter_token_ms_p50 inter_token_ms_p99 identical looping too_short
    speedup_without_loops differs
"""
FACTS = {"target_bytes": 100, "draft_bytes": 0}


def told_by(results, method, category="overall"):
    return next(result for result in results if (result["method"], result["category"]) == (method, category))


def whole_run():
    answers = []
    for number, task in enumerate(["qa", "qa", "rag"]):
        told = {"question": str(number), "task": task}
        slow = {"lengths": [1] * 9, "times": [0.1 * i for i in range(1, 10)], "nodes": [0] * 9, "depths": [0] * 9}
        fast = {"lengths": [1, 4, 4], "times": [0.1, 0.2, 0.45], "nodes": [0, 3, 3], "depths": [0, 3, 3], "calls": 6}
        answers += [answer(turn(9, 0.45, **fast, parts={"draft": 0.1, "forward": 0.3}), method="sam", **told)]
        answers += [plain(turn(9, 0.9, **slow, parts={"forward": 0.9}), **told)]
        answers += [answer(turn([0, 1, 5], 0.3), method="peer:other", **told)]
    return answers


def test_a_summary_has_every_figure_of_every_method():
    judged = [{"method": "peer:other", "question": "2", "repeat": 0, "turn": 0, "at": 2, "verdict": "bug"}]
    results = summarize(
        whole_run(),
        {"none": FACTS, "sam": {"target_bytes": 100, "draft_bytes": 10}, "peer:gone": {"unavailable": "not installed"}},
        judged=judged,
        resamples=50,
    )
    assert all(set(result) >= set(KEYS.split()) for result in results)
    order = [(result["method"], result["category"]) for result in results]
    none, sam, other = ([(m, c) for c in ("overall", "qa", "rag")] for m in ("none", "sam", "peer:other"))
    assert order == [*none, *sam, ("peer:gone", "overall"), *other]  # as the facts have them, whoever answered first
    assert json.loads(json.dumps(results)) == results

    sam = told_by(results, "sam")
    assert (sam["answers"], sam["compared"], sam["failed"], sam["rounds"], sam["new_tokens"]) == (3, 3, None, 9, 27)
    assert sam["speedup"] == pytest.approx(2)
    assert sam["speedup_low"] is sam["speedup_high"] is None  # of one task there is a single question
    qa = told_by(results, "sam", "qa")
    assert (qa["speedup"], qa["speedup_low"]) == (pytest.approx(2), None)  # of two questions
    assert sam["seconds"] == pytest.approx(1.35)
    assert sam["tokens_per_second"] == pytest.approx(20)
    assert sam["speedup_decode"] == pytest.approx(0.8 / 0.35)
    assert sam["round_cost"] == pytest.approx(4 / (0.8 / 0.35))
    assert sam["mbsu"] == pytest.approx(4 / (1 + 3 * 0.1))
    assert (sam["lengths"], (sam["identical"], sam["looping"])) == ([0, 3, 0, 0, 6], (1, 0))
    assert told_by(results, "sam", "qa")["answers"] == 2

    none = told_by(results, "none")
    assert none["speedup"] == none["speedup_spec_bench"] == none["round_cost"] == none["mbsu"] == 1

    other = told_by(results, "peer:other")  # tells tokens and seconds, nothing else
    assert other["speedup"] == pytest.approx((3 / 0.3) / 10)
    silent = "speedup_decode mean_accepted_tokens round_cost mbsu accepted_by_depth lengths rounds parts_ms"
    assert all(other[figure] is None for figure in silent.split())
    assert other["identical"] == 0
    assert other["differs"] == told_by(results, "peer:other", "rag")["differs"] == judged
    assert told_by(results, "peer:other", "qa")["differs"] == []

    gone = told_by(results, "peer:gone")
    assert (gone["failed"], gone["answers"], gone["speedup"]) == ("not installed", 0, None)


def test_a_draft_model_whose_calls_are_not_told_has_no_memory_bound_speedup():
    answers = [answer(turn(9, 0.5, lengths=[1, 4, 4]))]
    results = summarize(answers, {"sam": {"target_bytes": 100, "draft_bytes": 10}})
    assert told_by(results, "sam")["mbsu"] is None


def test_a_run_that_was_killed_is_summarized_as_far_as_it_goes():
    answers = whole_run()[:4]  # the second question has one answer, of sam
    answers.append(answer(turn(2, 9.0), method="peer:other", question="1", task="qa", failed="it died"))
    results = summarize(answers, {"none": FACTS, "sam": FACTS, "slow": FACTS}, resamples=10)
    sam, other, slow = (told_by(results, method) for method in ("sam", "peer:other", "slow"))
    assert (sam["answers"], sam["compared"], sam["failed"]) == (2, 1, None)
    assert sam["speedup"] == pytest.approx(2)
    assert (sam["speedup_low"], sam["speedup_high"]) == (None, None)
    assert ((other["answers"], other["failed"]), slow["failed"]) == ((1, "it died"), "no answers yet")
    assert (told_by(results, "none")["compared"], summarize([], {})) == (1, [])


def test_without_plain_decoding_there_are_no_speedups():
    results = summarize([a for a in whole_run() if a.method != "none"], {})
    sam = told_by(results, "sam")
    assert sam["speedup"] is sam["speedup_decode"] is sam["speedup_spec_bench"] is sam["identical"] is None
    assert sam["compared"] == 0
    assert sam["tokens_per_second"] == pytest.approx(20)
    assert sam["mean_accepted_tokens"] == 3


# Requests that are answered together


def test_figures_of_requests_that_are_answered_together():
    counts = {"rounds": 5, "rows": 9, "slots": 10, "drafting": 4, "same_length": 1, "moved_bytes": 1000}

    def request(question, tokens, **more):
        times = [float(i) for i in range(1, len(tokens) + 1)]
        reply = turn(tokens, times[-1], lengths=[1] * len(tokens), times=times, **more)
        return answer(reply, question=question, group=0)

    mine = [
        request("1", [5, 6, 7, 8], parts={"forward": 3.0, "align": 1.0}, batch=counts),
        request("2", [5, 6], parts={"forward": 4.0}),
    ]
    none = [replace(one, method="none") for one in (request("1", [5, 6, 9, 8]), request("2", [5, 6]))]
    results = summarize([*mine, *none], {})
    figures = told_by(results, "sam")
    expected = {"partial_match": 0.75, "align_share": 1 / 8, "group_rate": 1 / 4, "idle_slots": 0.1, "moved_bytes": 200}
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
    assert figures["latency_p50"] == 3
    unscheduled = told_by(results, "none")
    assert unscheduled["partial_match"] == 1
    assert unscheduled["idle_slots"] is unscheduled["group_rate"] is unscheduled["align_share"] is None


def test_speedups_at_the_same_batch():
    def result(drafter, schedule, batch, speed):
        how = {"drafter": drafter, "schedule": schedule, "batch": batch}
        return {"method": f"{drafter} {schedule} {batch}", "tokens_per_second": speed, "scheduled": how}

    results = [
        {"method": "none", "tokens_per_second": 10.0, "scheduled": None}, result("sam", "equal", 1, 15.0),
        result("sam", "equal", 4, 30.0), result("none", "ragged", 4, 40.0), result("sam", "equal", 8, 50.0),
        result("sam", "ragged", 4, None),
    ]
    gains = {"none": 1.0, "sam equal 1": 1.5, "sam equal 4": 0.75, "none ragged 4": 1.0}
    assert batch_speedups(results) == gains
