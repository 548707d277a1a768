"""What all commands have in common: settings from a file, variables, names that changed, and help in groups."""


import re
from dataclasses import asdict

import pytest
import typer
from tests.cli.command import commands

from paceline.bench import suites
from paceline.cli import app
from paceline.cli.frame import COMMANDS, OPTIONS, SUITES, configured, modern
from paceline.engine.engine import EngineConfig
from paceline.errors import PacelineError
from paceline.serve.settings import LIMITS

ROOT = typer.main.get_command(app)
EVERY = commands(ROOT)


@pytest.mark.parametrize(("old", "new"), COMMANDS.items())
def test_a_command_s_old_name_leads_to_one_that_exists(old, new, capsys):
    assert old not in EVERY
    assert new in EVERY
    assert modern([*old.split(), "MODEL", "--any", "x"], ROOT) == [*new.split(), "MODEL", "--any", "x"]
    assert capsys.readouterr().err == f"note: paceline {old} is called paceline {new} now\n"


SAID = {"--model": "endpoint:URL,a=1,model=NAME,b=2", "--engine": "http://h"}  # other values than 7


@pytest.mark.parametrize("old", OPTIONS, ids=lambda old: f"{old.command} {old.option}")
@pytest.mark.parametrize("by", ["words", "a word", "a file", "a variable"])
def test_an_option_s_old_name_leads_to_one_that_exists(old, by, capsys, tmp_path, monkeypatch):
    """However it is given; one that made another command of it leads there."""
    command = old.to or old.command
    names = {name for param in EVERY[command].params for name in param.opts}
    assert old.new in names or (not old.new and any(one.param_type_name == "argument" for one in EVERY[command].params))
    given, new = SAID.get(old.option, "7"), [*command.split(), *([] if old.new else ["http://h"])]
    if old.value != r"\g<0>":
        new += [old.new, {"--model": "URL#NAME,a=1,b=2"}.get(old.option, f"{old.option.removeprefix('--max-')}=7")]
    elif old.new:
        new += [old.new, given]
    elif old.option != "--engine":
        given = "http://h"
    words = old.command.split()
    if by == "a file":
        file = tmp_path / "p.toml"
        file.write_text(f'[{".".join(words)}]\n{old.option[2:]} = "{given}"\n')
        words = ["--config", str(file), *words]
    elif by == "a variable":
        monkeypatch.setenv(re.sub("[ -]", "_", f"PACELINE_{old.command} {old.option[2:]}").upper(), given)
    else:
        words += [old.option, given] if by == "words" else [f"{old.option}={given}"]
    got, settings = configured(words, ROOT)
    assert (got, re.search("7|//h", str(settings))) == (new, None)
    said = capsys.readouterr().err
    assert (said.count("note: "), old.option in said, (old.new or old.to) in said) == (1, True, True)


@pytest.mark.parametrize(("old", "new"), [
    ("bench m --batch=4 -- --batch-size", "bench m --batch=4 -- --batch-size"),
    ("bench m -b 4 --schedule ragged --batch-size 1,2", "bench schedules m -b 4 --schedule ragged --batch 1,2"),
    ("bench --suite log.jsonl --server http://a,http://b#m --concurrency 8",
     "bench server http://a http://b#m --log log.jsonl --batch 8"),
    ("bench --server http://a --suite spec-bench", "bench server http://a --suite spec-bench"),
    ("tune m --batch-sizes 1,8 --server http://a --without http://b -o t",
     "tune server http://a --tokenizer m --batch 1,8 --against http://b -o t"),
    ("certify --batch-size 2 --server http://a --shift 1 m", "certify server http://a --against m --batch 2 --shift 1"),
    ("certify m --server http://a --reference http://b", "certify server http://a --against m --against http://b"),
    ("certify m --engine vllm", "certify m --engine vllm"),
    ("launch codex m --max-batch 2 -- --max-batch 3", "launch codex m --batch 2 -- --max-batch 3"),
    ("train eagle3 m --batch 4", "train eagle3 m --batch 4"),
])  # fmt: skip
def test_a_command_of_old_names_is_one_of_new_ones(old, new):
    assert modern(old.split(), ROOT) == new.split()


def test_a_suite_of_ours_is_no_log():
    assert [one for one in suites.SUITES if not re.fullmatch(SUITES, one)] == []


