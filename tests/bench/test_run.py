"""What a run does around the questions: what it calibrates and keeps, and what it gives back before it judges."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import make
from tests.cost.test_calibrate_peer import Engine

from paceline.bench import calibrations, run
from paceline.bench.contestant import Ask, NotInstalled
from paceline.bench.folder import answers_of
from paceline.bench.record import Answer, Turn
from paceline.bench.run import Plan, Watch, bench
from paceline.bench.runner import Options
from paceline.cost.calibration import Calibration
from paceline.cost.calibrations import Effort
from paceline.cost.predict import pace
from paceline.errors import PacelineError

PEERS = ("transformers", "transformers-lookup")
PROMPTS = ("the cat", "the dog", "the mat")


class Peer(Engine):
    """Notes what it was asked for; may be interrupted at its first question."""

    interrupted = ""
    asked: list[tuple[str, int]] = []
    opened: list[str] = []

    def __init__(self, spec: str, *folder: str, **settings: Any):
        super().__init__()
        self.name = spec

    def open(self) -> None:
        Peer.opened.append(self.name)

    def answer(self, prompts: Sequence[Sequence[int]], ask: Ask) -> list[Turn]:
        if self.name == Peer.interrupted:
            raise KeyboardInterrupt
        Peer.asked.append((self.name, ask.max_tokens))
        return super().answer(prompts, ask)

    def close(self) -> None:
        if self.name in Peer.opened:
            Peer.opened.remove(self.name)


@pytest.fixture(autouse=True)
def _peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "create_peer", Peer)
    monkeypatch.setattr(calibrations, "USUAL", Effort(2, during=3, peers_before=2, peers_during=3, tokens=21))
    Peer.interrupted, Peer.asked, Peer.opened = "", [], []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make(tmp_path_factory.mktemp("model"), max_position_embeddings=512))


def plan(model: str, tmp_path: Path) -> Plan:
    tmp_path.mkdir(exist_ok=True)
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    options = Options(max_tokens=8, warm_up=0)
    return Plan(model, peers=PEERS, suite=str(questions), out=tmp_path / "run", options=options)


def sweeps(out: Path, of: str = "") -> list[dict[str, Any]]:
    """Of our engine, or of a peer."""
    told = json.loads((out / "sweeps.json").read_text())
    found: list[dict[str, Any]] = told["peers"].get(f"peer:{of}", []) if of else told["sweeps"]
    return found


def test_a_calibration_that_is_interrupted_keeps_what_it_has(model: str, tmp_path: Path) -> None:
    Peer.interrupted = "peer:transformers-lookup"
    with pytest.raises(KeyboardInterrupt):
        bench(plan(model, tmp_path))
    kept = json.loads((tmp_path / "run" / "calibration.json").read_text())
    assert list(kept) == ["paceline", "beside", "peer:transformers"]
    out = tmp_path / "run"
    before = sweeps(out), sweeps(out, "transformers")
    assert [len(of) for of in before] == [2, 2]
    assert not Peer.opened

    Peer.interrupted, Peer.asked = "", []
    bench(plan(model, tmp_path))
    now = json.loads((out / "calibration.json").read_text())
    assert list(now) == ["paceline", "beside", "peer:transformers", "peer:transformers-lookup"]
    assert now["beside"] == kept["beside"]
    assert (sweeps(out)[:2], sweeps(out, "transformers")[:2]) == before
    asked = [name for name, tokens in Peer.asked if tokens == 22]  # answers that are timed, four a sweep
    assert asked[:8] == ["peer:transformers-lookup"] * 8
    assert Counter(asked) == {"peer:transformers": 8, "peer:transformers-lookup": 16}


def test_a_calibration_that_is_stopped_goes_on_later(model: str, tmp_path: Path) -> None:
    """Behind our first sweep, then behind the first peer."""

    def stopped() -> bool:
        return len(sweeps(out)) >= 1 if (out / "sweeps.json").exists() else False

    out = tmp_path / "run"
    first = bench(plan(model, tmp_path), Watch(stopped=stopped))
    assert not first.complete
    assert {result["answers"] for result in first.results} == {0}
    kept = sweeps(out)
    assert len(kept) == 1
    assert not Peer.asked

    assert not bench(plan(model, tmp_path), Watch(stopped=lambda: bool(Peer.asked))).complete
    assert {name for name, _ in Peer.asked} == {"peer:transformers"}
    assert sweeps(out)[:1] == kept
    assert len(sweeps(out)) == 2

    last = bench(plan(model, tmp_path))
    assert last.complete
    assert all(result["predicted"] > 0 for result in last.results)


def test_all_are_calibrated_all_through_the_run(model: str, tmp_path: Path) -> None:
    """Stopped behind the first of the second question's answers, the run goes on with the sweeps it has."""
    answered: list[Answer] = []
    first = bench(plan(model, tmp_path), Watch(answered=answered.append, stopped=lambda: len(answered) >= 4))
    assert not first.complete
    kept = [sweeps(first.out, of) for of in ("", *PEERS)]
    assert [len(of) for of in kept] == [2 + 1] * 3
    there: list[list[int]] = []

    def answered_one(answer: Answer) -> None:
        there.append([len(sweeps(first.out, of)) for of in ("", *PEERS)])

    last = bench(plan(model, tmp_path), Watch(answered=answered_one))
    assert last.complete
    # Of three contestants; the last question comes when two thirds are done.
    assert there == [[3] * 3] * 6 + [[4] * 3] * 3
    assert [sweeps(first.out, of)[:3] for of in ("", *PEERS)] == kept
    assert all(result["predicted"] > 0 for result in last.results)

    before = json.loads((first.out / "calibration.json").read_text())
    (first.out / "calibration.json").write_text(json.dumps({"beside": before["beside"]}))
    again = bench(plan(model, tmp_path))
    after = json.loads((first.out / "calibration.json").read_text())
    assert after.keys() == before.keys()
    for name in ("peer:transformers", "paceline"):
        assert after[name]["ms"] == pytest.approx(before[name]["ms"], rel=0.01)  # seconds of answers are rounded
    (first.out / "calibration.json").unlink()
    again = bench(plan(model, tmp_path))
    assert all(result["predicted"] > 0 for result in again.results)
    assert [len(sweeps(first.out, of)) for of in ("", *PEERS)] == [4, 4, 4]
    for wrong in ({"sweeps": [{"ms": 3}]}, {"peers": {"peer:transformers": [{"ms": 3}]}}):
        (first.out / "sweeps.json").write_text(json.dumps(wrong))
        with pytest.raises(PacelineError, match=r"sweeps.json holds no sweeps .*; delete it"):
            bench(plan(model, tmp_path))


