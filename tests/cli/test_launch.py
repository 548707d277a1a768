"""`paceline launch`: fakes of coding agents, which say what they were started with."""

import json
import os
import signal
import subprocess
import sys
import tomllib
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from shutil import copytree
from time import sleep
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest
from tests import models, native

from paceline.folders import cache_folder

launch = import_module("paceline.cli.launch")  # whose name in its package is the command
FAKE = """#!{python} -IS
import json, os, sys, time
with open(os.environ["SAID"] + ".part", "w") as file:
    json.dump({{"arguments": sys.argv[1:], "env": dict(os.environ)}}, file)
os.rename(file.name, os.environ["SAID"])
time.sleep(60 * ("wait" in sys.argv))
sys.exit(7)
"""


@pytest.fixture
def said(tmp_path, monkeypatch):
    """Where a client says how it was started. All clients are on the PATH, and HOME is empty."""
    (tmp_path / "home").mkdir()
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("PACELINE_API_KEY", raising=False)
    for name, value in {"HOME": "home", "PATH": "bin", "SAID": "said.json"}.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    (tmp_path / "bin").mkdir()
    for one in launch.clients().values():
        file = tmp_path / "bin" / one.command
        file.write_text(FAKE.format(python=sys.executable))
        file.chmod(0o755)
    return tmp_path / "said.json"


@pytest.fixture
def asked(monkeypatch):
    """No server is started; the words that it would get, and its key."""
    words = []

    @contextmanager
    def server(own, key, log):
        words.append((own, key))
        yield "http://127.0.0.1:1", 'a-"model"', 1 << 16

    monkeypatch.setattr(launch, "_server", server)
    return words


def there(url, key):
    """The status of the server's list of models; 0 where nobody is there."""
    try:
        with urlopen(Request(f"{url}/models", headers={"Authorization": f"Bearer {key}"}), timeout=10) as reply:
            return reply.status
    except HTTPError as error:
        return error.code
    except URLError:
        return 0


@pytest.mark.parametrize("name", launch.clients())
def test_a_client_is_told_where_its_server_is(command, said, asked, name):
    """In its environment, its arguments and files of its own folder, with nothing left to fill in; HOME stays."""
    for _ in range(2):
        assert command("launch", name, "--", "do", "this").code == 7
    ((_, first), (_, key)) = asked
    assert key != first
    told, one = json.loads(said.read_text()), launch.clients()[name]
    assert told["arguments"][-2:] == ["do", "this"]
    assert not any(key in word for word in told["arguments"])  # other users see them
    home = Path(told["env"]["HOME"])
    assert [file.name for file in home.iterdir()] == [".cache"]
    folder = home / ".cache" / "paceline" / "launch" / name
    assert folder.stat().st_mode & 0o777 == 0o700
    written = {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}
    assert written.keys() == {*one.files, *one.once}
    for file, text in written.items():
        (tomllib.loads if file.endswith(".toml") else json.loads)(text)
    own = {variable: told["env"][variable] for variable in one.env}
    everything = " ".join([*told["arguments"], *own.values(), *written.values()])
    assert "http://127.0.0.1:1" in everything
    assert "a-" in everything
    assert key in everything
    assert first not in everything
    assert "$" not in everything


def test_what_is_a_clients_own_stays(command, said, asked):
    command("launch", "claude")
    file = Path(json.loads(said.read_text())["env"]["CLAUDE_CONFIG_DIR"]) / ".claude.json"
    assert json.loads(file.read_text())["hasCompletedOnboarding"]
    file.write_text("{}")
    command("launch", "claude")
    assert file.read_text() == "{}"


ANY = ["--name", "*"]


@pytest.mark.parametrize(
    ("words", "own"),
    [
        ([], [launch.MODEL, "--corpus", ".", "--prefix-cache", "HOME/.cache/paceline/prefixes", *ANY]),
        (["m", "--corpus", "x", "--prefix-cache", "y"], ["m", "--corpus", "x", "--prefix-cache", "y", *ANY]),
        (["m", "-d", "sam"], ["m", "-d", "sam", *ANY]),
        (["--draft", "sam", "--", "--draft", "x"], [launch.MODEL, "--draft", "sam", *ANY]),
    ],
)
def test_options_before_the_dashes_are_the_servers(command, said, asked, words, own):
    command("launch", "pi", *words)
    assert [word.replace(os.environ["HOME"], "HOME") for word in asked[0][0]] == own


