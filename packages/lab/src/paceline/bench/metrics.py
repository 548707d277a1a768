"""Metrics: every figure of a benchmark, defined once, computed from answers. `summarize` gives all of them.

A figure pools the repeats of its answers and leaves out failed ones. It is None if there is nothing to count, or if an
engine does not report the facts it needs. Sources: Spec-Bench (Xia et al. 2024, arXiv
2401.07851, and its evaluation/speed.py), VocabTrim (arXiv 2506.22694), Leviathan et al. 2023 (arXiv 2211.17192)."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np

from paceline.bench.pairs import Answers, Pairs, cells, totals
from paceline.bench.record import WINDOW, Answer, good, is_looping
from paceline.net.completion import Completion, in_common
from paceline.runs.runs import ENOUGH

BASELINE = "none"  # Plain decoding in the same engine, the baseline of all other methods.
OVERALL = "overall"  # The category of all tasks together; no task may have this name.
RESAMPLES = 1000
Facts = Mapping[str, Any]
Interval = tuple[float, float]


def length_histogram(answers: Answers) -> list[int] | None:
    """Entry i: the number of rounds with i new tokens, the target's own included.

    A round is a forward of the target that yields tokens; the end of the prefill is a round of one token."""
    lengths = [n for turn in _turns(answers) for n in turn.lengths or ()]
    return np.bincount(lengths).tolist() if lengths else None


def mean_accepted_tokens(answers: Answers) -> float | None:
    """New tokens / rounds, pooled. Plain decoding is 1.

    Spec-Bench's "#Mean accepted tokens": it counts the target's own tokens, and the round that ends the prefill."""
    return _mean(n for turn in _turns(answers) for n in turn.lengths or ())


def block_efficiency(answers: Answers) -> float | None:
    """Mean accepted tokens without each turn's first round, which cannot draft. Plain decoding is 1.

    tau of Leviathan et al. 2023 and VocabTrim."""
    return _mean(n for turn in _turns(answers) for n in (turn.lengths or ())[1:])


def accepted_by_depth(answers: Answers) -> list[float] | None:
    """Entry d-1: of the rounds whose draft reached depth d, the share that accepted at least d drafted tokens.

    A share of rounds, not of drafted tokens, and not conditional on the previous depth."""
    turns = [turn for turn in _turns(answers) if turn.lengths and turn.depths]
    if not turns:
        return None
    depths = np.array([depth for turn in turns for depth in turn.depths or ()])
    accepted = np.array([count for turn in turns for count in _accepted(turn)])
    return [float(np.mean(accepted[depths >= d] >= d)) for d in range(1, depths.max() + 1)]


def _accepted(turn: Completion) -> list[int]:
    """Drafted tokens accepted in each round. If an answer ends inside a draft, its last token is a drafted one."""
    accepted = [n - 1 for n in turn.lengths or ()]
    accepted[-1] += bool(turn.runs and turn.runs[-1][0])
    return accepted


def drafted_per_round(answers: Answers) -> float | None:
    """Mean number of drafted tokens (nodes of the tree without its root) verified in a round after the prefill."""
    return _mean(n for turn in _turns(answers) for n in (turn.nodes or ())[1:])


def calls_per_round(answers: Answers) -> float | None:
    """Sequential forwards of a draft model for each round after the prefill; 0 for drafters without one."""
    turns = [turn for turn in _turns(answers) if turn.lengths]
    rounds = sum(len(turn.lengths or ()) - 1 for turn in turns)
    return sum(turn.calls for turn in turns) / rounds if rounds else None


def mbsu(tau: float, calls_per_round: float, draft_bytes: int, target_bytes: int) -> float:
    """Memory-bound speed-up, tau / (1 + g c): g calls of the draft model a round, c = draft_bytes / target_bytes.

    VocabTrim: the speed-up on a machine that spends all its time on reading weights (the head once, the input embedding
    not at all). Without calls it is tau. Raises ValueError if bytes are needed and not given."""
    if not calls_per_round:
        return tau
    if draft_bytes <= 0 or target_bytes <= 0:
        raise ValueError(f"draft and target must weigh something, not {draft_bytes} and {target_bytes} bytes")
    return tau / (1 + calls_per_round * draft_bytes / target_bytes)


def tokens_per_second(answers: Answers, *, decode: bool = False) -> float | None:
    """New tokens / seconds. A turn of a group counts once, with medians over repeats. decode: see `pairs.cells`."""
    total = totals(answers, decode=decode)
    return total[0] / total[1] if total and total[1] > 0 else None


def speedup(answers: Answers, plain: Answers, *, decode: bool = False) -> float | None:
    """`tokens_per_second` over plain decoding's. Only groups answered by both in the same repeat count.

    It is a ratio of totals, so long answers weigh more. In `speedup_spec_bench` every question weighs the same."""
    pairs = Pairs.of(answers, plain, decode=decode)
    return pairs.ratio() if pairs else None


def speedup_interval(answers: Answers, plain: Answers, *, resamples: int = RESAMPLES, seed: int = 0) -> Interval | None:
    """95 % interval of `speedup`: 2.5th and 97.5th percentile over bootstrap resamples (Efron 1979).

    Paired: a resample draws a group's times with the method and with plain decoding together. Hierarchical: it draws
    groups within their task, then repeats within a group. Seeded: the same answers give the same interval. The interval
    covers other questions of the same kinds and other runs, not another machine. None if a task has a single group, or
    if there are fewer than ENOUGH questions."""
    pairs = Pairs.of(answers, plain)
    if pairs is None or min(map(len, pairs.members)) < 2 or len({one.question for one in answers}) < ENOUGH:
        return None
    random = np.random.default_rng(seed)
    sizes = [min(100, resamples - done) for done in range(0, resamples, 100)]  # All at once may need too much memory.
    ratios = np.concatenate([pairs.resampled(size, random) for size in sizes])
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), float(high)


def tokens_per_second_spec_bench(answers: Answers) -> float | None:
    """As Spec-Bench's speed.py: new tokens / seconds of a question's turns, averaged over questions, then over repeats.
    Plain decoding's tokens are counted as in its text encoded again, less one (`Completion.plain_tokens`). For
    questions answered one at a time."""
    speeds = _spec_bench(answers)
    return _mean(_mean(of_repeat.values()) or 0.0 for of_repeat in speeds.values())


def speedup_spec_bench(answers: Answers, plain: Answers) -> float | None:
    """As Spec-Bench's speed.py: the ratio of both means of `tokens_per_second_spec_bench`,
    over questions both answered."""
    mine, others = _spec_bench(answers), _spec_bench(plain)
    ratios = []
    for repeat in mine.keys() & others.keys():
        both = sorted(mine[repeat].keys() & others[repeat].keys())
        if below := sum(others[repeat][question] for question in both):
            ratios.append(sum(mine[repeat][question] for question in both) / below)
    return _mean(ratios)


def _spec_bench(answers: Answers) -> dict[int, dict[str, float]]:
    """Tokens per second of every question, by repeat."""
    speeds: dict[int, dict[str, float]] = {}
    for answer in good(answers):
        recounted = sum(turn.plain_tokens for turn in answer.turns)
        tokens = recounted if answer.method == BASELINE else answer.num_new
        if answer.seconds > 0:
            speeds.setdefault(answer.repeat, {})[answer.question] = tokens / answer.seconds
    return speeds


def draft_share(answers: Answers) -> float | None:
    """Drafting's share of the time of all parts, 0 to 1, prefill included."""
    return _share("draft", answers)


