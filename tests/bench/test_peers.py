"""Peers: transformers beside our engine on a tiny model; vLLM's protocol with scripts in its place; a small stand-in
for llama_cpp. None of the engines that live elsewhere is needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from tests import models
from tests.conftest import REPOSITORY

from paceline.bench.contestant import Ask, Contestant, NotInstalled
from paceline.bench.peers import PEERS, create_peer, describe, parse_peer, vllm
from paceline.bench.peers import transformers as ours
from paceline.bench.peers.setup import cut, cut_rounds, model_bytes
from paceline.bench.peers.vllm import cache_bytes, verified
from paceline.bench.record import Turn
from paceline.engine import Engine
from paceline.errors import MethodError, ModelError, PacelineError, PromptError
from paceline.sampling import SamplingParams
from paceline.target.load import load, read_config

PROMPTS = [[0, 9, 40, 41, 42, 9, 40, 41], [0, 50, 51, 52], [0, 7, 30, 31, 7, 30, 31, 7, 30]]
NEW = 24


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Settings of its own in generation_config.json, which no peer may heed, and text that repeats itself."""
    folder = models.make("llama2", tmp_path_factory.mktemp("tiny"), num_hidden_layers=4)
    _repeat_itself(folder)
    (folder / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.3, "top_k": 3, "repetition_penalty": 1.9, "max_length": 30, '
        '"eos_token_id": [1, 40], "num_assistant_tokens": 1}'
    )
    return folder


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """The first layer of it and the head: some drafts are right, some wrong."""
    from safetensors.torch import load_file, save_file

    folder = models.make("llama2", tmp_path_factory.mktemp("draft"), num_hidden_layers=1)
    weights = load_file(folder / "model.safetensors") | load_file(tiny / "model.safetensors")
    kept = {k: v for k, v in weights.items() if ".layers." not in k or ".layers.0." in k}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _repeat_itself(folder: Path) -> None:
    """Let the next token hang mostly on the last one."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weak = {k: v * 0.1 if "o_proj" in k or "down_proj" in k else v for k, v in load_file(file).items()}
    save_file(weak, file, metadata={"format": "pt"})


def decode(tokens: list[int]) -> str:
    return " ".join(map(str, tokens))


def peer(spec: str, model: Path, **changes: Any) -> Contestant:
    setup: dict[str, Any] = {
        "dtype": "float32",
        "threads": None,
        "python": None,
        "batch": 4,
        "max_context": models.MAX_CONTEXT,
        "decode": decode,
    }
    return create_peer(spec, str(model), **(setup | changes))


@contextmanager
def opened(spec: str, model: Path, **changes: Any) -> Iterator[Contestant]:
    one = peer(spec, model, **changes)
    try:
        one.open()
        yield one
    finally:
        one.close()


def answers(model: Path, new: int = NEW, ends: tuple[int, ...] = ()) -> list[list[int]]:
    """What our engine says, plainly."""
    engine = Engine(load(model, dtype="float32"))
    params = SamplingParams(max_tokens=new, ignore_eos=True, stop_token_ids=ends)
    return [one.tokens for one in engine.generate(PROMPTS, params)]


def check(turn: Turn) -> None:
    """What holds of every Turn that tells its rounds."""
    assert turn.lengths is not None
    assert turn.times is not None
    assert turn.nodes is not None
    assert sum(turn.lengths) == len(turn.tokens)
    assert turn.times == sorted(turn.times)
    assert turn.times[0] > 0
    assert turn.times[-1] <= turn.seconds
    assert len(turn.lengths) == len(turn.times) == len(turn.nodes)
    assert all(length <= nodes + 1 for length, nodes in zip(turn.lengths, turn.nodes, strict=True))
    assert turn.depths == turn.nodes
    assert turn.text == decode(turn.tokens)


# Names -----------------------------------------------------------------------------------------------------------


def test_every_peer_in_the_table_can_be_named() -> None:
    for name, entry in PEERS.items():
        takes_file = ":" in entry.help
        found, config = parse_peer(f"{name}:x" if takes_file else name)
        assert issubclass(found, Contestant)
        assert getattr(config, "checkpoint", None) == ("x" if takes_file else None), name
        assert all(option.help for option in describe(name)), name


def test_options_reach_the_peer() -> None:
    config = parse_peer(" vllm-ngram,k=7,max=4,eager=true ")[1]
    assert (config.k, config.min, config.max, config.eager) == (7, 1, 4, True)
    config = parse_peer("transformers-assisted:some/folder,schedule=heuristic,confidence=0")[1]
    assert (config.checkpoint, config.tokens, config.schedule, config.confidence) == ("some/folder", 20, "heuristic", 0)


def test_the_page_lists_every_peer_and_option() -> None:
    page = (REPOSITORY / "docs" / "peers.md").read_text("utf-8")
    for name, entry in PEERS.items():
        assert f"| `{name}` | {entry.help} | {entry.needs or 'nothing more'} |\n" in page
        for option in describe(name):
            assert f"| `{option.name}` | `{str(option.default).lower()}` | {option.help} |\n" in page, (
                name,
                option.name,
            )


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("vlm-ngram", "There is no peer 'vlm-ngram'. Did you mean 'vllm-ngram'\\? Peers: transformers, "),
        ("vllm-ngram,kk=3", "vllm-ngram has no option 'kk'. Did you mean 'k'\\? Its options: eager, k, min, max."),
        ("vllm-ngram,k=many", "k is 'many'; it must be a whole number"),
        ("transformers,tokens=3", "It has no options"),
        ("transformers:x", "takes no checkpoint"),
        ("vllm-draft", "vllm-draft needs a checkpoint: write vllm-draft:PATH"),
        ("transformers-assisted:x,schedule=heuristics", "Did you mean 'heuristic'"),
    ],
)
def test_a_wrong_name_or_option_says_what_exists(spec: str, says: str) -> None:
    with pytest.raises(MethodError, match=says):
        parse_peer(spec)


def test_a_dtype_must_be_settled(tiny: Path) -> None:
    with pytest.raises(PacelineError, match="one of float32, bfloat16, float16, not 'auto'"):
        peer("transformers", tiny, dtype="auto")


# transformers ----------------------------------------------------------------------------------------------------

ALONE = ["transformers-lookup", "transformers-assisted:{draft}", "transformers-early-exit"]


@pytest.mark.parametrize("spec", ["transformers", *ALONE])
def test_transformers_says_what_our_engine_says(spec: str, tiny: Path, draft: Path) -> None:
    expected = answers(tiny)
    with opened(spec.format(draft=draft), tiny) as one:
        turns = [one.answer([prompt], Ask(max_tokens=NEW))[0] for prompt in PROMPTS]
        assert one.name == "peer:" + spec.format(draft=draft)
    assert [turn.tokens for turn in turns] == expected
    assert [turn.prompt_tokens for turn in turns] == [len(prompt) for prompt in PROMPTS]
    assert {turn.finish for turn in turns} == {"length"}
    for turn in turns:
        check(turn)
    rounds = sum(len(turn.lengths or []) for turn in turns)
    drafted = sum(sum(turn.nodes or []) for turn in turns)
    if spec == "transformers":
        assert (rounds, drafted) == (NEW * len(PROMPTS), 0)
    else:
        assert rounds < NEW * len(PROMPTS)  # some draft was accepted, so the rounds above were worth a check
        assert drafted >= NEW * len(PROMPTS) - rounds
    calls = sum(turn.calls for turn in turns)
    assert calls == (drafted if "assisted" in spec or "early" in spec else 0)


def test_a_batch_is_answered_as_its_prompts_are_alone(tiny: Path) -> None:
    expected = answers(tiny)
    ends = (expected[1][5],)
    expected = answers(tiny, ends=ends)
    assert len({len(tokens) for tokens in expected}) > 1  # one ends sooner
    with opened("transformers", tiny) as one:
        turns = one.answer(PROMPTS, Ask(max_tokens=NEW, ends=ends))
    assert [turn.tokens for turn in turns] == expected
    assert len({turn.seconds for turn in turns}) == 1
    for turn in turns:
        check(turn)
        assert turn.lengths == [1] * len(turn.tokens)
        assert turn.nodes == [0] * len(turn.tokens)


@pytest.mark.parametrize("spec", ["transformers", *ALONE])
def test_answers_end_where_they_should(spec: str, tiny: Path, draft: Path) -> None:
    whole = answers(tiny)[0]
    ends = (whole[9],)
    until = whole.index(ends[0]) + 1
    with opened(spec.format(draft=draft), tiny) as one:
        for new in (1, 2, 7):
            (turn,) = one.answer(PROMPTS[:1], Ask(max_tokens=new))
            assert (turn.tokens, turn.finish) == (whole[:new], "length")
            check(turn)
        (turn,) = one.answer(PROMPTS[:1], Ask(max_tokens=NEW, ends=ends))
        assert (turn.tokens, turn.finish) == (whole[:until], "stop")
        check(turn)


def test_the_context_ends_an_answer(tiny: Path) -> None:
    with opened("transformers-lookup", tiny, max_context=12) as one:
        (turn,) = one.answer(PROMPTS[:1], Ask(max_tokens=50))
        assert (len(turn.tokens), turn.finish) == (4, "context")
        with pytest.raises(PromptError, match="has 12 tokens"):
            one.answer([[3] * 12], Ask(max_tokens=50))


@pytest.mark.parametrize("spec", ["transformers", *ALONE])
def test_sampling_hangs_on_the_seed(spec: str, tiny: Path, draft: Path) -> None:
    with opened(spec.format(draft=draft), tiny) as one:
        asks = [Ask(max_tokens=12, temperature=3.0, seeds=(seed,)) for seed in (1, 2, 1)]
        first, second, again = [one.answer(PROMPTS[:1], ask)[0] for ask in asks]
    assert first.tokens == again.tokens
    assert first.tokens != second.tokens
    check(first)


def test_sampling_is_from_the_whole_distribution(tiny: Path) -> None:
    """Neither the checkpoint's top_k of 3 nor transformers' own of 50 is heeded."""
    with opened("transformers", tiny, batch=200) as one:
        turns = one.answer([PROMPTS[1]] * 200, Ask(max_tokens=1, temperature=50.0, seeds=tuple(range(200))))
    assert len({turn.tokens[0] for turn in turns}) > 100


def test_a_mode_for_one_takes_one(tiny: Path) -> None:
    with opened("transformers-lookup", tiny) as one:
        assert one.max_batch == 1
        with pytest.raises(PacelineError, match="answers 1 at a time, not 2"):
            one.answer(PROMPTS[:2], Ask(max_tokens=4))
    assert peer("transformers", tiny).max_batch == 4


def test_peers_share_a_model_and_give_it_back(tiny: Path, draft: Path) -> None:
    first, second = peer("transformers", tiny), peer(f"transformers-assisted:{draft}", tiny)
    for one in (first, second):
        one.open()
    assert first.model is second.model  # type: ignore[attr-defined]
    assert len(ours._LOADED) == 2
    first.close()
    expected = answers(tiny)[0]
    assert second.answer(PROMPTS[:1], Ask(max_tokens=NEW))[0].tokens == expected
    second.close()
    assert ours._LOADED == {}


def test_a_draft_model_of_another_vocabulary_is_refused(tiny: Path, tmp_path: Path) -> None:
    other = models.make("llama2", tmp_path, vocab_size=352)
    one = peer(f"transformers-assisted:{other}", tiny)
    with pytest.raises(ModelError, match="knows 352 tokens and the target 320"):
        one.open()
    one.close()
    assert ours._LOADED == {}


def test_early_exit_leaves_the_others_alone(tiny: Path) -> None:
    plain, early = peer("transformers", tiny), peer("transformers-early-exit,layers=2,tokens=3,confidence=0", tiny)
    plain.open()
    early.open()
    model = plain.model  # type: ignore[attr-defined]
    before = plain.answer(PROMPTS[:1], Ask(max_tokens=NEW))[0].tokens
    (turn,) = early.answer(PROMPTS[:1], Ask(max_tokens=NEW))
    assert max(turn.nodes or []) == 3
    assert early.settings["layers"] == 2

    def interrupt(*_: Any) -> None:
        if model.config.num_hidden_layers == 2:
            raise KeyboardInterrupt

    hook = model.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        early.answer(PROMPTS[:1], Ask(max_tokens=NEW))
    hook.remove()
    assert model.config.num_hidden_layers == 4
    assert plain.answer(PROMPTS[:1], Ask(max_tokens=NEW))[0].tokens == before
    early.close()
    plain.close()


def test_early_exit_wants_some_layers_and_not_all(tiny: Path) -> None:
    one = peer("transformers-early-exit,layers=4", tiny)
    with pytest.raises(MethodError, match="layers is 4; the model has 4, so 1 to 3"):
        one.open()
    one.close()


def test_what_a_schedule_learnt_is_forgotten(tiny: Path) -> None:
    """The heuristic schedule keeps its draft length from call to call."""
    with opened("transformers-early-exit,layers=3,tokens=2,schedule=heuristic,confidence=0", tiny) as one:
        first, later = [one.answer(PROMPTS[2:], Ask(max_tokens=NEW))[0] for _ in range(2)]
        one.forget()
        (again,) = one.answer(PROMPTS[2:], Ask(max_tokens=NEW))
    assert first.nodes is not None
    assert later.nodes is not None
    assert first.nodes[0] == 2
    assert again.nodes == first.nodes
    assert len(later.tokens) == len(first.tokens)


def test_transformers_is_silent(tiny: Path, draft: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for spec in ("transformers", *ALONE):
            with opened(spec.format(draft=draft), tiny) as one:
                one.answer(PROMPTS[:1], Ask(max_tokens=4, temperature=0.5))
    assert capfd.readouterr() == ("", "")


def test_bytes_a_forward_reads(tiny: Path, tmp_path: Path) -> None:
    hidden, rows = 64, models.VOCAB_SIZE
    layer = 2 * hidden * hidden + 2 * hidden * 32 + 3 * hidden * 96 + 2 * hidden
    whole = 4 * layer + hidden + rows * hidden  # the head, not the input embedding
    assert model_bytes(str(tiny), torch.float32) == 4 * whole
    assert model_bytes(str(tiny), torch.bfloat16, layers=1) == 2 * (whole - 3 * layer)
    tied = models.make("smollm", tmp_path)
    assert model_bytes(str(tied), torch.float32) == 4 * (3 * layer + hidden + rows * hidden)
    with opened("transformers-early-exit,layers=1", tiny) as one:
        assert (one.target_bytes, one.draft_bytes) == (4 * whole, 4 * (whole - 3 * layer))


@pytest.mark.parametrize("spec", ["transformers", "transformers-early-exit"])
def test_transformers_is_woken(spec: str, tiny: Path) -> None:
    with opened(spec, tiny) as one:
        [before] = one.answer(PROMPTS[:1], Ask(max_tokens=NEW))
        forwards: list[int] = []
        hook = one.model.register_forward_hook(lambda *_: forwards.append(1))  # type: ignore[attr-defined]
        began = perf_counter()
        one.wake(0.05)
        assert 0.05 < perf_counter() - began < 2
        assert forwards, "its own forward is what wakes it"
        hook.remove()
        [after] = one.answer(PROMPTS[:1], Ask(max_tokens=NEW))
    assert after.tokens == before.tokens


def test_cutting() -> None:
    assert cut([5, 6, 7, 6], {6}, 10) == [5, 6]
    assert cut([5, 6, 7], {9}, 2) == [5, 6]
    assert cut([], {9}, 2) == []
    assert cut_rounds([1, 3, 3], 5) == [1, 3, 1]
    assert cut_rounds([1, 3, 3], 4) == [1, 3]


# vLLM ------------------------------------------------------------------------------------------------------------

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
             "drafted": [4]} for p, r in zip(asked["prompts"], asked["rooms"])]
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
    """An environment with a package called vllm that prints to standard output, from Python and below it."""
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
    return os.environ | {"PYTHONPATH": str(tmp_path)}


CONFIG = {"model": "m", "dtype": "float32", "max_context": 64, "batch": 1, "kv_bytes": 9, "eager": True}
ASKED = {"prompts": [[1, 2]], "rooms": [4], "temperature": 0.0, "seeds": [], "ends": []}


def test_the_worker_keeps_its_answers_apart_from_noise(noisy: dict[str, str]) -> None:
    worker = vllm.Worker([sys.executable, str(vllm.WORKER)], noisy, "peer:vllm")
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
    worker = vllm.Worker([sys.executable, str(vllm.WORKER)], noisy, "peer:vllm")
    worker.ask({**CONFIG, "speculative": None}, 60)
    for _ in range(2):
        assert becomes(worker.process.pid, "T")
        assert worker.ask(ASKED)["answers"]
    worker.stop()
    assert worker.process.returncode == 0  # it was let go on to end by itself


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is not stopped")
def test_a_stopped_worker_dies_with_whoever_asks(noisy: dict[str, str]) -> None:
    program = (
        "import os, sys\nfrom paceline.bench.peers import vllm\n"
        f"worker = vllm.Worker([sys.executable, str(vllm.WORKER)], {{**os.environ, 'PYTHONPATH': "
        f"{noisy['PYTHONPATH']!r}}}, 'peer:vllm')\n"
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


def test_no_engine_is_imported_before_it_is_opened() -> None:
    for name in PEERS:
        describe(name)
    assert not {"vllm", "llama_cpp"} & set(sys.modules)


# llama.cpp -------------------------------------------------------------------------------------------------------


class FakeLlama:
    """The loop of llama_cpp.Llama.generate over a rule for the next token: previous + 1, and 5 after 8."""

    def __init__(self, model_path: str, n_ctx: int, draft_model: Any = None, **words: Any):
        if "broken" in model_path:
            raise ValueError("Failed to load model from file")
        self.draft_model, self.words, self.n_threads = draft_model, words | {"n_ctx": n_ctx}, words["n_threads"] or 2
        self.metadata = {"general.file_type": "7"}
        self.seeds: list[int] = []
        self.n_tokens, self.input_ids = 0, np.zeros(n_ctx, np.intc)

    def set_seed(self, seed: int) -> None:
        self.seeds.append(seed)

    def reset(self) -> None:
        self.n_tokens = 0

    def close(self) -> None:
        self.words = {}

    def eval(self, tokens: list[int]) -> None:
        self.input_ids[self.n_tokens : self.n_tokens + len(tokens)] = tokens
        self.n_tokens += len(tokens)

    def generate(self, tokens: list[int], reset: bool, **sampling: Any) -> Iterator[int]:
        assert self.n_tokens == 0  # or a part of the prompt would be had for nothing
        self.sampling, tokens, at = sampling, list(tokens), len(tokens) - 1
        while True:
            self.eval(tokens)
            while at < self.n_tokens:
                token = 5 if self.input_ids[at] == 8 else int(self.input_ids[at]) + 1
                at += 1
                yield token
                tokens = [token]
                if at < self.n_tokens and token != self.input_ids[at]:
                    self.n_tokens = at
                    break
            if self.draft_model is not None:
                self.input_ids[self.n_tokens] = token
                tokens += self.draft_model(self.input_ids[: self.n_tokens + 1]).tolist()


class FakeLookup:
    """Always proposes the same two tokens behind a 5."""

    def __init__(self, max_ngram_size: int, num_pred_tokens: int):
        self.words = (max_ngram_size, num_pred_tokens)

    def __call__(self, ids: Any) -> Any:
        return np.array([6, 9] if ids[-1] == 5 else [], np.intc)


@pytest.fixture
def llama_cpp(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module, speculative = types.ModuleType("llama_cpp"), types.ModuleType("llama_cpp.llama_speculative")
    vars(module).update(__version__="0.3", Llama=FakeLlama, llama_supports_gpu_offload=lambda: False)
    vars(speculative).update(LlamaPromptLookupDecoding=FakeLookup)
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", speculative)
    return module


def test_llama_cpp_answers(llama_cpp: types.ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with opened(f"llama-cpp:{file}", tmp_path, threads=3) as one:
        for _ in range(2):
            (turn,) = one.answer([[4, 6]], Ask(max_tokens=6))
            assert (turn.tokens, turn.lengths, turn.nodes) == ([7, 8, 5, 6, 7, 8], [1] * 6, [0] * 6)
            check(turn)
        assert one.llama.sampling["temp"] == 0.0  # type: ignore[attr-defined]
        assert one.settings["threads"] == 3
        assert (one.max_batch, one.target_bytes) == (1, 4)
        (turn,) = one.answer([[4, 6]], Ask(max_tokens=9, ends=(8,), temperature=0.7, seeds=(5,)))
        assert (turn.tokens, turn.finish, one.llama.seeds) == ([7, 8], "stop", [5])  # type: ignore[attr-defined]
    with opened(f"llama-cpp-lookup:{file}", tmp_path) as one:
        (turn,) = one.answer([[4, 7]], Ask(max_tokens=9))
        assert turn.tokens == [8, 5, 6, 7, 8, 5, 6, 7, 8]
        assert (turn.lengths, turn.nodes) == ([1, 1, 2, 1, 1, 2, 1], [0, 0, 2, 0, 0, 2, 0])
        check(turn)
        assert one.llama.draft_model.words == (2, 2)  # type: ignore[attr-defined]
        assert one.settings["num_pred_tokens"] == 2
    vars(llama_cpp)["llama_supports_gpu_offload"] = lambda: True
    with opened(f"llama-cpp-lookup:{file}", tmp_path) as one:  # the target is on the processor, and so is this
        assert one.llama.words["n_gpu_layers"] == 0  # type: ignore[attr-defined]
    with opened(f"llama-cpp-lookup:{file}", tmp_path, device="cuda") as one:
        assert one.llama.draft_model.words == (2, 10)  # type: ignore[attr-defined]
        assert one.llama.words["n_gpu_layers"] == -1  # type: ignore[attr-defined]


def test_llama_cpp_that_is_not_there(llama_cpp: types.ModuleType, tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(ModelError, match="there is no file"):
        peer("llama-cpp:none.gguf", tmp_path).open()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"")
    with pytest.raises(ModelError, match=r"cannot load .*broken.gguf: Failed to load"):
        peer(f"llama-cpp:{broken}", tmp_path).open()
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(NotInstalled, match="llama-cpp-python is not installed: pip install llama-cpp-python"):
        peer("llama-cpp:none.gguf", tmp_path).open()
