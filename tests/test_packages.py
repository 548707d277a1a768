"""The distributions: what each imports it needs, and the commands that the base names are those that they bring."""

import ast
import sys
from importlib import metadata

import pytest
from packaging.utils import canonicalize_name

from paceline.cli import BROUGHT, commands
from paceline.cli.commands import GROUP, TABLE
from paceline.errors import PacelineError
from tests.apart import imported, needs_engine
from tests.distributions import ELSEWHERE, PLACES, UNUSUAL, extras, named, project, reached, source

OF_PYTHON = {canonicalize_name(name) for name in sys.stdlib_module_names}
WITHOUT_TORCH = ("paceline-net", "paceline-draft", "paceline-lab", "paceline-certify")
WITH_ENGINE = {
    "certify/command.py", "certify/exact.py", "certify/greedy.py",
    "bench/benchmark.py", "bench/checks.py", "bench/ours.py", "bench/setting.py", "replay/tune.py",
}  # fmt: skip
"""Modules of distributions without torch that run our engine; nothing that needs no engine imports them at once."""


@pytest.mark.parametrize("name", PLACES)
def test_what_is_imported_at_once_is_needed(name):
    """With its extras, because modules of a command may import at once what its extra brings."""
    there = reached(name, ("serve", "llama-cpp") if name == "paceline" else tuple(extras(name))).keys()
    files = {file.relative_to(source(name)).as_posix(): file for file in source(name).rglob("*.py")}
    wrong = []
    for where in sorted(files.keys() - WITH_ENGINE):
        for module in imported(files[where]):
            top, *rest = module.split(".")
            if top == "paceline":
                owners = {one for one in PLACES if (source(one) / f"{'/'.join(rest)}.py").is_file()}
            else:
                owners = {canonicalize_name(UNUSUAL.get(top, top))} - {*OF_PYTHON, *ELSEWHERE}
            if owners and not owners & there:
                wrong.append((where, module))
    assert wrong == []


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_the_engine_is_needed_only_by_modules_that_run_it(name):
    files = {file.relative_to(source(name)).as_posix(): file for file in source(name).rglob("*.py")}
    assert {where for where, file in files.items() if needs_engine(file)} == WITH_ENGINE & files.keys()


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_what_needs_no_torch_brings_none(name):
    assert not reached(name).keys() & {"torch", "transformers", "paceline"}
    assert not reached("paceline-certify").keys() & {"numba", "scipy"}


def test_what_is_imported_late_has_what_brings_it():
    """What a distribution may lack, because only an extra or another distribution brings it, has a line in errors."""
    lacking = set()
    for name in PLACES:
        for file in source(name).rglob("*.py"):
            walked = ast.walk(ast.parse(file.read_text("utf-8")))
            modules = [one.name for node in walked if isinstance(node, ast.Import) for one in node.names]
            walked = ast.walk(ast.parse(file.read_text("utf-8")))
            modules += [node.module for node in walked if isinstance(node, ast.ImportFrom) and node.module]
            tops = {module.partition(".")[0] for module in modules} - {*sys.stdlib_module_names, *ELSEWHERE, "paceline"}
            lacking |= {top for top in tops if canonicalize_name(UNUSUAL.get(top, top)) not in reached(name)}
    own = {"llama_cpp", "sentencepiece", "hatchling", "llvmlite"}  # Their absence has an error of its own.
    assert lacking - own <= BROUGHT.keys()
    for place in BROUGHT.values():
        name, chosen = named(place)
        assert set(chosen) <= extras(name).keys()


def test_commands_are_brought_by_the_distributions_that_are_named():
    brought = {entry.replace(".", " "): PLACES[name] for name in PLACES
               for entry in project(name)["project"].get("entry-points", {}).get(GROUP, {})}  # fmt: skip
    assert brought == {name: command.package for name, command in TABLE.items()}


def test_a_strangers_command_takes_no_name_of_ours_and_may_be_broken(monkeypatch):
    entries = [metadata.EntryPoint(name, f"stranger{name}:run", GROUP) for name in ("serve", "broken")]
    ours = metadata.EntryPoint("serve", "paceline.cli.serve:serve", GROUP)
    monkeypatch.setattr(commands, "entry_points", lambda group: [*entries, ours])
    found = commands.Commands()
    assert found.entries["serve"] == ours
    assert list(found)[-1] == "broken"
    with pytest.raises(PacelineError, match=r"^paceline broken \(strangerbroken:run\) cannot be imported: No"):
        found["broken"]


def test_one_version_for_all():
    versions = {name: metadata.version(name) for name in PLACES if any(metadata.distributions(name=name))}
    assert len(set(versions.values())) == 1, versions
