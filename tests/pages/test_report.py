"""The report: every figure of a run in its place, whatever is missing, and never fooled by what a model wrote."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.bench.runs import TASKS, WHY, answer, make_run

from paceline.bench.page import page
from paceline.bench.report import markdown, read_run
from paceline.cli import main
from paceline.errors import PacelineError
from paceline.workbench.report import DASH, interval, number, percent, size, words

VOID = {"meta", "br", "wbr"}
Change = Callable[[dict[str, Any], dict[str, Any]], None]


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    inside: list["Element | str"] = field(default_factory=list)

    @property
    def text(self) -> str:
        parts = self.inside if self.tag != "style" else []
        return "".join(part if isinstance(part, str) else part.text for part in parts)

    def find(self, *tags: str, of: str = "") -> list["Element"]:
        """All elements within, or those with one of the tags, or of a class."""
        found = []
        for one in self.inside:
            if isinstance(one, Element):
                if (not tags or one.tag in tags) and (not of or of in one.attributes.get("class", "").split()):
                    found.append(one)
                found += one.find(*tags, of=of)
        return found


class Seen(HTMLParser):
    """A page as a reader gets it; every element is closed in its turn."""

    def __init__(self, html: str) -> None:
        super().__init__()
        root = Element("", {})
        self.open = [root]
        self.feed(html)
        self.close()
        assert self.open == [root]
        self.text = root.text
        self.tags = [one.tag for one in root.find()]
        self.attributes = [pair for one in root.find() for pair in one.attributes.items()]
        self.tables = [
            [[cell.text for cell in row.find("td", "th")] for row in table.find("tr")] for table in root.find("table")
        ]
        self.runs = [(one.attributes["style"], one.text) for one in root.find(of="run")]  # what is coloured
        self.said = [one.text for one in root.find(of="said")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        new = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].inside.append(new)
        if tag not in VOID:
            self.open.append(new)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self.open[-1].inside.append(data)

    def row(self, table: str, method: str) -> list[str]:
        """The row of `method` in the first table with a column that begins with `table`."""
        rows = next(rows for rows in self.tables if any(cell.startswith(table) for cell in rows[0]))
        return next(row for row in rows if row[0].split()[0] == method)


def seen(folder: Path) -> Seen:
    return Seen(page(read_run(folder)))


def test_a_page_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    make_run(tmp_path, text="See https://example.org/a for @import url(x) more.")
    html = page(read_run(tmp_path))
    found = Seen(html)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "use", "image"} & set(found.tags)
    assert all(value.startswith("#") for name, value in found.attributes if name in ("href", "src", "srcset", "action"))
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert "prefers-color-scheme: dark" in style
    targets = {value for name, value in found.attributes if name == "id"}
    assert {value[1:] for name, value in found.attributes if name == "href"} <= targets


def test_what_won_is_said_first(tmp_path: Path) -> None:
    text = seen(make_run(tmp_path)).text
    assert "recycling,tree=16 answers 2.20 times as fast as plain decoding" in text
    assert "The 95 % interval of recycling,tree=16 is 2.11 to 2.31." in text
    assert "The fastest peer is transformers-lookup with 1.40." in text
    assert "4 methods on 48 questions of demo, model demo, at most 128 tokens an answer, greedy, " in text
    assert "each answered 3 times" in text
    assert "Loops flatter drafters" in text
    assert "plain decoding's answers\n6 % end in a loop (mt-bench 6 %, " in text


def test_figures_stand_in_their_places(tmp_path: Path) -> None:
    found = seen(make_run(tmp_path))
    overall = found.row("looping", "sam")
    loops = "6 %1.71 without"
    assert overall == ["sam", "1.901.82 to 1.99", loops, "912.0", "2.28", "9.5", "1.10", "2.38", "100 %", "144"]
    assert found.row("looping", "none")[1] == "1.00"
    by_task = next(rows for rows in found.tables if rows[0][1:] == ["overall", *TASKS])
    sam = next(row for row in by_task if row[0] == "sam")
    assert [cell[:4] for cell in sam[1:]] == ["1.90", "2.09", "2.28", "2.47", "2.66", "2.85", "3.04"]
    assert "1,003.2/s" in sam[2]
    assert found.row("first token", "sam") == ["sam", "11.5", "2.1", "4.8", "2.09", "4.3 %", "812.0 MB"]
    assert found.row("forward", "sam") == ["sam", "0.095", "3.500", "0.100", "0.200", "3.895"]
    spec_bench = next(rows for rows in found.tables if rows[0][-1] == "overallspeed-up")
    assert next(row for row in spec_bench if row[0] == "sam")[-2:] == ["893.0", "1.86"]
    for told in ("Some Xeon", "24.0 GB", "torch", "paceline bench models/demo -d sam", "engine some 1.0, draft n 3"):
        assert told in found.text
    assert "target 31.0 MB" in found.text
    assert "its prompt has 1,100 tokens" in found.text


def test_the_fastest_comes_first_and_peers_are_marked(tmp_path: Path) -> None:
    found = seen(make_run(tmp_path))
    table = next(rows for rows in found.tables if "looping" in rows[0])
    names = [row[0] for row in table[1:]]
    assert names == ["recycling,tree=16", "sam", "transformers-lookup peer", "none plain decoding"]


def test_bars_are_as_long_as_their_figures(tmp_path: Path) -> None:
    html = page(read_run(make_run(tmp_path, {"none": 1.0, "sam": 2.0}, tasks=())))
    widths = re.findall(r'<i style="width: ([\d.]+)%', html)
    whiskers = re.findall(r'<u style="left: ([\d.]+)%; width: ([\d.]+)%', html)
    most = 1.02 * 2.1  # the interval's end
    assert [float(width) for width in widths] == pytest.approx([200 / most, 100 / most], abs=0.01)
    assert [tuple(map(float, one)) for one in whiskers] == [pytest.approx((192 / most, 18 / most), abs=0.01)]


def test_rounds_longer_than_the_plot_share_its_last_column(tmp_path: Path) -> None:
    tips = re.findall(r"<title>sam: ([\d.]+) % of rounds brought ([\d+]+)</title>", page(read_run(make_run(tmp_path))))
    assert [n for _, n in tips] == [*map(str, range(1, 16)), "16+"]
    shares = {n: float(share) for share, n in tips}
    assert shares["1"] == pytest.approx(60.6, abs=0.05)
    assert shares["16+"] == pytest.approx(4.5, abs=0.05)
    assert sum(shares.values()) == pytest.approx(100, abs=0.5)


def test_acceptance_by_depth_has_the_others_behind_it(tmp_path: Path) -> None:
    html = page(read_run(make_run(tmp_path)))
    assert "sam: 47.5 % accepted to depth 2" in html
    assert html.count('class="faint"') == 3 * 2  # plain decoding drafts nothing


def test_parts_stand_in_the_order_of_the_loop(tmp_path: Path) -> None:
    def change(about: dict[str, Any], summary: dict[str, Any]) -> None:
        for row in summary["results"]:
            row["parts_ms"] = {"other": 1.0, "accept": 1.0, "forward": 2.0, "draft": 1.0}

    html = page(read_run(make_run(tmp_path, {"none": 1.0, "sam": 2.0}, change=change)))
    parts = re.findall(r'<div style="width: ([\d.]+)%; background: (#\w+)" title="(\w+): [\d.]+ ms">', html)
    assert [name for _, _, name in parts] == ["draft", "forward", "accept", "other"] * 2
    assert [float(width) for width, _, _ in parts[:4]] == [20, 40, 20, 20]
    assert len({color for _, color, _ in parts}) == 4


# Who won ------------------------------------------------------------------------------------------------------


def overall(summary: dict[str, Any], method: str) -> dict[str, Any]:
    return next(row for row in summary["results"] if row["method"] == method and row["category"] == "overall")


@pytest.mark.parametrize(
    ("gains", "says"),
    [
        ({"sam": 2.0, "suffix": 2.1}, ["suffix answers 2.10 times", "Intervals that overlap with it: sam."]),
        ({"sam": 1.03}, ["interval of sam is 0.99 to 1.08; it includes 1, so no gain is shown"]),
        ({"sam": 0.9}, ["No method was faster than plain decoding"]),
        (
            {"sam": 1.9, "peer:vllm-ngram": 2.5},
            ["vllm-ngram answers 2.50 times", "It is a peer; the fastest of our own is sam with 1.90."],
        ),
    ],
)
def test_who_won(tmp_path: Path, gains: dict[str, float], says: list[str]) -> None:
    text = seen(make_run(tmp_path, {"none": 1.0, **gains})).text
    assert [sentence for sentence in says if sentence not in text] == []


def test_a_run_too_small_for_intervals(tmp_path: Path) -> None:
    def change(about: dict[str, Any], summary: dict[str, Any]) -> None:
        for row in summary["results"]:
            row["speedup_low"] = row["speedup_high"] = None
        about["environment"]["threads"] = 1

    found = seen(make_run(tmp_path, change=change))
    assert "There are too few answers for an interval." in found.text
    assert found.row("looping", "sam")[1] == "1.90"
    assert "| `sam` | 1.90 | 2.09 |" in markdown(read_run(tmp_path))
    assert "Some Xeon, 1 thread, " in markdown(read_run(tmp_path))


def test_a_lossy_method_does_not_win(tmp_path: Path) -> None:
    def change(about: dict[str, Any], summary: dict[str, Any]) -> None:
        about["methods"][2]["lossless"] = False

    found = seen(make_run(tmp_path, change=change))
    assert "sam answers 1.90 times" in found.text
    assert "Not ranked: recycling,tree=16 (lossy)." in found.text
    assert found.row("looping", "recycling,tree=16")[0] == "recycling,tree=16 lossy"
    assert "`recycling,tree=16` (lossy)" in markdown(read_run(tmp_path))


def test_failed_and_missing_methods_are_listed_with_why(tmp_path: Path) -> None:
    def change(about: dict[str, Any], summary: dict[str, Any]) -> None:
        about["methods"].append({"method": "late"})

    make_run(tmp_path, failed={"recycling,tree=16": "out of memory"}, not_installed={"peer:vllm": WHY}, change=change)
    found = seen(tmp_path)
    assert "sam answers 1.90 times" in found.text
    assert "Not ranked: recycling,tree=16 (failed)." in found.text
    assert "recycling,tree=16failed after 144 answers: out of memory" in found.text
    assert f"peer:vllmdid not take part: {WHY}" in found.text
    assert "lateno answers yet" in found.text
    assert found.row("looping", "recycling,tree=16")[0] == "recycling,tree=16 failed"
    rows = markdown(read_run(tmp_path)).splitlines()
    assert any(row.startswith("| `peer:vllm` | did not take part: vLLM") for row in rows)
    assert any("2.20 (2.11 to 2.31); failed after 144 answers: out of memory" in row for row in rows)


# Losslessness -------------------------------------------------------------------------------------------------


def differing(*verdicts: str) -> Change:
    def change(about: dict[str, Any], summary: dict[str, Any]) -> None:
        row = overall(summary, "sam")
        row["identical"] = 0.9995
        row["differs"] = [
            {"question": f"q{i}", "repeat": 0, "turn": 0, "at": 35, "verdict": verdict, "gap": 0.0021, "noise": 0.0156}
            for i, verdict in enumerate(verdicts)
        ]

    return change


def test_a_bug_is_named_at_the_top(tmp_path: Path) -> None:
    found = seen(make_run(tmp_path, change=differing("tie", "bug")))
    assert "1 answer differs from plain decoding by\nmore than rounding explains" in found.text
    assert "1 tie, 1 bug" in found.text
    table = next(rows for rows in found.tables if rows[0][-1] == "verdict")
    assert [row[1] for row in table[1:]] == ["q1", "q0"]
    assert table[2] == ["sam", "q0", "0", "1", "36", "0.0021", "0.0156", "tie"]
    assert found.row("looping", "sam")[8] == "over 99.9 %"


def test_a_tie_is_no_alarm(tmp_path: Path) -> None:
    text = seen(make_run(tmp_path, change=differing("tie", "tie"))).text
    assert "2 ties" in text
    assert "more than rounding explains" not in text


# Answers ------------------------------------------------------------------------------------------------------


def test_answers_are_the_first_of_each_task_by_the_three_fastest(tmp_path: Path) -> None:
    gains = {"none": 1.0, "a": 1.1, "b": 1.4, "c": 1.3, "d": 1.2, "peer:x": 5.0}
    found = seen(make_run(tmp_path, gains, text="one two three four five"))
    shown = [f"one two three four five {task} 0, {name}." for task in TASKS for name in "bcd"]
    assert found.said == shown
    legend, runs = found.runs[:3], found.runs[3:]
    assert [text for _, text in legend] == ["b", "c", "d"]
    assert len({style for style, _ in legend}) == 3
    assert [style for style, _ in runs] == [style for style, _ in legend] * len(TASKS)
    assert runs[0][1] == " three four five mt-bench 0,"
    assert "9 tokens" not in found.text
    assert "8 tokens, 5 of them drafted, in 2 rounds." in found.text


def test_a_failed_answer_is_not_shown_but_the_later_one(tmp_path: Path) -> None:
    make_run(tmp_path, {"none": 1.0, "sam": 2.0}, tasks=())
    tries = [answer("sam", "qa", "q1", f"this is try {n} here") for n in (1, 2)]
    tries[0].failed = "the device fell off"
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(one.row()) + "\n" for one in tries))
    assert seen(tmp_path).said == ["this is try 2 here"]


def test_what_a_model_wrote_is_text(tmp_path: Path) -> None:
    hostile = "</div><script>alert(1)</script> & \x1b[31m\x00 \u202e it"
    why = "<img src=x onerror=alert(1)>"
    gains = {"none": 1.0, '"><script>x</script>': 2.0}

    def change(about: dict[str, Any], summary: dict[str, Any]) -> None:
        about["model_name"] = about["environment"]["cpu"] = about["methods"][0]["settings"] = why
        about["left_out"] = [{"question": why, "why": why}]

    make_run(tmp_path, gains, text=hostile, tasks=("<b>",), not_installed={"<i>": why}, change=change)
    found = seen(tmp_path)
    assert not {"script", "img"} & set(found.tags)
    assert found.text.count(why) >= 6
    assert "<script>alert(1)</script> & \u241b[31m\u2400" in found.said[0]


# What is not there --------------------------------------------------------------------------------------------


def test_figures_that_are_missing_are_dashes(tmp_path: Path) -> None:
    def change(about: dict[str, Any], summary: dict[str, Any]) -> None:
        for row in summary["results"]:
            row |= {key: None for key in row if key not in ("method", "category", "answers", "tokens_per_second")}
        about["environment"] = about["options"] = about["suite"] = {}
        del about["methods"]

    found = seen(make_run(tmp_path, change=change))
    assert "No method could be compared with plain decoding" in found.text
    assert found.row("looping", "sam") == ["sam", DASH, DASH, "912.0", *[DASH] * 5, "144"]
    for section in ("accepted", "time", "predicted"):
        assert ("id", section) not in found.attributes
    assert f"| `sam` | {DASH} |" in markdown(read_run(tmp_path))


def test_a_run_with_no_answer_yet(tmp_path: Path) -> None:
    make_run(tmp_path, {}, tasks=(), complete=False)
    found = seen(tmp_path)
    assert "The run is not complete" in found.text
    assert found.said == []


def test_not_finite_figures_are_missing(tmp_path: Path) -> None:
    make_run(tmp_path)
    summary = (tmp_path / "summary.json").read_text()
    (tmp_path / "summary.json").write_text(re.sub(r'"mbsu": [\d.]+', '"mbsu": NaN', summary))
    assert seen(tmp_path).row("looping", "sam")[7] == DASH


def test_a_killed_run(tmp_path: Path) -> None:
    make_run(tmp_path, {"none": 1.0, "sam": 2.0}, complete=False, text="Der Kater saß und fraß")
    file = tmp_path / "answers.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    cut = lines[1].index("ß".encode()) + 1  # in the middle of a character
    file.write_bytes(lines[0] + lines[1] + lines[1][:cut])
    found = seen(tmp_path)
    assert "The run is not complete" in found.text
    assert found.said == ["Der Kater saß und fraß mt-bench 0, sam."]
    assert "Not complete." in markdown(read_run(tmp_path))
    assert "not complete" not in seen(make_run(tmp_path / "whole")).text


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        *(("run.json", content, "run.json cannot be read; name the folder of a run") for content in (None, "{", "[]")),
        ("run.json", '{"model": "m"}', "was written by an older version of paceline; run it again in a new folder"),
        ("run.json", '{"kind": "bench", "identity": {}, "methods": ["sam"]}', '"methods" must list objects'),
        ("summary.json", None, "has no summary.json yet; run the command of the benchmark again"),
        ("summary.json", '{"results": {}}', '"results" must list objects'),
        ("summary.json", '{"results": [{"method": "sam"}]}', '"results" must list objects'),
        ("answers.jsonl", '{"method": "sam"}\n', "answers.jsonl, line 1: not an answer"),
    ],
)
def test_broken_folders_get_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, content: str | None, message: str
) -> None:
    make_run(tmp_path)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(content)
    with pytest.raises(PacelineError, match=re.escape(message)):
        read_run(tmp_path)
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


# Markdown and words -------------------------------------------------------------------------------------------


def test_markdown_is_a_table_with_its_machine_and_command(tmp_path: Path) -> None:
    lines = markdown(read_run(make_run(tmp_path, not_installed={"peer:a|b`c": "a\nb | c"}))).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 2 + 5
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {2 + len(TASKS) + 5 + 1}
    assert rows[0].startswith("| method | speed-up (95 % interval) | mt-bench | translation |")
    assert rows[3].startswith("| `sam` | 1.90 (1.82 to 1.99) | 2.09 | 2.28 |")
    assert rows[3].endswith("| 912.0 | 2.28 | 100 % | 6 % | 1.71 |")
    assert r"`` peer:a\|b`c ``" in rows[-1]
    assert any("Some Xeon, 2 threads, bfloat16, torch 2.13.0" in line for line in lines)
    assert lines[-1] == "`paceline bench models/demo -d sam -d recycling,tree=16`"


def test_figures_in_words() -> None:
    assert [percent(v) for v in (0, 1, 0.5, 0.0625, 0.996, 0.9999, 0.0001, 0.004, None)] == [
        "0 %", "100 %", "50 %", "6 %", "99.6 %", "over 99.9 %", "under 0.1 %", "0.4 %", DASH,
    ]  # fmt: skip
    assert [number(v) for v in (1, 1234.567, None, float("nan"))] == ["1.00", "1,234.57", DASH, DASH]
    assert [size(v) for v in (12, 1500, 2_500_000, 3e9, None)] == ["12 bytes", "1.5 kB", "2.5 MB", "3.0 GB", DASH]
    assert interval(1, None) == DASH
    assert words({"a": [1, 2.5], "b": {"c": None, "d": True}, "e": []}) == "a 1, 2.5, b c none, d yes, e none"


# The command --------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path)
    assert main(["report", str(tmp_path), "--markdown"]) == 0
    assert capsys.readouterr().out == markdown(read_run(tmp_path))
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "summary.json").read_text())
    assert not (tmp_path / "report.html").exists()
    for option, out in (([], tmp_path / "report.html"), (["--out", f"{tmp_path}/other"], tmp_path / "other")):
        assert main(["report", str(tmp_path), *option]) == 0
        assert capsys.readouterr().out == f"wrote {out}\n"
        assert out.read_text("utf-8") == page(read_run(tmp_path))
    (tmp_path / "no").write_text("a file")
    for wrong, says in (
        (["--markdown", "--json"], "choose one"),
        (["--out", str(tmp_path / "no" / "where.html")], "where.html cannot be written: "),
    ):
        assert main(["report", str(tmp_path), *wrong]) == 2
        assert says in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "name the folder of a run" in capsys.readouterr().err


def test_loops_are_told_as_far_as_they_can_be(tmp_path: Path) -> None:
    def change(summary: dict[str, Any], **told: float) -> None:
        for row in summary["results"]:
            row |= told

    none = make_run(tmp_path / "none", change=lambda _, summary: change(summary, looping=0.0))
    assert seen(none).row("looping", "sam")[2] == "0 %"
    assert "without loops" not in markdown(read_run(none))
    cut = make_run(tmp_path / "cut", change=lambda _, summary: change(summary, looping=0.0, too_short=0.75))
    assert seen(cut).row("looping", "sam")[2] == "0 %75 % too short"
    assert "75 % were cut off too early to tell" in seen(cut).text
    some = markdown(read_run(make_run(tmp_path / "some"))).splitlines()
    assert some[0].endswith(" looping | without loops |")
    assert next(line for line in some if line.startswith("| `sam`")).endswith(" 6 % | 1.71 |")


def test_a_disturbed_run_says_so_on_the_page_and_under_the_table(tmp_path: Path) -> None:
    line = "Timings are not reliable, another process seems to have used the processor: <b>x</b>."
    said = {"disturbed": [line]}
    run = read_run(make_run(tmp_path / "run", change=lambda about, summary: summary.update(said)))
    assert line in Seen(page(run)).text
    assert line in markdown(run)
    quiet = read_run(make_run(tmp_path / "quiet"))
    assert "not reliable" not in page(quiet) + markdown(quiet)
