"""Every page that the project makes, in a headless Chromium, on a phone and on a desk, light and dark: nothing beside
the window, no text on other text, no complaint."""

import json
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from tests.bench.runs import TASKS, WHY, make_run
from tests.evals.endpoint import Scripted
from tests.evals.test_run import go
from tests.pages.test_replay_page import OF_A, TWO, told
from tests.vision.sets import sample

import paceline.bench.page as bench
import paceline.certify.page as certificate
from paceline.bench.report import read_run
from paceline.evals.align.page import page as align_page
from paceline.evals.vision.evaluate import run as run_vision
from paceline.evals.vision.options import RunOptions
from paceline.evals.vision.report import page as vision_page
from paceline.replay import report as replay

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here")
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--enable-logging=stderr",
)  # fmt: skip
WIDTHS = (390, 1280)
MEASURE = """<script>
onload = () => {
  document.querySelectorAll("details").forEach(one => { one.open = true })
  const color = getComputedStyle(document.body).backgroundColor
  const loaded = performance.getEntriesByType("resource").map(one => one.name)
  const pictures = [...document.querySelectorAll("svg")].map(one => one.getBoundingClientRect().width)
  const holds = one => /auto|scroll|hidden/.test(getComputedStyle(one).overflowX)
  const scrolls = one => one && (holds(one) || scrolls(one.parentElement))
  const outside = [...document.body.querySelectorAll("*")].filter(one => {
    const box = one.getBoundingClientRect()
    return (box.right > innerWidth + 1 || box.left < -1) && !scrolls(one.parentElement)
  })
  const cut = [...document.querySelectorAll(".wide")].filter(one => one.scrollWidth > one.clientWidth + 1)
  const lonely = [...document.querySelectorAll(".wide")].filter(one => {
    const second = one.querySelector("tr > :nth-child(2)")
    return second && second.getBoundingClientRect().right > one.getBoundingClientRect().right + 1
  })
  const crossed = [...document.querySelectorAll("svg")].filter(drawn => {
    const boxes = [...drawn.querySelectorAll("text")].map(one => one.getBoundingClientRect())
    return boxes.some((a, i) => boxes.some((b, j) => i < j && a.left + 1 < b.right && b.left + 1 < a.right &&
                                                     a.top + 3 < b.bottom && b.top + 3 < a.bottom))
  })
  const says = one => one.tagName + " " + one.textContent.trim().slice(0, 60)
  parent.postMessage({page: location.pathname.split("/").pop().slice(0, -5), width: innerWidth,
                      wide: document.documentElement.scrollWidth, color, loaded,
                      narrowest: Math.min(...pictures), height: document.documentElement.scrollHeight,
                      outside: outside.map(says), cut: cut.map(says), lonely: lonely.map(says),
                      crossed: crossed.map(says)}, "*")
}
</script>"""
# The narrowest window of headless Chromium is wider than a phone, so the page is put into frames.
FRAMES = """<!doctype html><html style="color-scheme: light dark"><body style="margin: 0"><script>
const told = []
onmessage = message => {
  told.push(message.data)
  if (told.length == %d) {
    document.body.replaceChildren(JSON.stringify(told))
  }
}
</script>%s</body></html>"""


Told = dict[str, dict[int, dict[str, Any]]]
"""What a page says of itself, by its name and the width of the window."""