@pytest.mark.parametrize(("words", "variable"), [(["--api-key", "mine"], None), ([], "mine")])
def test_a_key_that_is_given_is_the_servers_and_the_clients(command, said, asked, monkeypatch, words, variable):
    if variable:
        monkeypatch.setenv("PACELINE_API_KEY", variable)
    command("launch", "pi", *words)
    assert asked[0][1] == json.loads(said.read_text())["env"]["PACELINE_API_KEY"] == "mine"


MISTAKES = {
    "codx": (["codx"], "no client is called 'codx'. Did you mean 'codex'? Known: codex, claude, "),
    "an option": (["codex", "--drafft", "sam"], "--drafft"),
    "two models": (["codex", "a", "b"], "b"),
    "a number": (["codex", "--context", "many"], "'--context': Input should be a valid integer"),
    "no client": ([], "Missing argument"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_a_line_before_anything_starts(command, said, asked, case):
    words, expected = MISTAKES[case]
    done = command("launch", *words)
    assert (done.code, asked, done.err.count("\n")) == (2, [], 1)
    assert expected in done.err
    assert not said.exists()


def test_a_client_that_is_not_there_says_what_installs_it(command, said, asked):
    (said.parent / "bin" / "codex").unlink()
    done = command("launch", "codex")
    assert (done.code, asked) == (2, [])
    assert "codex is not installed" in done.err
    assert done.err.endswith("npm install -g @openai/codex\n")


def test_settings_of_a_file_are_not_dropped_in_silence(command, said, asked, tmp_path):
    (tmp_path / "paceline.toml").write_text('[serve]\ndraft = "sam"\n')
    done = command("launch", "codex", "--config", tmp_path / "paceline.toml")
    assert (done.code, asked) == (2, [])
    assert "reads no --config" in done.err


def test_help_lists_the_clients(command):
    out = command("launch", "--help").out
    assert all(name in out and one.install in out for name, one in launch.clients().items())


KERNELS = cache_folder() / "kernels"


@pytest.fixture
def long(said, tmp_path):
    """A model, for a server that finds its kernels compiled."""
    if KERNELS.is_dir():
        copytree(KERNELS, tmp_path / "home" / ".cache" / "paceline" / "kernels")
    return models.make("qwen3", tmp_path / "long", **native.TINY | {"max_position_embeddings": 4096})


def test_a_context_that_is_too_short_is_said_at_once(command, said, long):
    done = command("launch", "claude", long)
    assert done.code == 2
    assert "long holds 4,096 tokens, and the first prompt of claude alone has" in done.err
    assert not said.exists()


@pytest.mark.parametrize("more", [0, 1])
def test_a_context_must_hold_more_than_a_clients_first_prompt(command, said, monkeypatch, more):
    @contextmanager
    def server(*_):
        yield "http://127.0.0.1:1", "small", launch.clients()["claude"].tokens + more

    monkeypatch.setattr(launch, "_server", server)
    assert command("launch", "claude").code == (7 if more else 2)
    assert said.exists() == bool(more)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="signals of POSIX")
def test_the_server_ends_with_the_client_and_the_client_with_us(said, long):
    """The client's server asks for the key; what ends the command ends both."""
    words = [sys.executable, "-m", "paceline", "launch", "pi", long, "--", "wait"]
    ours = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    while not said.exists():
        assert ours.poll() is None, ours.stderr.read()
        sleep(0.1)
    env = json.loads(said.read_text())["env"]
    written = json.loads((Path(env["PI_CODING_AGENT_DIR"]) / "models.json").read_text())
    ((_, provider),) = written["providers"].items()
    (model,) = provider["models"]
    assert (model["id"], model["contextWindow"]) == ("long", 4096)
    url, key = provider["baseUrl"], env[provider["apiKey"]]
    assert [there(url, one) for one in (key, "another")] == [200, 401]
    ours.send_signal(signal.SIGINT)  # which a terminal sends to all of its processes: it is the client's
    sleep(0.5)
    assert ours.poll() is None
    ours.terminate()
    assert ours.wait(30) == 128 + signal.SIGTERM
    assert there(url, key) == 0
    assert "serving long on" in (Path(env["PI_CODING_AGENT_DIR"]) / "server.log").read_text()
    assert os.path.isdir(env["PI_CODING_AGENT_DIR"])
