"""Figures in words, as a report writes them: a dash where there is none, units that people read.

    percent(0.9999), size(812_000_000), interval(1.9, 2.1)     # "over 99.9 %", "812.0 MB", "1.90 to 2.10"

Doesn't know: what was counted.
"""

from __future__ import annotations

import re
from math import isfinite
from typing import Any

from markupsafe import Markup

DASH = "\N{EN DASH}"
# A model may write anything; control characters are shown, and half a surrogate pair cannot be written at all.
CONTROLS = {i: 0x2400 + i for i in range(32) if chr(i) not in "\t\n"} | {0x7F: 0x2421}
CONTROLS |= dict.fromkeys([*range(0x80, 0xA0), *range(0xD800, 0xE000)], 0xFFFD)


def number(value: Any, digits: int = 2) -> str:
    """A dash where there is no figure."""
    is_figure = isinstance(value, int | float) and isfinite(value)
    return f"{value:,.{digits}f}" if is_figure else DASH


def percent(value: Any, digits: int = 0) -> str:
    """A share; one that is neither nothing nor the whole is not rounded to it."""
    if not isinstance(value, int | float) or not isfinite(value):
        return DASH
    for places in (digits, 1):
        text = f"{100 * value:.{places}f}"
        if value in (0, 1) or float(text) not in (0, 100):
            return f"{text} %"
    return "under 0.1 %" if value < 0.5 else "over 99.9 %"


def interval(low: Any, high: Any, digits: int = 2) -> str:
    """From a to b, or a dash."""
    return DASH if low is None or high is None else f"{number(low, digits)} to {number(high, digits)}"


def size(value: Any) -> str:
    """Bytes for people."""
    if not isinstance(value, int | float):
        return DASH
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:,.1f} {unit}"
    return f"{value:.0f} B"


def words(value: Any) -> str:
    """Any JSON value as a person would write it."""
    if value in (None, [], {}):
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {words(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(words, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def foldable(name: str) -> Markup:
    """A method's name that may go on in a new line between its parts."""
    return Markup("<wbr>").join(re.findall(r"[^+,=:/]*[+,=:/]?", name))


def visible(text: str) -> str:
    """An answer's text that can be written and seen."""
    return text.translate(CONTROLS)
