"""Peers that are servers: vLLM, llama.cpp's, and any command; a small server stands in for them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests import models
from tests.bench.peers import PROMPTS, asked, check, opened, peer

import paceline
from paceline.errors import ModelError, PacelineError
from paceline.peers import NotInstalled, served, vllm
from paceline.peers.served import rounds
from paceline.target.load import read_config

SCRIPT = Path(__file__).with_name("served_peer.py")
COMMAND = f"{sys.executable} {SCRIPT} --port {{port}}"
VLLM = {
    "__init__.py": "__version__ = '0.0'\n",
    "triton_utils.py": "HAS_TRITON = False\n",
    "entrypoints/__init__.py": "",
    "entrypoints/openai/__init__.py": "",
    "entrypoints/openai/api_server.py": f"import sys; sys.argv.append('--tell')\nexec(open({str(SCRIPT)!r}).read())\n",
}
XLLAMACPP = """
import subprocess, sys, types
__version__ = "1.0"
common_speculative_type = types.SimpleNamespace(**{f"COMMON_SPECULATIVE_TYPE_{name}": name.lower().replace("_", "-")
    for name in ("NGRAM_MOD", "NGRAM_CACHE", "DRAFT_EAGLE3", "DRAFT_MTP")})
def get_system_info(): return "AVX2 = 1"
class Any:
    def __getattr__(self, name):
        setattr(self, name, Any())
        return getattr(self, name)
class CommonParams(Any):
    def __init__(self):
        self.speculative.types, self.speculative.draft.n_max = ["none"], 3
        self.speculative.ngram_cache.lookup_cache_static = self.speculative.draft.mparams.path = ""
class Server:
    def __init__(self, params):
        drafting = params.speculative
        file = {"draft-eagle3": drafting.draft.mparams.path, "ngram-cache": drafting.ngram_cache.lookup_cache_static}
        kind = drafting.types[0]
        fits = kind not in file or open(file[kind]).read() == "drafter"
        size = drafting.draft.n_max if kind in ("draft-eagle3", "draft-mtp") else 5
        words = f"--port {params.port} --owner llamacpp --spec {kind if fits else 'none'} --k {size}"
        self.process = subprocess.Popen([sys.executable, SCRIPT, *words.split()])
"""
TORCH = "__version__ = '0'\nclass cuda:\n    is_available = lambda: False\ndef get_num_threads():\n    return 1\n"


@pytest.fixture
def python(tmp_path):
    """An interpreter with stand-ins of vLLM, of xllamacpp and of what vLLM brings along."""
    packages = tmp_path / "packages"
    for name, text in VLLM.items():
        (packages / "vllm" / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / "vllm" / name).write_text(text)
    (packages / "xllamacpp.py").write_text(f"SCRIPT = {str(SCRIPT)!r}\n{XLLAMACPP}")
    (packages / "torch.py").write_text(TORCH)
    (packages / "transformers.py").write_text("__version__ = '0'\n")
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={packages}:$PYTHONPATH exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def file(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    return tmp_path / "model.gguf"


def told(one):
    """The command line and the variables of vLLM's stand-in."""
    command, variables = json.loads(one.server.model)
    return command, variables


def option_of(command, name):
    return command[list(command).index(f"--{name}") + 1]


def test_a_command_is_a_peer(tiny):
    with opened(COMMAND, tiny) as one:
        one.wake(0.01)
        first, second = asked(one, [[4, 6], [9]], max_tokens=5)
        assert (first.tokens, second.tokens) == ([6, 7, 8, 9, 10], [9, 10, 11, 12, 13])
        assert (first.lengths, first.text, first.finish_reason) == ([2, 2, 1], "6 7 8 9 10", "length")
        assert first.times == sorted(first.times or [])
        assert (first.times or [0])[-1] <= first.seconds
        assert first.batch == {"drafts": 4, "drafted": 12, "accepted": 4}  # of both requests
        (ended,) = asked(one, [[4, 6]], max_tokens=5, ends=(8,))
        assert ended.tokens == [6, 7, 8]
        with pytest.raises(PacelineError, match="bad luck"):
            asked(one, [[666]], max_tokens=5)
        assert (asked(one, [[4, 6]], max_tokens=2)[0].tokens, one.facts["server"]) == ([6, 7], "vllm")


