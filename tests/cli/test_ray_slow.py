"""Work on a Ray cluster of two local workers: the same results as in one process, also where a worker is killed."""

import json
import os

import pytest
from tests import models
from tests.paths import REPOSITORY
from tests.ray_work import Doubling, Mortal

from paceline.errors import PacelineError
from paceline.replay.cluster import LOCAL, QUIET, spread
from paceline.replay.report import Report
from paceline.replay.workers import Replayer, ShardedReplay
from paceline.textfiles import pieces_of

ray = pytest.importorskip("ray", reason="pip install '.[ray]'")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster():
    """Two workers, for all tests that do not start their own."""
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]  # where workers find ray_work.py
    ray.init(LOCAL, num_cpus=2, **QUIET, runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}})
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    models.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def logs(tmp_path, monkeypatch):
    """Two files; the pieces of the first are small."""
    monkeypatch.setattr("paceline.textfiles.PIECE_BYTES", 500)
    said = ["the little cat", "and the little dog", "sat on the mat;", "the old teacher", "looks for the key"]
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for f, file in enumerate(files):
        lines = [
            {
                "prompt": said[i % 5] * 2, "response": (said[(i + f) % 5] + said[i % 3]) * (2 + i % 3),
                "category": "odd" if i % 2 else "even",
            }
            for i in range(20)
        ]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return files


def without_times(results):
    return [{key: value for key, value in result.items() if key != "draft_us_per_round"} for result in results]


@pytest.mark.usefixtures("cluster")
def test_results_come_in_order_though_a_worker_is_killed(tmp_path):
    assert list(spread(Doubling, (str(tmp_path),), range(12))) == [2 * i for i in range(12)]
    assert (tmp_path / "killed").exists()
    with pytest.raises(PacelineError, match="13 is not doubled"):
        list(spread(Doubling, (str(tmp_path),), range(20)))


@pytest.mark.usefixtures("cluster")
def test_a_replay_says_the_same_though_a_worker_is_killed(tokenizer, logs):
    job = ShardedReplay(logs, ["sam", "suffix,past=1000"], str(tokenizer))
    shards = job.shards()
    assert len(shards) > 5
    said = []
    for make, run in ((Replayer, None), (Mortal, spread)):
        report = Report(job.specs)
        parts = map(make(job), shards) if run is None else run(make, (job,), shards)
        for shard, part in zip(shards, parts, strict=True):
            report.merge(part, shard.numbers)
        said.append(without_times(report.results()))
    assert said[0] == said[1]
    assert logs[0].with_suffix(".killed").exists()


@pytest.mark.usefixtures("cluster")
def test_the_command_says_what_it_says_without(command, tokenizer, logs):
    asked = ("replay", *logs, "--tokenizer", tokenizer, "-d", "sam", "-d", "suffix,past=1000", "--json")
    here, there = (json.loads(command(*asked, *more).out) for more in ((), ("--ray",)))
    assert without_times(there["results"]) == without_times(here["results"])
    assert (there["answers"], there["complete"]) == (40, True)
    refused = command(*asked, "--categories", "even,prime", "--ray")
    assert (refused.code, refused.out) == (2, "")
    assert "has no category 'prime'" in refused.err


@pytest.mark.usefixtures("cluster")
def test_a_corpus_is_the_same_byte_for_byte(command, tokenizer, logs, tmp_path):
    assert len([*pieces_of(logs[0], PacelineError)]) > 2
    (tmp_path / "c.txt").write_text("one text of a file\nin two lines")
    for out, more in (("here", ()), ("there", ("--ray",))):
        files = ("--text", *logs, tmp_path / "c.txt")
        built = command("corpus", "build", tmp_path / out, *files, "--tokenizer", tokenizer, *more)
        assert built.code == 0, built.err
    here, there = ({f.name: f.read_bytes() for f in (tmp_path / out).iterdir()} for out in ("here", "there"))
    assert here == there
    logs[1].write_text("no JSON\n")
    refused = command("corpus", "build", tmp_path / "no", "--text", *logs, "--tokenizer", tokenizer, "--ray")
    assert refused.code == 2
    assert "b.jsonl, line 1: not JSON" in refused.err


def test_a_cluster_of_its_own(command, tokenizer, logs):
    ray.shutdown()
    asked = ("replay", *logs, "--tokenizer", tokenizer, "-d", "sam", "--json")
    told = command(*asked, "--ray", "local", "--workers", "2")
    assert told.code == 0, told.err
    assert json.loads(told.out)["answers"] == 40
    assert not ray.is_initialized()
    assert "no Ray cluster at 127.0.0.1:1" in command(*asked, "--ray=127.0.0.1:1").err
