"""The distributions: what each imports it needs, and the commands that the base names are those that they bring."""

import sys
import tomllib
from functools import cache
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from paceline.cli.commands import GROUP, TABLE
from tests.apart import imported, needs_engine
from tests.paths import REPOSITORY, SOURCES

PLACES = {"paceline": ".", **{f"paceline-{at.parts[-3]}": f"packages/{at.parts[-3]}" for at in SOURCES[1:]}}
UNUSUAL = {"PIL": "pillow", "yaml": "pyyaml", "sklearn": "scikit-learn", "prometheus_client": "prometheus-client"}
WITHOUT_TORCH = ("paceline-net", "paceline-draft", "paceline-lab", "paceline-certify")
OF_PYTHON = sys.stdlib_module_names
ELSEWHERE = {"vllm", "verl", "xllamacpp", "llama-cpp"}  # Each is imported in an environment of its own.


@cache
def project(name):
    return tomllib.loads((REPOSITORY / PLACES[name] / "pyproject.toml").read_text("utf-8"))


def needs(name, extras=()):
    """The names that a distribution lists with these extras."""
    hook = project(name)["tool"]["hatch"]["metadata"]["hooks"]["custom"]
    return [*hook["dependencies"], *(line for extra in extras for line in hook["optional-dependencies"][extra])]


def reached(name, extras=()):
    """Names of the distributions that come with one, itself included."""
    found = {name}
    for one in map(Requirement, needs(name, extras)):
        inner = reached(one.name, one.extras) if one.name in PLACES and one.name != name else set()
        found |= {canonicalize_name(one.name)} | inner
    return found


def source(name):
    return REPOSITORY / PLACES[name] / "src" / "paceline"


WITH_ENGINE = {
    "certify/command.py", "certify/exact.py", "certify/greedy.py",
    "bench/benchmark.py", "bench/checks.py", "bench/ours.py", "bench/setting.py", "replay/tune.py",
}  # fmt: skip
"""Modules of distributions without torch that run our engine; nothing that needs no engine imports them at once."""


@pytest.mark.parametrize("name", PLACES)
def test_what_is_imported_at_once_is_needed(name):
    """With its extras, because modules of a command may import at once what its extra brings."""
    every = project(name)["tool"]["hatch"]["metadata"]["hooks"]["custom"].get("optional-dependencies", {})
    there = reached(name, ["serve"] if name == "paceline" else every)
    files = {file.relative_to(source(name)).as_posix(): file for file in source(name).rglob("*.py")}
    wrong = []
    for where in sorted(files.keys() - WITH_ENGINE):
        for module in imported(files[where]):
            top, *rest = module.split(".")
            if top == "paceline":
                owners = {one for one in PLACES if (source(one) / f"{'/'.join(rest)}.py").is_file()}
            else:
                owners = {canonicalize_name(UNUSUAL.get(top, top))} - ELSEWHERE if top not in OF_PYTHON else set()
            if owners and not owners & there:
                wrong.append((where, module))
    assert wrong == []


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_the_engine_is_needed_only_by_modules_that_run_it(name):
    files = {file.relative_to(source(name)).as_posix(): file for file in source(name).rglob("*.py")}
    assert {where for where, file in files.items() if needs_engine(file)} == WITH_ENGINE & files.keys()


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_what_needs_no_torch_brings_none(name):
    assert not reached(name) & {"torch", "transformers", "paceline"}
    assert "numba" not in reached("paceline-certify")


def test_commands_are_brought_by_the_distributions_that_are_named():
    brought = {entry.replace(".", " "): PLACES[name] for name in PLACES
               for entry in project(name)["project"].get("entry-points", {}).get(GROUP, {})}  # fmt: skip
    assert brought == {name: command.package for name, command in TABLE.items()}


def test_one_version_for_all():
    versions = {name: metadata.version(name) for name in PLACES if any(metadata.distributions(name=name))}
    assert len(set(versions.values())) == 1, versions
