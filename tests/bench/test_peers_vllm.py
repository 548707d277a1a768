"""vLLM as a peer: its protocol, with scripts in the place of its worker, and the worker with a stand-in for vLLM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests import models
from tests.bench.peers import NEW, PROMPTS, check, opened, peer

import paceline
from paceline.errors import PacelineError
from paceline.target.load import read_config
from paceline.workbench.contestant import Ask, NotInstalled
from paceline.workbench.peers import vllm
from paceline.workbench.peers import worker as workers
from paceline.workbench.peers.vllm import cache_bytes, verified
from paceline.workbench.peers.worker import Worker

READY = '{"ready": {"engine": "vllm 0", "device": "cpu", "triton": false, "threads": 2}}'
HEAD = "import json, os, sys, time\nconfig = json.loads(sys.stdin.readline())\n"
SAY = "def say(x): sys.stdout.write((x if isinstance(x, str) else json.dumps(x)) + '\\n'); sys.stdout.flush()\n"
ANSWER = """
for line in sys.stdin:
    asked = json.loads(line)
    if "forget" in asked or "wake" in asked:
        say({"done": True})
        continue
    told = [{"tokens": [p[-1], p[-1], 7, 8][:r], "lengths": [1, 3], "times": [0.1, 0.2], "accepted": [2],
             "drafted": [4]} for p, r in zip(asked["prompts"], asked["limits"])]
    say({"answers": told, "seconds": 0.25, "peak_bytes": 1000, "config": config})
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a script in the worker's place."""

    def put(body: str) -> None:
        script = tmp_path / "worker.py"
        script.write_text(HEAD + SAY + body)
        monkeypatch.setattr(vllm, "WORKER", script)

    return put


def test_vllm_answers(stand_in: Callable[[str], None], tiny: Path) -> None:
    stand_in(f"say('''{READY}''')" + ANSWER)
    with opened("vllm-ngram,k=4", tiny, python=sys.executable) as one:
        turns = one.answer(PROMPTS[:2], Ask(max_tokens=3, ends=(8,)))
        (ended,) = one.answer(PROMPTS[:1], Ask(max_tokens=50, ends=(7,)))
        assert (ended.tokens, ended.lengths, ended.finish) == ([41, 41, 7], [1, 2], "stop")
        settings = one.settings
    assert [turn.tokens for turn in turns] == [[41, 41, 7], [52, 52, 7]]
    for turn in turns:
        assert (turn.seconds, turn.peak_bytes, turn.lengths, turn.nodes) == (0.25, 1000, [1, 2], [0, 4])
        check(turn)
    assert settings["engine"] == "vllm 0"
    assert settings["speculative_config"] == {
        "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 5,
    }  # fmt: skip
    assert settings["prefix_caching"] is False


