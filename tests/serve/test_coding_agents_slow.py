"""Coding agents themselves, started by `paceline launch`, each in a HOME of its own. What the model says is scripted.

Their packages are installed from npm and PyPI into PACELINE_AGENTS, or ~/.cache/paceline-clients; what cannot be
installed is skipped:

    pytest -n 0 -m slow tests/serve/test_coding_agents_slow.py -k codex
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from string import Template

import pytest
from transformers import PreTrainedTokenizerFast

from paceline import cli
from paceline.folders import cache_folder
from tests import models, native
from tests.paths import REPOSITORY

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
CACHE = Path(os.environ.get("PACELINE_AGENTS", Path.home() / ".cache" / "paceline-clients"))
SESSIONS = tomllib.loads((HERE / "coding_agents.toml").read_text("utf-8"))
TASK = "Mend area in shapes.py, and run it."
SHAPES = "def area(w, h):\n    return w + h\n\n\nprint(area(2, 3))\n"
MARKS = ["<|im_start|>", "<|im_end|>"]
launch = import_module("paceline.cli.launch")  # whose name in its package is the command
LONG = 320  # seconds: clients give up after 300 of silence


@pytest.fixture(scope="module")
def small(tmp_path_factory, shared):
    """A model without sense and with a long context, whose tokenizer makes few tokens of prompts of agents."""
    folder = tmp_path_factory.mktemp("m") / "small"
    file = shared / "models" / "gpt2-tokenizer" / "tokenizer.json"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token=MARKS[1], additional_special_tokens=MARKS)
    tokenizer.chat_template = (HERE / "coding_agents.jinja").read_text("utf-8")
    changes = native.TINY | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    models.make("qwen3", folder, max_position_embeddings=1 << 15, **changes)
    tokenizer.save_pretrained(folder)
    return folder


def installed(name):
    """The folder of a client's command. Skips what cannot be installed here."""
    one = SESSIONS[name]
    folder = CACHE / f"{name}-{one['version']}"
    how = launch.clients()[name]
    if how.install.startswith("npm"):
        quietly = ["npm", "install", "--no-fund", "--no-audit", "--prefix", folder]
        commands = [[*quietly, f"{one['package']}@{one['version']}"]]
        binaries = folder / "node_modules" / ".bin"
    else:
        binaries = folder / "bin"
        commands = [
            [python(one.get("python")), "-m", "venv", folder],
            [binaries / "pip", "install", "-q", f"{one['package']}=={one['version']}"],
        ]
    if not (binaries / how.command).exists():
        folder.mkdir(parents=True, exist_ok=True)
        for command in commands:
            if shutil.which(command[0]) is None:
                pytest.skip(f"{name} cannot be installed: there is no {Path(command[0]).name}")
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"{name} cannot be installed: {done.stderr[-300:]}")
    return binaries


def python(version):
    """An interpreter of this version; None: ours."""
    if version is None:
        return sys.executable
    named = [f"python{version}", *map(str, (Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))]

    def runs(one):
        return shutil.which(one) and subprocess.run([one, "-c", ""], capture_output=True, check=False).returncode == 0

    return next(filter(runs, named), named[0])


@pytest.fixture
def plays(tmp_path, small, monkeypatch, capfd):
    """Runs a client's session, and gives what it was to say, what the server noted of its turns, and the folder."""

    def run(name, hold=0.0):
        one, work, noted = SESSIONS[name], tmp_path / "work", tmp_path / "noted.jsonl"
        binaries, home = installed(name), tmp_path / "home" / ".cache" / "paceline"
        home.mkdir(parents=True)
        (home / "kernels").symlink_to(cache_folder() / "kernels")  # which take half a minute to compile
        (work / "shapes.py").parent.mkdir()
        (work / "shapes.py").write_text(SHAPES)
        subprocess.run(["git", "init", "-q", work], check=True)
        filled = lambda text: Template(text).safe_substitute(work=work, task=TASK)  # noqa: E731
        calls = [
            said if isinstance(said, str) else
            "<tool_call>\n" + json.dumps({"name": said[0], "arguments": said[1]}, ensure_ascii=False) + "\n</tool_call>"
            for said in one["answers"]
        ]  # fmt: skip
        answers = [*map(filled, calls)]
        (tmp_path / "script.json").write_text(json.dumps({"answers": answers, "hold": hold}))
        set_to = {"HOME": tmp_path / "home", "SCRIPT": tmp_path / "script.json", "SCRIPT_LOG": noted}
        set_to |= {"PATH": f"{binaries}:{os.environ['PATH']}", "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}"}
        for key, value in set_to.items():
            monkeypatch.setenv(key, str(value))
        for key in [key for key in os.environ if key.startswith(("XDG_", "OPENAI_", "ANTHROPIC_"))]:
            monkeypatch.delenv(key)
        monkeypatch.chdir(work)
        monkeypatch.setenv("PWD", str(work))
        monkeypatch.setattr(launch, "SERVE", [sys.executable, "-m", "tests.serve.scripted"])
        status = cli.main(["launch", name, str(small), "--", *map(filled, one["arguments"])])
        said = capfd.readouterr()
        print(said.out[-3000:], said.err[-3000:])
        lines = [json.loads(line) for line in noted.read_text().splitlines()]
        assert status == 0
        assert [line for line in lines if "refused" in line] == []
        turns = [line for line in lines if line["answer"] in answers]
        print(f"{name} {one['version']}:", [(line["prompt"], line["reused"]) for line in turns])
        return answers, turns, work

    yield run
    for file in Path("/proc").glob("[0-9]*/environ"):  # cline leaves a process behind
        with suppress(OSError):
            if f"HOME={tmp_path / 'home'}".encode() in file.read_bytes().split(b"\0"):
                os.kill(int(file.parent.name), signal.SIGTERM)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SESSIONS)
def test_a_session_reads_edits_runs_and_ends(plays, name):
    """A turn reuses what it shares with the one before: all of it, but aider shows the changed file in its middle."""
    answers, turns, work = plays(name)
    assert [line["answer"] for line in turns] == answers
    assert [line["finish"] for line in turns] == ["stop"] * len(answers)
    for before, after in pairwise(turns):
        assert after["reused"] >= before["prompt"] - (before["prompt"] // 2 if name == "aider" else 8)
    assert (work / "shapes.py").read_text() == SHAPES.replace("+", "*")
    assert (work / "out.txt").read_text() == "6\n"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["codex", "claude", "opencode", "cline"])
def test_a_client_waits_for_a_first_answer_that_takes_longer_than_its_patience(plays, name):
    answers, turns, _ = plays(name, LONG)
    assert [line["answer"] for line in turns] == answers