def test_old_names_stand_in_no_help(command):
    for path in {old.command for old in OPTIONS}:
        shown = command(*path.split(), "--help").out.split()
        assert not {old.option for old in OPTIONS if (old.command, old.when) == (path, ".*")} & {*shown}


def test_settings_of_a_command_of_two_words(command, tmp_path, monkeypatch):
    file = tmp_path / "paceline.toml"
    file.write_text('[bench]\nbatch = 2\n[bench.server]\nbatch = 3\nkey-over-http = true\n')
    words, settings = configured(["bench", "server", "http://h", "--config", str(file)], ROOT)
    assert settings == {"bench": {"batch": 2}, "bench server": {"concurrency": 3, "key_over_http": True}}
    monkeypatch.setenv("PACELINE_BENCH_SERVER_API_KEY_ENV", "NO_SUCH_KEY")
    told = command(*words)
    assert (told.code, "NO_SUCH_KEY" in told.err) == (2, True)


def test_settings_come_from_a_file_a_variable_and_the_command_line(tiny, tmp_path, command, monkeypatch):
    file = tmp_path / "paceline.toml"
    file.write_text('[generate]\nmax-tokens = 3\njson = true\n[eval.align]\nlimit = 2\n')
    words = ("generate", str(tiny), "the cat", "--config", str(file))
    assert '"new_tokens": 3' in command(*words).out
    assert '"new_tokens": 5' in command(*words, "-n", "5").out
    monkeypatch.setenv("PACELINE_GENERATE_MAX_TOKENS", "4")
    assert '"new_tokens": 4' in command(*words).out


@pytest.mark.parametrize(("text", "says"), [
    ("[generate]\nmax_tokens = 3", "has 'max_tokens'. Did you mean 'max-tokens'?"),
    ("[generat]\n", "has 'generat'. Did you mean 'generate'?"), ("generate = 3", "must be a table"),
    ("[generate", "cannot be read"), (None, "cannot be read"),
])
def test_settings_that_cannot_be_are_named(text, says, tmp_path):
    file = tmp_path / "paceline.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(PacelineError, match=says.replace("?", r"\?")):
        configured(["generate", "m", "--config", str(file)], ROOT)


def test_help_shows_options_in_groups(command):
    """By the class that declares them, or one of their own."""
    engine, shown = command("certify", "--help").out, command("serve", "--help").out
    of_engine, titles = (
        [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
        for text in (engine, shown)
    )
    assert of_engine == ["Arguments:", "Options:", "Engine:", "Tests:"]
    assert titles == ["Arguments:", "Options:", "Access:", "Load:", "Engine:", "Requests and answers:", "Watching it:",
                      "Limits that --limit NAME=N sets:"]  # fmt: skip
    access, load = shown.partition("\nLoad:")[0], shown.partition("\nLoad:")[2].partition("\nEngine:")[0]
    assert "--share-prefixes" in access
    assert "--head-seconds" in load
    for name, (default, *_) in LIMITS.items():
        assert re.search(rf"^  {name} +{'none' if default is None else f'{default:,}'}: ", shown, re.MULTILINE)
    assert "PACELINE_SERVE" not in shown


def test_every_limit_reaches_the_server(command, tiny, monkeypatch):
    seen, configs, check = [], [], EngineConfig.__post_init__

    def noted(config):
        configs.append(config)
        check(config)

    def refuse(worker, settings, requests):
        seen.append((worker, settings))
        worker.stop()
        raise PacelineError("seen enough")

    monkeypatch.setattr("paceline.serve.routes.create_app", refuse)
    monkeypatch.setattr(EngineConfig, "__post_init__", noted)
    most = {name: 3 + i for i, name in enumerate(LIMITS)}
    flags = [word for name, n in most.items() for word in ("--limit", f"{name}={n}")]
    assert "seen enough" in command("serve", tiny, "--port", 0, "--api-key", "k", *flags).err
    ((worker, settings),) = seen
    of_requests = {name.replace("_", "-"): n for name, n in asdict(settings.limits).items()}
    others = {"waiting": worker.most_waiting, "body": settings.max_body, "connections": settings.max_connections}
    assert of_requests | others | {"rows-per-key": configs[0].max_rows_per_client} == most
    refused = command("serve", tiny, "--limit", "rows-per-key=2")
    assert (refused.code, "rows-per-key=N needs an --api-key" in refused.err) == (2, True)
