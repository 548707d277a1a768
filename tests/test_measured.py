"""Figures of the documentation belong to the weights in models/: a page names the fingerprints it was measured with.

The comment on a page reads `<!-- measured with models/demo FINGERPRINT, models/demo-draft FINGERPRINT -->`."""

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from paceline.target.folder import fingerprint
from tests.paths import REPOSITORY

SHIPPED = {
    f"models/{file.parent.name}": fingerprint(load_file(file))
    for file in sorted((REPOSITORY / "models").glob("*/model.safetensors"))
}
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
CODE = re.compile(r"<!--.*?-->|`[^`]+`", re.DOTALL)
STATED = re.compile(r"<!-- measured with (.*?) -->", re.DOTALL)


def stated(text: str) -> dict[str, str]:
    """Model to fingerprint, of all comments of a page."""
    pairs = [pair.split() for comment in STATED.findall(text) for pair in comment.split(",")]
    return {pair[0]: pair[1] for pair in pairs}


def measured(text: str) -> set[str]:
    """The shipped models that the page's measuring commands name: those in comments or within a line, not the fenced
    examples."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    commands = [code for code in CODE.findall(prose) if "paceline bench" in code or "benchmarks/" in code]
    return {name for code in commands for name in re.findall(r"models/[\w-]+", code)} & set(SHIPPED)


def wrong_figures(text: str) -> list[str]:
    """What is to be done about a page; empty if its figures belong to the shipped weights."""
    pairs = stated(text)
    stale = [
        f"measured with {model} {digits}, but {model} is {SHIPPED.get(model)} now: run the page's commands again"
        for model, digits in pairs.items()
        if SHIPPED.get(model) != digits
    ]
    unstated = [
        f"add <!-- measured with {model} {SHIPPED[model]} --> once its figures are measured with these weights"
        for model in sorted(measured(text) - set(pairs))
    ]
    return stale + unstated


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_figures_were_measured_with_the_shipped_weights(page: Path) -> None:
    assert wrong_figures(page.read_text("utf-8")) == []


def test_a_page_that_measured_other_weights_is_found() -> None:
    digits = SHIPPED["models/demo"]
    command = "<!-- paceline bench models/demo -d sam -->"
    assert wrong_figures(f"<!-- measured with models/demo {digits} -->\n{command}") == []
    assert "run the page's commands again" in wrong_figures(f"<!-- measured with models/demo 0123 -->{command}")[0]
    assert "add <!-- measured with models/demo" in wrong_figures(command)[0]
    assert wrong_figures("```\npaceline bench models/demo -d sam\n```") == []


SCRIPT = re.compile(r"(?:\b([0-9a-f]{8}):)?\b(benchmarks/\w+\.py)")
"""`COMMIT:benchmarks/NAME.py` is of a commit; without one it is in the tree."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_scripts_named_are_there_or_of_a_commit(page: Path) -> None:
    named = SCRIPT.findall(page.read_text("utf-8"))
    assert [file for commit, file in named if not commit and not (REPOSITORY / file).exists()] == []
