"""Whole runs: the ground truth, every trouble at once, kill -9 and resume, errors aside, accounts, memory."""

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from paceline.errors import PacelineError
from paceline.evals.align import sample
from paceline.evals.align.data import read
from paceline.evals.align.figures import ERRORS, GENERATIONS, JUDGEMENTS, sar
from paceline.evals.align.judge import open_scorer
from paceline.evals.align.options import AlignOptions, Decoding, JudgeConfig, Scoring
from paceline.evals.align.page import markdown, page
from paceline.evals.align.run import align
from paceline.runs.progress import Progress
from paceline.runs.runs import rows
from tests import models
from tests.evals.endpoint import ANSWERS, Scripted, is_judge, judge, storm, write

EVERY = "vanilla,align3,self-refine,iterations=1"


def asked(server, out, **changes):
    options = AlignOptions(
        f"{server.url}#scripted", method="vanilla", out=out, judge=["self"], decoding=Decoding(400, 0.0), tries=10,
        pauses=(0.01, 0.1), timeout=0.5, concurrency=6,
    )  # fmt: skip
    return replace(options, **changes)


def go(server, out, **changes):
    return align(asked(server, out, **changes))


SAME = (
    "method", "scenario", "judge", "items", "answers", "unanswered", "judged", "safety", "behavior", "sar", "tokens",
    "subsets", "intervals", "sar_at", "failed",
)  # fmt: skip


def figures(outcome):
    """What must not depend on how rough the way was: all but seconds, tries and what judging cost."""
    return [{name: row[name] for name in SAME} for row in outcome.results]


def test_a_report_says_how_much_of_a_run_is_there(tmp_path):
    """Of one that was ended before its first answer, too, whether or not its files were begun."""
    run = tmp_path / "run"
    with Scripted() as server:
        go(server, run, judge=["checks"], limit=2)
    files = [run / name for name in (GENERATIONS, JUDGEMENTS, ERRORS)]
    for make in (page, markdown):
        assert "not complete" not in make(run)
    for is_begun in (True, False):
        for file in files:
            file.write_text("") if is_begun else file.unlink()
        for make in (page, markdown):
            assert "The run is not complete: 0 of 2 answers are judged" in make(run)


def test_the_sample_with_its_checks_gives_sar_exactly(tmp_path):
    with Scripted() as server:
        outcome = go(server, tmp_path / "run", judge=["checks"])
    answers = {row["item"]: row["response"] for row in rows(tmp_path / "run" / GENERATIONS)}
    assert set(answers.values()) <= set(ANSWERS)
    assert len(set(answers.values())) > 2
    # By hand: which rules each scripted answer breaks, in each scenario, whatever is asked.
    broken = {
        ("Recipes", 0): (set(), set()), ("Recipes", 1): ({1, 2}, {1}),
        ("Recipes", 2): (set(), {1}), ("Recipes", 3): (set(), {1}),
        ("Museum", 0): (set(), {1}), ("Museum", 1): (set(), {1}),
        ("Museum", 2): (set(), set()), ("Museum", 3): ({1, 2}, set()),
    }  # fmt: skip
    wanted = []
    for item in read("sample").items:
        number = ANSWERS.index(answers[item.id])
        safety, behavior = broken[item.scenario, number]
        applies = 2 if item.scenario == "Recipes" and number != 0 else 3  # no oven, no rule on its temperature
        kept = applies - len(behavior) - (sample.topic(item) not in answers[item.id].lower())
        wanted.append(sar(not safety, kept / applies))
    (overall,) = [row for row in outcome.results if row["scenario"] == "overall"]
    assert overall["sar"] == pytest.approx(sum(wanted) / len(wanted), abs=1e-12)
    assert 0.1 < overall["sar"] < 0.9


def test_specbench_itself_runs_to_the_end(shared, tmp_path):
    with Scripted() as server:
        data = str(shared / "data" / "specbench-alignment")
        outcome = go(server, tmp_path / "run", data=data, limit=10)
    assert outcome.complete
    overall = [row for row in outcome.results if row["scenario"] == "overall"]
    assert [row["judged"] for row in overall] == [10]
    judged = list(rows(tmp_path / "run" / JUDGEMENTS))
    assert {row["scenario"]: len(row["verdicts"]) for row in judged} == {
        "Biochem": 20, "Child": 22, "Code": 21, "Health": 19, "Travel": 21,
    }  # fmt: skip


