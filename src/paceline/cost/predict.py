"""Predictions of a run by the cost model: recorded rounds in, speed-ups out.

    predict_run(answers, calibration)       # {(method, category): speed-up}

Used of a method's answers: the tokens that its rounds brought, the nodes they verified, the seconds it drafted, and the
time to the first token, since prompts are not predicted. Never used: how long its rounds took. Knows no method by name,
and no suite.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from statistics import median

import numpy as np

from paceline.bench.metrics import BASELINE, OVERALL, speedup
from paceline.bench.record import PEER, Answer, Reply
from paceline.cost.calibration import Calibration
from paceline.cost.model import Rounds

Groups = dict[tuple[int, int], list[Answer]]
"""Answers given together, by (group, repeat)."""


def predict_run(answers: Iterable[Answer], calibration: Calibration) -> dict[tuple[str, str], float]:
    """Predicted `metrics.speedup` of our methods, overall and by task: {(method, category): speed-up}. Peers, and
    answers without rounds, are left out.

    The machine may have been faster or slower during the run than when it was calibrated: all rounds are scaled by
    one factor, with which the total of plain decoding comes out right."""
    ours = [answer for answer in answers if answer.failed is None and not answer.method.startswith(PEER)]
    plain = [answer for answer in ours if answer.method == BASELINE]
    scale = pace([turn for members in _groups(plain).values() for turn in _by_turn(members)], calibration)
    predicted: dict[tuple[str, str], float] = {}
    if scale is None:
        return predicted
    for method in dict.fromkeys(answer.method for answer in ours):
        of_method = _predicted([answer for answer in ours if answer.method == method], calibration, scale)
        for category in (OVERALL, *dict.fromkeys(answer.task for answer in of_method)):
            gain = speedup(*([a for a in some if category in (OVERALL, a.task)] for some in (of_method, plain)))
            if gain is not None:
                predicted[method, category] = gain
    return predicted


def pace(plain: Iterable[Sequence[Reply]], calibration: Calibration) -> float | None:
    """Measured over predicted time of all rounds of plain decoding; None without recorded rounds. plain: replies, those
    given together in one list.

    It is a ratio of totals, as a speed-up is: other processes took time from plain decoding and from methods alike."""
    measured = predicted = 0.0
    for replies in plain:
        if replies and all(reply.times and _has_rounds(reply) for reply in replies):
            seconds = max(reply.seconds for reply in replies) - max(reply.times[0] for reply in replies if reply.times)
            measured += seconds - _drafting(replies)
            predicted += _rounds_seconds(replies, calibration)
    return measured / predicted if predicted > 0 else None


def recorded_rounds(answers: Iterable[Answer]) -> Rounds | None:
    """The rounds after the first token of all answers, for `paceline.cost.model.predict`; None if they are unknown."""
    replies = [reply for answer in answers if answer.failed is None for reply in answer.turns]
    if not replies or not all(map(_has_rounds, replies)):
        return None
    sizes: dict[int, int] = {}
    for reply in replies:
        for nodes in _nodes(reply):
            sizes[nodes] = sizes.get(nodes, 0) + 1
    tokens = sum(sum((reply.lengths or [])[1:]) for reply in replies)
    return Rounds(tokens, sizes, _drafting(replies))


def _has_rounds(reply: Reply) -> bool:
    return bool(reply.lengths) and reply.nodes is not None and len(reply.nodes) == len(reply.lengths or ())


def _nodes(reply: Reply) -> list[int]:
    """Nodes verified in each round after the first token, the last committed token included."""
    return [nodes + 1 for nodes in (reply.nodes or [])[1:]]


def _groups(answers: Sequence[Answer]) -> Groups:
    groups: Groups = {}
    for answer in answers:
        groups.setdefault((answer.group, answer.repeat), []).append(answer)
    return groups


def _by_turn(members: Sequence[Answer]) -> list[list[Reply]]:
    """The replies of a group, turn by turn."""
    turns = zip_longest(*(answer.turns for answer in members))
    return [[reply for reply in turn if reply is not None] for turn in turns]


def _first_seconds(groups: Groups) -> dict[tuple[int, int], float]:
    """Seconds until every row of a group had its first token, by (group, turn), medians over the repeats."""
    seconds: dict[tuple[int, int], list[float]] = {}
    for (group, _), members in groups.items():
        for turn, replies in enumerate(_by_turn(members)):
            if all(reply.times for reply in replies):
                first = max(reply.times[0] for reply in replies if reply.times)
                seconds.setdefault((group, turn), []).append(first)
    return {key: median(of_turn) for key, of_turn in seconds.items()}


def _predicted(answers: Sequence[Answer], calibration: Calibration, scale: float) -> list[Answer]:
    """The answers with predicted seconds; groups that cannot be predicted are left out."""
    groups, predicted = _groups(answers), []
    first = _first_seconds(groups)
    for (group, _), members in groups.items():
        turns = _by_turn(members)
        if not all(map(_has_rounds, chain(*turns))) or any((group, n) not in first for n in range(len(turns))):
            continue
        seconds = [
            first[group, n] + scale * _rounds_seconds(replies, calibration) + _drafting(replies)
            for n, replies in enumerate(turns)
        ]
        for answer in members:
            replies = [replace(reply, seconds=s) for reply, s in zip(answer.turns, seconds, strict=False)]
            predicted.append(replace(answer, turns=replies))
    return predicted


def _rounds_seconds(replies: Sequence[Reply], calibration: Calibration) -> float:
    """Seconds of the rounds after the first tokens, by the calibration. Rows of a group run together, so a round is
    over the nodes of all rows that are not finished."""
    longest = max(len(reply.lengths or ()) for reply in replies) - 1
    if longest <= 0:
        return 0.0
    nodes, contexts, trees, rows, accepted = (np.zeros(longest) for _ in range(5))
    for reply in replies:
        lengths, verified = np.array(reply.lengths), np.array(_nodes(reply), float)
        n = len(verified)
        nodes[:n] += verified
        contexts[:n] += reply.prompt_tokens + lengths.cumsum()[:-1]
        accepted[:n] += lengths[1:] - 1
        rows[:n] += 1
        if reply.depths is not None:
            trees[:n] += np.array(reply.depths)[1:] + 1 < verified
    return 1e-3 * float(calibration.rounds_ms(nodes, contexts / rows, trees / rows, accepted).sum())


def _drafting(replies: Sequence[Reply]) -> float:
    """Seconds of drafting."""
    return sum(reply.parts.get("draft", 0.0) for reply in replies)
