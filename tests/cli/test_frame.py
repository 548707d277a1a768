"""What all commands have in common: settings from a file, variables, names that changed, and help in groups."""


import pytest
import typer
from tests.cli.command import commands

from paceline.cli import app
from paceline.cli.frame import COMMANDS, OPTIONS, configured, modern
from paceline.errors import PacelineError

EVERY = commands(typer.main.get_command(app))


@pytest.mark.parametrize(("old", "new"), COMMANDS.items())
def test_a_command_s_old_name_leads_to_one_that_exists(old, new, capsys):
    assert old not in EVERY
    assert new in EVERY
    assert modern([*old.split(), "MODEL", "--any", "x"]) == [*new.split(), "MODEL", "--any", "x"]
    assert capsys.readouterr().err == f"note: paceline {old} is called paceline {new} now\n"


def test_an_option_s_old_name_leads_to_one_that_exists(capsys):
    for path, names in OPTIONS.items():
        known = {name for param in EVERY[path].params for name in param.opts}
        assert known.isdisjoint(names)
        assert known >= set(names.values())
    assert modern(["bench", "--batch=4", "--endpoint", "u", "--", "--batch"]) == [
        "bench", "--batch-size=4", "--server", "u", "--", "--batch"
    ]  # fmt: skip
    assert "--endpoint is called --server now" in capsys.readouterr().err
    assert modern(["train", "eagle3", "m", "--batch", "4"]) == ["train", "eagle3", "m", "--batch", "4"]


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
        configured(["generate", "m", "--config", str(file)], typer.main.get_command(app))


def test_help_shows_options_in_groups(command):
    shown = command("serve", "--help").out
    titles = [line for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["Arguments:", "Options:", "Engine:", "Server:", "Limits of one request:"]
    assert "PACELINE_SERVE" not in shown