def test_vllm_gets_its_configuration_and_the_threads(stand_in: Callable[[str], None], tiny: Path, draft: Path) -> None:
    stand_in("say({'ready': {'config': config, 'threads': os.environ.get('OMP_NUM_THREADS'), "
             "'path': os.environ.get('PYTHONPATH'), 'device': 'cpu', 'triton': False}})" + ANSWER)  # fmt: skip
    with opened(f"vllm-draft:{draft},k=3,eager=yes", tiny, python=sys.executable, threads=3) as one:
        told = one.settings
        (turn,) = one.answer(PROMPTS[:1], Ask(max_tokens=NEW))
        assert turn.calls == 4
        assert 0 < one.draft_bytes < one.target_bytes
    config = told["config"]
    assert (told["threads"], told["path"]) == ("3", None)
    assert (config["model"], config["dtype"], config["batch"], config["eager"]) == (str(tiny), "float32", 4, True)
    assert config["max_context"] == models.MAX_CONTEXT
    assert config["speculative"] == {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    token = 2 * 2 * 16 * 4  # keys and values of 2 heads of 16 float32s, for each layer
    assert config["kv_bytes"] == 2 * (1 << 30) + (4 + 1) * token * 4 * (models.MAX_CONTEXT + 128)


def test_our_drafters_in_either_runner(stand_in: Callable[[str], None], tiny: Path) -> None:
    stand_in("say({'ready': {'config': config, 'path': os.environ.get('PYTHONPATH'), 'device': 'cpu', 'triton': False, "
             "'runner': os.environ.get('VLLM_USE_V2_MODEL_RUNNER')}})" + ANSWER)  # fmt: skip
    expected = {
        "": ({"model": "paceline.plugins.vllm.Proposer"}, "auto", None),
        ",v2=true": ({"method": "ngram"}, "paceline.plugins.vllm_v2.Worker", "1"),
    }
    for options, (method, worker, runner) in expected.items():
        with opened(f"vllm-paceline,draft=suffix,k=3{options}", tiny, python=sys.executable) as one:
            told = one.settings
        config = told["config"]
        assert config["speculative"] == method | {"num_speculative_tokens": 3}
        assert (config["worker"], told["runner"]) == (worker, runner)
        assert config["additional"]["paceline"]["draft"] == "suffix"
        assert told["path"] == str(Path(paceline.__file__).parent.parent)


def test_vllm_is_woken_in_its_own_process(stand_in: Callable[[str], None], tiny: Path) -> None:
    stand_in(f"say('''{READY}''')\nfor line in sys.stdin:\n    say({{'error': line.strip()}})\n")
    with opened("vllm", tiny, python=sys.executable) as one, pytest.raises(PacelineError, match=r'"wake": 0\.5'):
        one.wake(0.5)
    one.wake(0.5)  # closed: nobody to wake


def test_vllm_forgets_only_where_it_learns(stand_in: Callable[[str], None], tiny: Path) -> None:
    stand_in(f"say('''{READY}''')\nfor line in sys.stdin:\n    say({{'error': line.strip()}})\n")
    with opened("vllm", tiny, python=sys.executable) as one:
        one.forget()
    with opened("vllm-suffix", tiny, python=sys.executable) as one, pytest.raises(PacelineError, match="forget"):
        one.forget()


def test_vllm_that_samples_wrongly_is_not_asked_to(stand_in: Callable[[str], None], tiny: Path) -> None:
    stand_in(f"say('''{READY}''')" + ANSWER)
    sampled = Ask(max_tokens=3, temperature=0.7, seeds=(1,))
    with opened("vllm-ngram", tiny, python=sys.executable) as one:
        with pytest.raises(PacelineError, match=r"cannot sample here: on a CPU without triton-cpu.*issue 55005"):
            one.answer(PROMPTS[:1], sampled)
        one.settings["triton"] = True
        assert one.answer(PROMPTS[:1], sampled)
    with opened("vllm", tiny, python=sys.executable) as one:
        assert one.answer(PROMPTS[:1], sampled)


def test_vllm_that_is_not_there(stand_in: Callable[[str], None], tiny: Path) -> None:
    with pytest.raises(NotInstalled, match=r"environment of its own: .*pip install vllm .*--peer-python"):
        peer("vllm", tiny).open()
    with pytest.raises(NotInstalled, match="no-such-python cannot be run"):
        peer("vllm", tiny, python="/no/no-such-python").open()
    stand_in("""say({"missing": "ImportError: Arctic Inference is required"})""")
    with (
        pytest.raises(NotInstalled, match="Arctic Inference is required"),
        opened("vllm-suffix", tiny, python=sys.executable),
    ):
        pass


def test_the_worker_says_that_vllm_is_missing(tiny: Path) -> None:
    """The real one, with an interpreter that has no vLLM; its own folder, which has a vllm.py, does not count."""
    with pytest.raises(NotInstalled, match="No module named 'vllm'"), opened("vllm", tiny, python=sys.executable):
        pass


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("sys.stderr.write('noise\\nRuntimeError: out of memory\\n')\nsys.exit(3)",
         r"ended \(exit status 3\); its last words: RuntimeError: out of memory"),
        ("os.kill(os.getpid(), 9)", r"ended \(exit status -9\); it left no message"),
        ("say('INFO hello')", "answered what is no JSON: 'INFO hello'"),
        ("say({'error': 'ValueError: no such dtype'})", "peer:vllm: ValueError: no such dtype"),
        ("sys.stderr.write('compiling\\n'); sys.stderr.flush(); time.sleep(60)",
         "said nothing for 0.5 s; its last words: compiling"),
    ],
)  # fmt: skip
def test_vllm_that_does_not_start(
    body: str, says: str, stand_in: Callable[[str], None], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(body)
    monkeypatch.setattr(vllm, "START_SECONDS", 0.5 if "sleep" in body else 60.0)
    one = peer("vllm", tiny, python=sys.executable)
    with pytest.raises(PacelineError, match=says):
        one.open()
    worker = one.worker  # type: ignore[attr-defined]
    one.close()
    assert worker.process.poll() is not None
    assert not Path(worker.log.name).exists()


def test_vllm_that_dies_while_answering(stand_in: Callable[[str], None], tiny: Path) -> None:
    stand_in(f"say('''{READY}''')\nsys.stdin.readline()\nsys.exit('Killed: too much')\n")
    with opened("vllm", tiny, python=sys.executable) as one:
        with pytest.raises(PacelineError, match="its last words: Killed: too much"):
            one.answer(PROMPTS[:1], Ask(max_tokens=3))
        with pytest.raises(PacelineError, match="ended"):  # and is not waited for
            one.answer(PROMPTS[:1], Ask(max_tokens=3))


def test_vllm_that_hangs_is_ended(
    stand_in: Callable[[str], None], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "ANSWER_SECONDS", 0.5)
    stand_in(f"say('''{READY}''')\nsys.stdin.readline()\ntime.sleep(600)\n")
    with opened("vllm", tiny, python=sys.executable) as one:
        for says in ("said nothing for 0.5 s", "ended"):
            with pytest.raises(PacelineError, match=says):
                one.answer(PROMPTS[:1], Ask(max_tokens=3))
        with pytest.raises(PacelineError, match="ended"):
            one.wake(1.0)


@pytest.fixture
def _minds_ctrl_c() -> Iterator[None]:
    """A process that a shell began in the background does not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_minds_ctrl_c")
def test_ctrl_c_ends_vllm_and_its_children(stand_in: Callable[[str], None], tiny: Path, tmp_path: Path) -> None:
    child = tmp_path / "child"
    stand_in(
        f"import subprocess\nsay('''{READY}''')\nsys.stdin.readline()\n"
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(child)!r}, 'w').write(str(child.pid))\n"
        f"os.kill(os.getppid(), {int(signal.SIGINT)})\ntime.sleep(60)\n"
    )
    with opened("vllm", tiny, python=sys.executable) as one:
        with pytest.raises(KeyboardInterrupt):
            one.answer(PROMPTS[:1], Ask(max_tokens=3))
        assert one.worker.process.poll() is not None  # type: ignore[attr-defined]
    stat = Path(f"/proc/{child.read_text()}/stat")
    for _ in range(100):  # until it is gone, or waits for whoever adopted it
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the worker's child lives on")


@pytest.fixture
def noisy(tmp_path: Path) -> dict[str, str]:
    """An environment with a package called vllm that prints to standard output, from Python and below it; and with as
    much of torch and transformers as its worker asks for, which would take seconds to import."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(
        "import os, types\n__version__ = '0.0'\nprint('noise')\nos.write(1, b'more noise')\nclass Core:\n"
        "    def get_output(self):\n"
        "        row = types.SimpleNamespace(request_id='0-ab', new_token_ids=[4, 5])\n"
        "        return types.SimpleNamespace(outputs=[row])\n"
        "class LLM:\n"
        "    def __init__(self, model, **config):\n"
        "        self.config = config\n"
        "        self.llm_engine = types.SimpleNamespace(engine_core=Core())\n"
        "    def generate(self, prompts, wishes, use_tqdm):\n"
        "        print('noise')\n"
        "        if wishes[0].stop_token_ids == [9]: raise RuntimeError('bad\\nluck')\n"
        "        for _ in range(2): self.llm_engine.engine_core.get_output()\n"
        "        steps = types.SimpleNamespace(per_step_accepted=[1], per_step_drafted=[3])\n"
        "        one = types.SimpleNamespace(token_ids=(4, 5, 4, 5), spec_decode_metrics=steps)\n"
        "        return [types.SimpleNamespace(request_id='0', outputs=[one])]\n"
        "def SamplingParams(**words):\n    return types.SimpleNamespace(**words)\n"
    )
    (tmp_path / "vllm" / "triton_utils.py").write_text("HAS_TRITON = False\n")
    (tmp_path / "torch.py").write_text(
        "__version__ = '0'\nclass cuda:\n    is_available = lambda: False\ndef get_num_threads():\n    return 1\n"
    )
    (tmp_path / "transformers.py").write_text("__version__ = '0'\n")
    return os.environ | {"PYTHONPATH": str(tmp_path)}


