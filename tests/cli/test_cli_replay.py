"""`paceline replay`: recorded answers in, figures out; and one line for what cannot be replayed."""

import gzip
import json
import os
import signal
import time
from pathlib import Path
from threading import Thread

import pytest
from tests import models
from tests.logs import test_sessions

RESULT_KEYS = {
    "draft", "category", "mean_accepted_tokens", "answers", "rounds", "new_tokens", "draft_rate", "verified_per_round",
    "verified_per_token", "draft_us_per_round", "accepted_by_depth",
}  # fmt: skip

CHILDREN = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
"""Processes that this one has started."""


def records(count):
    said = "the little cat and the little dog sat on the mat; "
    return [{"prompt": said * 2, "response": said * 3, "category": "odd" if i % 2 else "even"} for i in range(count)]


def write(file, lines):
    text = "".join(json.dumps(line) + "\n" for line in lines)
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    return file


@pytest.fixture
def log(tmp_path):
    return write(tmp_path / "log.jsonl", records(12))


def test_a_table_that_fits_80_columns(command, vocabulary, log):
    many = [word for n in (3, 5, 7, 9, 11, 13, 15, 17, 19, 21) for word in ("-d", f"sam,draft={n}")]
    result = command("replay", log, "--tokenizer", vocabulary, *many, "--verify-cost", "flat")
    assert result.code == 0, result.err
    assert max(len(line) for line in result.out.splitlines()) <= 80
    for words in ("/round", "speed-up", "even", "odd", "overall", "#10", "12 answers, 10 drafters"):
        assert words in result.out
    assert "sam,draft=21" in result.out
    assert result.err == ""


def test_the_sessions_of_coding_agents_on_this_machine(command, vocabulary, tmp_path, monkeypatch):
    """A row for each; old ones are left out."""
    monkeypatch.setenv("HOME", str(tmp_path))
    refused = command("replay", "--agents", "--tokenizer", vocabulary)
    assert refused.err.startswith("error: no session of the last month below ")
    assert command("replay", "--tokenizer", vocabulary).err.startswith("error: give files of recorded answers, or --ag")
    for write_session in (test_sessions.codex, test_sessions.claude, test_sessions.cline):
        write_session(tmp_path)
    old = test_sessions.aider(tmp_path)
    os.utime(old, (1, 1))
    result = command("replay", "--agents", "--tokenizer", vocabulary)
    assert result.code == 0, result.err
    agents = ("codex", "claude", "cline", "aider")
    names = [" ".join(line.split()[:4]) for line in result.out.splitlines() if line.startswith(agents)]
    assert [name.split()[0] for name in names] == ["codex", "codex", "claude", "claude", "cline"]
    assert len({*names}) == 5
    assert "neither their tools nor all of their system prompt" in result.err
    both = command("replay", tmp_path, "--tokenizer", vocabulary, "-d", "sam", "--json")
    assert {one["category"] for one in json.loads(both.out)["results"]} == {*agents, "overall"}


