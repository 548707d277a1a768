"""Every method has a page, and its options are the code's."""

import itertools
import re

import pytest

from paceline.draft.registry import describe, names
from tests.draft import mtps
from tests.draft.docs import PUBLISHED, options_table, page, with_refused, with_table
from tests.draft.test_dflash import SECONDS, SIGHTS, SPARKS
from tests.draft.test_layouts import EAGLE1, EAGLE3, PARALLEL

BUILT_IN = names()


@pytest.mark.parametrize("name", BUILT_IN)
def test_options_on_the_page_are_those_of_the_code(name):
    text = page(name).read_text()
    assert with_table(text, describe(name)) == text, "run python -m tests.draft.docs"


def test_the_table_shows_defaults_choices_and_help():
    table = options_table(describe("sam"))
    assert "| `draft` | `40` | int | most tokens a draft holds" in table
    assert "| `min_match` | `1`; `5` in front of another drafter | int |" in table
    assert "| `shape` | `path` | `path`, `tree` |" in options_table(describe("suffix"))


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_page_says_what_the_method_is(name):
    info, text = describe(name), page(name).read_text()
    assert text.startswith(f"# {name}\n\n{info.summary}\n")
    for heading in ("When to use it", "Lossless", "Options"):
        assert f"\n## {heading}" in text


def test_published_layouts_on_the_page_are_those_of_the_code_and_the_tests():
    text = PUBLISHED.read_text()
    assert with_refused(text) == text, "run python -m tests.draft.docs"
    rows = [line.strip("|").split("|") for line in text.partition("| layout | published by")[2].splitlines()[2:]]
    cases = {"eagle3": EAGLE3 | PARALLEL, "eagle": EAGLE1, "dflash": {*SIGHTS, *SPARKS, *SECONDS}, "mtp": mtps.LAYOUTS}
    named = [(row[2], re.findall("`(.*?)`", row[4])) for row in itertools.takewhile(lambda row: len(row) == 5, rows)]
    assert len(named) == 24
    for methods, names_ in named:
        assert {*names_} <= {case for method in re.findall(r"`(\w+)`", methods) for case in cases.get(method, ())}
