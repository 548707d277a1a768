"""Plans of steps: the shipped ones are whole, resumable and made of commands that exist; bad files are refused."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli.later import recipe
from paceline.errors import PacelineError
from tests.cli.command import WHERE
from tests.paths import REPOSITORY
from zoo.__main__ import app, main
from zoo.family import read_steps, run

PLANS = [REPOSITORY / "zoo" / f"{name}.toml" for name in ("zoo", "smollm2", "qwen-coder")]
COMMANDS = typer.main.get_command(app).commands
PLAN = """
same = "--data {work}/a"
more = ["b.txt", "/z.txt"]
[sources]
a = "x.txt"
b = ["y.txt", "hf:o/n"]
c = "{work}/c.txt"
[[steps]]
name = "one"
run = "zoo one SOURCES --without=MORE --tokens {tokens}"
done = "{work}/one"
tokens = 1000
processes = true
[[steps]]
name = "two"
run = "zoo two {same} --prompts=SOURCES:b --out {out}"
done = "{out}/two"
threads = true
"""


def plan(folder, text=PLAN):
    (folder / "plan.toml").write_text(text)
    return folder / "plan.toml"


def test_a_step_names_files_and_texts_of_its_plan(tmp_path):
    one, two = read_steps(plan(tmp_path), Path("models"), Path("work"), 0.1)
    files = [f"a={tmp_path}/x.txt", f"b={tmp_path}/y.txt", "b=hf:o/n", "c=work/c.txt"]
    without = ["--without", f"{tmp_path}/b.txt", "--without", "/z.txt"]
    assert list(one.words) == ["zoo", "one", *files, *without, "--tokens", "100"]
    prompts = ["--prompts", f"b={tmp_path}/y.txt", "--prompts", "b=hf:o/n"]
    assert list(two.words) == ["zoo", "two", "--data", "work/a", *prompts, "--out", "models"]
    assert (one.done, two.done) == (Path("work/one"), Path("models/two"))
    assert "torch.distributed.run" in one.command(2)
    assert two.command(2)[-2:] == ["--threads", "2"]
    assert "--threads" not in two.command(1)


@pytest.mark.parametrize("file", PLANS, ids=lambda file: file.stem)
def test_every_step_is_a_command_and_reads_what_an_earlier_one_wrote(file):
    written = set()
    steps = read_steps(file, Path("OUT"), Path("WORK"))
    for step in steps:
        module, command, *words = step.words
        if (module, command) != ("paceline", "quantize"):
            path = ("train", words.pop(0)) if module == "paceline" else ()
            path += (words.pop(0),) if path == ("train", "tools") else ()
            parser = recipe(WHERE[path] if path else f"zoo.commands:{command}")
            parser.make_parser(parser.context_class(parser)).parse_args(list(words))  # raises for an unknown option
        written |= {words[words.index("--out") + 1]} if "--out" in words else {str(step.done.parent)}
        made = (word for word in (w.partition("=")[2] or w for w in words) if word.startswith(("OUT/", "WORK/")))
        for word in made:
            of_run = word.startswith(("WORK/run-", "WORK/states", "WORK/vocab."))
            assert of_run or any(word == one or word.startswith(f"{one}/") for one in written), word
    assert len({step.name for step in steps}) == len(steps)


def test_what_is_done_is_skipped(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr("subprocess.call", lambda command: ran.append(command[3]) or int("two" in command))
    steps = read_steps(plan(tmp_path), tmp_path, tmp_path)
    assert run(steps, dry_run=True) == 0
    assert not ran
    assert (run(steps), ran) == (1, ["one", "two"])
    (tmp_path / "one").touch()
    assert run([*steps, steps[1]]) == 1, "the step after a failed one waits"
    assert ran == ["one", "two", "two"]


@pytest.mark.parametrize("text", ["steps = 3", "[a]\nb = 1", '[[steps]]\nname = "x"', "[a", '[[steps]]\nrun = "{no}"'])
def test_bad_files_are_refused(tmp_path, text):
    with pytest.raises(PacelineError, match=r"is no plan of steps|cannot be read"):
        read_steps(plan(tmp_path, text), tmp_path, tmp_path)


@pytest.mark.parametrize("words", [
    ("pretrain", "a.txt", "--tokenizer", ".", "--out", "out", "--checkpoints", "/dev/null/x"),
    ("tokenizer", "a.txt", "--out", "/dev/null/x"), ("make", "nowhere.toml", "--out", "/dev/null/x"),
    ("prompts", "dolly=a.jsonl", "--out", "/dev/null/x"), ("page", "smollm2", "--out", "/dev/null/x"),
], ids=lambda words: words[0])
def test_what_cannot_be_written_is_said_at_once(words):
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, PacelineError)
    assert "/dev/null/x" in str(result.exception)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"python -m zoo {command}" in " ".join(result.output.split())


def test_a_mistake_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["zoo", "tokenizer", "mine=/no/such/file.txt", "--out", "build/never"])
    with pytest.raises(SystemExit) as stopped:
        main(app)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: source 'mine': no such file: /no/such/file.txt\n"


def test_a_tokenizer_of_one_small_file(tmp_path):
    (tmp_path / "cats.txt").write_text("The cat sat on the mat.\n\n" * 50)
    options = ["--out", str(tmp_path / "tokenizer"), "--vocabulary", "270", "--generated", "0"]
    made = CliRunner().invoke(app, ["tokenizer", str(tmp_path / "cats.txt"), *options], catch_exceptions=False)
    assert "270 tokens" in made.output
    assert (tmp_path / "tokenizer" / "tokenizer.json").exists()


def test_help_does_not_wait_for_torch():
    code = "import sys; import zoo.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
