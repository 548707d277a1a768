"""Audits: our sample passes, and each kind of fault is found."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.evals.vision import layouts
from paceline.evals.vision.audit import FEWEST, audit, features, probe
from paceline.evals.vision.captions import VALUES
from paceline.evals.vision.engine import compose, render
from paceline.evals.vision.options import BuildOptions
from paceline.evals.vision.writer import build

from .sets import sample


def _failed(folder):
    return [check["name"] for check in audit(folder)["checks"] if check["ok"] is False]


@pytest.fixture
def copy(tmp_path):
    return Path(shutil.copytree(sample(), tmp_path / "copy"))


def test_our_sample_passes():
    checks = audit(sample())["checks"]
    assert [check["name"] for check in checks if check["ok"] is False] == []
    judged = {check["name"] for check in checks if check["ok"]}
    wanted = "captions true of one picture each, pictures differ in boxes only, drawn again, sizes in drawn area"
    assert set(wanted.split(", ")) <= judged
    few = [check["says"] for check in checks if check["ok"] is None]
    assert few == ["too few to judge (4 of 20)"] * 6


def test_from_twenty_cases_on_trivial_features_are_judged(tmp_path):
    build(BuildOptions(size=32), {"relative_spatial": FEWEST}, tmp_path / "set", workers=1)
    (check,) = (one for one in audit(tmp_path / "set")["checks"] if one["name"].startswith("trivial"))
    assert check["ok"] is True
    assert "% of pictures alone" in check["says"]


def _show_an_apple_instead(case):
    """An apple in a picture that is said to show no leaf."""
    names = {case["objects"][0]: "leaf", case["boxes"][0][1][0]: "apple"}
    case["objects"] = [names.get(name, name) for name in case["objects"]]
    case["boxes"] = [[[names.get(name, name), *box] for name, *box in boxes] for boxes in case["boxes"]]


def _swap_boxes(case):
    case["boxes"][:2] = case["boxes"][1::-1]


def _name_half_a_place(case):
    case["values"][1] = "at the top"  # true of corners too


@pytest.mark.parametrize(("subset", "change"), [
    ("existence", _show_an_apple_instead), ("absolute_spatial", _swap_boxes), ("absolute_spatial", _name_half_a_place),
])
def test_a_caption_that_is_not_true_of_its_picture_alone_is_found(copy, subset, change):
    lines = [json.loads(line) for line in (copy / "cases.jsonl").read_text().splitlines()]
    change(next(line for line in lines if line["subset"] == subset))
    (copy / "cases.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "captions true of one picture each" in _failed(copy)


def test_sizes_by_longer_sides_alone_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(layouts, "_fill", lambda thing: min(thing.aspect, 1 / thing.aspect))
    build(BuildOptions(size=64), {"relative_size": 12}, tmp_path / "set", workers=1)
    assert "sizes in drawn area" in _failed(tmp_path / "set")


def test_what_another_version_drew_is_not_drawn_again(copy):
    manifest = json.loads((copy / "build.json").read_text())
    (copy / "build.json").write_text(json.dumps(manifest | {"engine_version": 1}))
    checks = {check["name"]: check for check in audit(copy)["checks"]}
    for name in ("drawn again", "sizes in drawn area"):
        assert checks[name]["ok"] is None
        assert "engine_version 1" in checks[name]["says"]


def test_the_official_layout_is_checked_as_far_as_it_goes(copy):
    (copy / "cases.jsonl").unlink()
    (copy / "build.json").unlink()
    names = {check["name"] for check in audit(copy)["checks"]}
    assert {"whole", "no picture twice", "one wording a case"} <= names
    assert not {"captions true of one picture each", "drawn again"} & names


def test_a_stray_pixel_is_found(copy):
    file = copy / "count/images/00000_4.png"
    with Image.open(file) as opened:
        picture = opened.convert("RGB")
    lines = map(json.loads, (copy / "cases.jsonl").read_text().splitlines())
    boxes = next(line for line in lines if line["subset"] == "count")["boxes"]
    free = np.ones((96, 96), bool)
    for _, x, y, width, height in boxes[8]:
        free[y : y + height, x : x + width] = False
    row, column = np.argwhere(free)[0].tolist()
    picture.putpixel((column, row), (255, 0, 255))
    picture.save(file)
    assert _failed(copy) == ["pictures differ in boxes only", "drawn again"]


def test_mixed_wording_and_unshuffled_keys_are_found(copy):
    """The release's own sample mixes "situated", "positioned" and "placed" inside a case."""
    (copy / "cases.jsonl").unlink()
    folder = copy / "relative_spatial"
    texts, images = (json.loads((folder / f"{name}.json").read_text()) for name in ("image2text", "text2image"))
    ways = {" to the left of ": " situated to the left of ", " above ": " positioned above "}

    def other(text):
        for plain, odd in ways.items():
            text = text.replace(plain, odd)
        return text

    for query in texts:
        query["keys"] = [other(key) for key in query["keys"]]
    for query in images:
        query["query"] = other(query["query"])
        right = query["keys"].pop(query["label"])
        query["keys"], query["label"] = [right, *query["keys"]], 0
    for name, queries in (("image2text", texts), ("text2image", images)):
        (folder / f"{name}.json").write_text(json.dumps(queries))
    failed = _failed(copy)
    assert "one wording a case" in failed
    assert "places of labels, relative position t2i" in failed


def test_a_picture_twice_is_found(copy):
    shutil.copy(copy / "count/images/00000_0.png", copy / "count/images/00001_0.png")
    assert "no picture twice" in _failed(copy)


@pytest.mark.slow
def test_trivial_features_tell_nothing_but_covered_area():
    """60 cases of each subset: near chance where nothing forces more; size and number show in the covered area."""
    plan = BuildOptions(seed=11, size=96)
    for subset, values in VALUES.items():
        cases = [compose(plan, subset, n) for n in range(60)]
        accuracy, error = probe(np.stack([features(render(plan, case), case.scenes) for case in cases]))
        if subset in ("absolute_size", "count"):
            assert accuracy > 100 / len(values) + 10
        else:
            assert accuracy < 100 / len(values) + 3 * error + 2