@pytest.mark.parametrize("tells", [True, False])
def test_a_peer_that_fails_or_tells_no_rounds_is_asked_no_more(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tells: bool
) -> None:
    answer = Peer.answer

    def one_fails(peer: Peer, prompts: Sequence[Sequence[int]], ask: Ask) -> list[Turn]:
        turns = answer(peer, prompts, ask)
        if peer.name == "peer:transformers" and ask.max_tokens == 22:
            if tells:
                raise PacelineError("out of memory")
            return [replace(turn, nodes=None) for turn in turns]
        return turns

    monkeypatch.setattr(Peer, "answer", one_fails)
    outcome = bench(plan(model, tmp_path))
    assert outcome.complete
    assert [(name, tokens) for name, tokens in Peer.asked].count(("peer:transformers", 22)) == 1
    assert [len(sweeps(outcome.out, of)) for of in PEERS] == [0, 4]
    overall = {result["method"]: result for result in outcome.results if result["category"] == "overall"}
    assert overall["peer:transformers"]["predicted"] is None
    assert overall["peer:transformers-lookup"]["predicted"] > 0


def test_peers_are_predicted_at_the_pace_of_the_run_they_were_calibrated_in(model: str, tmp_path: Path) -> None:
    """Their clock stands still beside ours, so what they took is what was foreseen; in a run that takes it over, as
    much more or less as plain decoding is slower or faster there."""

    def off(outcome: run.Outcome) -> float:
        told = {result["method"]: result for result in outcome.results if result["category"] == "overall"}
        found: float = told["peer:transformers"]["predicted"] / told["peer:transformers"]["speedup"]
        return found

    def plain_pace(outcome: run.Outcome) -> float:
        kept = json.loads((outcome.out / "calibration.json").read_text())["beside"]
        plain = [answer for answer in answers_of(outcome.out) if answer.method == "none"]
        return pace([[t] for a in plain for t in a.turns], Calibration.from_json(json.dumps(kept))) or 0.0

    whole = replace(plan(model, tmp_path), options=Options(max_tokens=32, warm_up=0))
    first = bench(whole)
    assert off(first) == pytest.approx(1, rel=0.02)
    second = bench(replace(whole, out=tmp_path / "second", calibration=first.out))
    assert off(second) == pytest.approx(plain_pace(first) / plain_pace(second), rel=0.02)