def parts_ms(answers: Answers) -> dict[str, float] | None:
    """Milliseconds of a round by part: each part's time over the number of rounds, prefill included."""
    parts = _parts(answers)
    rounds = sum(len(turn.lengths or ()) for turn in _turns(answers) if turn.parts)
    return {part: 1e3 * seconds / rounds for part, seconds in parts.items()} if rounds else None


def _share(part: str, answers: Answers) -> float | None:
    parts = _parts(answers)
    whole = sum(parts.values())
    return parts.get(part, 0.0) / whole if whole else None


def _parts(answers: Answers) -> Counter[str]:
    """Seconds of all turns by part of a round."""
    return _summed(turn.parts for turn in _turns(answers))


def waits(answers: Answers) -> list[float]:
    """Seconds between successive deliveries of tokens, in all turns.

    The tokens of a round arrive together as one delivery. A method that accepts many tokens has fewer waits, not
    necessarily shorter ones. Time per token is 1 / tokens per second."""
    return [after - before for turn in _turns(answers) for before, after in pairwise(turn.times or ())]


def peak_bytes(answers: Answers) -> int | None:
    """Peak memory of the process while answering, in bytes, with all that it had loaded."""
    return max((turn.peak_bytes for turn in _turns(answers) if turn.peak_bytes is not None), default=None)


