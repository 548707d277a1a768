"""`paceline eval align` and the report of its runs, as users meet them."""

import json
import shutil
from pathlib import Path

import pytest
from tests.evals.endpoint import ANSWERS, Scripted, is_judge, judge, write
from tests.pages.test_report import Seen

from paceline.evals.align.figures import GENERATIONS, JUDGEMENTS, agreement, results
from paceline.evals.align.options import AlignOptions, Decoding
from paceline.evals.align.run import align
from paceline.runs.runs import RUN, rows

ROOT = Path(__file__).parents[2]
NAUGHTY = "\x1b[31mWelcome <script>alert(1)</script>\x1b[0m"


def naughty(body):
    """Answers that would colour a terminal and run in a page."""
    return judge(body) if is_judge(body) else f"{NAUGHTY} {write(body)}"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two methods and two judges."""
    folder = tmp_path_factory.mktemp("align") / "run"
    with Scripted(naughty) as server:
        asked = AlignOptions(
            f"{server.url}#scripted", judge=["self", "checks"], out=folder, decoding=Decoding(400, 0.0)
        )
        align(asked)
    return folder


def test_one_json_object_and_no_answer_on_the_terminal(command, tmp_path):
    with Scripted(naughty) as server:
        done = command(
            "eval", "align", "--model", f"{server.url}#m", "--method", "vanilla", "--judge", "self", "--limit", 6,
            "--scenario", "Museum,Recipes", "--out", tmp_path / "run", "--json",
        )  # fmt: skip
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["complete"]
    first = told["results"][0]
    assert {"method", "scenario", "items", "safety", "behavior", "sar", "tokens"} <= first.keys()
    assert (first["method"], first["scenario"], first["items"]) == ("vanilla", "overall", 6)
    assert "Welcome" not in done.out + done.err


def test_a_table_by_default_and_answers_only_if_asked_for(command, tmp_path):
    with Scripted(naughty) as server:
        asked = ("eval", "align", "--model", f"{server.url}#m", "--method", "vanilla", "--out", tmp_path / "run")
        quiet, shown = command(*asked), command(*asked, "--show")
    assert (quiet.code, shown.code) == (0, 0)
    assert "SAR" in quiet.out
    assert "Welcome" not in quiet.out
    assert "Welcome" in shown.out
    assert "\x1b[31m" not in shown.out


def test_failed_items_are_counted_and_the_status_says_so(command, tmp_path):
    with Scripted(trouble=lambda body, attempt: "400" if "touch the" in str(body["messages"][1]) else None) as server:
        done = command("eval", "align", "--model", f"{server.url}#m", "--method", "raw", "--out", tmp_path / "run")
    assert done.code == 1
    assert "1 items failed" in done.err
    assert len(done.err.splitlines()) == 1


def test_the_page_holds_the_figures_and_runs_nothing(command, finished):
    done = command("report", finished)
    assert done.code == 0, done.err
    page = Seen((finished / "report.html").read_text("utf-8"))
    assert not {"script", "img", "link", "iframe"} & set(page.tags)
    told, _ = results(finished)
    for row in told:
        assert f"{100 * row['sar']:.2f}" in page.text
    assert ANSWERS[0].splitlines()[0] in page.text
    assert "alert(1)" in page.text
    assert "\x1b" not in page.text
    for choice in ("disguised prompts", "as it was asked", "left out of behavior", "alpha is 0.3", "all of an answer"):
        assert choice in page.text
    assert "Kendall's W" in page.text


def test_the_report_as_a_table_and_as_json(command, finished):
    table = command("report", finished, "--markdown")
    assert table.out.count("| `align3` |") == 6
    told = json.loads(command("report", finished, "--json").out)
    assert told["results"] == json.loads(json.dumps(results(finished)[0]))
    pair, every = told["agreement"]
    assert (pair["judges"], pair["verdicts"]) == (["scripted", "checks"], 24 * 6)
    assert 0 < pair["same_verdicts"] < 1
    assert -1 <= pair["kappa"] < 0.5  # one judge rolls dice
    assert 0 <= every["kendall_w"]["sar"] <= 1


def test_judges_that_say_the_same_agree_wholly(finished, tmp_path):
    told, about = results(finished)
    assert agreement(finished, about | {"judges": about["judges"][:1]}, told) == []
    twins = tmp_path / "twins"
    shutil.copytree(finished, twins)
    with (twins / JUDGEMENTS).open("a") as file:
        for row in rows(finished / JUDGEMENTS):
            if row["judge"] == "scripted":
                file.write(json.dumps(row | {"key": f"twin {row['key']}", "judge": "twin", "judge_id": "twin"}) + "\n")
    (judge, _) = about["judges"]
    (twins / RUN).write_text(json.dumps(about | {"judges": [judge, {"label": "twin", "id": "twin"}]}))
    told, about = results(twins)
    pair, every = agreement(twins, about, told)
    assert pair["answers"] == 24
    assert pair["same_verdicts"] == pair["kappa"] == pair["same_safety"] == 1
    assert pair["sar_gap"] == 0
    assert pair["sar"]["rho"] == pair["sar"]["tau"] == pytest.approx(1)
    assert every["kendall_w"]["sar"] == pytest.approx(1)


def test_overall_is_two_thirds_unsafe_and_one_third_safe_here_too(finished):
    for row in results(finished)[0]:
        unsafe, safe = row["subsets"]["unsafe"], row["subsets"]["safe"]
        assert unsafe["judged"] == 2 * safe["judged"]
        for name in ("safety", "behavior", "sar"):
            assert row[name] == pytest.approx((2 * unsafe[name] + safe[name]) / 3)
        assert row["sar_at"]["1"] == pytest.approx(row["safety"])
        assert row["sar_at"]["0.3"] == pytest.approx(row["sar"])


def test_compat_is_named_in_the_report(command, tmp_path):
    with Scripted() as server:
        command(
            "eval", "align", "--model", f"{server.url}#m", "--method", "vanilla", "--judge", "self", "--limit", 3,
            "--compat", "--out", tmp_path / "run",
        )  # fmt: skip
    said = command("report", tmp_path / "run", "--markdown").out
    for choice in ("before its disguise", "first 8,000 characters", "counts as not kept", "--compat"):
        assert choice in said


@pytest.fixture(scope="module")
def tiny_rules(tmp_path_factory):
    """A random model with room for rules."""
    from tests import models

    return models.make("llama2", tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


def test_a_model_in_this_process_answers_and_judges(command, tiny_rules, tmp_path):
    done = command(
        "eval", "align", "--model", tiny_rules, "--method", "vanilla", "--judge", "self", "--limit", 2, "-n", 8,
        "--judge-max-tokens", 8, "--out", tmp_path / "run",
    )  # fmt: skip
    assert done.code == 1  # a random model gives no verdicts that can be read
    assert sum(1 for _ in rows(tmp_path / "run" / GENERATIONS)) == 2
    report = json.loads(command("report", tmp_path / "run", "--json").out)
    assert [phase["phase"] for phase in report["phases"]] == ["answer", "judge"]
