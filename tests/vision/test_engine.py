"""The data engine: what is drawn, where it stands, and what its captions say."""

import hashlib
import json
import re
import subprocess
import sys
from math import sqrt

import numpy as np
import pytest
from PIL import Image, ImageDraw

from paceline.errors import PacelineError
from paceline.evals.vision import engine
from paceline.evals.vision.captions import HELD_OUT_TEMPLATES, PLACES, RATIOS, SAME, TEMPLATES, VALUES, holds
from paceline.evals.vision.drawing import KINDS, Drawing, Shape, sprite, trace
from paceline.evals.vision.engine import ENGINE, PLAIN, compose, drawn_area, open_provider, render
from paceline.evals.vision.options import BuildOptions
from paceline.evals.vision.providers import cut_out

PLAN = BuildOptions(seed=3, size=128)


def test_every_kind_fills_its_bounds_and_has_its_colours():
    assert len(KINDS) >= 40
    for kind in KINDS.values():
        looks = [kind.draw(colour) for colour in kind.colours]
        assert all(min(drawing.bounds) >= -6 and max(drawing.bounds) <= 106 for drawing in looks), kind.name
        colours = {tuple((s.fill, s.stroke) for s in drawing.shapes) for drawing in looks}
        assert all(re.fullmatch("#[0-9a-f]{6}", c) for look in colours for pair in look for c in pair if c)
        assert len(colours) == len(set(kind.colours)), kind.name  # one that changes nothing is no colour of the kind
        drawing, width = looks[0], 64
        drawn = sprite(drawing, width, max(1, round(width / drawing.aspect)))
        left, top, right, bottom = drawn.getchannel("A").point(lambda a: 255 * (a > 40)).getbbox()
        assert max(left, top, drawn.width - right, drawn.height - bottom) <= 2, kind.name


def _digest(value):
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def test_what_this_version_of_the_engine_draws():
    """Other drawings, cases or captions of a seed are another engine's: count ENGINE up."""
    drawn = [
        [[f"{v + 1e-6:.3f}" for v in s.points.flat] + [s.fill, s.stroke, s.width] for s in kind.draw(colour).shapes]
        for _, kind in sorted(KINDS.items())
        for colour in kind.colours
    ]
    plan = BuildOptions(seed=5, size=96)
    cases = [compose(plan, subset, n).facts(plan) for subset in (*VALUES, *PLAIN) for n in range(4)]
    assert (ENGINE, _digest(drawn), _digest(cases)) == (2, "5cccf5e542f32597", "2c074fcf73b86486")


def test_shapes_stand_where_they_are_and_are_lit_from_the_upper_left():
    """A grey square, and on it a red one with an edge in its lower right quarter."""
    grey = Shape(trace("M0 0 L100 0 L100 100 L0 100"), "#808080", None, 0.0)
    red = Shape(trace("M50 50 L90 50 L90 90 L50 90"), "#d00000", "#000000", 4.0)
    pixels = np.asarray(sprite(Drawing((grey, red)), 50, 50), int)
    assert (pixels[..., 3] == 255).all()
    is_red = pixels[..., 0] > pixels[..., 1] + 60
    rows, columns = np.nonzero(is_red)
    assert all(abs(found - wanted) <= 2 for found, wanted in zip(
        (rows.min(), rows.max(), columns.min(), columns.max()), (26, 43, 26, 43), strict=True
    ))  # fmt: skip
    assert pixels[25, 35, :3].max() < 60, "the edge"
    assert pixels[2, 2, 1] > 128 > pixels[47, 47, 1]
    assert pixels[28, 28, 0] > pixels[42, 42, 0]


@pytest.mark.parametrize("subset", VALUES)
@pytest.mark.parametrize("size", [64, 512])
def test_every_caption_is_true_of_its_own_picture_alone(subset, size):
    seen = set()
    for number in range(60):
        case = compose(BuildOptions(seed=1, size=size), subset, number)
        assert len(set(case.captions)) == len(case.captions)
        seen.add(case.template)
        a, b = (*(thing.name for thing in case.things), "")[:2]
        table = [[holds(subset, value, scene, size, a, b) for value in case.values] for scene in case.scenes]
        assert np.array_equal(table, np.eye(len(case.values))), (case.captions, case.scenes)
    assert len(seen) > 2


