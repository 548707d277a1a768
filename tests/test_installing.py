"""What is imported stands in pyproject.toml, and a wheel in an environment with one extra alone runs that extra's
command."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
import venv
import zipfile
from functools import cache
from importlib import metadata
from pathlib import Path

import httpx2
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from paceline.cli import EXTRAS, OWN_EXTRAS
from tests import models
from tests.paths import REPOSITORY
from tests.served import Served
from tests.train.conftest import following_answers

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
ELSEWHERE = {"vllm", "xllamacpp", "verl", "sentencepiece"}
"""Imported in other environments, or named by an error of their own."""
UNUSUAL = {"llama_cpp": "llama-cpp-python", "PIL": "pillow", "yaml": "pyyaml", "sklearn": "scikit-learn"}


def wanted(*extras):
    """The distributions that pyproject.toml names, with the extras of each that are asked for."""
    named = {}
    lines = (line for extra in extras for line in PROJECT["optional-dependencies"][extra])
    for one in map(Requirement, [*PROJECT["dependencies"], *lines]):
        inner = wanted(*one.extras) if one.name == "paceline" else {canonicalize_name(one.name): one.extras}
        named |= {name: named.get(name, set()) | more for name, more in inner.items()}
    return named


def reached(*extras):
    """The installed distributions that an installation with these extras has."""
    found = set()
    left = [(name, extra) for name, inner in wanted(*extras).items() for extra in ("", *inner)]
    while left:
        name, extra = left.pop()
        if (name, extra) in found or not any(metadata.distributions(name=name)):
            continue
        found.add((name, extra))
        for one in map(Requirement, metadata.requires(name) or ()):
            if one.marker is None or one.marker.evaluate({"extra": extra}):
                left += [(canonicalize_name(one.name), inner) for inner in ("", *one.extras)]
    return {name for name, _ in found}


@cache
def imported():
    """The packages of others that the source imports, anywhere, and the distributions that they may be of."""
    known, tops = metadata.packages_distributions(), set[str]()
    for file in (REPOSITORY / "src" / "paceline").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                tops |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                tops.add(node.module.partition(".")[0])
    tops -= {*sys.stdlib_module_names, "paceline", *ELSEWHERE}
    return {top: {*map(canonicalize_name, known.get(top, [UNUSUAL.get(top, top)]))} for top in tops}


def test_what_is_imported_is_listed_and_has_an_extra_to_name():
    every = wanted(*(extra for extra in PROJECT["optional-dependencies"] if extra != "dev"))
    assert [top for top, names in imported().items() if not names & every.keys()] == []
    optional = {top for top, names in imported().items() if not names & wanted().keys()}
    assert optional - {"llama_cpp"} == EXTRAS.keys()  # llama.cpp's plug-in and peer have errors of their own
    assert set(EXTRAS.values()) | set(OWN_EXTRAS) <= PROJECT["optional-dependencies"].keys()


HELP = """
import functools, sys, typer
sys.modules |= dict.fromkeys(sys.argv[1:])
from paceline.cli import app, main
typer.main.get_command = functools.cache(typer.main.get_command)
def walk(group, *words):
    assert main([*words, "--help"]) == 0, words
    for word, one in getattr(group, "commands", {}).items():
        walk(one, *words, word)