def test_llama_cpp_says_what_each_round_drafted(tiny):
    with opened(f"{COMMAND} --owner llamacpp --spec ngram-mod", tiny) as one:
        (turn,) = asked(one, [[4, 6]], max_tokens=9)
        assert (turn.lengths, turn.nodes) == ([1, 3, 3, 1, 1], [0, 5, 5, 0, 0])
        check(turn)
        (turn,) = asked(one, [[4, 6]], max_tokens=5, ends=(8,), temperature=0.7, seeds=(5,))
        assert (turn.tokens, turn.finish_reason) == ([6, 7, 8], "stop")
        with pytest.raises(PacelineError, match="bad luck"):
            asked(one, [[666]], max_tokens=5)


def test_vllm_gets_its_configuration_and_the_threads(python, tiny, draft):
    with opened(f"vllm-draft:{draft},k=3,eager=yes", tiny, python=python, threads=3) as one:
        command, variables = told(one)
        assert asked(one, PROMPTS[:1], max_tokens=4)[0].tokens == [41, 42, 43, 44]
        assert 0 < one.draft_bytes < one.target_bytes
        settings = one.facts
    assert (variables["OMP_NUM_THREADS"], variables["VLLM_CPU_OMP_THREADS_BIND"]) == ("3", "nobind")
    wanted = {"model": str(tiny), "dtype": "float32", "max-num-seqs": "4", "max-model-len": str(models.MAX_CONTEXT)}
    assert {name: option_of(command, name) for name in wanted} == wanted
    drafting = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    assert json.loads(option_of(command, "speculative-config")) == settings["speculative_config"] == drafting
    token = 2 * 2 * 16 * 4  # keys and values of 2 heads of 16 float32s, for each layer
    size = 2 * (1 << 30) + (4 + 1) * token * 4 * (models.MAX_CONTEXT + 128)
    assert option_of(command, "kv-cache-memory-bytes") == str(size)
    assert {"--enforce-eager", "--no-enable-prefix-caching"} <= set(command)
    assert (settings["engine"], settings["device"], settings["triton"]) == ("vllm 0.0", "cpu", False)


@pytest.mark.parametrize(("options", "method", "worker"), [
    ("", {"model": "paceline.plugins.vllm.Proposer"}, None),
    (",v2=true", {"method": "ngram"}, "paceline.plugins.vllm_v2.Worker"),
])
def test_our_drafters_in_either_runner(options, method, worker, python, tiny):
    with opened(f"vllm-paceline,draft=suffix,k=3{options}", tiny, python=python) as one:
        command, variables = told(one)
    assert json.loads(option_of(command, "speculative-config")) == method | {"num_speculative_tokens": 3}
    assert json.loads(option_of(command, "additional-config"))["paceline"]["draft"] == "suffix"
    assert (option_of(command, "worker-cls") if worker else None) == worker
    assert variables.get("VLLM_USE_V2_MODEL_RUNNER") == ("1" if worker else None)
    assert str(Path(paceline.__file__).parent.parent) in variables["PYTHONPATH"].split(":")


def test_a_drafter_that_learns_starts_anew_and_no_other(python, tiny):
    for spec, learns in {"vllm-suffix": True, "vllm-ngram": False}.items():
        with opened(spec, tiny, python=python) as one:
            before = one.server.url
            one.forget()
            assert (one.server.url != before) == learns


def test_vllm_that_samples_wrongly_is_not_asked_to(python, tiny):
    sampled = {"max_tokens": 3, "temperature": 0.7, "seeds": (1,)}
    with opened("vllm-ngram", tiny, python=python) as one:
        with pytest.raises(PacelineError, match=r"cannot sample here: on a CPU without triton-cpu.*issue 55005"):
            asked(one, PROMPTS[:1], **sampled)
        one.facts["triton"] = True
        assert asked(one, PROMPTS[:1], **sampled)
    with opened("vllm", tiny, python=python) as one:
        assert asked(one, PROMPTS[:1], **sampled)


def test_what_is_not_there_is_named(tiny, file):
    for spec, python, words in (
        ("vllm", None, r"environment of its own: .*pip install vllm .*--peer-python"),
        ("vllm", "/no/no-such-python", "no-such-python cannot be run"),
        ("vllm", sys.executable, "No module named 'vllm'"),
        (f"xllamacpp:{file}", "vllm=/somewhere/python", "xllamacpp wants an environment of its own: python -m"),
        (f"xllamacpp:{file}", sys.executable, r"cannot run it \(ModuleNotFoundError"),
    ):
        one = peer(spec, tiny, python=python)
        with pytest.raises(NotInstalled, match=words):
            one.open()
        one.close()
    with pytest.raises(ModelError, match="there is no file"):
        peer("xllamacpp:none.gguf", tiny, python=sys.executable).open()
    with pytest.raises(PacelineError, match="no-such-program cannot be started"):
        peer("no-such-program serve", tiny).open()


