"""The report: every figure of a run in its place, whatever is missing, and never fooled by what a model wrote."""

import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

import pytest
from tests.bench.runs import TASKS, WHY, make_run
from tests.golden import plainly, same

from paceline.bench.page import page
from paceline.bench.report import describe, markdown, read_run
from paceline.cli import main
from paceline.errors import PacelineError
from paceline.runs.report import DASH, interval, number, percent, size, words

VOID = {"meta", "br", "wbr"}
@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    inside: list["Element | str"] = field(default_factory=list)

    @property
    def text(self):
        parts = self.inside if self.tag != "style" else []
        return "".join(part if isinstance(part, str) else part.text for part in parts)

    def find(self, *tags, of=""):
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

    def __init__(self, html):
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

    def handle_starttag(self, tag, attrs):
        new = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].inside.append(new)
        if tag not in VOID:
            self.open.append(new)

    def handle_endtag(self, tag):
        assert self.open.pop().tag == tag

    def handle_data(self, data):
        self.open[-1].inside.append(data)

    def row(self, table, method):
        """The row of `method` in the first table with a column that begins with `table`."""
        rows = next(rows for rows in self.tables if any(cell.startswith(table) for cell in rows[0]))
        return next(row for row in rows if row[0].split()[0] == method)


def seen(folder):
    return Seen(page(read_run(folder)))


def test_a_page_is_whole_and_loads_nothing(tmp_path):
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


def loops(summary, **figures):
    for row in summary["results"]:
        row |= figures


def odd(about, summary):
    """A lossy method, one without answers, a bug and a tie, loops, other parts, and another process."""
    about["methods"][2]["lossless"] = False
    about["methods"].append({"method": "late"})
    loops(summary, looping=0.0, too_short=0.75, parts_ms={"other": 1.0, "accept": 1.0, "forward": 2.0, "draft": 1.0})
    row = next(row for row in summary["results"] if (row["method"], row["category"]) == ("sam", "overall"))
    where = {"repeat": 0, "turn": 0, "at": 35, "gap": 0.0021, "noise": 0.0156}
    row["identical"] = 0.9995
    row["differs"] = [{"question": f"q{i}", "verdict": one, **where} for i, one in enumerate(("tie", "bug"))]
    summary["disturbed"] = ["Timings are not reliable, another process seems to have used the processor: <b>x</b>."]


def few(about, summary):
    """Too few answers for intervals, and no loop."""
    loops(summary, speedup_low=None, speedup_high=None, looping=0.0)
    about["environment"]["threads"] = 1


def bare(about, summary):
    for row in summary["results"]:
        row |= {key: None for key in row if key not in ("method", "category", "answers", "tokens_per_second")}
    about["environment"] = about["options"] = about["suite"] = {}
    del about["methods"]


ODD = {"methods": {"none": 1.0, "sam": 1.9, "tree": 2.2, "x": 2.5}, "failed": {"x": "out of memory"}, "complete": False,
       "not_installed": {"peer:vllm": WHY, "peer:a|b`c": "a\nb | c"}, "tasks": TASKS[:1], "change": odd}  # fmt: skip
