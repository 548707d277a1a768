"""docs/results: its tables are what `benchmarks/results.py` prints of the record, and the record what runs hold."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from benchmarks import results

from tests.bench.runs import make_run
from tests.paths import REPOSITORY

RESULTS = REPOSITORY / "docs" / "results"


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    """What the command prints for its arguments."""

    def run(*arguments: str) -> str:
        assert results.main(arguments) == 0
        return capsys.readouterr().out

    return run


def test_the_pages_are_what_the_command_prints(printed: Any) -> None:
    page = (RESULTS / "README.md").read_text("utf-8")
    assert page.split(results.BEGIN)[1].split(results.END)[0] == printed("table").lstrip("\n")
    assert (RESULTS / "runs.md").read_text("utf-8") == printed("full")


def test_runs_become_a_record_and_tables(tmp_path: Path, printed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RECORD", tmp_path / "runs.json")
    methods = {"none": 1.0, "sam": 1.25, "rest:/a/corpus-qwen": 0.9, "peer:llama-cpp:/models/q.gguf": 0.75}
    for name in ("qwen-q4-spec-bench", "qwen-q4-spec-bench-more", "qwen-q4-code-edits", "smollm2-spec-bench-sampled"):
        make_run(tmp_path / name, methods, not_installed={"peer:xllamacpp:/models/q.gguf,spec=ngram-mod": "not there"})
    (tmp_path / "README.md").write_text(f"before {results.BEGIN}old\n{results.END} after")
    assert "holds 4 of 18 runs" in printed("collect", str(tmp_path))
    assert (tmp_path / "README.md").read_text() == f"before {results.BEGIN}{printed('table')}{results.END} after"
    assert (tmp_path / "runs.md").read_text() == printed("full")
    lines = printed("table").splitlines()
    assert lines[0] == "| Qwen2.5-Coder-1.5B, Q4_K_M | Spec-Bench | Code edits |"
    assert lines[2] == "| `sam` | 1.25 (1.20 to 1.31), 1.50 a round | 1.25 (1.20 to 1.31), 1.50 a round |"
    assert [line.split("`")[1] for line in lines[2:6]] == ["sam", "none", "rest", "peer:llama-cpp"]
    whole = printed("full")
    assert whole.count("\n## ") == 4
    assert "| `peer:xllamacpp,spec=ngram-mod` | not there |" in whole
    assert "| `sam` | 1.25 (1.20 to 1.31) | 1.38 | 1.50 | 600.0 |" in whole


def test_a_run_is_one_command_and_stops_when_the_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Namespace(
        runs=["qwen-q4-code-edits", "smollm2-humaneval"], out=tmp_path, minutes=1.0, limit=2, max_tokens=9, corpus=[],
        qwen="q.gguf", smollm2="s.gguf", spec_bench="s", humaneval="h", code_edits="code-edits", peer_python="x",
    )  # fmt: skip
    commands: list[list[str]] = []
    monkeypatch.setattr(results, "_interruptible", lambda words, until: commands.append(list(words)) or 0)
    assert results.run(asked) == 0
    qwen, smollm2 = (" ".join(words[3:]) for words in commands)
    assert qwen.startswith("bench q.gguf --dtype auto -n 9 --warm-up 1 --suite code-edits --out ")
    assert " --limit 2 -t 0.0 -d suffix " in qwen
    assert qwen.endswith(" --peer xllamacpp:q.gguf,spec=ngram-simple --peer-python x")
    assert " -d prediction " in qwen
    assert "corpus" not in smollm2, "without a text for one"
    assert "--dtype bfloat16" in smollm2
    asked.minutes = 0.1
    assert results.run(asked) == 130
    monkeypatch.undo()
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert results._interruptible(sleeper, 0.0) == 130


def test_the_plan_names_each_run_once(printed: Any) -> None:
    names = [line.split()[0] for line in printed("plan").splitlines()]
    assert len(set(names)) == len(names) == len(results.PLANS)
    assert set(json.loads((RESULTS / "runs.json").read_text())) <= set(names)
