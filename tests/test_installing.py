"""Help needs no extra, and wheels in an environment of their own run their commands."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import venv
import zipfile
from functools import cache
from importlib import metadata
from pathlib import Path

import httpx2
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from paceline.cli.commands import TABLE
from paceline.errors import install
from tests import models
from tests.distributions import ELSEWHERE, PLACES, UNUSUAL, named, reached, source
from tests.paths import REPOSITORY
from tests.served import Served
from tests.train.conftest import following_answers


def installed(*places):
    """The installed distributions of others that come with ours."""
    found = set()
    left = [(name, extra) for place in places for name, chosen in reached(*named(place)).items()
            for extra in ("", *chosen)]  # fmt: skip
    while left:
        name, extra = left.pop()
        if (name, extra) in found or name in PLACES or not any(metadata.distributions(name=name)):
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
    for file in (file for name in PLACES for file in source(name).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                tops |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                tops.add(node.module.partition(".")[0])
    tops -= {*sys.stdlib_module_names, "paceline", "sentencepiece", *ELSEWHERE}
    return {top: {*map(canonicalize_name, known.get(top, [UNUSUAL.get(top, top)]))} for top in tops}


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
    missing = [top for top, names in imported().items() if not names & installed(".")]
    assert "accelerate" in missing
    done = subprocess.run([sys.executable, "-c", HELP, *missing], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """What pip makes of our distributions; built with the hatchling that is installed, else with one from the
    network."""
    folder = tmp_path_factory.mktemp("wheels")
    here = ["--no-build-isolation"] if any(metadata.distributions(name="hatchling")) else []
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", *here, "-w", str(folder)]
    told = {"capture_output": True, "text": True, "timeout": 900, "env": os.environ | {"PACELINE_RELEASE": "1"}}
    done = subprocess.run([*command, *(str(REPOSITORY / at) for at in PLACES.values())], **told)
    if done.returncode and not here:
        pytest.skip(f"hatchling is not installed, and cannot be had: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return {name: next(folder.glob(f"{name.replace('-', '_')}-*.whl")) for name in PLACES}


def environment(folder, wheels, place):
    """The interpreter of a new environment with the wheels that a place needs, and what they bring, linked."""
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in reached(*named(place)).keys() & wheels.keys():
        with zipfile.ZipFile(wheels[name]) as archive:
            archive.extractall(site)
    for name in installed(place):
        for file in metadata.distribution(name).files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(Path(str(metadata.distribution(name).locate_file(top))))
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return models.make_repetitive(tmp_path_factory.mktemp("model"), max_position_embeddings=512)


COMMANDS = {
    ".": [
        "generate {model} hello --raw -n 4 --draft sam",
        "bench {model} -d sam --limit 1 -n 4 --warm-up 0 --out {out}/bench",
        "report {out}/bench",
        "replay {log} --tokenizer {model}",
        "tune {model} --log {log} --batch 1,2 --seconds 0.1 -o {out}/tune.json",
        "corpus build {out}/corpus --text {log} --tokenizer {model}",
        "quantize {model} {out}/int8",
    ],
    ".[serve]": [],
    "packages/lab": [
        "replay {log} --tokenizer {model}",
        "corpus build {out}/corpus --text {log} --tokenizer {model}",
        "bench server {url} --log {log} --limit 1 -n 2 --warm-up 0 --out {out}/bench",
        "tune server {url} --tokenizer {model} --log {log} --batch 1,2 -n 8 --minutes 0.05 -o {out}/tuned",
        "watch {url} --once",
    ],
    "packages/certify": ["certify server {url} --against {url} --budget 1s --requests 0"],
    ".[certify]": ["certify {model} -d sam --requests 40 --budget 0 -n 8"],
    "packages/evals": [
        "eval align --model {url}#m --data sample --method vanilla --limit 1 -n 4 --out {out}/align",
        "report {out}/align",
    ],
    "packages/evals[vision]": [
        "eval vision build {out}/set --cases 1 --size 64 --subsets existence,plain",
        "eval vision run {out}/set --model random",
        "eval vision run {out}/set --model {url}#m,cases=1",
        "eval vision audit {out}/set",
        "eval vision train small --data {out}/set --steps 1 --out {out}/clip",
    ],
    "packages/train": ["train kangaroo {model} --exit 0 --data {answers} --tokens 200 --out {out}/drafter"],
}
"""By what is installed, commands that need no more: the smallest case of each."""


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
@pytest.mark.parametrize("place", COMMANDS)
def test_wheels_run_their_commands(place, wheels, tmp_path, places):
    python = environment(tmp_path / "env", wheels, place)
    has_torch = subprocess.run([str(python), "-c", "import torch"], capture_output=True).returncode == 0
    assert has_torch == (place not in ("packages/lab", "packages/certify"))
    for line in COMMANDS[place]:
        done = run(python, line, places)
        told = (line, done.stdout, done.stderr)
        # What a fake of a server or so few requests are worth is not asked here.
        assert done.returncode in ((0, 1, 2, 3) if line.startswith(("certify", "tune")) else (0,)), told
        assert "not installed" not in done.stderr, told
        assert "Traceback" not in done.stderr, told
    if place == ".[serve]":
        _serves(python, places)


@pytest.mark.slow
def test_the_base_alone_says_what_brings_a_command(wheels, tmp_path, places):
    python = environment(tmp_path / "env", wheels, "packages/net")
    said = run(python, "--help", places)
    assert said.returncode == 0, said.stderr
    told = said.stdout
    for name, command in TABLE.items():
        done = run(python, f"{name} x", places)
        assert (done.returncode, install(command.place) in done.stderr) == (2, True), done.stderr
        assert name in " ".join(told.split())


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
    assert {"torch", "markupsafe", "openai"} <= reached("paceline").keys()
    assert {"scikit-learn", "datasets"} <= reached("paceline", ("bench",)).keys()
    assert "fastapi" not in installed(".")
    assert {"openai", "httpx2", "anyio"} <= installed("packages/net")
    assert not installed("packages/lab") & {"torch", "transformers", "scipy"}