def first_divergence(answer: Answer, plain: Answer) -> tuple[int, int] | None:
    """(turn, position) of the first token that differs from plain decoding's, both from 0; None if none does.

    The position may be right after the shorter answer's end."""
    for number, (mine, other) in enumerate(zip(answer.turns, plain.turns, strict=False)):
        own, others = mine.beside(other)
        if own != others:
            return number, in_common(own, others)
    same_turns = len(answer.turns) == len(plain.turns)
    return None if same_turns else (min(len(answer.turns), len(plain.turns)), 0)


def identical(answers: Answers, plain: Answers) -> float | None:
    """Share of answers whose tokens, in all turns, are plain decoding's for that question and repeat.

    Spec-Bench's equal.py compares texts instead. Answers without a counterpart of plain decoding do not count."""
    return _mean(first_divergence(answer, other) is None for answer, other in matched(answers, plain))


def partial_match(answers: Answers, plain: Answers) -> float | None:
    """Mean share of plain decoding's turn before the first token that differs; 1 if none does.

    P of Zhang et al. 2025 (arXiv 2510.22876), on tokens; their E is `identical`."""
    turns = (zip(answer.turns, known.turns, strict=False) for answer, known in matched(answers, plain))
    return _mean(partial(*mine.beside(other)) for mine, other in chain.from_iterable(turns))


def matched(answers: Answers, plain: Answers) -> list[tuple[Answer, Answer]]:
    """Pairs of an answer and plain decoding's answer to the same question in the same repeat."""
    others = {(other.question, other.repeat): other for other in good(plain)}
    return [(a, others[a.question, a.repeat]) for a in good(answers) if (a.question, a.repeat) in others]


def partial(tokens: Sequence[Any], reference: Sequence[Any]) -> float:
    """P of an answer: the number of its first tokens that equal the reference's, over the reference's tokens.

    Near 0, positions or masks are wrong. If a good beginning diverges later, the cache is wrong."""
    return in_common(tokens, reference) / len(reference) if reference else float(not tokens)


def looping(answers: Answers) -> float | None:
    """Share of answers with a turn that ends in a loop (`is_looping`), which is easy to draft."""
    return _mean(map(_loops, _spelt(answers)))


def too_short(answers: Answers) -> float | None:
    """Share of answers without a loop, but with a turn cut off too early to recognise a loop."""
    return _mean(any(_is_cut(turn) for turn in answer.turns) and not _loops(answer) for answer in _spelt(answers))


def speedup_without_loops(answers: Answers, plain: Answers) -> float | None:
    """`speedup` over the groups in which plain decoding has no loop."""
    left_out = {(answer.group, answer.repeat) for answer in good(plain) if _loops(answer)}
    return speedup(answers, [answer for answer in plain if (answer.group, answer.repeat) not in left_out])


def _spelt(answers: Answers) -> list[Answer]:
    """Answers with known tokens."""
    return [answer for answer in good(answers) if all(turn.tokens or not turn.num_new for turn in answer.turns)]


def _is_cut(turn: Completion) -> bool:
    return turn.finish_reason != "stop" and len(turn.tokens) < WINDOW


def _loops(answer: Answer) -> bool:
    return any(is_looping(turn.tokens) for turn in answer.turns)


def scheduled(result: Mapping[str, Any]) -> dict[str, Any]:
    """Drafter, schedule and batch size of a result of `summarize`; a batch of one if schedules are not compared."""
    return result.get("scheduled") or {"drafter": result["method"], "schedule": "ragged", "batch": 1}


