"""`paceline train`: the recipes' own commands, and one line for a user's mistake."""

import json
import sys

import pytest
from accelerate.state import AcceleratorState
from tests import models
from typer.testing import CliRunner

from paceline.cli.parameters import app_of
from paceline.cli.train import later
from paceline.formats.heads.vocab import FILE, read_vocabulary

DRAFTERS = ("model", "s2d", "jacobi", "kangaroo", "medusa", "hydra", "amphista", "tools")
HELP = (*DRAFTERS[:-1], "tools vocab", "tools tree")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return models.make("llama2", tmp_path_factory.mktemp("models") / "mine")


@pytest.fixture
def answers(tmp_path):
    file = tmp_path / "answers.jsonl"
    rows = [{"prompt_tokens": [0, 5], "tokens": [100 + i % 4, 101, 1]} for i in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_every_drafter_is_listed(command):
    shown = command("train", "--help")
    assert shown.code == 0
    listed = [line.split()[0] for line in shown.out.splitlines() if line.strip()]
    assert {*DRAFTERS} <= set(listed)


@pytest.mark.parametrize("name", HELP)
def test_help_has_an_example(command, name):
    shown = command("train", *name.split(), "--help")
    assert shown.code == 0
    assert f"paceline train {name} smollm2" in " ".join(shown.out.split())


def test_a_vocabulary_is_counted_and_checked(command, target, answers, tmp_path):
    wanted = ("--text", answers, answers, "--out", tmp_path / "d", "--keep", "9")
    made = command("train", "tools", "vocab", target, *wanted)
    assert made.code == 0, made.err
    assert "80 answers, 240 tokens" in made.out
    assert "100.00%" in made.out
    known = read_vocabulary(tmp_path / "d" / FILE)
    assert len(known.keep) == 9
    assert {1, 100, 101, 102, 103} <= set(known.keep.tolist())
    judged = command("train", "tools", "vocab", target, "--text", answers, "--check", tmp_path / "d")
    assert "40 answers" in judged.out
    assert judged.out.split()[-1] == "100.00%"


def test_a_vocabulary_is_counted_in_generated_answers(command, target, tmp_path):
    out = tmp_path / "v.safetensors"
    wanted = ("train", "tools", "vocab", target, "--generate", "6", "--max-tokens", "4", "--out", out)
    assert command(*wanted).code == 0
    known = read_vocabulary(out)
    written = [json.loads(line)["tokens"] for line in (tmp_path / "v.answers.jsonl").read_text().splitlines()]
    assert len(written) == 6
    assert int(known.counts.sum()) == sum(i < len(known.counts) for ids in written for i in ids)
    before = (tmp_path / "v.answers.jsonl").read_bytes()
    assert (command(*wanted).code, (tmp_path / "v.answers.jsonl").read_bytes()) == (0, before)


@pytest.fixture
def fresh_accelerate():
    """accelerate keeps one precision for a process, and the recipes' tests use another than the command."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("fresh_accelerate")
def test_an_adapter_is_trained_on_what_the_target_writes_freely(command, target, tmp_path):
    """The line of the README: no text, no budget, no folder for checkpoints."""
    asked = ("kangaroo", target, "--generate", "40", "--max-tokens", "8", "--out", tmp_path / "adapter")
    done = command("train", *asked, "--length", "32", "--rows", "4")
    assert done.code == 0, done.err
    answers = [json.loads(line) for line in (tmp_path / "adapter-run" / "answers.jsonl").read_text().splitlines()]
    assert len({tuple(answer["tokens"]) for answer in answers}) > 20  # one greedy answer, not twenty
    budget = 10 * sum(len(answer["prompt_tokens"] + answer["tokens"]) for answer in answers)
    assert json.loads((tmp_path / "adapter" / "config.json").read_text())["recipe"]["loop"]["tokens"] == budget
    spec = f"kangaroo:{tmp_path / 'adapter'}"
    said = command("generate", target, "the cat", "--raw", "-n", "5", "-d", spec, "--json")
    assert json.loads(said.out)["new_tokens"] == 5


def test_a_command_may_lie_in_a_module_that_is_imported_late(monkeypatch, tmp_path):
    (tmp_path / "my_recipe.py").write_text(
        "import typer\n"
        "def mine(target: str, steps: int = 3) -> None:\n"
        '    """Train my drafter."""\n'
        "    typer.echo(f'{target} for {steps} steps')\n"
        "    if steps > 9:\n"
        "        raise typer.Exit(130)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    app = app_of()  # Typer keeps the commands that it has read of the whole command line's.
    for name in ("mine", "other"):
        later(name, "my_recipe:mine", f"Train {name}.", app)
    assert "Train mine." in CliRunner().invoke(app, ["--help"]).output
    assert "my_recipe" not in sys.modules
    done = CliRunner().invoke(app, ["mine", "demo", "--steps", "5"])
    assert (done.exit_code, done.output) == (0, "demo for 5 steps\n")
    assert "--steps" in CliRunner().invoke(app, ["mine", "--help"]).output
    assert CliRunner().invoke(app, ["mine", "demo", "--steps", "10"]).exit_code == 130
    assert CliRunner().invoke(app, ["mine", "demo", "--stps", "5"]).exit_code == 2
