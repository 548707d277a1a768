"""Whom an API key is sent to: nobody but OpenAI gets OpenAI's, and a server that is asked gets the one named for it."""

import json

import pytest
import typer
from tests.cli.command import commands
from tests.served import Served

from paceline.cli import app
from paceline.errors import PacelineError
from paceline.evals.vision.options import BuildOptions
from paceline.evals.vision.writer import build
from paceline.net.client import api_key

COMMANDS = {
    "watch": "watch {url} --once",
    "bench server": "bench server {url} --log {log} -n 2 --warm-up 0 --out {out}",
    "bench sessions": "bench sessions {sessions} --server {host} -n 2 --out {out}",
    "tune server": "tune server {url} --tokenizer {tiny} --log {log} --batch 1,2 -n 8 --minutes 0.05 -o {out}",
    "certify server": "certify server {url} --against {url} --budget 1s --requests 0",
    "eval align": "eval align --model {url}#m --data sample --method vanilla --limit 1 -n 4 --out {out}",
    "eval vision run": "eval vision run {pictures} --subsets existence --model {url}#m,cases=1",
}


@pytest.fixture(autouse=True)
def _keys(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-openai")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Gateway: sk-openai\nAuthorization: Bearer sk-openai")
    monkeypatch.setenv("MINE", "sk-mine")
    monkeypatch.setenv("NO_KEY", "two\nlines")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_server_gets_the_key_that_is_named_for_it_and_no_other(name, command, tiny, tmp_path):
    (tmp_path / "log.jsonl").write_text(json.dumps({"prompt": "the cat", "answer": "and the dog"}) + "\n")
    said = [{"role": role, "content": "the cat"} for role in ("user", "assistant")]
    (tmp_path / "sessions.jsonl").write_text(json.dumps({"messages": said}) + "\n")
    if "vision" in name:
        build(BuildOptions(size=64), {"existence": 1}, tmp_path / "pictures", workers=1)
    for named, sent in ((), {None}), (("--api-key-env", "MINE"), {"Bearer sk-mine"}):
        with Served(accepted=(1,)) as fake:
            places = {"url": fake.url, "tiny": tiny, "log": tmp_path / "log.jsonl", "pictures": tmp_path / "pictures"}
            places |= {"sessions": tmp_path / "sessions.jsonl", "host": fake.url.removesuffix("/v1")}
            line = COMMANDS[name].format(out=tmp_path / f"out{len(named)}", **places)
            told = command(*line.split(), *named)
        assert fake.asked or name == "watch", told.err
        assert {one.get("Authorization") for one in fake.headers} == sent
        assert "sk-openai" not in str(fake.headers)
    told = command(*line.split(), "--api-key-env", "NOT_SET")
    assert (told.code, "NOT_SET, which was to hold the API key, is not in the environment" in told.err) == (2, True)


def test_every_command_that_takes_a_servers_address_is_tested_above():
    asking = {
        name for name, one in commands(typer.main.get_command(app)).items()
        if any("URL" in f"{getattr(parameter, 'help', '')}{parameter.metavar}" for parameter in one.params)
    }  # fmt: skip
    assert asking == COMMANDS.keys()


@pytest.mark.parametrize(("spec", "variable", "key"), [
    ("https://api.openai.com/v1#gpt", None, "sk-openai"), ("https://api.openai.com", None, "sk-openai"),
    ("https://api.openai.com/v1", "MINE", "sk-mine"), ("http://api.openai.com/v1", None, None),
    ("https://api.openai.com.evil.org/v1", None, None), ("https://api.openai.com:8443/v1", None, None),
    ("https://api.openai.com@evil.org/v1", None, None), ("https://evil.org/https://api.openai.com/", None, None),
    ("https://api.openai.com/v1,http://127.0.0.1:8000/v1", None, None), ("http://127.0.0.1:8000", "MINE", "sk-mine"),
])
def test_openais_key_is_for_openai_by_https(spec, variable, key):
    assert api_key(spec, variable) == key


def test_a_key_goes_to_no_other_machine_by_plain_http(tmp_path):
    (tmp_path / "key").write_text("sk-file\n")
    for spec in ("http://10.0.0.2:8000/v1", "https://ours/v1,http://theirs/v1#m", "http://localhost.evil.org"):
        for named in ({"variable": "MINE"}, {"file": tmp_path / "key"}):
            with pytest.raises(PacelineError, match=r"over plain http.*--key-over-http"):
                api_key(spec, **named)
        assert api_key(spec, file=tmp_path / "key", over_http=True) == "sk-file"
        assert api_key(spec) is None
    for spec in ("http://localhost:8000", "http://127.0.0.7/v1", "http://[::1]:8000/v1#m", "https://theirs/v1"):
        assert api_key(spec, file=tmp_path / "key") == "sk-file"
    wrong = (({"file": tmp_path / "none"}, "cannot be read"), ({"file": "key", "variable": "MINE"}, "one of the two"))
    for named, says in wrong:
        with pytest.raises(PacelineError, match=says):
            api_key("http://127.0.0.1", **named)


def test_what_is_no_key_is_named_and_not_shown():
    with pytest.raises(PacelineError, match="NO_KEY holds no API key") as raised:
        api_key("http://127.0.0.1:8000", "NO_KEY")
    assert "two" not in str(raised.value)
