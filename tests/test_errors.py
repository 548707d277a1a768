"""Messages that errors share."""

import json
import re
from importlib import metadata

from paceline.errors import install, kind_of
from tests.paths import REPOSITORY

REQUIRES = [
    "torch>=2.9",
    'numpy>=2.0; extra == "serve"',
    'no-such-package>=1; extra == "serve"',
    'winloop; sys_platform == "no such system" and extra == "serve"',
    'paceline[serve]; extra == "all"',
    'other-absent[x]>=2; extra == "all"',
]


def test_values_have_the_names_of_json():
    names = {"{}": "an object", "[1]": "a list", '"a"': "a text", "1": "a number", "1.5": "a number", "null": "null",
             "true": "true or false"}  # fmt: skip
    assert {text: kind_of(json.loads(text)) for text in names} == names


def test_what_is_missing_of_an_extra_is_named(monkeypatch):
    monkeypatch.setattr(metadata, "requires", lambda name: REQUIRES)
    for extra, names in (("serve", "no-such-package"), ("all", "no-such-package other-absent")):
        line = install(f".[{extra}]")
        assert line == f"in a checkout of Paceline: pip install '.[{extra}]', elsewhere: pip install {names}"


def test_an_extra_of_installed_packages_is_named_whole(monkeypatch):
    """One of them is there and cannot be imported."""
    monkeypatch.setattr(metadata, "requires", lambda name: REQUIRES[:2])
    assert install(".[serve]").endswith("elsewhere: pip install numpy")


def test_without_an_installation_the_checkout_is_named(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", absent)
    assert install("packages/lab") == "in a checkout of Paceline: pip install packages/lab"
    assert install(".[serve]") == "in a checkout of Paceline: pip install '.[serve]'"


def test_nothing_says_to_install_a_package_that_is_not_published():
    """A stranger could publish one under our name."""
    files = [REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md"]
    for folder in ("docs", "src", "packages", "examples", "benchmarks", "models"):
        files += [f for f in (REPOSITORY / folder).rglob("*") if f.suffix in (".md", ".py", ".html", ".toml", ".j2")
                  and f.name != "pyproject.toml"]  # which pip reads: hatch_build.py says from where
    published = re.compile(r"paceline\[|pip install paceline")
    assert [str(file) for file in files if published.search(file.read_text("utf-8"))] == []
