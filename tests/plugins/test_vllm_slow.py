"""Our drafters in vLLM itself, on the demo model. Set PACELINE_VLLM_PYTHON to the interpreter of an environment with
vLLM, then

    pytest -m slow tests/plugins/test_vllm_slow.py
"""

import os
import re
from pathlib import Path

import pytest

import paceline
from paceline.certify.certificate import certify
from paceline.certify.exact import Exact
from paceline.certify.options import Scope
from paceline.certify.page import findings
from paceline.draft.recording import Recording
from paceline.engine.engine import Engine
from paceline.errors import PacelineError
from paceline.net.endpoint import Started
from paceline.peers import create_peer
from paceline.peers.reference import Reference
from paceline.train.export import export_medusa
from tests.bench.peers import asked

TEXTS = ("Repeat after me: one two three one two three one two three.", "Count from 1 to 9.", "Hello!", "a b a b a")
LENGTH = 48


@pytest.fixture(scope="module")
def engine(demo):
    if not os.environ.get("PACELINE_VLLM_PYTHON"):
        pytest.skip("set PACELINE_VLLM_PYTHON to the interpreter of an environment with vLLM")
    return Engine(demo, dtype="float32")


def host(spec, demo, engine, batch, python=None):
    under = create_peer(
        spec, str(demo), dtype="float32", threads=1, python=python or os.environ["PACELINE_VLLM_PYTHON"], batch=batch,
        max_context=1024, tokenizer=engine.tokenizer, ends=engine.target.eos_token_ids,
    )
    under.guarded = False
    under.open()
    return under


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "spec", ["vllm-paceline,eager=true,draft=sam", "vllm-paceline,eager=true,draft=sam;past=9999+suffix"]
)
def test_greedy_text_is_plain_vllms_own(spec, demo, engine):
    prompts = [engine.encode([{"role": "user", "content": text}]).tolist() for text in TEXTS]
    how = {"max_tokens": LENGTH, "ends": engine.target.eos_token_ids}
    said = {}
    for one in ("vllm,eager=true", spec):
        under = host(one, demo, engine, 2)
        try:
            alone = [asked(under, [prompt], **how)[0] for prompt in prompts]
            pairs = [*asked(under, prompts[:2], **how), *asked(under, prompts[2:], **how)]
        finally:
            under.close()
        assert [reply.tokens for reply in alone] == [reply.tokens for reply in pairs]
        said[one] = [reply.tokens for reply in alone]
        if one == spec:
            assert max(length for reply in alone for length in reply.lengths) > 2
    assert said[spec] == said["vllm,eager=true"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("repaired", [True, False])
def test_sampling_with_drafts_on_a_cpu(repaired, demo, engine):
    """vLLM 0.32 without Triton: wrong as it is (vllm-project/vllm issue 55005), right when mended."""
    spec = f"vllm-paceline,eager=true,draft=sam,paced=false,repair={str(repaired).lower()}"
    under = host(spec, demo, engine, 64)
    if under.facts["device"] != "cpu" or under.facts["triton"]:
        under.close()
        pytest.skip("vLLM's own sampling is right here")
    facts = Recording(None, tuple(engine.target.eos_token_ids), 8192)
    starts = [engine.encode(text).tolist() for text in ("one two three one two three one two", "a b a b a b a")]
    oracle = Exact(Reference.load(str(demo), dtype="float32"), None, facts, starts[:1], starts)
    try:
        try:
            found = certify(under, oracle, Scope(shift=0.1, max_tokens=8))
        except PacelineError:
            assert not repaired  # what lies in that memory may be no top-k at all
            return
        if repaired:  # a step without a draft, in which top-k ended the engine
            how = {"max_tokens": 4, "ends": engine.target.eos_token_ids, "temperature": 1.0, "top_k": 20}
            (reply,) = asked(under, [engine.encode("Hello!").tolist()], **how)
            assert reply.tokens
    finally:
        under.close()
    print(findings(found), found["sampled"])
    assert found["sampled"]["lossless"] == repaired
    if not repaired:
        assert found["sampled"]["tv"] > 5 * found["sampled"]["tv_by_chance"]


DOCS = Path(__file__).parents[2] / "docs" / "vllm.md"
STARTS = re.compile(r"^(?:ENV/bin/)?python -m vllm\.(?:.*\\\n)*.*", re.M)
SERVED = [one.replace("\\\n", " ") for one in STARTS.findall(DOCS.read_text())]


def test_each_documented_server_is_started_by_what_pip_installs():
    assert (len(SERVED), "vllm serve" in DOCS.read_text()) == (4, False)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", [one for one in SERVED if "worker-cls" not in one])
def test_a_documented_command_starts_and_answers(command, demo, tmp_path):
    python = os.environ.get("PACELINE_VLLM_PYTHON")
    if not python:
        pytest.skip("set PACELINE_VLLM_PYTHON to the interpreter of an environment with vLLM")
    export_medusa(demo.with_name("demo-medusa"), demo, tmp_path / "medusa")
    for theirs, ours in (
        ("build/medusa-vllm", tmp_path / "medusa"), ("build/eagle3", demo.with_name("demo-eagle3")), ("MODEL", demo),
        ("ENV/bin/python", "python"), ("python -m", f"{python} -m"),
    ):  # fmt: skip
        command = command.replace(theirs, str(ours))
    ours = os.pathsep.join(str(Path(part).parent) for part in paceline.__path__)
    env = os.environ | {"PYTHONPATH": ours, "VLLM_CPU_KVCACHE_SPACE": "1"}
    quick = " --enforce-eager --max-model-len 256"
    with Started(command + quick, env=env) as server:
        (one,) = server.ask([{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4, "temperature": 0}])
        assert one.usage["completion_tokens"] <= 4


@pytest.fixture(scope="module")
def interpreted(engine, tmp_path_factory):
    """An interpreter whose vLLM has its second model runner, slowly, in all processes that it starts."""
    path = tmp_path_factory.mktemp("bin") / "python"
    hooks = Path(__file__).with_name("interpreted_triton")
    python = os.environ["PACELINE_VLLM_PYTHON"]
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{hooks}:$PYTHONPATH" exec "{python}" "$@"\n')
    path.chmod(0o755)
    return str(path)


SHORT = {"max_tokens": 24}


@pytest.fixture(scope="module")
def plain(demo, engine):
    """Two prompts, and their greedy answers by vLLM's first runner without drafts."""
    prompts = [engine.encode([{"role": "user", "content": text}]).tolist() for text in TEXTS[:2]]
    under = host("vllm,eager=true", demo, engine, 2)
    try:
        return prompts, [asked(under, [prompt], **SHORT)[0].tokens for prompt in prompts]
    finally:
        under.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("draft", ["sam", "suffix;past=9999", "hierarchy", "auto"])
def test_the_second_runner_says_what_the_first_says_without_drafts(draft, demo, engine, interpreted, plain):
    """One at a time and two at a time."""
    prompts, expected = plain
    under = host(f"vllm-paceline,eager=true,v2=true,paced=false,draft={draft}", demo, engine, 2, interpreted)
    try:
        alone = [asked(under, [prompt], **SHORT)[0] for prompt in prompts]
        pair = asked(under, prompts, **SHORT)
        under.forget()
        again = asked(under, prompts[:1], **SHORT)
    finally:
        under.close()
    assert ([reply.tokens for reply in alone], [reply.tokens for reply in pair]) == (expected, expected)
    assert [reply.tokens for reply in again] == expected[:1]
    assert sum(reply.batch.get("drafted", 0) for reply in (*alone, *pair)) > 0, "drafts were verified"
    if draft != "auto":  # what it verifies depends on the clock, and a draft costs much here
        assert max(length for reply in (*alone, *pair) for length in reply.lengths) > 2, "and accepted"
    if draft == "suffix;past=9999":
        assert len(pair[0].lengths) < len(alone[0].lengths), "finished requests are read"
        assert len(again[0].lengths) == len(alone[0].lengths), "until it is told to forget them"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sampling_in_the_second_runner(demo, engine, interpreted):
    under = host("vllm-paceline,eager=true,v2=true,draft=sam,k=3,paced=false", demo, engine, 64, interpreted)
    facts = Recording(None, tuple(engine.target.eos_token_ids), 8192)
    starts = [engine.encode(text).tolist() for text in ("one two three one two three one two", "a b a b a b a")]
    oracle = Exact(Reference.load(str(demo), dtype="float32"), None, facts, starts[:1], starts)
    try:
        found = certify(under, oracle, Scope(requests=256, max_tokens=8))
    finally:
        under.close()
    print(findings(found), found["sampled"])
    assert found["sampled"]["lossless"]