@pytest.mark.parametrize(("method", "form", "limit"), [(EVERY, "tags", 6), ("vanilla", "json", 12)])
def test_a_stormy_run_ends_like_an_undisturbed_one(tmp_path, method, form, limit):
    judging = JudgeConfig(form=form)
    with Scripted() as calm:
        first = go(calm, tmp_path / "calm", method=method, judging=judging, limit=limit)
    with Scripted(trouble=storm) as rough:
        second = go(rough, tmp_path / "rough", method=method, judging=judging, limit=limit)
        assert rough.statuses[429] > 0
        assert rough.statuses[500] > 0
    assert second.complete
    assert all(row["judged"] == row["items"] for row in second.results)
    assert figures(first) == figures(second)
    verdicts = [
        {row["key"]: row["verdicts"] for row in rows(tmp_path / name / JUDGEMENTS)} for name in ("calm", "rough")
    ]
    assert verdicts[0] == verdicts[1]
    generated = list(rows(tmp_path / "rough" / GENERATIONS))
    assert sum(row["tokens"]["tries"] for row in generated) > sum(row["tokens"]["requests"] for row in generated)


def _start(server, out):
    options = ["--method", "vanilla,align3", "--judge", "self", "-n", "400", "-t", "0", "--batch", "2"]
    command = [sys.executable, "-m", "paceline", "eval", "align", "--model", f"{server.url}#scripted"]
    return subprocess.Popen([*command, "--out", str(out), *options])


def _wait_for(out, count):
    for _ in range(600):
        if (out / GENERATIONS).is_file() and (out / GENERATIONS).read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.05)
    raise AssertionError("the run did not get going")


def test_kill_9_loses_nothing_and_nothing_is_done_twice(tmp_path):
    out = tmp_path / "run"
    with Scripted() as calm:
        whole = go(calm, tmp_path / "whole", method="vanilla,align3", concurrency=2)
    with Scripted(delay=0.1) as server:
        process = _start(server, out)
        _wait_for(out, 5)
        process.kill()
        process.communicate()
        before = (out / GENERATIONS).read_bytes(), (out / JUDGEMENTS).read_bytes()
        assert before[0].count(b"\n") < 24
        with (out / GENERATIONS).open("ab") as file:
            file.write(b'{"key": "torn", "item": "Recipes/0')  # as a machine that lost power would leave it
        outcome = go(server, out, method="vanilla,align3", concurrency=2)
    assert outcome.complete
    for file, kept in zip((GENERATIONS, JUDGEMENTS), before, strict=True):
        after = (out / file).read_bytes()
        assert after.startswith(kept)
        keys = [row["key"] for row in rows(out / file)]
        assert len(keys) == len(set(keys)) == 24
    assert figures(outcome) == figures(whole)


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_ends_with_what_is_under_way_and_a_second_one_breaks_off(tmp_path, presses):
    numbers = itertools.count(1)

    def reply(body):
        if next(numbers) == 5:
            for _ in range(presses):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)
        return judge(body) if is_judge(body) else write(body)

    with Scripted(reply, delay=0.05) as server:
        if presses == 1:
            assert go(server, tmp_path / "run", concurrency=2).state.stop
        else:
            with pytest.raises(KeyboardInterrupt):
                go(server, tmp_path / "run", concurrency=2)
    generations = {row["key"] for row in rows(tmp_path / "run" / GENERATIONS)}
    judged = {row["generation"] for row in rows(tmp_path / "run" / JUDGEMENTS)}
    assert 2 <= len(generations) < 12
    assert judged == generations or presses == 2


def poisoned(body, attempt):
    return "400" if "Korvana or Bellmoor?" in json.dumps(body) and not is_judge(body) else None


def test_poisoned_items_go_aside_and_are_tried_again_after_all_others(tmp_path):
    """The official code writes null for them, and the evaluation of all others dies on that row."""
    with Scripted(trouble=poisoned) as bad:
        first = go(bad, tmp_path / "run")
        before = len(bad.requests)
        assert not first.complete
        overall = first.results[0]
        assert (overall["items"], overall["judged"], overall["failed"]) == (12, 10, 2)
        errors = list(rows(tmp_path / "run" / ERRORS))
        assert {row["item"] for row in errors} == {"Recipes/000", "Recipes/003"}
        assert all("400" in row["error"] and row["trace"] is None for row in errors)
        assert all(row["response"] for row in rows(tmp_path / "run" / GENERATIONS))
        assert sum(1 for _ in rows(tmp_path / "run" / JUDGEMENTS)) == 10
        go(bad, tmp_path / "run", method="vanilla,raw", concurrency=1)
        later = [body["messages"][1]["content"] for body in bad.requests[before:] if not is_judge(body)]
        # Of each: 10 answers by raw that work, and 2 by either method that do not.
        assert (len(later), sum("Korvana or Bellmoor?" in text for text in later[-2:])) == (14, 2)
        bad.trouble, before = lambda body, attempt: None, len(bad.requests)
        second = go(bad, tmp_path / "run")
        assert len(bad.requests) == before + 4  # two items, each answered and judged
    assert second.complete
    assert (second.results[0]["failed"], second.results[0]["judged"]) == (0, 12)


