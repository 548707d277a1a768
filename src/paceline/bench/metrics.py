"""Metrics: every figure of a benchmark, defined once, worked out from answers.

    none, sam = ([a for a in answers if a.method == name] for name in ("none", "sam"))
    speedup(sam, none), speedup_interval(sam, none), mean_accepted_tokens(sam)
    summarize(answers, facts)                       # all of them, for every method and task

A figure is over the answers it is given and pools their repeats; answers that failed count in none. It is None where
there is nothing to count, or where an engine does not tell what it takes. Sources: Spec-Bench (Xia et al. 2024, arXiv
2401.07851, and its evaluation/speed.py), VocabTrim (arXiv 2506.22694), Leviathan et al. 2023 (arXiv 2211.17192).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from paceline.bench.looping import WINDOW, is_looping
from paceline.bench.pairs import Answers, Pairs, cells, totals
from paceline.bench.record import Answer, good
from paceline.cost import model as cost
from paceline.workbench.contestant import Reply

BASELINE = "none"
"""The method that all are compared with: plain decoding in the same engine."""
OVERALL = "overall"
"""The category of all tasks together; no task may have this name."""
RESAMPLES = 1000


# Tokens a round --------------------------------------------------------------------------------------------------


def length_histogram(answers: Answers) -> list[int] | None:
    """Entry i: rounds that brought i tokens, the target's own included. A round is a forward of the target that
    brought tokens; the one that ended the prompt is a round of one token."""
    lengths = [n for turn in _turns(answers) for n in turn.lengths or ()]
    return np.bincount(lengths).tolist() if lengths else None


def mean_accepted_tokens(answers: Answers) -> float | None:
    """Mean of all rounds' lengths, pooled: new tokens / rounds. Plain decoding is 1.

    Spec-Bench's "#Mean accepted tokens": the target's own token counts, and so does the round that ended the prompt."""
    return _mean(n for turn in _turns(answers) for n in turn.lengths or ())


def block_efficiency(answers: Answers) -> float | None:
    """Mean length of the rounds after the prompt: what a round that could draft brought. Plain decoding is 1.

    tau of Leviathan et al. 2023 and VocabTrim; mean accepted tokens without each turn's first round."""
    return _mean(n for turn in _turns(answers) for n in (turn.lengths or ())[1:])


def accepted_by_depth(answers: Answers) -> list[float] | None:
    """Entry d-1: of the rounds whose draft reached depth d, the share in which at least d drafted tokens stood.

    A share of rounds, not of drafted tokens, and not conditional on the depth before."""
    turns = [turn for turn in _turns(answers) if turn.lengths and turn.depths]
    if not turns:
        return None
    depths = np.array([depth for turn in turns for depth in turn.depths or ()])
    accepted = np.array([count for turn in turns for count in _accepted(turn)])
    return [float(np.mean(accepted[depths >= d] >= d)) for d in range(1, depths.max() + 1)]


def _accepted(turn: Reply) -> list[int]:
    """Drafted tokens kept in each round. An answer may end inside a draft: its last token is then a drafted one."""
    accepted = [n - 1 for n in turn.lengths or ()]
    if turn.runs and turn.runs[-1][0]:
        accepted[-1] += 1
    return accepted


def drafted_per_round(answers: Answers) -> float | None:
    """Drafted tokens (nodes of the tree but for its root) that a round after the prompt had verified."""
    return _mean(n for turn in _turns(answers) for n in (turn.nodes or ())[1:])


def calls_per_round(answers: Answers) -> float | None:
    """Forwards of a draft model, one after another, for each round after the prompt; 0 for drafters without one."""
    turns = [turn for turn in _turns(answers) if turn.lengths]
    rounds = sum(len(turn.lengths or ()) - 1 for turn in turns)
    return sum(turn.calls for turn in turns) / rounds if rounds else None