CAT, DOG, BELOW = ("cat", 10, 40, 20, 20), ("dog", 60, 42, 20, 20), ("dog", 70, 100, 20, 20)
SNOWMAN, HAT, TREE = ("snowman", 0, 0, 20, 20), ("hat", 60, 0, 20, 20), ("tree", 60, 0, 20, 20)


@pytest.mark.parametrize(("subset", "boxes", "names", "true"), [
    ("relative_spatial", [CAT, DOG], ("cat", "dog"), {"to the left of"}),
    ("relative_spatial", [CAT, DOG], ("dog", "cat"), {"to the right of"}),
    ("relative_spatial", [CAT, BELOW], ("cat", "dog"), set()),  # on a diagonal
    ("relative_spatial", [SNOWMAN, TREE], ("snowman", "tree"), {"to the left of"}),
    ("relative_spatial", [HAT, SNOWMAN], ("hat", "snowman"), set()),  # which hat?
    ("count", [CAT, DOG, CAT], ("cat",), {"two"}),
    ("existence", [CAT, DOG], ("owl",), {"no"}),
    ("existence", [CAT, DOG], ("cat",), {"a"}),
    ("existence", [SNOWMAN], ("hat",), {"a"}),
    ("existence", [HAT], ("snowman",), {"no"}),
])
def test_what_is_true_of_boxes(subset, boxes, names, true):
    assert {value for value in VALUES[subset] if holds(subset, value, boxes, 130, *names)} == true


def test_what_a_kind_shows_is_a_kind():
    for thing, seen in ((kind.name, kind.shows) for kind in KINDS.values()):
        assert {thing, *seen} <= KINDS.keys()
        assert thing not in seen


@pytest.mark.parametrize("subset", ["existence", "relative_size", "relative_spatial"])
def test_no_thing_of_a_case_shows_another_and_the_oracle_would_see_it(subset, monkeypatch):
    def wrong():
        found = 0
        for number in range(300):
            case = compose(BuildOptions(seed=1), subset, number)
            a, b = (*(thing.name for thing in case.things), "")[:2]
            table = [[holds(subset, value, scene, 512, a, b) for value in case.values] for scene in case.scenes]
            found += not np.array_equal(table, np.eye(len(case.values)))
        return found

    assert wrong() == 0
    monkeypatch.setattr(engine, "shows", lambda thing, name: thing == name)
    assert wrong() > 0


def test_compared_sizes_are_those_of_drawn_areas():
    for size in (64, 512):
        for number in range(12):
            case = compose(BuildOptions(seed=2, size=size), "relative_size", number)
            for value, scene in zip(case.values, case.scenes, strict=True):
                drawn = sqrt(drawn_area(case, scene[0]) / drawn_area(case, scene[1]))
                longer = max(scene[0][3:]) / max(scene[1][3:])
                if value == "the same size as":
                    assert all(1 / SAME <= ratio <= SAME for ratio in (drawn**2, longer)), scene
                else:
                    assert 0.8 <= drawn / RATIOS[value] <= 1.25
                    assert (longer < 1 / SAME) == (value == "smaller than")


def test_no_place_is_true_of_another_cell():
    cells = [("kite", x, y, 20, 20) for y in (5, 40, 75) for x in (5, 40, 75)]
    for i, place in enumerate(PLACES):
        assert [holds("absolute_spatial", place, [cell], 100, "kite") for cell in cells] == [j == i for j in range(9)]
    for place, where in {"at the top": {0, 1, 2}, "on the left side": {0, 3, 6}, "in the center": {4}}.items():
        assert {j for j in range(9) if holds("absolute_spatial", place, [cells[j]], 100, "kite")} == where


def test_words_follow_the_noun():
    captions = [c for n in range(200) for c in compose(BuildOptions(seed=2), "count", n).captions]
    assert any("one sheep" in c for c in captions)
    assert any("nine sheep" in c for c in captions)
    assert any("two cherries" in c for c in captions)
    assert not any("cherrys" in c for c in captions)
    there = [c for n in range(200) for c in compose(BuildOptions(seed=2), "existence", n).captions]
    assert any("an e" in c for c in there)
    assert not any(f" a {vowel}" in c for c in there for vowel in "aeiou")


