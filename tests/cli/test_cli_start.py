"""Starting up: help that does not wait for torch, the version, and the list of methods."""

import json
import os
import re
import subprocess
import sys
from typing import get_args, get_type_hints

import pytest

import paceline
from paceline.__main__ import main as process_main
from paceline.cli.train import RECIPES
from paceline.draft.registry import describe, names
from paceline.serve.reading import FORMATS, REASONING
from paceline.serve.settings import Settings


def test_help_does_not_wait_for_torch():
    code = """
import sys
from paceline.cli import main
for arguments in (["--help"], ["generate", "--help"], ["train", "--help"], ["--version"], [], ["generat"]):
    main(arguments)
    heavy = {"torch", "transformers", "numba", "tokenizers", "scipy"} & set(sys.modules)
    assert not heavy, (arguments, heavy)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_an_answer_does_not_wait_for_packages_that_it_does_not_need(demo):
    """transformers' models, torch's compiler, and what only --compare and servers need."""
    code = f"""
import sys
from paceline.cli import main
assert main(["generate", {str(demo)!r}, "Hi", "-n", "1"]) == 0
heavy = {{"openai", "scipy.stats", "torch._dynamo", "transformers.activations", "transformers.modeling_utils"}}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
from transformers.utils.type_validators import ACT2FN
assert "silu" in ACT2FN and len(ACT2FN) > 9
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


DROPPED = {  # where Python drops an exception: each presses Ctrl-C there
    "a __del__": "type('Pressing', (), {'__del__': lambda self: press()})()",
    "a weak reference's callback": "one = type('One', (), {})(); ref = weakref.ref(one, lambda _: press()); del one",
    "a call from C": "ctypes.CFUNCTYPE(None)(press)()",
    "the garbage collector": "gc.callbacks.append(press); gc.collect(); gc.callbacks.clear()",
}


