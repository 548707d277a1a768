"""Many conversations, many drafters, several workers: the same figures however the work is shared out."""

import json
import os
import re
import signal
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import numpy as np
import pytest

from paceline.core.tree import DraftTree
from paceline.draft import registry
from paceline.draft.base import Drafter
from paceline.draft.recording import Recording
from paceline.errors import MethodError, PacelineError
from paceline.logs.transcript import RecordedAnswer, Transcript
from paceline.replay.report import OVERALL, Report
from paceline.replay.workers import PORTION, start, sweep
from tests.paths import REPOSITORY

RECORDING = Recording(None, (9,), 10)


def conversations(count, seed=0):
    random = np.random.default_rng(seed)
    made = []
    for i in range(count):
        turns = [
            RecordedAnswer(random.integers(0, 3, 20), np.append(random.integers(0, 3, 30), 9)) for _ in range(1 + i % 2)
        ]
        made.append(Transcript(("left", "right")[i % 3 == 0], turns))
    return made


@dataclass(frozen=True)
class MemoryConfig:
    past: int = 0


class Memory(Drafter):
    """Drafts the answer of the row before, if it may remember it."""

    name = "memory"
    lossless = paper = "-"
    Config = MemoryConfig

    def __init__(self, config=MemoryConfig()):
        self.config, self.seen = config, set()
        self.before = np.empty(0, np.int64)

    def start(self, row):
        assert row.id not in self.seen
        self.seen.add(row.id)

    def propose(self, asks):
        rows = [row for row, _ in asks]
        return [DraftTree.chain(row.last_token, self.before[row.num_new : row.num_new + 3]) for row in rows]

    def drop(self, row):
        if self.config.past:
            assert row.finish_reason == "stop"
            self.before = row.new_tokens.copy()


class Mortal(Drafter):
    """Dies of its third row, in the way that MORTAL says."""

    name = "mortal"
    lossless = paper = "-"
    rows = 0

    def start(self, row):
        Mortal.rows += 1
        if Mortal.rows == 3:
            if os.environ["MORTAL"] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise MethodError("three is too many") if os.environ["MORTAL"] == "error" else RuntimeError("a bug")


@pytest.fixture(autouse=True)
def third_party(monkeypatch):
    here = [EntryPoint(kind.name, f"{__name__}:{kind.__name__}", registry.GROUP) for kind in (Memory, Mortal)]
    monkeypatch.setattr(registry, "added", lambda: here)
    monkeypatch.setattr(Mortal, "rows", 0)


def report(made, specs, workers):
    whole = Report(specs, made)
    for done in start(made, specs, RECORDING, workers):
        whole.add(done)
    assert whole.is_complete
    return [{k: v for k, v in result.items() if k != "draft_us_per_round"} for result in whole.results()]


def test_figures_do_not_depend_on_the_number_of_workers():
    """Not even those of a drafter that remembers: it sees the conversations in their order."""
    made, specs = conversations(3 * PORTION + 1), ["sam", "memory,past=1000", "prompt-lookup", "memory"]
    alone = report(made, specs, 1)
    assert report(made, specs, 3) == alone
    overall = {result["draft"]: result for result in alone if result["category"] == OVERALL}
    assert overall["memory"]["mean_accepted_tokens"] == 1
    assert overall["memory,past=1000"]["mean_accepted_tokens"] > 1


def test_a_report_adds_up():
    made = conversations(20)
    results = report(made, ["sam"], 1)
    assert [r["category"] for r in results] == ["right", "left", OVERALL]
    for what in ("rounds", "new_tokens", "answers"):
        assert results[0][what] + results[1][what] == results[2][what]
    assert results[2]["new_tokens"] == sum(c.new_tokens for c in made)
    assert results[2]["mean_accepted_tokens"] == round(results[2]["new_tokens"] / results[2]["rounds"], 4)


def test_a_recording_without_categories_has_one_line_a_drafter():
    made = [Transcript("", one.turns) for one in conversations(5)]
    assert [r["category"] for r in report(made, ["sam", "none"], 1)] == [OVERALL, OVERALL]
    made = [Transcript(OVERALL, one.turns) for one in conversations(5)]
    assert [r["answers"] for r in report(made, ["none"], 1)] == [7]


def test_a_memory_behind_another_drafter_counts():
    made, spec = conversations(2 * PORTION), "prompt-lookup,min_ngram=3+memory,past=10"
    assert report(made, [spec], 2) == report(made, [spec], 1)


@pytest.mark.parametrize("workers", [1, 2])
def test_closing_stops_the_workers(workers):
    made = conversations(4 * PORTION)
    whole, replays = Report(["sam"], made), start(made, ["sam"], RECORDING, workers)
    whole.add(next(replays))
    replays.close()
    assert not whole.is_complete
    (right, overall) = whole.results()
    assert right["answers"] == overall["answers"] == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_the_users_arrives_whole(workers, monkeypatch):
    monkeypatch.setenv("MORTAL", "error")
    with pytest.raises(MethodError, match="three is too many"):
        list(start(conversations(4 * PORTION), ["mortal"], RECORDING, workers))


@pytest.mark.slow
def test_workers_that_are_not_forked(monkeypatch):
    """As on systems other than Linux; they import everything themselves."""
    made, specs = conversations(2 * PORTION), ["sam", "prompt-lookup"]
    alone = report(made, specs, 1)
    monkeypatch.setattr("sys.platform", "elsewhere")
    assert report(made, specs, 2) == alone


def test_a_worker_that_dies_is_noticed(monkeypatch):
    monkeypatch.setenv("MORTAL", "killed")
    with pytest.raises(RuntimeError, match="terminated abruptly"):
        list(start(conversations(4 * PORTION), ["mortal"], RECORDING, 2))


def test_drafters_are_checked_before_anything_is_replayed():
    with pytest.raises(MethodError, match="'samm'"):
        start(conversations(2), ["sam", "samm"], RECORDING, 2)


def test_a_sweep_makes_variants_of_those_that_have_the_option():
    assert sweep(["sam", "none"], None) == {"sam": "sam", "none": "none"}
    swept = {"sam,grow=0,draft=5": "sam,grow=0", "sam,grow=0,draft=10": "sam,grow=0", "none": "none"}
    assert sweep(["sam,grow=0", "none"], "draft=5, 10") == swept
    assert list(sweep(["sam+none+prompt-lookup"], "draft=7")) == ["sam,draft=7+none+prompt-lookup,draft=7"]
    with pytest.raises(PacelineError, match="none of none, sam has an option 'depth'"):
        sweep(["none", "sam"], "depth=3")
    with pytest.raises(PacelineError, match="option=value,value"):
        sweep(["sam"], "draft")
    with pytest.raises(MethodError, match="'samm'"):
        sweep(["samm"], "draft=3")


def test_the_python_on_the_page_runs(tmp_path, demo, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "replay.md").read_text("utf-8"), re.DOTALL)
    (tmp_path / "log.jsonl").write_text(json.dumps({"prompt": "Hello?", "response": "Hello, hello, hello."}))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "demo").symlink_to(demo)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "replay.md", "exec"), {})
    assert "'mean_accepted_tokens'" in capsys.readouterr().out
