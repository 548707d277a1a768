"""Rollouts with reuse inside TRL: the contract with a double of the trainer, and the example with the real one."""

import json
import math
import subprocess
import sys
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from examples.rollout_rules import policy

from paceline.errors import PacelineError
from paceline.rollout import RolloutStore
from paceline.rollout.store import Key, digest
from tests.paths import REPOSITORY

accelerate = pytest.importorskip("accelerate", reason="TRL's processes come with the package accelerate")

from paceline.rollout.trl import RolloutReuse, _keys  # noqa: E402

IDS = [[1, 4, 5], [1, 4, 5], [1, 6], [1, 4, 5]]


def trainer(**changes):
    """The part of GRPOTrainer that is asked."""
    made = {
        "model": policy(0),
        "accelerator": accelerate.Accelerator(cpu=True),
        "state": SimpleNamespace(global_step=0),
        "args": SimpleNamespace(generation_kwargs=None),
        "eos_token_ids": [2],
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "max_completion_length": 8,
        "use_vllm": False,
        "is_fsdp_enabled": False,
        "is_deepspeed_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "_tokenize_prompts": lambda prompts: (prompts, None, {}),
    }
    return SimpleNamespace(**(made | changes))


def test_rows_come_back_in_order_and_the_second_epoch_reuses_them():
    reuse, of = RolloutReuse(RolloutStore()), trainer()
    of.model.train()
    first = reuse(IDS, of)
    assert first["prompt_ids"] == IDS
    assert [len(row) for row in first["completion_ids"]] == [len(row) for row in first["logprobs"]]
    assert of.model.training, "the trainer finds its model as it left it"
    of.state.global_step = 1
    assert (reuse(IDS, of)["completion_ids"], reuse.last.decoded) == (first["completion_ids"], 0)
    assert (of._metrics["train"]["rollout/reuse"], len(reuse.store)) == ([0.0, 1.0], 4)


def test_evaluation_neither_uses_nor_changes_the_store():
    reuse, of = RolloutReuse(RolloutStore()), trainer()
    of.model.train()
    trained = reuse(IDS, of)
    entries = reuse.store.state_dict()["records"].tolist()
    of.model.eval()
    fresh = reuse(IDS, of)
    assert fresh["completion_ids"] != trained["completion_ids"]
    assert (reuse.store.state_dict()["records"].tolist(), reuse.figures.answers) == (entries, 4)


def test_the_weights_of_now_are_used():
    reuse, of = RolloutReuse(RolloutStore(), rule="one-hot"), trainer()
    of.model.train()
    reuse(IDS, of)
    for weight in of.model.parameters():
        weight.data.mul_(3.0)  # a sure model
    answers = reuse(IDS * 8, of)
    logprobs = [value for row in answers["logprobs"] for value in row]
    assert sum(logprobs) / len(logprobs) > math.log(1 / 17) + 0.5


def test_rollouts_may_be_rounded_while_the_trainers_weights_are_not():
    of = trainer()
    of.model.train()
    kinds = (None, torch.float32, torch.bfloat16)
    own, whole, rounded = (RolloutReuse(RolloutStore(), dtype=dtype)(IDS, of) for dtype in kinds)
    assert own == whole != rounded
    assert {weight.dtype for weight in of.model.parameters()} == {torch.float32}


@pytest.mark.parametrize(("changes", "says"), [
    ({"args": SimpleNamespace(generation_kwargs={"typical_p": 0.9})}, "generation_kwargs has typical_p"),
    ({"use_vllm": True}, "use_vllm is on"),
    ({"is_fsdp_enabled": True}, "spread over processes"),
    ({"_tokenize_prompts": lambda prompts: (prompts, None, {"pixel_values": []})}, "are for text"),
])
def test_what_would_change_the_distribution_is_refused(changes, says):
    with pytest.raises(PacelineError, match=says):
        RolloutReuse(RolloutStore())(IDS, trainer(**changes))


def test_the_trainers_temperature_and_nucleus_count():
    reuse = RolloutReuse(RolloutStore())
    of = trainer(temperature=0.8, top_p=0.9)
    of.model.train()
    reuse(IDS, of)
    of.temperature = 0.7
    with pytest.raises(PacelineError, match=r"temperature=0\.8 and are to be verified with temperature=0\.7"):
        reuse(IDS, of)


def test_copies_are_numbered_over_all_processes(monkeypatch):
    """A group of six over three processes of four rows."""
    a, b = digest([1]), digest([2])
    slices = [[a, a, a, a], [a, a, b, b], [b, b, b, b]]
    monkeypatch.setattr("paceline.rollout.trl.gather_object", lambda mine: slices)
    ids = [[[1]] * 4, [[1], [1], [2], [2]], [[2]] * 4]
    keys = [_keys(ids[rank], SimpleNamespace(process_index=rank)) for rank in range(3)]
    assert keys[1] == [Key(a, 4), Key(a, 5), Key(b, 0), Key(b, 1)]
    assert len({key for part in keys for key in part}) == 12


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["--in-memory"]], ids=["file", "in memory"])
@pytest.mark.parametrize("processes", [1, 2])
def test_the_example_trains(tmp_path, processes, arguments):
    """Three epochs with the real trainer: reuse from the second on, finite rewards, every copy kept once."""
    pytest.importorskip("trl", reason="the package trl is not installed")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(processes)]
    script = [str(REPOSITORY / "examples" / "grpo_trl.py"), "--out", str(tmp_path), *arguments]
    plain = [sys.executable] if processes == 1 else launch
    run = subprocess.run([*plain, *script], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    *lines, last = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{") and '"' in line]
    batches = [line for line in lines if "reused" in line]
    assert {line["process"] for line in batches} == set(range(processes))
    assert all(line["reused"] == 0 for line in batches if line["epoch"] < 1)
    later = [line for line in batches if line["epoch"] >= 1]
    assert later
    assert all(line["reuse"] > 0 for line in later)
    assert all(math.isfinite(reward) for reward in last["rewards"])
    assert last["kept"] == 16
