"""What a run does around the questions: what it keeps, and what it gives back before it judges."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.bench.turns import reply
from tests.models import make_repetitive

from paceline.bench import benchmark as benchmarks
from paceline.bench.benchmark import Benchmark, bench
from paceline.bench.options import Options
from paceline.peers import NotInstalled
from paceline.peers.peer import Peer as Endpoint
from paceline.runs.progress import Progress

PEERS = ("transformers", "transformers-lookup")
PROMPTS = ("the cat", "the dog", "the mat")


class Peer(Endpoint):
    """Answers at once, and notes what it was asked for."""

    asked: list[tuple[str, int]] = []
    opened: list[str] = []
    contexts: set[int] = set()

    def __init__(self, spec, *folder, **settings):
        super().__init__(f"peer:{spec}", 1 << 30, None)
        Peer.contexts.add(settings["max_context"])

    def open(self):
        Peer.opened.append(self.name)

    def answer(self, prompts, params):
        n = params[0].max_tokens
        Peer.asked.append((self.name, n))
        times = [0.005 * (i + 1) for i in range(n)]
        return [reply(len(prompt), [1] * n, "", times[-1], [1] * n, times, [0] * n, [0] * n) for prompt in prompts]

    def close(self):
        if self.name in Peer.opened:
            Peer.opened.remove(self.name)


@pytest.fixture(autouse=True)
def _peers(monkeypatch):
    monkeypatch.setattr(benchmarks, "create_peer", Peer)
    Peer.asked, Peer.opened, Peer.contexts = [], [], set()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_repetitive(tmp_path_factory.mktemp("model"), max_position_embeddings=512))


def plan(model, tmp_path):
    tmp_path.mkdir(exist_ok=True)
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    options = Options(max_tokens=8, warm_up=0)
    return Benchmark(model, peers=PEERS, suite=str(questions), out=tmp_path / "run", options=options)


def test_engines_are_put_away_before_answers_are_judged(model, tmp_path, monkeypatch):
    """The float32 model that judges needs the room."""
    found = []
    judge = benchmarks.judge_differences

    def watched(*arguments):
        found.append(list(Peer.opened))
        return judge(*arguments)

    monkeypatch.setattr(benchmarks, "judge_differences", watched)
    outcome = bench(plan(model, tmp_path))
    assert outcome.complete
    assert found == [[]]
    (context,) = Peer.contexts
    assert 256 + 8 < context < 300, "of the longest conversation, not the model's 512"


def test_judging_says_how_far_it_is_can_be_stopped_and_goes_on(model, tmp_path):
    judged, said = [], []
    progress = Progress(said.append, lambda *far: judged.append(far) if said[-1].startswith("comparing") else None)

    def verdicts(outcome):
        overall = [result for result in outcome.results if result["category"] == "overall"]
        return [one["verdict"] for result in overall for one in result["differs"]]

    stopped = bench(plan(model, tmp_path), replace(progress, stopped=lambda: len(judged) == 2))
    assert stopped.complete
    assert judged == [(1, 6), (2, 6)]  # two peers' answers to three questions
    assert sorted(verdicts(stopped)) == ["bug"] * 2 + ["not judged"] * 4
    judged.clear()
    whole = bench(plan(model, tmp_path), progress)
    assert (judged, verdicts(whole)) == ([(done, 4) for done in range(1, 5)], ["bug"] * 6)
    judged.clear()
    again = bench(plan(model, tmp_path), progress)
    assert not judged
    assert [result["differs"] for result in again.results] == [result["differs"] for result in whole.results]


def test_nobody_is_started_who_has_nothing_left_to_do(model, tmp_path):
    """A whole run's command says its figures again; of one that is not whole, only those start who are missing."""
    first = bench(replace(plan(model, tmp_path), drafts=("sam",)))
    described = (first.out / "run.json").read_text()
    Peer.asked = []
    again = replace(plan(model, tmp_path), drafts=("sam",))
    said = []
    second = bench(again, Progress(say=said.append))
    assert second.complete
    assert not Peer.asked
    assert not [text for text in said if text.startswith("starting")]
    figures = [[result["speedup"] for result in outcome.results] for outcome in (first, second)]
    assert figures[0] == pytest.approx(figures[1], 0.01)  # seconds are written down to the microsecond
    assert (first.out / "run.json").read_text() == described

    lines = (first.out / "answers.jsonl").read_text().splitlines(keepends=True)
    (first.out / "answers.jsonl").write_text("".join(line for line in lines if json.loads(line)["method"] != "sam"))
    said.clear()
    last = bench(again, Progress(say=said.append))
    assert [text for text in said if text.startswith("starting")] == ["starting sam"]
    assert [result["answers"] for result in last.results if result["category"] == "overall"] == [3, 3, 3, 3]


def test_a_peer_may_be_installed_later(model, tmp_path, monkeypatch):
    def missing(peer):
        raise NotInstalled(f"{peer.name}: not there")

    with monkeypatch.context() as patch:
        patch.setattr(Peer, "open", missing)
        first = bench(plan(model, tmp_path))
    assert first.unavailable == {f"peer:{name}": "not there" for name in PEERS}
    methods = {told["method"]: told for told in json.loads((first.out / "run.json").read_text())["methods"]}
    assert methods["peer:transformers"]["unavailable"] == "not there"

    second = bench(plan(model, tmp_path))
    assert not second.unavailable
    methods = {told["method"]: told for told in json.loads((first.out / "run.json").read_text())["methods"]}
    assert [told["unavailable"] for told in methods.values()] == [None] * 3
    assert all(result["speedup"] for result in second.results)