def mbsu(tau: float, calls_per_round: float, draft_bytes: int, target_bytes: int) -> float:
    """Memory-bound speed-up, tau / (1 + g c): g calls of the draft model a round, c = draft_bytes / target_bytes.

    VocabTrim: the speed-up on a machine that does nothing but read weights: verifying costs a plain step whatever its
    size, drafting what its weights weigh, everything else nothing. Without calls it is tau. Bytes are those a forward
    reads (the head once, of the input embedding nothing). ValueError if they are needed and not given."""
    if not calls_per_round:
        return tau
    if draft_bytes <= 0 or target_bytes <= 0:
        raise ValueError(f"draft and target must weigh something, not {draft_bytes} and {target_bytes} bytes")
    return cost.memory_bound_speedup(tau, calls_per_round, draft_bytes, target_bytes)


def recorded_rounds(answers: Iterable[Answer]) -> cost.Rounds | None:
    """The rounds after the first token of all answers, for `paceline.cost.model.predict`; None if they are unknown."""
    replies = [reply for answer in answers if answer.failed is None for reply in answer.turns]
    if not replies or any(not r.lengths or r.nodes is None or len(r.nodes) != len(r.lengths) for r in replies):
        return None
    nodes = Counter(drafted + 1 for reply in replies for drafted in (reply.nodes or [])[1:])  # and the root
    tokens = sum(sum((reply.lengths or [])[1:]) for reply in replies)
    return cost.Rounds(tokens, dict(nodes), sum(reply.parts.get("draft", 0.0) for reply in replies))


# Time ------------------------------------------------------------------------------------------------------------


def tokens_per_second(answers: Answers, *, decode: bool = False) -> float | None:
    """All new tokens over all seconds. Of each group and turn the medians over the repeats count; questions answered
    together are a group, and its seconds count once.

    decode  without the prompt: the time to the first token (of a group's last row to get one) is left out, and so
            are the tokens that came until then."""
    total = totals(answers, decode=decode)
    return total[0] / total[1] if total and total[1] > 0 else None


def speedup(answers: Answers, plain: Answers, *, decode: bool = False) -> float | None:
    """Tokens per second over plain decoding's (see `tokens_per_second`): a ratio of totals, so long answers weigh
    more. Only groups that both answered, repeat for repeat, count.

    Spec-Bench's own ratio, in which every question weighs the same, is `speedup_spec_bench`."""
    pairs = Pairs.of(answers, plain, decode=decode)
    return pairs.ratio() if pairs else None


def speedup_interval(
    answers: Answers, plain: Answers, *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float] | None:
    """95 % interval of `speedup`: 2.5th and 97.5th percentile over bootstrap resamples (Efron 1979).

    Paired: a resample takes a group's times with the method and with plain decoding together. Hierarchical: groups are
    drawn within their task, and then repeats within a group. Seeded: the same answers give the same interval. It says
    how far the figure would move with other questions of the same kinds, and with other runs; not with another machine.
    None where a task has a single group: how much questions of its kind differ is then not known."""
    pairs = Pairs.of(answers, plain)
    if pairs is None or min(map(len, pairs.members)) < 2:
        return None
    random = np.random.default_rng(seed)
    ratios = np.concatenate([pairs.resampled(size, random) for size in _portions(resamples, 100)])
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), float(high)


def tokens_per_second_spec_bench(answers: Answers) -> float | None:
    """As Spec-Bench's speed.py: the mean over questions of new tokens / seconds, each of all turns, then over the
    repeats. Plain decoding's tokens are those of its text encoded again, less one (`Reply.plain_tokens`).

    Short answers weigh as much as long ones. Meant for questions answered one at a time."""
    speeds = _spec_bench(answers)
    return _mean(_mean(of_repeat.values()) or 0.0 for of_repeat in speeds.values())


def speedup_spec_bench(answers: Answers, plain: Answers) -> float | None:
    """As Spec-Bench's speed.py: the ratio of the two means of `tokens_per_second_spec_bench`, then the mean over
    repeats. Only questions that both answered count, which is all of them in a whole run."""
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
    """Share of the time of all parts that drafting takes, 0 to 1, prompts included."""
    return _share("draft", answers)


def parts_ms(answers: Answers) -> dict[str, float] | None:
    """Milliseconds of a round by part, the prompt's rounds included: each part's time over the number of rounds."""
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