@pytest.mark.usefixtures("_few_turns")
def test_what_generate_writes_is_replayed(command, tmp_path):
    target, chat = models.make("llama2", tmp_path / "target"), [{"role": "user", "content": "a"}]
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": "the cat"}, {"messages": chat}])
    written = command("generate", target, "--prompts", prompts, "-n", "20", "--json", "--compare")
    assert written.code == 0, written.err
    (tmp_path / "log.jsonl").write_text(written.out)
    result = command("replay", tmp_path / "log.jsonl", "--tokenizer", target, "-d", "sam", "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["answers"] == 2


def test_json(command, vocabulary, log):
    result = command("replay", log, "--tokenizer", vocabulary, "-d", "sam", "-d", "none", "--json")
    assert (result.code, result.err) == (0, "")
    told = json.loads(result.out)
    assert told["complete"] is True
    assert told["answers"] == 12
    assert [(r["draft"], r["category"]) for r in told["results"]] == [
        (draft, category) for draft in ("sam", "none") for category in ("even", "odd", "overall")
    ]
    assert all(set(r) == RESULT_KEYS for r in told["results"])
    sam, none = (r for r in told["results"] if r["category"] == "overall")
    assert sam["mean_accepted_tokens"] > 3
    assert none["mean_accepted_tokens"] == none["verified_per_token"] == 1
    assert none["rounds"] == none["new_tokens"] == sam["new_tokens"]


def test_the_cost_of_verifying_chooses_the_drafter(command, vocabulary, log):
    """Where every node costs half a forward, it is dear to be wrong; where they cost nothing, more is better."""
    sweep = ("replay", log, "--tokenizer", vocabulary, "-d", "sam,grow=0", "--sweep", "draft=1,20")
    free, dear = (command(*sweep, "--verify-cost", cost).out for cost in ("flat", "linear:2"))
    assert "fastest at this cost: sam,grow=0,draft=20" in free
    assert "fastest at this cost: sam,grow=0,draft=1\n" in dear
    assert "fastest" not in command(*sweep).out


def test_standard_input_is_a_log_like_another(command, vocabulary, log):
    asked = ("--tokenizer", vocabulary, "-d", "sam", "--json")
    told = [json.loads(command("replay", source, *asked, stdin=log.read_bytes()).out) for source in (log, "-")]
    by_name, piped = ([(one["category"], one["rounds"]) for one in facts["results"]] for facts in told)
    assert by_name == piped != []


def test_gzip_templates_limits_workers_and_a_prediction(command, vocabulary, tmp_path):
    log = write(tmp_path / "log.jsonl.gz", [one | {"notes": "what would not be read"} for one in records(20)])
    how = ("--template", "vicuna", "--limit", 18, "--categories", "odd", "--workers", 2, "--verify-cost", "linear:0.1")
    result = command(
        "replay", log, "--tokenizer", vocabulary, "-d", "sam", *how, "--forward-ms", 20, "--ignore", "notes", "--json"
    )
    (odd, overall) = json.loads(result.out)["results"]
    assert odd["answers"] == overall["answers"] == 10
    assert 1 < odd["predicted_speedup"] < odd["mean_accepted_tokens"]


def test_without_a_draft_all_that_a_recording_can_judge(command, vocabulary, log):
    asked = ("replay", log, "--tokenizer", vocabulary, "--limit", 2)
    told = json.loads(command(*asked, "--json").out)
    assert {r["draft"] for r in told["results"]} == {"none", "prompt-lookup", "sam", "suffix", "hierarchy"}
    assert set(told["left_out"]) == {"auto", "past-answer", "prediction", "grammar"}
    (line,) = [line for line in command(*asked).out.splitlines() if line.startswith("left out")]
    assert line.startswith("left out, because a recording does not have what they need: past-answer (an earlier answer")
    assert "auto (the time that rounds take)" in line


def test_what_a_recording_cannot_judge_is_said(command, vocabulary, log):
    asked = ("replay", log, "--tokenizer", vocabulary, "--limit", 2)
    assert "\nprediction drafted nothing: prediction needs a prediction with" in command(*asked, "-d", "prediction").out
    assert "drafted nothing" not in command(*asked, "-d", "prediction+sam", "-d", "none").out
    refused = command(*asked, "-d", "sam+auto")
    assert (refused.code, refused.out) == (2, "")
    assert "sam+auto drafts by how long rounds take, and a recording has no rounds" in refused.err


def test_figures_only(command, vocabulary, log, tmp_path):
    log.write_text('{"secret": 1}\n' + log.read_text())
    run, asked = tmp_path / "run", ("replay", log, "--tokenizer", vocabulary, "-d", "sam", "--json", "--out")
    whole = command(*asked, run)
    assert whole.err.startswith(f"1 of 13 lines skipped: first at {log}, line 1: unknown record with the keys secret;")
    assert "unknown record with the keys secret" in page_of(command, run)
    redacted = command(*asked, run, "--redact")
    assert redacted.err == "1 of 13 lines skipped\n"
    told, before = json.loads(redacted.out), json.loads(whole.out)
    assert (told["lines"], told["skipped"], told["notes"]) == (13, 1, ["1 of 13 lines skipped"])
    assert [one["category"] for one in told["results"]] == ["category 1", "category 2", "overall"]
    assert [one["rounds"] for one in told["results"]] == [one["rounds"] for one in before["results"]]
    for written in (redacted.out, page_of(command, run)):
        assert not any(word in written for word in ("secret", "even", "odd", "little cat"))


def page_of(command, run):
    """The page that `paceline report` makes of a replay."""
    (run / "report.html").unlink(missing_ok=True)
    assert command("report", run).code == 0
    return (run / "report.html").read_text("utf-8")


def test_a_page(command, vocabulary, log, tmp_path):
    run = tmp_path / "run"
    result = command("replay", log, "--tokenizer", vocabulary, "-d", "sam", "--sweep", "draft=4,8", "--out", run)
    assert result.code == 0
    html = page_of(command, run)
    assert html.startswith("<!doctype html>")
    assert "sam,draft=4" in html
    assert "sam,draft=8" in html


@pytest.mark.skipif(not CHILDREN.exists(), reason="cannot see when the workers are there")
def test_ctrl_c_prints_what_is_done(command, vocabulary, tmp_path):
    log, run = write(tmp_path / "log.jsonl", records(1500)), tmp_path / "run"
    presses = Thread(target=_press, args=(set(CHILDREN.read_text().split()),))
    presses.start()
    many = ("-d", "prompt-lookup", "-d", "sam", "--sweep", "draft=1,2,3,4", "--workers", 2, "--json")
    result = command("replay", log, "--tokenizer", vocabulary, "--out", run, *many)
    presses.join()
    assert result.code == 130, result.err
    told = json.loads(result.out)
    assert told["complete"] is False
    assert result.err.splitlines() == ["interrupted; the figures above are of what was replayed"]
    assert "Interrupted" in page_of(command, run)


def _press(others):
    """Ctrl-C when two workers are there: as from a terminal, everybody gets it."""
    for _ in range(1200):
        if len(workers := {*CHILDREN.read_text().split()} - others) >= 2:
            time.sleep(0.2)
            for pid in (*map(int, workers), os.getpid()):
                os.kill(pid, signal.SIGINT)
            return
        time.sleep(0.05)
