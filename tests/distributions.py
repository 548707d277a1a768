"""Our distributions as their pyproject.toml describe them, by where they lie: ".", "packages/lab"."""

import tomllib
from functools import cache

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.paths import REPOSITORY, SOURCES

PLACES = {"paceline": ".", **{f"paceline-{at.parts[-3]}": f"packages/{at.parts[-3]}" for at in SOURCES[1:]}}
UNUSUAL = {"PIL": "pillow", "yaml": "pyyaml", "sklearn": "scikit-learn", "llama_cpp": "llama-cpp-python"}
"""Distributions of modules that have another name."""
ELSEWHERE = {"vllm", "verl", "xllamacpp"}
"""Imported in environments of their own."""


@cache
def project(name):
    return tomllib.loads((REPOSITORY / PLACES[name] / "pyproject.toml").read_text("utf-8"))


def source(name):
    return REPOSITORY / PLACES[name] / "src" / "paceline"


def extras(name):
    """Its extras, each with what it brings."""
    return project(name)["tool"]["hatch"]["metadata"]["hooks"]["custom"].get("optional-dependencies", {})


def reached(name, chosen=()):
    """The distributions that it brings, itself included, with the extras of each."""
    found = {name: set(chosen)}
    listed = project(name)["tool"]["hatch"]["metadata"]["hooks"]["custom"]["dependencies"]
    for one in map(Requirement, [*listed, *(line for extra in chosen for line in extras(name)[extra])]):
        more = {canonicalize_name(one.name): one.extras}
        if one.name in PLACES and (one.name != name or one.extras):
            more = reached(one.name, tuple(one.extras))
        for inner, its in more.items():
            found.setdefault(inner, set()).update(its)
    return found


def named(place):
    """The name and the extras of "packages/evals[vision]"."""
    folder, _, extra = place.partition("[")
    name = next(name for name, at in PLACES.items() if at == folder)
    return name, tuple(extra.removesuffix("]").split(",")) if extra else ()