def first_token_ms(answers: Answers) -> float | None:
    """Median over turns of the milliseconds from handing the prompt over to its first token."""
    times = [1e3 * turn.times[0] for turn in _turns(answers) if turn.times]
    return float(np.median(times)) if times else None


def inter_token_ms(answers: Answers) -> tuple[float, float] | None:
    """Median and 99th percentile of the milliseconds between two deliveries of tokens, pooled over all turns.

    As a reader of a stream sees it: the tokens of a round arrive together and are one delivery. So a method that
    accepts much has fewer, not necessarily shorter, waits; time per token is 1 / tokens per second."""
    waits = [1e3 * (after - before) for turn in _turns(answers) for before, after in pairwise(turn.times or ())]
    return tuple(np.percentile(waits, [50, 99]).tolist()) if waits else None


def peak_bytes(answers: Answers) -> int | None:
    """Most memory of the process while answering, in bytes, everything that was loaded included."""
    return max((turn.peak_bytes for turn in _turns(answers) if turn.peak_bytes is not None), default=None)


# What was said ---------------------------------------------------------------------------------------------------


def first_divergence(answer: Answer, plain: Answer) -> tuple[int, int] | None:
    """(turn, position) of the first token that is not plain decoding's, both from 0; None if all are the same.

    The position may be one after the shorter answer's end."""
    for number, (mine, other) in enumerate(zip(answer.turns, plain.turns, strict=False)):
        if mine.tokens != other.tokens:
            same = [a == b for a, b in zip(mine.tokens, other.tokens, strict=False)]
            return number, same.index(False) if False in same else len(same)
    same_turns = len(answer.turns) == len(plain.turns)
    return None if same_turns else (min(len(answer.turns), len(plain.turns)), 0)


def identical(answers: Answers, plain: Answers) -> float | None:
    """Share of answers whose tokens, in all turns, are plain decoding's for that question and repeat.

    Tokens, where Spec-Bench's equal.py compares texts. Answers that plain decoding did not give do not count."""
    return _mean(first_divergence(answer, other) is None for answer, other in _side_by_side(answers, plain))


def partial_match(answers: Answers, plain: Answers) -> float | None:
    """Mean share of a turn that is plain decoding's, up to the first token that differs; 1 where all are the same.

    P of Zhang et al. 2025 (arXiv 2510.22876), on tokens; their E is `identical`."""
    return _mean(
        partial(mine.tokens, other.tokens)
        for answer, known in _side_by_side(answers, plain)
        for mine, other in zip(answer.turns, known.turns, strict=False)
    )


def _side_by_side(answers: Answers, plain: Answers) -> list[tuple[Answer, Answer]]:
    """Answers with plain decoding's to the same question in the same repeat."""
    others = {(other.question, other.repeat): other for other in good(plain)}
    return [(a, others[a.question, a.repeat]) for a in good(answers) if (a.question, a.repeat) in others]


def exact(tokens: Sequence[int], reference: Sequence[int], ends: Collection[int] = ()) -> bool:
    """E of one answer: whether it is the reference, token for token."""
    return up_to_end(tokens, ends) == up_to_end(reference, ends)


def partial(tokens: Sequence[int], reference: Sequence[int], ends: Collection[int] = ()) -> float:
    """P of one answer: how many tokens at its beginning are the reference's, over the reference's number.

    Low from the first token on: positions or masks are wrong. A good beginning that drifts: the cache is."""
    mine, other = up_to_end(tokens, ends), up_to_end(reference, ends)
    same = next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), min(len(mine), len(other)))
    return same / len(other) if other else float(not mine)


def up_to_end(tokens: Sequence[int], ends: Collection[int]) -> list[int]:
    """The tokens up to and with the first that ends an answer."""
    return list(tokens[: next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))])


def looping(answers: Answers) -> float | None:
    """Share of answers of which a turn ends in a loop (`paceline.bench.looping.is_looping`): easy text to draft."""
    return _mean(map(_loops, good(answers)))