def browse(folder, file, *options):
    command = [str(CHROMIUM), *QUIET, f"--user-data-dir={folder / 'profile'}", *options, file.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def measured(folder, pages, *options):
    """What each page says of itself by window width, every detail unfolded; and what the browser complained of. One
    browser reads them all: to start it takes longer than that."""
    for name, html in pages.items():
        (folder / f"{name}.html").write_text(_with_measure(html), "utf-8")
    frames = [
        f'<iframe src="{name}.html" style="width: {width}px; height: 900px; border: 0"></iframe>'
        for name in pages
        for width in WIDTHS
    ]
    (folder / "frames.html").write_text(FRAMES % (len(frames), "".join(frames)), "utf-8")
    done = browse(folder, folder / "frames.html", "--dump-dom", "--virtual-time-budget=5000", *options)
    told = re.search(r"\[\{.*\}\]", done.stdout)
    assert told, done.stdout[:500]
    found = {name: {} for name in pages}
    for one in json.loads(told[0]):
        found[one["page"]][one["width"]] = one
    return found, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def _with_measure(html):
    return re.sub(r"(</body>)?\s*</html>\s*$", lambda _: f"{MEASURE}</html>", html)


RESULTS = {file.stem: file for file in (Path(__file__).parents[2] / "docs" / "results").glob("*.html")}


def of_align(folder):
    method = "vanilla,align3,align3,steps=13,self-refine,iterations=1"
    with Scripted() as server:
        go(server, folder / "run", method=method, judge=["self", "checks"])
    return align_page(folder / "run")


def of_silence(folder):
    endless = {"message": {"role": "assistant", "content": "<think> And so on"}, "finish_reason": "length"}
    with Scripted(lambda body: endless) as server:
        go(server, folder / "run", method="vanilla")
    return align_page(folder / "run")


def of_bench(folder):
    """Twenty methods, long names, a long word, failures: everything a report can hold."""
    methods = {
        "none": 1.0, "hierarchy,order=WL,model=build/own,corpus=build/four,n=8": 1.7,
        "averylongnamewithoutanyplacetobreakitatall": 1.5, "peer:transformers-assisted:models/draft": 0.8,
        **{f"method-{i},tree={i}": 1 + i / 10 for i in range(16)},
    }  # fmt: skip

    def change(about, summary):
        about["environment"]["command"] = "paceline bench models/demo " + "--draft=" + "x" * 300
        summary["results"][1 + len(TASKS)]["differs"] = [
            {"question": "q" * 60, "repeat": 0, "turn": 0, "at": 35, "verdict": "bug", "gap": 0.5, "noise": 0.01}
        ]

    text = "An answer of some words\n\n  and lines <b>, then " + "w" * 400 + " end"
    run = make_run(
        folder / "run", methods, failed={"method-3,tree=3": "e" * 200}, not_installed={"peer:vllm-ngram": WHY},
        text=text, complete=False, change=change,
    )  # fmt: skip
    return bench.page(read_run(run))


def of_schedules(folder):
    def change(about, summary):
        for row in summary["results"]:
            if row["method"] != "none":
                drafter, schedule, batch = row["method"].split()
                row["scheduled"] = {"drafter": drafter, "schedule": schedule, "batch": int(batch)}

    methods = {f"sam {how} {batch}": 1.5 for how in ("ragged", "equal", "grouped") for batch in (1, 4)}
    return bench.page(read_run(make_run(folder / "run", {"none": 1.0, **methods}, change=change)))


def of_replay(folder):
    return replay.page(told(TWO) | {"variants": OF_A})


def of_certificate(folder):
    shown = {"verdict": "bug", "prompt": 3, "at": 17, "company": "alone", "why": "", "before": "w" * 200,
             "said": 3, "best": 4, "gap": 0.5, "noise": 0.01}  # fmt: skip
    case = {"name": "temperature 1, top_k 40, a long name of a case", "requests": 12345, "outcomes": 4096, "tv": 0.1,
            "tv_by_chance": 0.02, "p": 1e-9}  # fmt: skip
    return certificate.page(
        {
            "engine": "an engine with a name that is long: http://a.host.with.a.long.name.example:8000/v1",
            "verdict": "not lossless", "why": "greedy, sampling",
            "target": "models/demo", "lossless": False, "seconds": 3.5, "ran_on": {}, "environment": {"torch": "2.13"},
            "greedy": {"lossless": False, "answers": 1000, "tokens": 123456, "bugs": 1, "ties": 2, "shown": [shown],
                       "why": "", "findings": [{"what": "a token that is not the best, by far"}]},
            "stops": {"lossless": False, "answers": 40, "bugs": 1,
                      "shown": [{"stop": "x" * 99, "text": "a" * 300, "right": "b" * 300}]},
            "sampled": {"lossless": False, "cases": [case] * 3, "requests": 12345, "p": 1e-9, "p_of_worst_case": 1e-9,
                        "tv": 0.1, "tv_by_chance": 0.02, "plain_differs": False, "p_of_difference": None,
                        "findings": [{"what": "tokens that come too often"}], "looks": []},
            "scenarios": [{"scenario": "prefix cache", "verdict": "wrong", "answers": 8, "bugs": 2, "ties": 0,
                           "seconds": 0.9, "why": "text parts"}], "reports": [], "features": ["logprobs"],
            "acceptance": {"tokens_a_round": 2.5, "reference": 2.4, "collapsed": False},
            "power": {"tokens": 3, "greedy_rate": 1e-4, "detectable": 0.05, "shift": 0.05, "power": 0.9, "level": 1e-6,
                      "hidden": 0.01, "detectable_in_one_case": 0.1},
            "not_tested": [],
        }
    )  # fmt: skip


def of_vision(folder):
    for name in ("random", "oracle"):
        run_vision(sample(), RunOptions(name, out=folder / name))
    (folder / "report.html").write_text(vision_page([folder / "random", folder / "oracle"]))
    return (folder / "report.html").read_text("utf-8")


def of_server(folder):
    html = (files("paceline.serve") / "page.html").read_text("utf-8")
    html = re.sub(r"<script>.*</script>", "", html, flags=re.DOTALL)  # which asks the server
    return html.replace('aria-live="polite">', f'aria-live="polite"><mark>{"w" * 300}</mark> and so on')


PAGES = {
    "align": of_align, "silence": of_silence, "bench": of_bench, "schedules": of_schedules, "replay": of_replay,
    "certificate": of_certificate, "vision": of_vision, "server": of_server,
    **{name: lambda folder, file=file: file.read_text("utf-8") for name, file in RESULTS.items()},
}


def test_no_element_is_beside_the_window_and_no_text_on_another(tmp_path):
    pages = {}
    for name, make in PAGES.items():
        (tmp_path / name).mkdir()
        pages[name] = make(tmp_path / name)
    every, complaints = measured(tmp_path, pages)
    for name, found in every.items():
        assert sorted(found) == list(WIDTHS), name
        for width, page in found.items():
            assert page["outside"] == [], name
            assert page["wide"] <= width, name
            assert page["lonely"] == [] or name == "bench", name  # a table shows figures; there a name is of 60 letters
            assert page["crossed"] == [], name
            assert page["loaded"] == [], name
            assert (page["narrowest"] or 200) > 120, name  # a plot, where there is one, can be read
        if name not in RESULTS:  # whose pages are of earlier versions
            assert found[390]["cut"] == [] or name == "vision", name  # which has matrices of every value by every value
            assert found[1280]["cut"] == [] or name == "bench", name  # whose names are of 60 letters
    assert (complaints, {page["color"] for page in every["bench"].values()}) == ([], {"rgb(255, 255, 255)"})


def test_dark_where_the_reader_wants_it_dark(tmp_path):
    """And light in the test above."""
    found, _ = measured(tmp_path, {"bench": of_bench(tmp_path)}, "--force-dark-mode")
    assert {page["color"] for page in found["bench"].values()} == {"rgb(20, 24, 30)"}
