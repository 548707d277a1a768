"""benchmarks/gpu.py and parcel.py, which nobody can try without a GPU but by their own `--cpu`; and that the harnesses
run."""

import json
import subprocess
import sys
import tarfile
from types import SimpleNamespace

import pytest
from benchmarks import gpu, parcel, results

from paceline.core.sampling import SamplingParams
from paceline.core.tree import DraftTree
from paceline.engine.engine import Engine
from tests import drafters, models, native
from tests.paths import REPOSITORY


def test_a_recorded_rule_accepts_what_the_recording_says(monkeypatch):
    """Whatever the target thinks of it: the time of a round is what is measured."""
    rule = gpu.Recorded()

    class Replaying(drafters.Random):
        def propose(self, asks):
            rule.take = 2
            return [DraftTree.chain(row.last_token, [7] * min(4, most)) for row, most in asks]

    (done,) = Engine(native.of(models.model("llama2")), Replaying(), rule=rule).generate(
        [[5, 6, 7]], SamplingParams(max_tokens=12, ignore_eos=True)
    )
    assert done.tokens[1:3] == done.tokens[4:6] == [7, 7]  # the first is the prompt's
    assert done.stats.accepted[2] >= 3


def test_what_was_measured_becomes_a_page(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RECORD", tmp_path / "runs.json")
    for row in ({"part": "exact", "card": "A", "ms": 1}, {"part": "exact", "card": "A", "ms": 2}, {"part": "x"}):
        gpu.write(tmp_path, row)
    assert results.main(["gpu", str(tmp_path)]) == 0
    page = (tmp_path / "gpu.md").read_text()
    assert "| part | card | ms |\n|---|---|---|\n| exact | A | 1 |\n| exact | A | 2 |" in page
    assert "| part |\n|---|\n| x |" in page


def test_a_case_that_breaks_is_a_line_and_the_next_one_follows(tmp_path):
    part = gpu.Part(SimpleNamespace(name="exact", out=tmp_path, smollm2="", cpu=True, seconds=60))

    def act(number):
        part.row(ms=1 / number)

    part.each([0, 2], act)
    first, second = (json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines())
    assert first["error"].startswith("ZeroDivisionError")
    assert second["ms"] == 0.5


def test_pieces_of_a_parcel_are_the_archive(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(parcel, "FOLDERS", ("benchmarks",))
    monkeypatch.setattr(parcel, "MADE", ("build/never",))
    (tmp_path / "large").write_bytes(bytes(100) * 100)
    large = f"large.gguf={tmp_path / 'large'}"
    words = ["parcel.py", str(tmp_path / "out"), "--wheels", "--file", large, "--piece", "1"]
    monkeypatch.setattr(sys, "argv", words)
    parcel.main()
    assert capsys.readouterr().out.startswith("without build/never, ")
    whole = tmp_path / "whole"
    whole.write_bytes(b"".join(piece.read_bytes() for piece in sorted((tmp_path / "out").iterdir())))
    with tarfile.open(whole) as tar:
        names = tar.getnames()
    assert {"pyproject.toml", "benchmarks/gpu.py", "large.gguf"} <= {*names}
    assert not [name for name in names if "__pycache__" in name]


@pytest.mark.slow
def test_all_parts_run_on_a_cpu(tmp_path):
    """Eight minutes on two busy cores."""
    words = [sys.executable, "benchmarks/gpu.py", "--cpu", "--minutes", "8", "--out", str(tmp_path)]
    assert subprocess.run(words, cwd=REPOSITORY, timeout=700).returncode == 0
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {row["part"] for row in rows} == {*gpu.PARTS}
    assert not [row for row in rows if "error" in row or row.get("failed")]


SMALL = "--shape demo --rounds 1 --tokens 1 2"
PROMPTS = "--every 3 --max-tokens 8"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        f"forward.py {SMALL}",
        "forward.py families --rounds 1 --tokens 1 2",
        f"forward.py exact models/demo {SMALL}",
        f"forward.py products {SMALL} --kinds float32 bfloat16 Q8_0 --activations 8 16",
        f"forward.py steps {SMALL} --least",
        "forward.py context models/demo --lengths 64 128 --tokens 1 4 --rounds 1",
        f"drafters.py accept models/demo none sam medusa:models/demo-medusa {PROMPTS} --before 0 50 9999",
        "drafters.py time sam suffix --contexts 64 --nothing",
        f"drafters.py shapes models/demo {PROMPTS}",
        "servers.py overhead models/demo --limit 3 --repeats 1 --clients 2 --max-tokens 8",
        "servers.py soak models/demo --seconds 2 --limit 3 --clients 2",
        "servers.py long models/demo --lengths 1024",
    ],
    ids=lambda words: " ".join(words.split()[:2]),
)
def test_a_harness_prints_its_table(words):
    done = subprocess.run(
        [sys.executable, *f"benchmarks/{words}".split()], cwd=REPOSITORY, timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") > 1
