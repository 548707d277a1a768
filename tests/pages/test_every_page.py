"""Every page that the project makes, in a browser: nothing beside the window, no text on other text."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.bench.runs import make_run
from tests.evals.endpoint import Scripted
from tests.evals.test_run import go
from tests.pages.browser import WIDTHS, measured, needs_chromium
from tests.pages.test_replay_page import OF_A, TWO, told
from tests.vision.sets import sample

import paceline
import paceline.bench.page as bench
import paceline.certify.page as certificate
from paceline.bench.report import read_run
from paceline.evals.align.page import page as align_page
from paceline.evals.vision.evaluate import run as run_vision
from paceline.evals.vision.report import write_page
from paceline.replay import page as replay
from paceline.rollout.demo import page as rollout

pytestmark = needs_chromium
RESULTS = {file.stem: file for file in (Path(__file__).parents[2] / "docs" / "results").glob("*.html")}


def of_align(folder: Path) -> str:
    method = "vanilla,align3,align3,steps=13,self-refine,iterations=1"
    with Scripted() as server:
        go(server, folder / "run", method=method, judge=["self", "checks"])
    return align_page(folder / "run")


def of_bench(folder: Path) -> str:
    return bench.page(read_run(make_run(folder / "run")))


def of_schedules(folder: Path) -> str:
    def change(about: dict[str, Any], summary: dict[str, Any]) -> None:
        for row in summary["results"]:
            if row["method"] != "none":
                drafter, schedule, batch = row["method"].split()
                row["scheduled"] = {"drafter": drafter, "schedule": schedule, "batch": int(batch)}

    methods = {f"sam {how} {batch}": 1.5 for how in ("ragged", "equal", "grouped") for batch in (1, 4)}
    return bench.page(read_run(make_run(folder / "run", {"none": 1.0, **methods}, change=change)))


def of_replay(folder: Path) -> str:
    return replay.page(told(TWO), OF_A)


def of_certificate(folder: Path) -> str:
    shown = {"verdict": "bug", "prompt": 3, "at": 17, "company": "alone", "why": "", "before": "w" * 200,
             "said": 3, "best": 4, "gap": 0.5, "noise": 0.01}  # fmt: skip
    case = {"name": "temperature 1, top_k 40, a long name of a case", "requests": 12345, "outcomes": 4096, "tv": 0.1,
            "tv_by_chance": 0.02, "p": 1e-9}  # fmt: skip
    return certificate.page(
        {
            "engine": "an engine with a name that is long: http://a.host.with.a.long.name.example:8000/v1",
            "target": "models/demo", "lossless": False, "seconds": 3.5, "ran_on": {}, "environment": {"torch": "2.13"},
            "greedy": {"lossless": False, "answers": 1000, "tokens": 123456, "bugs": 1, "ties": 2, "shown": [shown]},
            "stops": {"answers": 40, "bugs": 1, "shown": [{"stop": "x" * 99, "text": "a" * 300, "right": "b" * 300}]},
            "sampled": {"lossless": False, "cases": [case] * 3, "requests": 12345, "p": 1e-9, "p_of_worst_case": 1e-9,
                        "tv": 0.1, "tv_by_chance": 0.02},
            "acceptance": {"tokens_a_round": 2.5, "reference": 2.4, "collapsed": False},
            "power": {"tokens": 3, "greedy_rate": 1e-4, "detectable": 0.05, "shift": 0.05, "power": 0.9, "level": 1e-6},
            "not_tested": [],
        }
    )  # fmt: skip


def of_rollout(folder: Path) -> str:
    rules = {"vanilla": "no reuse", "exact": "ratio, exact", "plain:0.5": "plain, e^0.5 (not lossless)",
             "specrl": "SPEC-RL's own rule, lenience e^0.5 (not lossless)"}  # fmt: skip
    epochs = [
        {"rule": rule, "seed": 0, "epoch": epoch, "reward": 0.3 + 0.001 * i, "accuracy": 0.0, "decoded": 41405 - i,
         "cpu_seconds": 12.5, "reused": 10 * i, "old_tokens": 100 * epoch, "full": i, "offered": 10, "drift": 0.1,
         "looked": 10}
        for i, rule in enumerate(rules)
        for epoch in range(4)
    ]  # fmt: skip
    results = [
        {"name": name, "rule": rule, "tokens_decoded": 41405, "reuse": 0.532, "full_reuse": 0.321, "drift": 0.0123,
         "final_reward": 0.354, "final_accuracy": 0.363, "accuracy_noise": 0.012, "seconds": 123.4,
         "cpu_seconds": 234.5}
        for rule, name in rules.items()
    ]  # fmt: skip
    return rollout.page({"epochs": epochs, "results": results})


def of_vision(folder: Path) -> str:
    for name in ("random", "oracle"):
        run_vision(sample(), name, out=folder / name)
    write_page([folder / "random", folder / "oracle"], folder / "report.html")
    return (folder / "report.html").read_text("utf-8")


def of_server(folder: Path) -> str:
    html = (Path(paceline.__file__).parent / "serve" / "page.html").read_text("utf-8")
    html = re.sub(r"<script>.*</script>", "", html, flags=re.DOTALL)  # which asks the server
    return html.replace('aria-live="polite">', f'aria-live="polite"><mark>{"w" * 300}</mark> and so on')


PAGES: dict[str, Callable[[Path], str]] = {
    "align": of_align,
    "bench": of_bench,
    "schedules": of_schedules,
    "replay": of_replay,
    "certificate": of_certificate,
    "rollout": of_rollout,
    "vision": of_vision,
    "server": of_server,
    **{name: lambda folder, file=file: file.read_text("utf-8") for name, file in RESULTS.items()},  # type: ignore[misc]
}


SLOW = sorted(RESULTS)[1:]
"""Pages that do not change, and are all made by one template."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in PAGES])
def test_no_element_is_beside_the_window_and_no_text_on_another(tmp_path: Path, name: str) -> None:
    found, complaints = measured(tmp_path, PAGES[name](tmp_path))
    assert sorted(found) == list(WIDTHS)
    for width, page in found.items():
        assert page["outside"] == []
        assert page["wide"] <= width
        assert page["crossed"] == []
        assert page["loaded"] == []
    if name not in RESULTS:  # whose tables have a column for every device
        assert found[1280]["cut"] == []
    assert complaints == []