walk(typer.main.get_command(app))
"""


def test_help_needs_no_extra():
    missing = [top for top, names in imported().items() if not names & reached()]
    assert "accelerate" in missing
    done = subprocess.run([sys.executable, "-c", HELP, *missing], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """What pip makes of the project; built with the hatchling that is installed, else with one from the network."""
    folder = tmp_path_factory.mktemp("wheel")
    here = ["--no-build-isolation"] if any(metadata.distributions(name="hatchling")) else []
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", *here, "-w", str(folder), str(REPOSITORY)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode and not here:
        pytest.skip(f"hatchling is not installed, and cannot be had: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("paceline-*.whl")
    return made


def environment(folder, wheel, *extras):
    """The interpreter of a new environment with the wheel, what it depends on and what these extras bring, linked."""
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for name in reached(*extras):
        for file in metadata.distribution(name).files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(Path(str(metadata.distribution(name).locate_file(top))))
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return models.make_repetitive(tmp_path_factory.mktemp("model"), max_position_embeddings=512)


COMMANDS = {
    "": [
        "generate {model} hello --raw -n 4 --draft sam",
        "bench {model} -d sam --limit 1 -n 4 --warm-up 0 --out {out}/bench",
        "report {out}/bench",
        "replay {log} --tokenizer {model}",
        "tune {model} --log {log} --batch 1,2 --seconds 0.1 -o {out}/tune.json",
        "corpus build {out}/corpus --text {log} --tokenizer {model}",
        "quantize {model} {out}/int8",
    ],
    "serve": [],
    "bench": ["bench server {url} --log {log} --limit 1 -n 2 --warm-up 0 --out {out}/bench"],
    "tune": ["tune server {url} --tokenizer {model} --log {log} --batch 1,2 -n 8 --minutes 0.05 -o {out}/tuned"],
    "watch": ["watch {url} --once"],
    "certify": [
        "certify server {url} --against {url} --budget 1s --requests 0",
        "certify {model} -d sam --requests 40 --budget 0 -n 8",
    ],
    "eval": [
        "eval align --model {url}#m --data sample --method vanilla --limit 1 -n 4 --out {out}/align",
        "report {out}/align",
    ],
    "vision": [
        "eval vision build {out}/set --cases 1 --size 64 --subsets existence,plain",
        "eval vision run {out}/set --model random",
        "eval vision run {out}/set --model {url}#m,cases=1",
        "eval vision audit {out}/set",
        "eval vision train small --data {out}/set --steps 1 --out {out}/clip",
    ],
    "train": ["train kangaroo {model} --exit 0 --data {answers} --tokens 200 --out {out}/drafter"],
}
"""By extra, commands that need no other: the smallest case of each."""
MISSING = {
    "serve": "serve {model}",
    "bench": "bench server {url} --log {log} --out {out}/bench",
    "tune": "tune server {url} --tokenizer {model}",
    "watch": "watch {url}",
    "certify": "certify {model} -d sam",
    "eval": "eval align --model {url}#m --data sample --out {out}/align",
    "vision": "eval vision build {out}/set",
    "train": "train kangaroo {model} --out {out}/drafter",
}


@pytest.fixture
def places(model, tmp_path):
    (tmp_path / "log.jsonl").write_text(json.dumps({"prompt": "the cat", "response": "and the dog " * 9}) + "\n")
    answers = following_answers(tmp_path / "answers.jsonl")
    with Served(accepted=(1,)) as fake:
        yield {"model": model, "url": fake.url, "log": tmp_path / "log.jsonl", "answers": answers, "out": tmp_path}


def run(python, line, places):
    command = [str(python), "-m", "paceline", *line.format(**places).split()]
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=ours, cwd=str(places["out"]))


@pytest.mark.slow
@pytest.mark.parametrize("extra", COMMANDS)
def test_a_wheel_with_an_extra_runs_its_command(extra, wheel, tmp_path, places):
    python = environment(tmp_path / "env", wheel, *([extra] if extra else []))
    assert COMMANDS.keys() - {""} == set(OWN_EXTRAS)
    for line in COMMANDS[extra]:
        done = run(python, line, places)
        told = (line, done.stdout, done.stderr)
        # What a fake of a server or so few requests are worth is not asked here.
        assert done.returncode in ((0, 1, 2, 3) if line.startswith(("certify", "tune")) else (0,)), told
        assert "not installed" not in done.stderr, told
        assert "Traceback" not in done.stderr, told
    if extra == "serve":
        _serves(python, places)
    if not extra:
        for name, line in MISSING.items():
            done = run(python, line, places)
            assert done.returncode == 2, (line, done.stderr)
            assert f"pip install '.[{name}]'" in done.stderr.strip().splitlines()[-1], (line, done.stderr)


def _serves(python, places):
    command = [str(python), "-m", "paceline", "serve", str(places["model"]), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=str(places["out"]))
    try:
        assert server.stdout is not None
        address = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+", line)))
        reply = httpx2.post(f"{address}/v1/completions", json={"prompt": "the cat", "max_tokens": 3}, timeout=120)
        assert reply.json()["usage"]["completion_tokens"] == 3, reply.text
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(60) in (0, 130)


def test_every_requirement_is_read():
    assert {"torch", "markupsafe"} <= wanted().keys()
    assert {"openai", "scikit-learn"} <= wanted("bench").keys()
    assert "openai" not in reached()
    assert {"openai", "httpx2", "anyio"} <= reached("watch")