@pytest.mark.parametrize("place", DROPPED)
def test_ctrl_c_ends_a_command_wherever_it_falls(place):
    """In silence but for one word, also of objects that are half-built when the interpreter ends."""
    code = f"""
import ctypes, gc, signal, sys, time, types, weakref
from paceline import __main__, cli
class Broken:
    def __del__(self):
        raise RuntimeError("half-built")
sys.modules["built"] = types.ModuleType("built")
sys.modules["built"].half, presses = Broken(), iter([signal.SIGINT])
def press(*_):
    for number in presses:
        signal.raise_signal(number)
        len("a look at what was pressed")
def run(argv):
    {DROPPED[place]}
    time.sleep(50)
cli._run = run
sys.exit(__main__.main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=40)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


MODEL = ("generate {} hi", "chat {}", "serve {}", "demo {}", "doctor {}", "quality {} --dtype int8 --text HERE",
         "quantize {} out", "bench {}", "certify {}", "tune {}", "replay HERE --tokenizer {}",
         "train eagle {} --out out", "corpus build out --text HERE --tokenizer {}",
         "generate MODEL hi --tokenizer {}", "quality MODEL --text HERE --against {}")  # fmt: skip
ENGINE = ("generate MODEL hi", "chat MODEL", "serve MODEL")
LOADED = (*ENGINE, "demo MODEL", "bench MODEL", "certify MODEL", "tune MODEL", "eval align --model MODEL")
SERVERS = ("watch", "bench server", "certify server", "tune server --tokenizer MODEL --batch 1,2")
TRAINED = [f"train {recipe} MODEL --out out" for recipe in RECIPES["recipes"]]
OPTIONS = [
    (("generate MODEL hi", "chat MODEL"), [
        "--temperature -1", "--temperature nan", "--top-p 0", "--top-k -1", "--min-p 2", "--repetition-penalty 0",
        "--max-tokens 0", "--threads 0", "--stop=", "--seed -1", f"--seed {2**64}",
    ]),
    (ENGINE, ["--cache-memory much", "--prefix-cache-size much", "--tokenizer ./none", "--context 1"]),
    (LOADED, ["--draft samm", "--draft sam+samm", "--dtype bfloat61", "--device abacus"]),
    (SERVERS, ["host:8000", "http://h --api-key-env NO_SUCH_KEY", "http://h --api-key-file none"]),
    (TRAINED, [
        "--tokens x", "--seed -1", "--threads 0", "--save-every -1", "--minutes 1 --hours 1", "--checkpoints HERE",
        "--data none.jsonl",
    ]),
    (["demo MODEL"], ["-n 0", "--also samm", "--prompts none.jsonl"]),
    (["bench MODEL"], [
        "-n 0", "--temperature -1", "-t nan", f"--seed {2**64}",
        "--batch 1,x", "--peer vlm-ngram", "--suite spec-banch",
        "--categories poetry", "--template vicunia",
    ]),
    (["bench schedules MODEL"], ["--batch 1,x", "--schedule equall", "--batch 1,2 --schedule grouped:2"]),
    (["serve MODEL"], [
        "--port 99999", "--log none/x", "--allow-draft samm", "--tool-parser x", "--reasoning-parser x",
        "--json-whitespace x", "--threads -2", "--deadline -3", "--deadline 0", "--grace -1", "--batch 0", "--port -1",
        "--limit waiting=0", "--limit body=x", "--limit stop=3",
    ]),
    (["certify MODEL"], ["--engine vlm", "--prompts none.jsonl", "--against http://x", "--budget x"]),
    (["tune MODEL"], ["--batch 1,x", "--template vicunia", "--log none.jsonl"]),
    (["replay HERE --tokenizer x"], [
        "-d samm", "--template vicunia", "--forward-ms 20", "--limit 1 --ray", "--workers 0",
    ]),
    (["eval align --model http://h/v1#m"], [
        "--method align4", "--scenario Chidl", "--data none", "--timeout 0", "--alpha 2", "-t -1", "--top-p 2",
        "--min-p -1",
    ]),
    (["corpus build out --text HERE --tokenizer x"], ["--max-tokens 1"]),
]
NAMED = [f"{command} {option}" for commands, options in OPTIONS for command in commands for option in options]
REFUSED = [
    *NAMED, *(command.format(name) for command in MODEL for name in ("./none", "none.gguf")),
    *("bench", "certify", "methods samm", "report none", "corpus info none", "corpus build out --tokenizer x"),
    "generate MODEL hi --schedule equall", "generate MODEL --prompts none.jsonl", "train eagle MODEL",
    "generate MODEL hi --prediction none.txt", "generate MODEL hi --file .", "generate MODEL hi --prompts HERE",
    "replay none.jsonl --tokenizer x", "replay HERE none.jsonl --tokenizer x", "quality MODEL --text none.txt",
    "quality MODEL --text HERE", "quality ./none --dtype int8 --text HERE --save", "quantize MODEL HERE",
    "quantize MODEL out --dtype int9", "watch http://h --tuned none",
]


def test_what_needs_no_model_is_refused_before_torch_is_loaded(tmp_path):
    (tmp_path / "HERE").write_text("{}")
    code = """
import functools, sys, typer
from paceline.cli import main
typer.main.get_command = functools.cache(typer.main.get_command)
for line in sys.argv[1:]:
    status, heavy = main(line.split()), {"torch", "transformers", "numba", "scipy"} & set(sys.modules)
    assert (status, heavy) == (2, set()), (line, status, heavy)