def test_llama_cpp_by_its_wheel(python, file, tmp_path):
    (tmp_path / "drafter").write_text("drafter")
    with opened(f"xllamacpp:{file}", tmp_path, python=f"vllm=nowhere,xllamacpp={python}", threads=3) as one:
        (turn,) = asked(one, [[4, 6]], max_tokens=5)
        assert (turn.tokens, turn.lengths, turn.nodes) == ([6, 7, 8, 9, 10], [1] * 5, [0] * 5)
        assert (one.facts["threads"], one.facts["system"], one.target_bytes) == (3, "AVX2 = 1", 4)
        assert one.slots == 1
    for options, size in {"spec=draft-eagle3,k=7": 7, "spec=draft-eagle3": 3, "spec=ngram-cache": 5}.items():
        with opened(f"xllamacpp:{file},{options},file={tmp_path / 'drafter'}", tmp_path, python=python) as one:
            assert asked(one, [[4, 6]], max_tokens=9)[0].nodes == [0, size, size, 0, 0]
    with opened(f"xllamacpp:{file},spec=draft-mtp,k=2", tmp_path, python=python) as one:  # in the model's own file
        assert asked(one, [[4, 6]], max_tokens=9)[0].nodes == [0, 2, 2, 0, 0]
    refused = {"spec=draft-eagle3": "draft-eagle3 needs file=", "file=none.gguf": "there is no file"}
    for options, words in refused.items():
        with pytest.raises(PacelineError, match=words):
            peer(f"xllamacpp:{file},{options}", tmp_path, python=python).open()


@pytest.mark.parametrize(("fault", "says"), [
    ("start", "ended with status 1: .*RuntimeError: out of memory"), ("die", "broke off|cannot be"),
    ("hang", "timed out"),
])
def test_a_server_that_fails(fault, says, tiny, monkeypatch):
    monkeypatch.setattr(served, "ANSWER_SECONDS", 0.5)
    one = peer(f"{COMMAND} --fault {fault}", tiny)
    with pytest.raises(PacelineError, match=says):
        one.open()
    one.close()
    with pytest.raises(PacelineError, match="is not running"):
        asked(one, PROMPTS[:1], max_tokens=3)


def state(pid):
    """As /proc tells it: T is stopped, Z dead; "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def becomes(pid, wanted):
    for _ in range(200):
        if state(pid) in wanted:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is not stopped")
def test_a_server_is_stopped_between_answers_and_dies_with_us(tiny):
    with opened(COMMAND, tiny) as one:
        process = one.server._process
        for _ in range(2):
            assert becomes(process.pid, "T")
            assert asked(one, [[4, 6]], max_tokens=2)
    assert becomes(process.pid, ("", "Z"))
    program = (
        "import os\nfrom paceline.net.endpoint import Started\n"
        f"server = Started({COMMAND!r}).__enter__()\nserver.pause(True)\n"
        "print(server._process.pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert becomes(int(ended.stdout), ("", "Z"))


@pytest.mark.parametrize(("events", "expected"), [
    ([(0.1, 1, 0, 0), (0.2, 1, 0, 0)], ([0.1, 0.2], [1, 1], [0, 0])),
    # A draft of 22, of which one stood, then a round without a draft, then a draft of which none did.
    ([(0.1, 1, 0, 0), (0.2, 1, 22, 1), (0.3, 1, 22, 1), (0.4, 1, 22, 1), (0.5, 1, 30, 1)],
     ([0.1, 0.3, 0.4, 0.5], [1, 2, 1, 1], [0, 22, 0, 8])),
    # Several tokens in an event, and an answer that ends inside a draft.
    ([(0.1, 1, 0, 0), (0.2, 2, 6, 4)], ([0.1, 0.2], [1, 2], [0, 6])),
    ([], ([], [], [])),
])
def test_rounds_are_told_by_the_counts_of_drafts(events, expected):
    assert rounds(events) == expected


def test_vllms_cache_grows_with_batch_and_context(tiny):
    setup = peer("transformers", tiny, batch=3).setup
    assert vllm.cache_bytes(setup, read_config(tiny)) == (1 << 30) + 3 * (128 + 128) * 4 * 2 * 2 * 16 * 4