def test_a_case_is_the_same_again_and_differs_in_its_boxes_only():
    for subset in VALUES:
        case = compose(PLAN, subset, 7)
        first, again = render(PLAN, case), render(PLAN, compose(PLAN, subset, 7))
        assert [p.tobytes() for p in first] == [p.tobytes() for p in again]
        for i in range(1, len(first)):
            changed = np.asarray(first[0]) != np.asarray(first[i])
            assert changed.any()
            for _, x, y, width, height in (*case.scenes[0], *case.scenes[i]):
                changed[y : y + height, x : x + width] = False
            assert not changed.any()


def test_seeds_and_splits_are_disjoint():
    held_out = {kind.name for kind in KINDS.values() if kind.held_out}
    for subset, templates in TEMPLATES.items():
        train = [compose(BuildOptions(split="train"), subset, n) for n in range(40)]
        test = [compose(BuildOptions(split="test"), subset, n) for n in range(40)]
        assert not {thing.name for case in train for thing in case.things} & held_out
        assert {thing.name for case in test for thing in case.things} <= held_out
        assert {case.template for case in train} == set(range(len(templates) - HELD_OUT_TEMPLATES))
        assert {case.template for case in test} == set(range(len(templates) - HELD_OUT_TEMPLATES, len(templates)))
    assert compose(BuildOptions(seed=1), "count", 0).scenes != compose(BuildOptions(seed=2), "count", 0).scenes


def test_counted_objects_may_change_their_size():
    one, other = (compose(BuildOptions(count_size=way, size=512), "count", 0).scenes for way in ("case", "image"))
    assert len({scene[0][3] for scene in one}) == 1
    assert len({scene[0][3] for scene in other}) > 5


def test_a_folder_of_cut_outs(tmp_path):
    picture = Image.new("RGBA", (60, 40))
    picture.paste((200, 30, 30, 255), (10, 10, 50, 30))
    picture.save(tmp_path / "mouse.png")
    about = {"mouse.png": {"name": "mouse", "plural": "mice", "licence": "CC0", "author": "someone"}}
    (tmp_path / "objects.json").write_text(json.dumps(about))
    plan = BuildOptions(objects=str(tmp_path), size=64)
    case = compose(plan, "count", 0)
    assert case.captions[1].endswith("two mice")
    assert (case.facts(plan)["licences"], case.things[0].aspect, len(render(plan, case))) == (["CC0"], 2.0, 9)
    with pytest.raises(PacelineError, match="relative_size needs 2 different objects"):
        compose(plan, "relative_size", 0)


def test_a_cut_out_without_a_licence_is_refused(tmp_path):
    (tmp_path / "objects.json").write_text(json.dumps({"a.png": {"name": "a"}}))
    with pytest.raises(PacelineError, match=r"a\.png has no licence"):
        open_provider(str(tmp_path))
    with pytest.raises(PacelineError, match="no source of objects"):
        open_provider(str(tmp_path / "nowhere"))


def test_paths_are_lines_and_curves():
    points = trace("M0 0 L10 0 Q20 0 20 10 C20 20 30 20 30 30")
    assert (points[0].tolist(), points[-1].tolist()) == ([0, 0], [30, 30])
    assert [17.5, 2.5] in points[2:20].round(6).tolist()  # the middle of the quadratic curve
    with pytest.raises(ValueError, match="'A'"):
        trace("M0 0 A1 1")


def test_cutting_out_by_the_border():
    picture = Image.new("RGB", (100, 100), (250, 250, 245))
    ImageDraw.Draw(picture).ellipse((30, 20, 80, 70), fill=(200, 30, 30))
    picture.putpixel((5, 90), (0, 0, 0))  # a speck
    cut = cut_out(picture)
    assert abs(cut.width - 51) <= 3
    assert abs(cut.height - 51) <= 3
    assert (cut.getpixel((cut.width // 2, cut.height // 2)), cut.getpixel((0, 0))[3]) == ((200, 30, 30, 255), 0)
    assert cut_out(Image.new("RGB", (20, 20), "white")).size == (20, 20)


def test_the_engine_needs_no_torch(tmp_path):
    """Nor diffusers, nor a network: the command draws with what Pillow alone can do."""
    program = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'diffusers', 'httpx2', 'sklearn'): sys.modules[name] = None\n"
        "from paceline.cli import main\n"
        f"sys.exit(main(['eval', 'vision', 'build', {str(tmp_path / 'set')!r}, '--cases', '1', '--size', '32']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "30 pictures" in done.stdout
