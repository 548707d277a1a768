"""Plots: round ticks, whole SVG, text that stays text. The recorded answer of the README."""

import re
from html import unescape

from benchmarks import recording

from paceline.runs.report import COLORS, FAINT, SMALL, Curve, plot, ticks


def test_ticks_are_round_and_span_the_values():
    for values in ([0.0, 1.0], [1.53, 2.91], [3.0], [0, 100], [1, 86.3], [0.0001, 0.00012]):
        found = ticks(values)
        assert found[0] <= min(values)
        assert found[-1] >= max(values)
        assert 3 <= len(found) <= 9


def test_names_and_tips_are_text():
    drawn = plot([Curve([(1, 2.0)], ["<i>tip"], [COLORS[0]], "<b>name")], "<across", "<up", label="<label")
    for words in ("&lt;i&gt;tip", "&lt;b&gt;name", "&lt;across", "&lt;up", "&lt;label"):
        assert words in drawn


def test_no_tick_is_negative_unless_a_value_is():
    for values in ([0.0, 0.0], [0.003], [0.02, 1.0], [5.0, 5.0]):
        assert ticks(values)[0] >= 0
    assert ticks([-0.5, -0.5])[0] < 0


def test_names_stand_below_the_plot_in_their_colours():
    lines = [Curve([(1, 2.0), (2, 2.0)], ["a", "b"], [color] * 2, f"rule {i}") for i, color in enumerate(COLORS[:3])]
    picture, _, key = plot(lines, "across", "up").partition("</svg>")
    assert "rule" not in picture
    for i, color in enumerate(COLORS[:3]):
        assert f'style="background: {color}"></i>rule {i}<' in key


def test_large_ticks_are_short():
    drawn = plot([Curve([(0, 0.0), (1, 200_000.0)], ["", ""], [COLORS[0]] * 2)])
    assert ">150k<" in drawn
    assert "150000" not in drawn


def test_nothing_to_plot():
    assert (plot([]), plot([Curve([], [], [])])) == ("", "")


def test_a_faint_line_has_no_points():
    lines = [Curve([(1, 1.0), (2, 3.0)], [], [FAINT]), Curve([(1, 2.0)], ["tip"], [COLORS[0]])]
    drawn = plot(lines, frame=SMALL, xs=(1, 2), ys=(0, 4))
    assert (drawn.count("<circle"), drawn.count('class="faint"')) == (1, 1)


def test_points_lie_where_the_axes_say():
    drawn = plot([Curve([(0, 0.0), (1, 100.0)], ["", ""], [COLORS[0]] * 2)], frame=SMALL, xs=(0, 1), ys=(0, 100))
    right, foot = SMALL.width - SMALL.right, SMALL.height - SMALL.bottom
    assert f"M{SMALL.left:.1f} {foot:.1f}L{right:.1f} {SMALL.top:.1f}" in drawn


def test_the_recorded_answer_is_as_its_program_draws_it():
    """Times and texts are of one run; all else of the picture is the program's."""
    said = recording.OUT.read_text("utf-8")
    (slow,) = {float(found) - recording.REST for found in re.findall(r'dur="([\d.]+)s"', said)}
    name, fast = re.search(r'class="head">(\S+): ([\d.]+) s, the same text<', said).groups()
    panes = []
    for part in said.split("<rect ")[1:]:
        top = float(re.search(r' y="(\d+)"', part)[1]) - 19
        pieces = re.findall(r'<text x="(\S+)" y="(\d+)" textLength.*?opacity="1"(.*?)>(.*?)<.*?"0;(\S+)" values', part)
        panes.append([
            (round((int(y) - top - 33) / recording.ROW), round((float(x) - 8) / recording.STEP),
             float(at) * (slow + recording.REST), unescape(text), "drafted" in kind)
            for x, y, kind, text, at in pieces
        ])  # fmt: skip
    model = re.search(r'class="small">(\S+), two CPU cores<', said)[1]
    assert recording.draw(model, panes[0], slow, name, panes[1], float(fast)) == said
