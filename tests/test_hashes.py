"""With `exact`, in float32 and with weights in blocks, answers are the same bits at every level of a processor, and on
every processor: those of hashes.json."""

import json
import os
import subprocess
import sys

import pytest

from paceline import processor
from tests import hashes, models

FOLLOWERS = {name for variables in processor._FOLLOWERS.values() for name in variables}


@pytest.mark.timeout(900)  # for another level all is compiled, by a process of its own
@pytest.mark.parametrize("level", processor.LEVELS)
@pytest.mark.parametrize("families", [("qwen3-moe",), pytest.param((), marks=pytest.mark.slow)], ids=["one", "all"])
def test_logits_and_answers_are_those_of_every_processor(families, level):
    if level not in processor.levels():
        pytest.skip(f"this processor has no {level}")
    known = json.loads(hashes.FILE.read_text())
    families = families or tuple(models.NATIVE)
    here = level == "library" and not processor.has("amx-bf16")  # which other libraries need not hear of
    if here or level == processor.level():
        with processor.forced(level):
            found = {family: hashes.hashes(family) for family in families}
    else:  # torch, oneDNN and Numba must hear of the level before they are imported
        forced = {name: value for name, value in os.environ.items() if name not in FOLLOWERS}
        command = [sys.executable, "-m", "tests.hashes", *families]
        done = subprocess.run(command, env=forced | {processor.VARIABLE: level}, stdout=subprocess.PIPE, check=True)
        found = json.loads(done.stdout)
    assert found == {family: known[family] for family in families}


def test_every_family_has_hashes():
    assert json.loads(hashes.FILE.read_text()).keys() == models.NATIVE.keys()
