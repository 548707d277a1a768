"""docs/adding-a-drafter.md works as it is written."""

import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from paceline.draft import registry
from tests.paths import REPOSITORY

PAGE = REPOSITORY / "docs" / "adding-a-drafter.md"


@pytest.fixture
def written(tmp_path: Path, demo: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The page's Python blocks; the first is the drafter, in a module that can be imported."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "pingpong.py").write_text(blocks[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.delitem(sys.modules, "pingpong", raising=False)
    return blocks


def test_the_drafter_runs_and_its_test_passes(written: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _, use, test = written
    exec(compile(use, str(PAGE), "exec"), {})
    assert len(capsys.readouterr().out.strip()) > 10
    names: dict[str, object] = {}
    exec(compile(test, str(PAGE), "exec"), names)
    names["test_it_is_lossless"]()  # type: ignore[operator]


def test_it_can_be_registered(written: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    entry = re.search(r'^pingpong = "(.*)"$', PAGE.read_text(), re.MULTILINE)
    assert entry is not None
    monkeypatch.setattr(registry, "added", lambda: [EntryPoint("pingpong", entry[1], registry.GROUP)])
    assert registry.create("pingpong,draft=6").config.draft == 6  # type: ignore[attr-defined]
    assert registry.describe("pingpong").options[0].help == "most tokens a draft holds"
    assert registry.create("pingpong+sam").name == "pingpong+sam"