def test_the_calibration_of_another_run_is_taken(model: str, tmp_path: Path) -> None:
    first = plan(model, tmp_path)
    bench(first)
    known = json.loads((first.out / "calibration.json").read_text())
    del known["peer:transformers"]
    known["beside"]["token_ms"] = 0.123
    (first.out / "calibration.json").write_text(json.dumps(known))
    Peer.asked = []
    second = replace(first, out=tmp_path / "second", options=Options(max_tokens=9, warm_up=0), calibration=first.out)
    bench(second)
    now = json.loads((second.out / "calibration.json").read_text())
    for name in ("beside", "peer:transformers-lookup"):
        assert now[name] == known[name]
    assert "peer:transformers" in now
    assert now["paceline"] != known["paceline"], "ours is of this run"
    assert [tokens for name, tokens in Peer.asked if name == "peer:transformers-lookup"] == [9] * 3

    grouped = replace(second, out=tmp_path / "third", options=Options(batch=2))
    with pytest.raises(PacelineError, match="is of another run: its batch was 1 and now is 2"):
        bench(grouped)
    assert not grouped.out.exists()
    with pytest.raises(PacelineError, match="is not the folder of a run that was calibrated"):
        bench(replace(grouped, calibration=tmp_path))


def test_a_large_models_peers_answer_less_to_be_calibrated(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrations, "OF_LARGE", Effort(1, during=1, peers_before=2, peers_during=1, tokens=5))
    bench(plan(model, tmp_path / "small"))
    assert max(tokens for _, tokens in Peer.asked) == 22
    Peer.asked = []
    monkeypatch.setattr(calibrations, "LARGE", 0)
    large = bench(plan(model, tmp_path / "large"))
    assert max(tokens for _, tokens in Peer.asked) == 8
    assert [len(sweeps(large.out, of)) for of in ("", *PEERS)] == [2, 3, 2]  # the peers take turns


def test_engines_are_put_away_before_answers_are_judged(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The float32 model that judges needs the room."""
    found: list[list[str]] = []
    judge = run._judge

    def watched(*arguments: Any) -> Any:
        found.append(list(Peer.opened))
        return judge(*arguments)

    monkeypatch.setattr(run, "_judge", watched)
    outcome = bench(plan(model, tmp_path))
    assert outcome.complete
    assert found == [[]]


def test_judging_says_how_far_it_is_can_be_stopped_and_goes_on(model: str, tmp_path: Path) -> None:
    judged: list[tuple[int, int]] = []
    watch = Watch(judged=lambda *far: judged.append(far))

    def verdicts(outcome: run.Outcome) -> list[str]:
        overall = [result for result in outcome.results if result["category"] == "overall"]
        return [one["verdict"] for result in overall for one in result["differs"]]

    stopped = bench(plan(model, tmp_path), replace(watch, stopped=lambda: len(judged) == 2))
    assert stopped.complete
    assert judged == [(1, 6), (2, 6)]  # two peers' answers to three questions
    assert sorted(verdicts(stopped)) == ["bug"] * 2 + ["not judged"] * 4
    judged.clear()
    whole = bench(plan(model, tmp_path), watch)
    assert judged == [(done, 4) for done in range(1, 5)]
    assert verdicts(whole) == ["bug"] * 6
    judged.clear()
    again = bench(plan(model, tmp_path), watch)
    assert not judged
    assert [result["differs"] for result in again.results] == [result["differs"] for result in whole.results]


def test_nobody_is_started_who_has_nothing_left_to_do(model: str, tmp_path: Path) -> None:
    """A whole run's command says its figures again; of one that is not whole, only those start who are missing."""
    first = bench(replace(plan(model, tmp_path), drafts=("sam",)))
    described = (first.out / "run.json").read_text()
    Peer.asked = []
    again = replace(plan(model, tmp_path), drafts=("sam",))
    said: list[str] = []
    second = bench(again, Watch(say=said.append))
    assert second.complete
    assert not Peer.asked
    assert not [text for text in said if text.startswith("starting")]
    figures = [[result["speedup"] for result in outcome.results] for outcome in (first, second)]
    assert figures[0] == pytest.approx(figures[1], 0.01)  # seconds are written down to the microsecond
    assert (first.out / "run.json").read_text() == described

    known = json.loads((first.out / "calibration.json").read_text())
    (first.out / "calibration.json").write_text(json.dumps({name: known[name] for name in ("paceline", "beside")}))
    (first.out / "sweeps.json").write_text(json.dumps({"sweeps": sweeps(first.out)}))
    said.clear()
    bench(again, Watch(say=said.append))
    started = [text for text in said if text.startswith("starting")]
    assert started == ["starting peer:transformers", "starting peer:transformers-lookup"]
    assert {name for name, _ in Peer.asked} == {"peer:transformers", "peer:transformers-lookup"}

    lines = (first.out / "answers.jsonl").read_text().splitlines(keepends=True)
    (first.out / "answers.jsonl").write_text("".join(line for line in lines if json.loads(line)["method"] != "sam"))
    said.clear()
    last = bench(again, Watch(say=said.append))
    assert [text for text in said if text.startswith("starting")] == ["starting sam"]
    assert [result["answers"] for result in last.results if result["category"] == "overall"] == [3, 3, 3, 3]


def test_a_peer_may_be_installed_later(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(peer: Peer) -> None:
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