RUNS = {"whole": {"tasks": TASKS[:2]}, "odd": ODD, "bare": {"tasks": (), "change": bare},
        "few": {"methods": {"none": 1.0, "sam": 1.9}, "tasks": (), "change": few},
        "empty": {"methods": {}, "tasks": (), "complete": False}}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_every_figure_is_in_its_place(tmp_path, name):
    """On the page and in the table; bars are as long as their figures."""
    run = read_run(make_run(tmp_path, **RUNS[name]))
    page_only, definitions = plainly(page(run)).split("\nDefinitions\n")
    assert "speed-up" in definitions
    same(f"report-{name}.txt", f"{page_only}\n\n{markdown(run)}")
    rows = [line for line in markdown(run).splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1


def test_acceptance_by_depth_has_the_others_behind_it(tmp_path):
    assert page(read_run(make_run(tmp_path))).count('class="faint"') == 3 * 2  # plain decoding drafts nothing


@pytest.mark.parametrize(("gains", "says"), [
    ({"sam": 2.0, "suffix": 2.1}, ["suffix answers 2.10 times", "Intervals that overlap with it: sam."]),
    ({"sam": 1.03}, ["interval of sam is 0.99 to 1.08; it includes 1, so no gain is shown"]),
    ({"sam": 0.9}, ["No method was faster than plain decoding"]),
    (
        {"sam": 1.9, "peer:vllm-ngram": 2.5},
        ["vllm-ngram answers 2.50 times", "It is a peer; the fastest of our own is sam with 1.90."],
    ),
])
def test_who_won(tmp_path, gains, says):
    text = seen(make_run(tmp_path, {"none": 1.0, **gains})).text
    assert [sentence for sentence in says if sentence not in text] == []


def test_what_a_model_wrote_is_text(tmp_path):
    hostile = "</div><script>alert(1)</script> & \x1b[31m\x00 \u202e it"
    why = "<img src=x onerror=alert(1)>"
    gains = {"none": 1.0, '"><script>x</script>': 2.0}

    def change(about, summary):
        about["model_name"] = about["environment"]["cpu"] = about["methods"][0]["settings"] = why
        about["left_out"] = [{"question": why, "why": why}]

    make_run(tmp_path, gains, text=hostile, tasks=("<b>",), not_installed={"<i>": why}, change=change)
    found = seen(tmp_path)
    assert not {"script", "img"} & set(found.tags)
    assert found.text.count(why) >= 6


def test_not_finite_figures_are_missing(tmp_path):
    make_run(tmp_path)
    summary = (tmp_path / "summary.json").read_text()
    (tmp_path / "summary.json").write_text(re.sub(r'"mbsu": [\d.]+', '"mbsu": NaN', summary))
    assert seen(tmp_path).row("looping", "sam")[7] == DASH


def test_a_headline_has_no_figure_that_the_page_calls_unreliable(tmp_path):
    unreliable = "Timings are not reliable, another process used the processor."
    for lines, headline in (
        ([], "recycling,tree=16 answers 2.20 times as fast as plain decoding"),
        ([unreliable], "recycling,tree=16 was the fastest, but these times are not reliable"),
    ):
        change = lambda _, summary, lines=lines: summary.update(disturbed=lines)  # noqa: E731
        folder = make_run(tmp_path / str(len(lines)), change=change)
        assert describe("headline", read_run(folder)) == headline
        assert f"<h1>{headline}</h1>" in page(read_run(folder))


def test_a_killed_run(tmp_path):
    make_run(tmp_path, {"none": 1.0, "sam": 2.0}, complete=False, text="Der Kater saß und fraß")
    file = tmp_path / "answers.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    cut = lines[1].index("ß".encode()) + 1  # in the middle of a character
    file.write_bytes(lines[0] + lines[1] + lines[1][:cut])
    found = seen(tmp_path)
    assert "The run is not complete" in found.text
    assert "Not complete." in markdown(read_run(tmp_path))
    assert "not complete" not in seen(make_run(tmp_path / "whole")).text


@pytest.mark.parametrize("lines", [None, 0, 1, 8], ids=lambda lines: f"{lines} lines")
def test_a_run_that_was_killed_before_its_figures_were_written(tmp_path, capsys, lines):
    make_run(tmp_path, {"none": 1.0, "sam": 2.0})
    (tmp_path / "summary.json").unlink()
    file = tmp_path / "answers.jsonl"
    kept = file.read_bytes().splitlines(keepends=True)[:lines]
    file.unlink() if lines is None else file.write_bytes(b"".join(kept))
    assert "The run is not complete" in seen(tmp_path).text
    told = markdown(read_run(tmp_path))
    assert "Not complete." in told
    assert ("no answers yet" in told) == (not lines or lines == 1)
    assert main(["report", str(tmp_path), "--json"]) == 0
    answers = {row["method"]: row["answers"] for row in json.loads(capsys.readouterr().out)["results"]
               if row["category"] == "overall"}
    assert sum(answers.values()) == (lines or 0)


@pytest.mark.parametrize(("file", "content", "message"), [
    *(("run.json", content, "run.json cannot be read; name the folder of a run") for content in (None, "{", "[]")),
    ("run.json", '{"model": "m"}', "cannot be read; name the folder of a run"),
    ("run.json", '{"kind": "bench", "identity": {}, "methods": ["sam"]}', 'do not list methods and their results'),
    ("summary.json", '{"results": {"sam": 1}}', 'do not list methods and their results'),
    ("summary.json", '{"results": [{"method": "sam"}]}', 'do not list methods and their results'),
])
def test_broken_folders_get_one_line(tmp_path, capsys, file, content, message):
    make_run(tmp_path)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(content)
    with pytest.raises(PacelineError, match=re.escape(message)):
        read_run(tmp_path)
    assert (main(["report", str(tmp_path)]), capsys.readouterr().err.count("\n")) == (2, 1)
    assert not (tmp_path / "report.html").exists()


def test_figures_in_words():
    assert [percent(v) for v in (0, 1, 0.5, 0.0625, 0.996, 0.9999, 0.0001, 0.004, None)] == [
        "0 %", "100 %", "50 %", "6 %", "99.6 %", "over 99.9 %", "under 0.1 %", "0.4 %", DASH,
    ]  # fmt: skip
    assert [number(v) for v in (1, 1234.567, None, float("nan"))] == ["1.00", "1,234.57", DASH, DASH]
    assert [size(v) for v in (12, 1500, 2_500_000, 3e9, None)] == ["12 bytes", "1.5 kB", "2.5 MB", "3.0 GB", DASH]
    assert interval(1, None) == DASH
    assert words({"a": [1, 2.5], "b": {"c": None, "d": True}, "e": []}) == "a 1, 2.5, b c none, d yes, e none"


def test_the_command(tmp_path, capsys):
    make_run(tmp_path)
    assert main(["report", str(tmp_path), "--markdown"]) == 0
    assert (capsys.readouterr().out, main(["report", str(tmp_path), "--json"])) == (markdown(read_run(tmp_path)), 0)
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "summary.json").read_text())
    assert not (tmp_path / "report.html").exists()
    for option, out in (([], tmp_path / "report.html"), (["--out", f"{tmp_path}/other"], tmp_path / "other")):
        assert (main(["report", str(tmp_path), *option]), capsys.readouterr().out) == (0, f"wrote {out}\n")
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