def batch_speedups(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By method: tokens per second over those of plain decoding in a ragged batch of the same size."""
    measured = [(r["method"], r["tokens_per_second"], scheduled(r)) for r in results if r["tokens_per_second"]]
    ragged = [one for one in measured if (one[2]["drafter"], one[2]["schedule"]) == (BASELINE, "ragged")]
    plain = {how["batch"]: speed for _, speed, how in ragged}
    return {name: speed / plain[how["batch"]] for name, speed, how in measured if how["batch"] in plain}


def align_share(answers: Answers) -> float | None:
    """Realigning's share of the time of all parts, 0 to 1; None if schedules are not compared."""
    return _share("align", answers) if _counts(answers) else None


def group_rate(answers: Answers) -> float | None:
    """Share of the drafting rounds that have a full batch of equally long rows (Zhang et al. 2025)."""
    counts = _counts(answers)
    return counts["same_length"] / counts["drafting"] if counts.get("drafting") else None


def idle_slots(answers: Answers) -> float | None:
    """Share of row slots without a row, over all rounds, including a group's last ones."""
    counts = _counts(answers)
    return 1 - counts["rows"] / counts["slots"] if counts.get("slots") else None


def moved_bytes(answers: Answers) -> float | None:
    """Bytes of keys and values that a round reads and writes to realign its rows."""
    counts = _counts(answers)
    return counts["moved_bytes"] / counts["rounds"] if counts.get("rounds") else None


def _counts(answers: Answers) -> Counter[str]:
    """Sums of all groups' counts."""
    return _summed(turn.batch for turn in _turns(answers))


# Servers ---------------------------------------------------------------------------------------------------------


def token_seconds(turn: Completion) -> float | None:
    """Seconds from the first token to the last, over the tokens after the first; None for an answer of one token.

    "Time per output token" (TPOT) of vLLM's and other load generators."""
    return (turn.times[-1] - turn.times[0]) / (turn.num_new - 1) if turn.times and turn.num_new > 1 else None


def goodput(answers: Answers, first_ms: float | None = None, token_ms: float | None = None) -> float | None:
    """Share of all requests, failed ones included, that meet both goals: milliseconds to the first token, and
    milliseconds a token after it (`token_seconds`)."""
    most = [np.inf if goal is None else goal / 1e3 for goal in (first_ms, token_ms)]
    return _mean(
        bool(turn.times) and turn.times[0] <= most[0] and (token_seconds(turn) or 0.0) <= most[1]
        for turn in _turns(answers)
    )


def errors(answers: Answers) -> int:
    """Number of failed requests."""
    return sum(turn.finish_reason == "error" for turn in _turns(answers))


def draft_tokens_accepted(answers: Answers) -> float | None:
    """Mean accepted drafted tokens in a round with a draft, by the server's own counters. Plain rounds do not count."""
    counts = _counts(answers)
    return counts["accepted"] / counts["drafts"] if counts.get("drafts") else None


def server_drafts(answers: Answers) -> dict[str, Any] | None:
    """The server's own counts: rounds with a draft, drafted and accepted tokens,
    and the same by drafter if reported."""
    counts = _counts(answers)
    by = {
        name.removeprefix("drafted by "): {"drafted": count, "accepted": counts[name.replace("drafted", "accepted", 1)]}
        for name, count in counts.items() if name.startswith("drafted by ") and count
    }  # fmt: skip
    drafts = {"rounds": counts["drafts"], "drafted": counts["drafted"], "accepted": counts["accepted"]}
    return drafts | {"by_drafter": by} if counts.get("drafts") else None


def accepted_by_position(answers: Answers) -> list[float] | None:
    """Entry i: share of the rounds with a draft that accepted at least i + 1 drafted tokens, by the server's own
    counters. As in vLLM, a draft that does not reach a position counts as rejected there."""
    counts = _counts(answers)
    places = sorted(int(name.rpartition("_")[2]) for name in counts if name.startswith("accepted_"))
    return [counts[f"accepted_{place}"] / counts["drafts"] for place in places] if counts.get("drafts") else None


def percentiles(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """The 50th, 90th and 99th percentile of a figure, by name."""
    shares = (50, 90, 99)
    found = np.percentile(values, shares).tolist() if values else [None] * 3
    return {f"{name}_p{share}": value for share, value in zip(shares, found, strict=True)}


# All figures -----------------------------------------------------------------------------------------------------


def summarize(
    answers: Iterable[Answer], facts: Mapping[str, Facts], *, judged: Iterable[Facts] = (), resamples: int = RESAMPLES
) -> list[dict[str, Any]]:
    """Every figure of every method: one dict for "overall" and one for each task, plain decoding first.

    facts   by method, in the order of the results: draft_bytes, target_bytes, "baseline" if the method replaces plain
            decoding as the baseline, "goals" of goodput under "settings". A method without answers has an overall dict
            too, with the reason as "unavailable".
    judged  differing answers, with "method" and "question"; returned as "differs".

    "answers" counts the method's answers, "compared" the answers in its speed-up. "failed" is None or the reason.
    "new_tokens", "seconds" and "rounds" cover all repeats. Unknown figures are None."""
    every = list(answers)
    baseline = next((method for method, of in facts.items() if of.get("baseline")), BASELINE)
    by_method: dict[str, list[Answer]] = {method: [] for method in facts}  # The order of `facts` is kept.
    for answer in every:
        by_method.setdefault(answer.method, []).append(answer)
    methods = sorted(by_method, key=lambda method: method != baseline)
    tasks = list(dict.fromkeys(answer.task for answer in every))
    task_of = {answer.question: answer.task for answer in every}
    differing = list(judged)
    figures: list[dict[str, Any]] = []
    for method in methods:
        of_method = facts.get(method, {})
        for category in (OVERALL, *tasks):
            mine, plain = _of(by_method[method], category), _of(by_method.get(baseline, []), category)
            if not mine and category != OVERALL:
                continue
            of_category = [one for one in differing if category in (OVERALL, task_of.get(one["question"]))]
            counted = {"answers": len(good(mine)), "failed": _failed(mine, of_method)}
            counted |= _figures(mine, plain, of_method, resamples)
            differs = [dict(one) for one in of_category if one["method"] == method]
            figures.append({"method": method, "category": category, **counted, "differs": differs})
    return figures


def _of(answers: Answers, category: str) -> list[Answer]:
    return [answer for answer in answers if category in (OVERALL, answer.task)]


def _failed(answers: Answers, facts: Mapping[str, Any]) -> str | None:
    """Why a method failed, or has not answered; None if all is well."""
    if not answers:
        return str(facts.get("unavailable") or "no answers yet")
    return next((answer.failed for answer in answers if answer.failed is not None), None)


def _figures(mine: Answers, plain: Answers, facts: Mapping[str, Any], resamples: int) -> dict[str, Any]:
    tau, decode = block_efficiency(mine), speedup(mine, plain, decode=True)
    interval = speedup_interval(mine, plain, resamples=resamples) or (None, None)
    times = [turn.times for turn in _turns(mine) if turn.times]
    first = percentiles("first_token_ms", [1e3 * of_turn[0] for of_turn in times])
    lengths = length_histogram(mine)
    pairs = Pairs.of(mine, plain)
    return {
        "compared": pairs.answers if pairs else 0,
        "speedup": speedup(mine, plain),
        "speedup_low": interval[0],
        "speedup_high": interval[1],
        "speedup_decode": decode,
        "tokens_per_second": tokens_per_second(mine),
        "tokens_per_second_decode": tokens_per_second(mine, decode=True),
        "round_cost": tau / decode if tau and decode else None,
        "mbsu": _mbsu(mine, tau, facts),
        "lengths": lengths,
        "rounds": sum(lengths) if lengths else None,
        "new_tokens": sum(answer.num_new for answer in good(mine)),
        "seconds": float(sum(cell.turns[:, 1].sum() for cell in cells(mine).values())),
        **first,
        "first_token_ms": first["first_token_ms_p50"],
        **percentiles("inter_token_ms", [1e3 * seconds for seconds in waits(mine)]),
        **percentiles("token_ms", [1e3 * seconds for seconds in map(token_seconds, _turns(mine)) if seconds]),
        **percentiles("latency", [of_turn[-1] for of_turn in times]),
        "goodput": goodput(mine, **goals) if (goals := facts.get("settings", {}).get("goals")) else None,
        "scheduled": facts.get("settings", {}).get("scheduled"),
        **{figure.__name__: figure(mine) for figure in OF_A_METHOD},
        **{figure.__name__: figure(mine, plain) for figure in OVER_PLAIN},
    }


OF_A_METHOD = (
    tokens_per_second_spec_bench, mean_accepted_tokens, block_efficiency, accepted_by_depth, drafted_per_round,
    draft_share, parts_ms, peak_bytes, align_share, group_rate, idle_slots, moved_bytes, looping,
    too_short, errors, server_drafts, draft_tokens_accepted, accepted_by_position,
)  # fmt: skip
OVER_PLAIN = (speedup_spec_bench, identical, partial_match, speedup_without_loops)
"""Figures recorded under the names of their functions."""


def _mbsu(answers: Answers, tau: float | None, facts: Mapping[str, Any]) -> float | None:
    """`mbsu`, or None if the draft model's calls, or the bytes of a model, are unknown."""
    calls, draft, target = calls_per_round(answers), facts.get("draft_bytes", 0), facts.get("target_bytes", 0)
    if tau is None or calls is None or bool(calls) != bool(draft) or (calls and not target):
        return None
    return mbsu(tau, calls, draft, target)


def _summed(counts: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Sums by name, including sums of 0."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return total


def _turns(answers: Iterable[Answer]) -> Iterator[Completion]:
    return (turn for answer in good(answers) for turn in answer.turns)


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return float(np.mean(numbers)) if numbers else None