CONFIG = {"model": "m", "dtype": "float32", "max_context": 64, "batch": 1, "kv_bytes": 9, "eager": True}
ASKED = {"prompts": [[1, 2]], "limits": [4], "seeds": [], "ends": [], **Ask(4).sampling()}


def test_the_worker_keeps_its_answers_apart_from_noise(noisy: dict[str, str]) -> None:
    worker = Worker([sys.executable, str(vllm.WORKER)], noisy, "peer:vllm", vllm.HOW)
    ready = worker.ask({**CONFIG, "speculative": {"method": "ngram"}}, 60)["ready"]
    assert ready["engine"] == "vllm 0.0"
    reply = worker.ask(ASKED)
    (told,) = reply["answers"]
    assert (told["tokens"], told["lengths"], told["accepted"], told["drafted"]) == ([4, 5, 4, 5], [2, 2], [1], [3])
    assert 0 < told["times"][0] < told["times"][1] < reply["seconds"]
    assert reply["peak_bytes"] is None or reply["peak_bytes"] > 1 << 20
    with pytest.raises(PacelineError, match="RuntimeError: bad luck"):
        worker.ask({**ASKED, "ends": [9]})
    assert worker.ask(ASKED)["answers"][0]["lengths"] == [2, 2]  # the rounds of this request alone
    worker.stop()
    assert worker.process.returncode == 0


