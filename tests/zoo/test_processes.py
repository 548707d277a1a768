"""Several processes, and kills in the middle: the same curve as one unbroken run. Real processes, so it takes time."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STORIES = [f"Cat {i} sat on mat {i * 7 % 11}. Dog {i * 3 % 13} sat by door {i}. They talked." for i in range(400)]


def prepared(folder: Path) -> list[str]:
    """A source and a tokenizer; the arguments that a run needs."""
    source = folder / "story.jsonl"
    lines = [json.dumps({"text": text * 3}) for text in STORIES]
    lines += [json.dumps({"question": f"Where is cat {i}?", "answer": f"On mat {i * 7 % 11}."}) for i in range(200)]
    source.write_text("\n".join(lines))
    tokenizer = folder / "tokenizer"
    command = [sys.executable, "-m", "zoo", "tokenizer", f"story={source}", "--out", str(tokenizer)]
    subprocess.run([*command, "--vocabulary", "400", "--generated", "50"], check=True, capture_output=True)
    small = ["--size", "tiny", "--no-compiled", "--generated", "500"]
    return ["pretrain", f"story={source}", "--tokenizer", str(tokenizer), *small]


def run(arguments: list[str], folder: Path, name: str, tokens: int, processes: int = 1) -> subprocess.Popen[bytes]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    paths = ["--out", str(folder / name), "--checkpoints", str(folder / f"{name}-run"), "--tokens", str(tokens)]
    command = [sys.executable, *launcher, "-m", "zoo", *arguments, *paths]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def losses(folder: Path, name: str) -> list[float]:
    rows = map(json.loads, (folder / name / "training-pretrain.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_run_has_the_curve_of_an_unbroken_one(tmp_path: Path) -> None:
    arguments, tokens = prepared(tmp_path), 16_384 * 60
    assert run(arguments, tmp_path, "whole", tokens).wait() == 0
    log = tmp_path / "broken-run" / "log.jsonl"
    for rows in (1, 2):  # killed twice, each time some steps behind its last checkpoint
        process = run([*arguments, "--save-every", "0.02"], tmp_path, "broken", tokens)
        while process.poll() is None and (not log.exists() or len(log.read_text().splitlines()) < rows):
            time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "broken").exists()
    assert run(arguments, tmp_path, "broken", tokens).wait() == 0
    assert losses(tmp_path, "whole") == losses(tmp_path, "broken")
    assert len(losses(tmp_path, "whole")) == 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    arguments, tokens = prepared(tmp_path), 16_384 * 40
    assert run(arguments, tmp_path, "one", tokens).wait() == 0
    assert run(arguments, tmp_path, "two", tokens, processes=2).wait() == 0
    assert losses(tmp_path, "one") == pytest.approx(losses(tmp_path, "two"), rel=2e-2)
    assert (tmp_path / "two" / "model.safetensors").exists()
