"""Write a run's answers as files of Spec-Bench, for its own scripts (evaluation/speed.py and equal.py).

For their format see Xia et al. 2024, arXiv 2401.07851, and its repository (hemingkx/Spec-Bench)."""

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from paceline.bench.metrics import BASELINE
from paceline.bench.record import Answer
from paceline.bench.suites import Suite
from paceline.outputs import write_whole

VANILLA = "vanilla"  # Spec-Bench's name of plain decoding.
LONGEST = 120  # letters of a method in a file's name; a server's command may have more than a name can
RUNS = 3  # speed.py's mean report takes so many runs.


def export(
    answers: Sequence[Answer], folder: Path, *, model: str, dtype: str, temperature: float, suite: Suite
) -> list[str]:
    """Write `folder`/model_answer/MODEL-METHOD-DTYPE-temp-T.jsonl for every method and, if there are three repeats or
    more, folders model_answer_temp0_run_1 to 3 for the first three repeats. Plain decoding is "vanilla".

    A line is a question, in the order of question_id: the suite's ids if all are whole numbers, else numbers from 1.
    Returns notes, a sentence each, on files that are missing or incomplete.
    Raises PacelineError if a file cannot be written."""
    repeats = sorted({answer.repeat for answer in answers})
    places = {"model_answer": repeats[:1]}
    if len(repeats) >= RUNS:
        places |= {f"model_answer_temp0_run_{n}": [repeat] for n, repeat in enumerate(repeats[:RUNS], 1)}
    ids = _ids(suite)
    asked = len({answer.question for answer in answers})
    notes = []
    for method, name in _names(answers, f"{model}-{{}}-{dtype}-temp-{float(temperature)}").items():
        of_method = [answer for answer in answers if answer.method == method and answer.failed is None]
        if any(turn.lengths is None for answer in of_method for turn in answer.turns):
            notes.append(f"{method} has no Spec-Bench file: its engine does not tell the tokens of each round")
            continue
        for place, wanted in places.items():
            lines = {ids[a.question]: _line(a, ids[a.question], name) for a in of_method if a.repeat in wanted}
            if not lines:
                notes.append(f"{method} has no file in {place}: no answers")
                continue
            if len(lines) < asked:
                notes.append(f"{method} has {len(lines)} of {asked} questions in {place}")
            content = "".join(json.dumps(lines[id], ensure_ascii=False) + "\n" for id in sorted(lines))
            write_whole(folder / place / f"{name}.jsonl", content.encode("utf-8"))
    return notes


def _ids(suite: Suite) -> dict[str, int]:
    """question_id of every question of the suite; Spec-Bench's are whole numbers."""
    ids = [question.id for question in suite.questions]
    whole = all(id.isascii() and id.isdigit() and id == str(int(id)) for id in ids)
    return {id: int(id) if whole else number for number, id in enumerate(ids, 1)}


def _names(answers: Sequence[Answer], pattern: str) -> dict[str, str]:
    """A distinct file name for every method, without its ending."""
    names: dict[str, str] = {}
    for method in dict.fromkeys(answer.method for answer in answers):
        name = re.sub(r"[^\w.=+-]+", "_", pattern.format(VANILLA if method == BASELINE else method[:LONGEST]))
        while name in names.values():
            name += "_"
        names[method] = name
    return names


def _line(answer: Answer, id: int, model_id: str) -> dict[str, Any]:
    """The line of an answer. accept_lengths has the tokens of each round of all turns, the target's own included."""
    turns = answer.turns
    return {
        "question_id": id,
        "category": answer.category,
        "answer_id": uuid5(NAMESPACE_URL, f"{model_id}/{answer.repeat}/{id}").hex[:22],
        "model_id": model_id,
        "choices": [
            {
                "index": 0,
                "turns": [turn.text.strip() for turn in turns],
                "decoding_steps": [len(turn.lengths or ()) for turn in turns],
                "new_tokens": [len(turn.tokens) for turn in turns],
                "wall_time": [turn.seconds for turn in turns],
                "accept_lengths": [n for turn in turns for n in turn.lengths or ()],
            }
        ],
        "tstamp": time.time(),
    }