"""
    line = [sys.executable, "-c", code, *REFUSED]
    done = subprocess.run(line, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    told = done.stderr.splitlines()
    assert [said.partition(":")[0] for said in told] == ["error"] * len(REFUSED)
    pairs = zip(NAMED, told, strict=False)
    wrong = [pair for pair in pairs if not any(word in pair[1] for word in re.split("[ =+/]", pair[0])[-2:])]
    assert wrong == [], "\n".join(map(str, wrong))
    assert os.listdir(tmp_path) == ["HERE"]


def test_parsers_are_the_formats_that_are_read():
    """Their names are options, whose check brings no torch."""
    names = {name: get_args(hint) for name, hint in get_type_hints(Settings).items()}
    assert names["tool_parser"] == ("auto", *FORMATS, "none")
    assert names["reasoning_parser"] == ("auto", *REASONING, "none")


def test_version(command):
    result = command("--version")
    assert (result.code, result.out) == (0, f"paceline {paceline.__version__}\n")


@pytest.mark.parametrize(("closed", "mistake"), [
    *((closed, "generat") for closed in ("<&-", ">&-", "2>&-")), ("<&- >&- 2>&-", "generate model_that_is_nowhere/x -"),
])
def test_standard_streams_may_be_closed(closed, mistake):
    """Once with all that a command imports, which may look at them, too."""
    for command, code in (("--version", 0), (mistake, 2)):
        line = f"{sys.executable} -m paceline {command} {closed}"
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr


@pytest.mark.parametrize("columns", ["0", "10"])
def test_no_name_is_cut_where_there_are_few_columns(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys, "argv", ["paceline", "methods"])
    monkeypatch.setattr("paceline.interrupt.at_once", lambda: None)  # Ctrl-C is pytest's
    assert process_main() == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in names())


@pytest.mark.parametrize("name", ["generate", "chat", "demo", "methods", "replay", "corpus"])
def test_help_teaches_by_example(command, name):
    assert name in command("--help").out
    assert f"paceline {name} " in command(name, "--help").out.split("\n", 2)[2]


def test_every_option_of_generate_has_a_help_text(command):
    from typer.main import get_command

    from paceline.cli import app

    for each in get_command(app).commands.values():
        for parameter in each.params:
            assert parameter.help, (each.name, parameter.name)


def test_methods_lists_what_the_registry_has(command):
    result = command("methods")
    assert result.code == 0
    listed = [line.split()[0].split(":")[0].split("[")[0] for line in result.out.splitlines() if line[:1].strip()]
    assert set(names()) <= set(listed)
    told = json.loads(command("methods", "--json").out)
    assert [method["name"] for method in told] == names()


def test_methods_are_listed_without_compiling(tmp_path):
    """Not even where nothing has been compiled before."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    line = [sys.executable, "-m", "paceline", "methods"]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


@pytest.mark.parametrize("group", ["eval", "eval vision", "train", "train tools", "corpus", "export"])
def test_a_groups_name_alone_shows_its_help(command, group):
    alone, asked = command(*group.split()), command(*group.split(), "--help")
    assert (alone.code, alone.err) == (0, "")
    assert alone.out.strip() == asked.out.strip() != ""


def test_one_method_in_full(command):
    result = command("methods", "sam")
    about = describe("sam")
    assert about.summary in result.out
    assert about.paper in result.out
    assert all(option.name in result.out for option in about.options)
    told = json.loads(command("methods", "sam", "--json").out)
    assert {o["name"]: o["default"] for o in told["options"]} == {o.name: o.default for o in about.options}


@pytest.mark.parametrize(("arguments", "line"), [
    (["eval", "align", "--model", "http://127.0.0.1:9/v1#m", "--data", "sample"], "pip install packages/net"),
    (["eval", "vision", "build", "new", "--cases", "1"], "pip install 'packages/evals[vision]'"),
])
def test_a_package_that_is_missing_is_named_with_its_extra(command, monkeypatch, arguments, line):
    read = {name for name in sys.modules if name.startswith(("paceline.evals", "paceline.net", "paceline.runs"))}
    read = {name for name in read if not name.endswith((".options", ".keys"))}  # the command line reads these
    for name in read:  # an import replaces its parent's attribute, too, which later tests want as it was
        parent, _, child = name.rpartition(".")
        monkeypatch.setattr(sys.modules[parent], child, sys.modules[name], raising=False)
    for name in read:
        monkeypatch.delitem(sys.modules, name)
    for name in ("openai", "PIL"):
        monkeypatch.setitem(sys.modules, name, None)
    result = command(*arguments)
    assert (result.code, result.err.strip().count("\n")) == (2, 0)
    assert line in result.err
