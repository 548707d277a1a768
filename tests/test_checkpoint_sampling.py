"""Answers are drawn as a checkpoint says, where neither request nor option says otherwise."""

import json

import httpx2 as httpx
import pytest

from paceline.cli import main
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.errors import ModelError, PacelineError
from paceline.serve.local import Local
from paceline.serve.settings import Settings
from paceline.target.load import load
from tests import models, native
from tests.gguf_files import write
from tests.serve.live import engine, serving

SAYS = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}
KEYS = {"temp": 0.7, "top_p": 0.8, "min_p": 0.05, "penalty_repeat": 1.05}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = models.make("qwen3", tmp_path_factory.mktemp("m") / "tiny", **native.TINY)
    path = made / "generation_config.json"
    facts = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(facts | SAYS | {"do_sample": True, "typical_p": None}))
    return made


@pytest.fixture(scope="module")
def file(folder, tmp_path_factory):
    def more(writer):
        for key, value in KEYS.items():
            writer.add_float32(f"general.sampling.{key}", value)
        writer.add_int32("general.sampling.top_k", 20)

    return write(folder, tmp_path_factory.mktemp("m") / "tiny.gguf", more=more)


@pytest.fixture
def asked(monkeypatch):
    """The parameters of every request that an engine gets."""
    seen, check = [], Engine.check

    def noted(self, prompt, params):
        seen.append(params)
        return check(self, prompt, params)

    monkeypatch.setattr(Engine, "check", noted)
    return seen


def drawn(params):
    return {name: getattr(params, name) for name in SAYS}


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_checkpoint_says_how_its_tokens_are_drawn(folder, file, kind):
    assert load(folder if kind == "folder" else file).sampling == SAYS


@pytest.mark.parametrize(("facts", "what"), [({"top_k": -1}, {"top_k": 0}), ({"top_k": None}, {}), ({}, {})])
def test_what_a_checkpoint_leaves_open(tmp_path, facts, what):
    made = models.make("qwen3", tmp_path / "tiny", **native.TINY)
    (made / "generation_config.json").write_text(json.dumps(facts))
    assert load(made).sampling == what


def test_a_checkpoint_that_says_nonsense(tmp_path):
    made = models.make("qwen3", tmp_path / "tiny", **native.TINY)
    (made / "generation_config.json").write_text('{"top_p": 3}')
    with pytest.raises(ModelError, match=r"generation_config\.json: top_p is 3; it must be above 0 and at most 1"):
        load(made)


@pytest.mark.parametrize(("option", "request_", "expected"), [
    ("checkpoint", {}, SAYS), ("checkpoint", {"temperature": 0, "top_k": -1}, SAYS | {"temperature": 0, "top_k": 0}),
    ("none", {}, drawn(SamplingParams(temperature=1.0))), ("top_p=0.5,top_k=3", {}, SAYS | {"top_p": 0.5, "top_k": 3}),
    ("none,temperature=0.5", {"top_p": 0.3}, drawn(SamplingParams(temperature=0.5, top_p=0.3))),
])
def test_a_server_samples_as_the_checkpoint_says(folder, asked, option, request_, expected):
    with serving(engine(folder), sampling=option) as address:
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        for route, body in (("chat/completions", chat), ("completions", {"prompt": "a", "max_tokens": 1}),
                            ("responses", {"input": "a", "max_output_tokens": 16})):  # fmt: skip
            done = httpx.post(f"{address}/v1/{route}", json=body | ({} if route == "responses" else request_))
            assert done.status_code == 200, done.text
            if route != "responses":
                assert drawn(asked[-1]) == expected
    if not request_:
        assert drawn(asked[-1]) == expected


@pytest.mark.parametrize(("option", "why"), [
    ("hot", "--sampling has 'hot'; it can be checkpoint, none, or NAME=NUMBER"), ("seed=1", "has 'seed=1'"),
    ("top_p=x", "top_p is 'x'; it must be a number"), ("top_p=2", "top_p is 2.0; it must be above 0"),
])
def test_sampling_that_cannot_be_read(option, why):
    with pytest.raises(PacelineError, match=why):
        Settings(sampling=option)


def test_endpoints_of_benchmarks_do_not_heed_it(folder, asked):
    local = Local(Engine(str(folder), dtype="float32", device="cpu"))
    local.ask([{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "temperature": 0.0}])
    assert drawn(asked[-1]) == drawn(SamplingParams())


@pytest.mark.parametrize("words", ["generate", "chat"])
def test_the_command_line_samples_as_the_checkpoint_says(folder, tmp_path, asked, words, capsys, monkeypatch):
    if words == "chat":
        monkeypatch.setattr("builtins.input", lambda *_, lines=iter(["a", "/quit"] * 2): next(lines))
        command = ["chat", folder, "-n", "1"]
    else:
        command = ["generate", folder, "a", "-n", "1"]
    assert main([*map(str, command)]) == 0
    assert drawn(asked[-1]) == SAYS
    assert "as the checkpoint says: temperature 0.7, top_p 0.8" in capsys.readouterr().err
    assert main([*map(str, command), "-t", "0", "--repetition-penalty", "1"]) == 0
    assert drawn(asked[-1]) == SAYS | {"temperature": 0, "repetition_penalty": 1}
    if words == "generate":
        path = tmp_path / "p.jsonl"
        path.write_text('{"prompt": "a", "top_p": 0.4}\n{"prompt": "a"}\n')
        assert main(["generate", str(folder), "-p", str(path), "-n", "1"]) == 0
        assert [drawn(one) for one in asked[-2:]] == [SAYS | {"top_p": 0.4}, SAYS]
