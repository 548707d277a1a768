"""`paceline eval vision` and `paceline train vision` as users run them, and the page."""

import json

import numpy as np
import pytest

from paceline.cli import main
from paceline.evals.vision.towers import small

from .sets import sample


def _json(capsys, *arguments):
    assert main(["eval", "vision", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_build_run_audit_report(tmp_path, capsys):
    out = str(tmp_path / "set")
    built = _json(capsys, "build", out, "--cases", "2", "--size", "64", "--seed", "4")
    assert (built["pictures"], built["drawn"]) == (60, 60)
    assert _json(capsys, "build", out, "--cases", "2", "--size", "64", "--seed", "4")["drawn"] == 0
    for name in ("oracle", "random"):
        report = _json(capsys, "run", out, "--model", name, "--out", str(tmp_path / name))
        assert [set(one) >= {"subset", "i2t", "t2i", "mean", "group"} for one in report["results"]] == [True] * 6
    assert not any(check["ok"] is False for check in _json(capsys, "audit", out)["checks"])
    assert main(["eval", "vision", "audit", out]) == 0
    assert "-       trivial features, count: too few to judge (2 of 20)" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "oracle"), str(tmp_path / "random")]) == 0
    page = (tmp_path / "oracle" / "report.html").read_text()
    assert "http" not in page.split("<h2>Published")[0].replace("http-equiv", "")
    assert page.count("<img") > 20
    assert "data:image/webp" in page
    assert "64.8" in page
    assert "33.39" not in page
    assert "44.27 / 36.27" in page
    assert "picture to text, wrong" in page
    assert "picture to text, right" in page
    with np.load(tmp_path / "random" / "scores.npz") as scores:
        assert (len(scores.files), scores["count/00000"].shape) == (12, (9, 9))


def test_pairs_beside_the_six(tmp_path, capsys):
    wanted = ["--subsets", "plain,classes", "--cases", "20", "--size", "64"]
    assert main(["eval", "vision", "build", str(tmp_path / "p"), *wanted]) == 0
    lines = [json.loads(line) for line in (tmp_path / "p/plain/pairs.jsonl").read_text().splitlines()]
    assert {len(line["objects"]) for line in lines} == {1, 2, 3}
    assert all(
        line["caption"].startswith("a photo of a") and (tmp_path / "p/plain" / line["image"]).exists() for line in lines
    )
    classes = [json.loads(line) for line in (tmp_path / "p/classes/pairs.jsonl").read_text().splitlines()]
    assert {len(line["objects"]) for line in classes} == {1}


@pytest.mark.parametrize(("arguments", "message"), [
    (["build", "SET", "--subsets", "colour", "--cases", "1"], "no subset 'colour'; there are absolute_size"),
    (["run", "SET", "--model", "orakel"], "no model 'orakel'. Did you mean 'oracle'?"),
    (["run", "SET/nothing", "--model", "oracle"], "there is no data set at"),
    (["build", "new", "--objects", "SET"], "is no source of objects"),
])
def test_mistakes_are_one_line(arguments, message, capsys):
    given = [word.replace("SET", str(sample())) for word in arguments]
    assert main(["eval", "vision", *given]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert len(printed.err.strip().splitlines()) == 1
    assert not printed.out


def test_what_is_broken_is_skipped_and_the_status_says_so(tmp_path, capsys):
    out = str(tmp_path / "set")
    assert main(["eval", "vision", "build", out, "--cases", "2", "--size", "64", "--subsets", "existence"]) == 0
    (tmp_path / "set/existence/images/00001_0.png").unlink()
    capsys.readouterr()
    assert main(["eval", "vision", "run", out, "--model", "oracle", "--json"]) == 1
    printed = capsys.readouterr()
    assert "skipped: existence, case with images/00001_0.png: existence/images/00001_0.png missing" in printed.err
    assert json.loads(printed.out)["results"][0]["cases"] == 1


def test_training_from_the_command_line(tmp_path, capsys):
    """A small model from nothing, then tuned, with the mixture chosen: the commands of the documentation."""
    small(size=32, patch=16, width=32, layers=1).save(tmp_path / "base")
    build = ["eval", "vision", "build", str(tmp_path / "set"), "--cases", "3", "--size", "32"]
    assert main([*build, "--subsets", "count,existence,plain,classes"]) == 0
    train = ["eval", "vision", "train", str(tmp_path / "base"), "--data", str(tmp_path / "set")]
    train += ["--steps", "3", "--batch", "3"]
    train += ["--cases", "2", "--warmup", "1", "--generic", str(tmp_path / "set/plain"), "--out", str(tmp_path / "out")]
    assert main([*train, "--validate", str(tmp_path / "set")]) == 2
    assert "belong together" in capsys.readouterr().err
    checked = ["--validate", str(tmp_path / "set"), "--retention", str(tmp_path / "set/classes"), "--mu", "1"]
    assert main([*train, *checked]) == 0
    assert "<- written" in capsys.readouterr().out
    frontier = json.loads((tmp_path / "out/frontier.json").read_text())
    assert [point["share"] for point in frontier["points"]] == [n / 10 for n in range(11)]
    model = f"transformers:{tmp_path / 'out'}"
    assert main(["eval", "vision", "run", str(tmp_path / "set"), "--model", model, "--out", str(tmp_path / "run")]) == 0
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "What was kept" in (tmp_path / "run/report.html").read_text()
