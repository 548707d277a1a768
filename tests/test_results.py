"""docs/results: its tables, and figures taken from them elsewhere, are what `benchmarks/results.py` prints."""

import runpy
from collections.abc import Callable

import pytest

from tests.paths import REPOSITORY

RESULTS = REPOSITORY / "docs" / "results"


@pytest.fixture(scope="module")
def command() -> Callable[[list[str]], None]:
    """It reads every page once."""
    main: Callable[[list[str]], None] = runpy.run_path(str(REPOSITORY / "benchmarks" / "results.py"))["main"]
    return main


@pytest.fixture
def printed(command: Callable[[list[str]], None], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What the command prints for its arguments."""

    def run(*arguments: str) -> str:
        command(list(arguments))
        return capsys.readouterr().out

    return run


def test_the_short_table_is_what_the_command_prints(printed: Callable[..., str]) -> None:
    page = (RESULTS / "README.md").read_text("utf-8")
    assert f"<!-- python benchmarks/results.py table -->\n{printed('table')}<!-- end -->" in page


@pytest.mark.parametrize("run", sorted(path.stem for path in RESULTS.glob("*.html")))
def test_the_page_of_a_run_is_what_the_command_prints(printed: Callable[..., str], run: str) -> None:
    assert (RESULTS / f"{run}.md").read_text("utf-8") == printed("full", run)


def test_the_number_of_differing_answers_is_what_the_command_counts(printed: Callable[..., str]) -> None:
    differing, of, answers = printed("differing").splitlines()[-1].removeprefix("all: ").split()[:3]
    assert of == "of"
    for page, sentence in {
        "docs/measurements.md": f"{differing} of our drafters' {answers} answers are not plain decoding's",
        "docs/results/README.md": f"Of our drafters' {answers} answers in the six runs below, {differing} differ",
    }.items():
        assert sentence in " ".join((REPOSITORY / page).read_text("utf-8").split()), page