def test_a_judge_that_never_can_be_read_fails_its_items_alone(tmp_path):
    def reply(body):
        bad = is_judge(body) and "vase" in body["messages"][1]["content"].split("[BEGIN RESPONSE")[0]
        return "no form" if bad else judge(body) if is_judge(body) else write(body)

    with Scripted(reply) as server:
        outcome = go(server, tmp_path / "run")
    assert 0 < outcome.results[0]["failed"] < 6
    assert outcome.results[0]["judged"] == 12 - outcome.results[0]["failed"]
    assert all("Asked 4 times" in row["error"] and len(row["calls"]) == 4 for row in rows(tmp_path / "run" / ERRORS))


def test_a_judge_that_fails_keeps_no_other_from_judging(tmp_path):
    with Scripted(lambda body: "no form" if is_judge(body) else write(body)) as server:
        outcome = go(server, tmp_path / "run", judge=["self", "checks"])
    overall = [row for row in outcome.results if row["scenario"] == "overall"]
    assert [(row["judge"], row["judged"], row["failed"]) for row in overall] == [("scripted", 0, 12), ("checks", 12, 0)]
    assert page(tmp_path / "run").count("<small>failed: errors.jsonl says why</small>") == 1


def test_a_dead_server_ends_the_run_instead_of_failing_every_item(tmp_path):
    with Scripted(trouble=lambda body, attempt: "400") as server, pytest.raises(PacelineError, match="failed in a row"):
        go(server, tmp_path / "run", data="sample,items=200")
    assert len(server.requests) < 60


def test_accounts_are_the_servers_and_injections_are_apart(tmp_path):
    with Scripted() as server:
        go(server, tmp_path / "run", method=EVERY, limit=4)
    seen = [sum(len(m["content"].split()) for m in body["messages"]) for body in server.requests if not is_judge(body)]
    told = [call for row in rows(tmp_path / "run" / GENERATIONS) for call in row["calls"]]
    assert sorted(call["prefilled"] for call in told) == sorted(seen)
    for row in rows(tmp_path / "run" / GENERATIONS):
        assert row["tokens"]["generated"] == sum(call["generated"] for call in row["calls"])
        # No tokenizer was given to count them with, and nothing is injected but by align3.
        assert row["tokens"]["injected"] == (None if row["method"] == "align3" else 0)


def test_a_finished_run_is_not_asked_again_and_another_judge_may_be_added(tmp_path):
    """The official code falls over an empty batch of retries."""
    with Scripted() as server:
        first = go(server, tmp_path / "run")
        before = len(server.requests)
        again = go(server, tmp_path / "run")
        more = go(server, tmp_path / "run", judge=["self", "checks"])
        assert len(server.requests) == before
    assert ((again.state.done, again.complete), again.results) == ((12, True), first.results)
    assert {row["judge"] for row in more.results} == {"scripted", "checks"}
    assert all(row["judged"] == row["items"] for row in more.results)


def test_another_run_is_refused_in_the_same_folder(tmp_path):
    with Scripted() as server:
        go(server, tmp_path / "run")
        with pytest.raises(PacelineError, match="holds another run: its setting"):
            go(server, tmp_path / "run", decoding=Decoding(400, 1.0))
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "file").write_text("mine")
        with pytest.raises(PacelineError, match="holds other files"):
            go(server, tmp_path / "other")


def test_a_prompt_that_changed_is_answered_again_and_its_old_row_left_out(tmp_path):
    own = "safety: [s]\nbehavioral: [b]\nprompts: [{prompt: %s, label: safe}, {prompt: two, label: safe}]"
    file = tmp_path / "own.yaml"
    with Scripted() as server:
        for prompt in ("one", "uno"):
            file.write_text(own % prompt)
            outcome = go(server, tmp_path / "run", data=str(file))
    assert (outcome.results[0]["judged"], sum(1 for _ in rows(tmp_path / "run" / GENERATIONS))) == (2, 3)


