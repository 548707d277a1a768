"""Every method has a page, and its options are the code's."""

import pytest

from paceline.draft.registry import describe, names
from tests.draft.docs import options_table, page, with_table

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