def too_short(answers: Answers) -> float | None:
    """Share of answers that do not loop and of which a turn was cut off before it had enough tokens to
    recognise a loop: it may have been about to run into one."""
    return _mean(any(_is_cut(turn) for turn in answer.turns) and not _loops(answer) for answer in good(answers))


def speedup_without_loops(answers: Answers, plain: Answers) -> float | None:
    """`speedup` over the groups in which no answer of plain decoding loops."""
    left_out = {(answer.group, answer.repeat) for answer in good(plain) if _loops(answer)}
    return speedup(answers, [answer for answer in plain if (answer.group, answer.repeat) not in left_out])


def _is_cut(turn: Reply) -> bool:
    return turn.finish != "stop" and len(turn.tokens) < WINDOW


def _loops(answer: Answer) -> bool:
    return any(is_looping(turn.tokens) for turn in answer.turns)


# Requests that are answered together -----------------------------------------------------------------------------


def scheduled(result: Mapping[str, Any]) -> dict[str, Any]:
    """Drafter, schedule and batch of a result of `metrics.summarize`; plain decoding is a batch of one."""
    return result.get("scheduled") or {"drafter": result["method"], "schedule": "ragged", "batch": 1}


def beside_plain(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By method, tokens per second over those of plain decoding in a ragged batch of the same size."""
    speeds = {r["method"]: r["tokens_per_second"] for r in results if r["tokens_per_second"]}
    how = {r["method"]: scheduled(r) for r in results}
    plain = {
        how[name]["batch"]: speed
        for name, speed in speeds.items()
        if (how[name]["drafter"], how[name]["schedule"]) == (BASELINE, "ragged")
    }
    return {name: speed / plain[how[name]["batch"]] for name, speed in speeds.items() if how[name]["batch"] in plain}


def latency(answers: Answers) -> tuple[float, float, float] | None:
    """50th, 90th and 99th percentile of the seconds from handing a prompt over to its last token, waiting included."""
    seconds = [turn.times[-1] for turn in _turns(answers) if turn.times]
    return tuple(np.percentile(seconds, [50, 90, 99]).tolist()) if seconds else None


def align_share(answers: Answers) -> float | None:
    """Share of the time of all parts that realigning rows takes, 0 to 1; None where no schedule is measured."""
    return _share("align", answers) if _counts(answers) else None


def group_rate(answers: Answers) -> float | None:
    """Rounds in which a whole batch of equally long rows ran, over all rounds after prompts (Zhang et al. 2025)."""
    counts = _counts(answers)
    return counts["same_length"] / counts["drafting"] if counts.get("drafting") else None


def idle_slots(answers: Answers) -> float | None:
    """Share of a round's row slots in which no row ran, over all rounds, the last ones of a group included."""
    counts = _counts(answers)
    return 1 - counts["rows"] / counts["slots"] if counts.get("slots") else None


def moved_bytes(answers: Answers) -> float | None:
    """Bytes of keys and values read and written in a round to realign its rows."""
    counts = _counts(answers)
    return counts["moved_bytes"] / counts["rounds"] if counts.get("rounds") else None


def _counts(answers: Answers) -> Counter[str]:
    """The counts of all groups together."""
    return _summed(turn.batch for turn in _turns(answers))


# All of them -----------------------------------------------------------------------------------------------------


def summarize(
    answers: Iterable[Answer],
    facts: Mapping[str, Mapping[str, Any]],
    *,
    judged: Iterable[Mapping[str, Any]] = (),
    resamples: int = RESAMPLES,
) -> list[dict[str, Any]]:
    """Every figure of every method: a dict each for "overall" and for its tasks, plain decoding first.

    facts      of each method, in the order of the results: draft_bytes and target_bytes. A method of which there
               is no answer gets its overall dict too, with what facts say under "unavailable" as the reason.
    judged     differing answers, with "method" and "question": the dicts come back under "differs".

    answers is how many there are of the method, compared how many of those count in its speed-up; failed is None or
    why it failed; new_tokens, seconds and rounds are of all repeats. None where a figure is unknown."""
    every = list(answers)
    by_method: dict[str, list[Answer]] = {method: [] for method in facts}  # in the order they were given
    for answer in every:
        by_method.setdefault(answer.method, []).append(answer)
    methods = sorted(by_method, key=lambda method: method != BASELINE)
    tasks = list(dict.fromkeys(answer.task for answer in every))
    task_of = {answer.question: answer.task for answer in every}
    differing = list(judged)
    figures = []
    for method in methods:
        of_method = facts.get(method, {})
        for category in (OVERALL, *tasks):
            mine, plain = _of(by_method[method], category), _of(by_method.get(BASELINE, []), category)
            if not mine and category != OVERALL:
                continue
            differs = [
                dict(one)
                for one in differing
                if one["method"] == method and category in (OVERALL, task_of.get(one["question"]))
            ]
            figures.append(
                {
                    "method": method,
                    "category": category,
                    "answers": len(good(mine)),
                    "failed": _failed(mine, of_method),
                    **_figures(mine, plain, of_method, resamples),
                    "differs": differs,
                }
            )
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
    waits = inter_token_ms(mine) or (None, None)
    late = latency(mine) or (None, None, None)
    lengths = length_histogram(mine)
    pairs = Pairs.of(mine, plain)
    return {
        "compared": pairs.answers if pairs else 0,
        "speedup": speedup(mine, plain),
        "speedup_low": interval[0],
        "speedup_high": interval[1],
        "speedup_decode": decode,
        "speedup_spec_bench": speedup_spec_bench(mine, plain),
        "tokens_per_second": tokens_per_second(mine),
        "tokens_per_second_decode": tokens_per_second(mine, decode=True),
        "tokens_per_second_spec_bench": tokens_per_second_spec_bench(mine),
        "mean_accepted_tokens": mean_accepted_tokens(mine),
        "block_efficiency": tau,
        "round_cost": cost.round_cost(tau, decode) if tau and decode else None,
        "mbsu": _mbsu(mine, tau, facts),
        "accepted_by_depth": accepted_by_depth(mine),
        "drafted_per_round": drafted_per_round(mine),
        "draft_share": draft_share(mine),
        "parts_ms": parts_ms(mine),
        "lengths": lengths,
        "rounds": sum(lengths) if lengths else None,
        "new_tokens": sum(answer.num_new for answer in good(mine)),
        "seconds": float(sum(cell.turns[:, 1].sum() for cell in cells(mine).values())),
        "peak_bytes": peak_bytes(mine),
        "first_token_ms": first_token_ms(mine),
        "inter_token_ms_p50": waits[0],
        "inter_token_ms_p99": waits[1],
        "latency_p50": late[0],
        "latency_p90": late[1],
        "latency_p99": late[2],
        "align_share": align_share(mine),
        "group_rate": group_rate(mine),
        "idle_slots": idle_slots(mine),
        "moved_bytes": moved_bytes(mine),
        "partial_match": partial_match(mine, plain),
        "scheduled": facts.get("settings", {}).get("scheduled"),
        "identical": identical(mine, plain),
        "looping": looping(mine),
        "too_short": too_short(mine),
        "speedup_without_loops": speedup_without_loops(mine, plain),
    }


def _mbsu(answers: Answers, tau: float | None, facts: Mapping[str, Any]) -> float | None:
    """None for a draft model whose calls, or whose target's bytes, are unknown."""
    calls, draft, target = calls_per_round(answers), facts.get("draft_bytes", 0), facts.get("target_bytes", 0)
    if tau is None or calls is None or bool(calls) != bool(draft) or (calls and not target):
        return None
    return mbsu(tau, calls, draft, target)


def _portions(whole: int, portion: int) -> Iterator[int]:
    """`whole` in portions, so that resamples of a large run need not lie in memory together."""
    return (min(portion, whole - done) for done in range(0, whole, portion))


def _summed(counts: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Sums by name; a name whose sum is 0 stays."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return total


def _turns(answers: Answers) -> Iterator[Reply]:
    return (turn for answer in good(answers) for turn in answer.turns)


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return float(np.mean(numbers)) if numbers else None