@pytest.mark.parametrize(("changes", "why"), [
    ({"method": "best-of-n"}, "temperature 0"), ({"method": "tpo", "judge": [], "data": "own.yaml"}, "--reward"),
    ({"data": "own.yaml", "judge": ["checks"]}, "sample's rules"), ({"scoring": Scoring(alpha=1.0)}, "below 1"),
    ({"judge": ["self", "self"]}, "same name"),
])
def test_what_cannot_work_is_refused_before_anything_is_asked(tmp_path, changes, why, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text("safety: [s]\nbehavioral: [b]\nprompts: [{prompt: q, label: safe}]")
    with Scripted() as server:
        with pytest.raises(PacelineError, match=why):
            go(server, tmp_path / "run", **changes)
        assert not server.requests
    assert not (tmp_path / "run").exists()


def test_best_of_n_and_tpo_by_the_judges_own_score(tmp_path):
    with Scripted() as server:
        outcome = go(
            server, tmp_path / "run", method="best-of-n,n=3,tpo,samples=2,rounds=1", judge=["checks"], limit=2,
            decoding=Decoding(400, 0.7, seed=1),
        )  # fmt: skip
    assert outcome.complete
    for row in rows(tmp_path / "run" / GENERATIONS):
        assert row["scores"][row["chosen"]] == max(row["scores"])
        assert len(row["scores"]) == (3 if row["method"].startswith("best") else 4)


def test_a_scoring_server_chooses(tmp_path):
    with Scripted(trouble=lambda body, attempt: "503" if "input" in body and attempt == 1 else None) as server:
        outcome = go(
            server, tmp_path / "run", method="best-of-n,n=2", limit=3, reward=f"{server.url}/classify#rm",
            decoding=Decoding(400, 0.7, seed=1),
        )  # fmt: skip
        scored = [body for body in server.requests if body["path"].endswith("/classify")]
    assert outcome.complete
    assert all(body["model"] == "rm" and body["input"].startswith("User: ") for body in scored)
    for row in rows(tmp_path / "run" / GENERATIONS):
        assert row["scores"] == [(len(f"User: {row['prompt']}\n\nAssistant: {row['response']}")) / 1000] * 2


def test_a_local_reward_model_scores_the_conversation(tmp_path):
    config = models.config("llama2", num_labels=1, pad_token_id=0)
    reward = transformers.AutoModelForSequenceClassification.from_config(config)
    models.randomize(reward)
    reward.save_pretrained(tmp_path)
    models.tokenizer().save_pretrained(tmp_path)
    (scenario, (item, *_)), *_ = sample.read()
    scorer = open_scorer(str(tmp_path), (), Scoring())
    (one, _), (again, _), (other, _) = (
        asyncio.run(scorer.score(item, scenario, item.prompt, text))
        for text in ("the cat", "the cat", "the little dog")
    )
    assert one == again != other
    with pytest.raises(PacelineError, match="reward model"):
        open_scorer(str(tmp_path / "nothing"), (), Scoring())


def _resident():
    """Memory of this process, in kilobytes."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def many(tmp_path, items, concurrency, delay):
    """Seconds of a run over `items` items, memory on the way, and the server."""
    memory = []

    def step(done, *_):
        if done % 50 == 0:
            memory.append(_resident())

    with Scripted(delay=delay) as server:
        server.keep = False
        options = asked(
            server, tmp_path / "run", data="sample,items=250", limit=items, concurrency=concurrency,
            timeout=30.0,
        )  # fmt: skip
        began = time.perf_counter()
        outcome = align(options, Progress(step=step))
        seconds = time.perf_counter() - began
    assert outcome.complete
    assert outcome.results[0]["judged"] == items
    return seconds, memory, server


def test_concurrency_is_used_and_kept(tmp_path):
    _, _, server = many(tmp_path, items=32, concurrency=16, delay=0.4)  # long beside what a busy machine adds
    assert server.most_busy == 16


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_500_items_at_64_at_once_are_as_fast_as_the_endpoint_and_memory_stays_flat(tmp_path):
    seconds, memory, server = many(tmp_path, items=500, concurrency=64, delay=1.0)
    assert server.most_busy == 64
    least = 500 * 2 / 64  # seconds: two requests an item, a second each, 64 at once
    megabytes = [kilobytes / 1024 for kilobytes in memory]
    print(f"{seconds:.1f} s, the endpoint alone {least:.1f} s; memory {megabytes[1]:.0f} to {megabytes[-1]:.0f} MB")
    assert seconds < 2 * least  # one process plays both sides here, and shares its time between them
    assert memory[-1] - memory[1] < 20_000
