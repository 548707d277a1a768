"""What the cost model says a run should have gained: recorded rounds in, speed-ups out.

    predict_run(answers, {"paceline": calibration})       # {(method, category): speed-up}

A prediction takes from a method's answers how many tokens its rounds brought, how many nodes they verified, how long it
drafted, and when the first token came: prompts are not what is predicted. How long the method's rounds took it never
looks at. Knows no method by name, and no suite.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from statistics import median

import numpy as np

from paceline.bench.metrics import BASELINE, OVERALL, speedup
from paceline.bench.record import Answer, Turn
from paceline.cost.calibration import Calibration
from paceline.cost.model import Rounds

BESIDE = "beside"
"""Among calibrations: our engine as it was when the run began, which is the pace that the peers are at."""


def predict_run(
    answers: Iterable[Answer],
    calibrations: Mapping[str, Calibration],
) -> dict[tuple[str, str], float]:
    """Predicted speed-up of every method, overall and by task: {(method, category): `metrics.speedup` as it would
    have come out}. Methods whose engine tells no rounds, or was not calibrated, are left out.

    calibrations  by method for peers, which were calibrated themselves, drafting included; otherwise by engine:
                  "paceline" for our drafters, "transformers" for the peers that run on it; see BESIDE, too.

    The machine may have been faster or slower during the run than when it was calibrated: all rounds are scaled by
    one factor, which makes the plain answers together come out right."""
    answers = [answer for answer in answers if answer.failed is None]
    plain = [answer for answer in answers if answer.method == BASELINE]
    together = [turns for members in _groups(plain).values() for turns in _by_turn(members)]
    ours = calibrations.get("paceline")
    beside = calibrations.get(BESIDE, ours)
    scales = {each: pace(together, each) if each else None for each in (ours, beside)}
    predicted: dict[tuple[str, str], float] = {}
    for method in dict.fromkeys(answer.method for answer in answers):
        calibration = calibrations.get(method) or calibrations.get(_engine(method))
        scale = scales[ours if calibration is ours else beside]
        if calibration is None or scale is None:
            continue
        mine = [answer for answer in answers if answer.method == method]
        told = _predicted(mine, calibration, scale)
        for category in (OVERALL, *dict.fromkeys(answer.task for answer in told)):
            gain = speedup(*([a for a in some if category in (OVERALL, a.task)] for some in (told, plain)))
            if gain is not None:
                predicted[method, category] = gain
    return predicted


def pace(plain: Iterable[Sequence[Turn]], calibration: Calibration) -> float | None:
    """What all rounds of plain turns took over what they should have taken; turns answered together are given together.
    None without rounds that are told.

    Of all of them, since a speed-up is a ratio of totals: what else took the machine took it from plain decoding and
    from the method alike."""
    all_took = all_should = 0.0
    for turns in plain:
        if turns and all(turn.times and _tells_rounds(turn) for turn in turns):
            took = max(turn.seconds for turn in turns) - max(turn.times[0] for turn in turns if turn.times)
            all_took += took - _drafting(turns)
            all_should += _rounds_seconds(turns, calibration)
    return all_took / all_should if all_should > 0 else None


def recorded_rounds(answers: Iterable[Answer]) -> Rounds | None:
    """The rounds behind the first token of all answers, for `paceline.cost.model.predict`; None if they are unknown."""
    turns = [turn for answer in answers if answer.failed is None for turn in answer.turns]
    if not turns or not all(_tells_rounds(turn) for turn in turns):
        return None
    sizes: dict[int, int] = {}
    for turn in turns:
        for nodes in _nodes(turn):
            sizes[int(nodes)] = sizes.get(int(nodes), 0) + 1
    tokens = sum(sum((turn.lengths or [])[1:]) for turn in turns)
    drafting = sum(turn.parts.get("draft", 0.0) for turn in turns)
    return Rounds(tokens, sizes, drafting, sum(turn.calls for turn in turns))


def _engine(method: str) -> str:
    """What `calibrations` calls the engine that a method ran on."""
    if method.startswith("peer:transformers"):  # in a batch
        return "transformers"
    return "" if method.startswith("peer:") else "paceline"


def _tells_rounds(turn: Turn) -> bool:
    return bool(turn.lengths) and turn.nodes is not None and len(turn.nodes) == len(turn.lengths or ())


def _nodes(turn: Turn) -> list[int]:
    """Nodes verified in each round behind the first token, the last committed token included."""
    return [nodes + 1 for nodes in (turn.nodes or [])[1:]]


_Together = list[list[Turn]]
"""Turns of one group, by turn."""


def _groups(answers: Sequence[Answer]) -> dict[tuple[int, int], list[Answer]]:
    """Answers given together, by (group, repeat)."""
    found: dict[tuple[int, int], list[Answer]] = {}
    for answer in answers:
        found.setdefault((answer.group, answer.repeat), []).append(answer)
    return found


def _by_turn(members: Sequence[Answer]) -> _Together:
    every = zip_longest(*(answer.turns for answer in members))
    return [[turn for turn in turns if turn is not None] for turns in every]


def _first_seconds(answers: Sequence[Answer]) -> dict[tuple[int, int], float]:
    """Seconds until every row of a group had its first token, by (group, turn), medians over the repeats."""
    found: dict[tuple[int, int], list[float]] = {}
    for (group, _), members in _groups(answers).items():
        for number, turns in enumerate(_by_turn(members)):
            if all(turn.times for turn in turns):
                found.setdefault((group, number), []).append(max(turn.times[0] for turn in turns if turn.times))
    return {key: median(seconds) for key, seconds in found.items()}


def _predicted(answers: Sequence[Answer], calibration: Calibration, scale: float) -> list[Answer]:
    """The answers with the seconds that they should have taken; groups that cannot be predicted are left out."""
    told, first = [], _first_seconds(answers)
    for (group, _), members in _groups(answers).items():
        together = _by_turn(members)
        if not all(map(_tells_rounds, chain(*together))) or any((group, n) not in first for n in range(len(together))):
            continue
        seconds = [
            first[group, number]
            + scale * _rounds_seconds(turns, calibration)
            + _drafting(turns)
            for number, turns in enumerate(together)
        ]
        for answer in members:
            turns = [replace(turn, seconds=s) for turn, s in zip(answer.turns, seconds, strict=False)]
            told.append(replace(answer, turns=turns))
    return told


def _rounds_seconds(turns: Sequence[Turn], calibration: Calibration) -> float:
    """Seconds of the rounds behind the first tokens, by the calibration. Rows of a group go side by side, so a round
    is over the nodes of all that are not done."""
    deepest = max(len(turn.lengths or ()) for turn in turns) - 1
    nodes, contexts, trees, rows, accepted = (np.zeros(max(deepest, 0)) for _ in range(5))
    for turn in turns:
        lengths, mine = np.array(turn.lengths), np.array(_nodes(turn), float)
        n = len(mine)
        nodes[:n] += mine
        contexts[:n] += turn.prompt_tokens + lengths.cumsum()[:-1]
        accepted[:n] += lengths[1:] - 1
        rows[:n] += 1
        if turn.depths is not None:
            trees[:n] += np.array(turn.depths)[1:] + 1 < mine
    if not len(nodes):
        return 0.0
    ms = calibration.rounds_ms(nodes, contexts / rows, trees / rows, accepted)
    ms = ms + (nodes > rows) * (calibration.drafting_ms + calibration.drafted_ms * (nodes - rows))
    return 1e-3 * float(ms.sum())


def _drafting(turns: Sequence[Turn]) -> float:
    """Seconds of drafting, of engines that tell."""
    return sum(turn.parts.get("draft", 0.0) for turn in turns)
