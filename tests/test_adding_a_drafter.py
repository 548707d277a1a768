"""docs/adding-a-drafter.md works as it is written."""

import re
import sys
from importlib.metadata import EntryPoint

import pytest

from paceline.draft import registry
from tests.paths import REPOSITORY

PAGE = REPOSITORY / "docs" / "adding-a-drafter.md"


@pytest.fixture
def written(tmp_path, demo, monkeypatch):
    """The page's Python blocks; the drafters among them are in modules that can be imported."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for name, block in (("pingpong", blocks[0]), ("bigram", blocks[2])):
        (tmp_path / f"{name}.py").write_text(block)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(REPOSITORY)
    return blocks


def test_the_drafter_runs_and_its_test_passes(written, capsys):
    _, use, _, test = written
    exec(compile(use, str(PAGE), "exec"), {})
    assert len(capsys.readouterr().out.strip()) > 10
    names = {}
    exec(compile(test, str(PAGE), "exec"), names)
    names["test_it_is_lossless"]()


def test_it_can_be_registered(written, monkeypatch):
    entry = re.search(r'^pingpong = "(.*)"$', PAGE.read_text(), re.MULTILINE)
    assert entry is not None
    monkeypatch.setattr(registry, "added", lambda: [EntryPoint("pingpong", entry[1], registry.GROUP)])
    assert registry.create("pingpong,draft=6").config.draft == 6
    assert registry.describe("pingpong").options[0].help == "most tokens a draft holds"
    assert registry.create("pingpong+sam").name == "pingpong+sam"


def test_the_drafter_with_a_model_drafts_chains_and_trees(written):
    from bigram import Bigram

    names = {}
    exec(compile(written[-1], str(PAGE), "exec"), names)
    plain = names["answers"]("none", 2)
    for tree in (0, 6):
        drafter = Bigram(Bigram.Config(stop="fixed", draft=2, tree=tree))
        assert names["answers"](drafter, 2) == plain