def states(pid: int) -> str:
    """As /proc tells it: T is stopped, Z dead; "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def becomes(pid: int, wanted: Sequence[str]) -> bool:
    for _ in range(200):
        if states(pid) in wanted:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it would not be sure to die with us")
def test_the_worker_is_stopped_between_answers(noisy: dict[str, str]) -> None:
    worker = Worker([sys.executable, str(vllm.WORKER)], noisy, "peer:vllm", vllm.HOW)
    worker.ask({**CONFIG, "speculative": None}, 60)
    for _ in range(2):
        assert becomes(worker.process.pid, "T")
        assert worker.ask(ASKED)["answers"]
    worker.stop()
    assert worker.process.returncode == 0  # it was let go on to end by itself


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is not stopped")
@pytest.mark.slow
def test_a_stopped_worker_dies_with_whoever_asks(noisy: dict[str, str]) -> None:
    program = (
        "import os, sys\nfrom paceline.workbench.peers import vllm\n"
        "from paceline.workbench.peers.worker import Worker\n"
        f"worker = Worker([sys.executable, str(vllm.WORKER)], {{**os.environ, 'PYTHONPATH': "
        f"{noisy['PYTHONPATH']!r}}}, 'peer:vllm', vllm.HOW)\n"
        f"worker.ask({ {**CONFIG, 'speculative': None}!r}, 60)\nprint(worker.process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert becomes(int(ended.stdout), ("", "Z"))


def test_drafts_go_to_the_rounds_they_fit() -> None:
    assert verified([1, 3, 1, 2], [2, 1], [4, 4]) == [0, 4, 0, 4]
    assert verified([1, 1, 1], [], []) == [0, 0, 0]
    assert verified([1, 1, 3], [0, 2], [5, 2]) == [0, 5, 2]
    assert verified([1, 2, 2], [1, 4], [5, 5]) == [0, 5, 5]  # the last was cut short
    assert verified([1], [], []) == [0]


def test_the_cache_grows_with_batch_and_context(tiny: Path) -> None:
    one = vllm.Plain("peer:vllm", _setup(tiny, batch=3), vllm.PlainConfig())
    assert cache_bytes(one.setup, read_config(tiny)) == (1 << 30) + 3 * (128 + 128) * 4 * 2 * 2 * 16 * 4


def _setup(model: Path, **changes: Any) -> Any:
    return peer("transformers", model, **changes).setup  # type: ignore[attr-defined]
