"""`paceline bench` as its users meet it, on a tiny model: a whole run, one that goes on, and whatever can be wrong."""

import json

import pytest

from paceline.bench.record import read_answers
from paceline.cli.show import Steps
from paceline.errors import PacelineError

QUESTIONS = [
    {"question_id": 1, "category": "qa", "turns": ["the cat"]},
    {"question_id": 2, "category": "qa", "turns": ["the dog and the cat"]},
    {"question_id": 3, "category": "writing", "turns": ["a little mat", "and then?"]},
    {"question_id": 4, "category": "writing", "turns": ["hello there"]},
]


@pytest.fixture
def suite(tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    return file


def results(text):
    return {(result["method"], result["category"]): result for result in json.loads(text)["results"]}


def test_a_whole_run(command, tiny, suite, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/usr/bin/paceline", "bench", "a model"])
    out = tmp_path / "run"
    arguments = ["bench", tiny, "-d", "sam", "-d", "prompt-lookup", "--peer", "transformers", "--peer", "vllm-ngram",
                 "--suite", suite, "-n", 12, "--warm-up", 1, "--repeats", 2, "--out", out]  # fmt: skip
    told = command(*arguments, "--json")
    assert told.code == 1, told.err  # one peer is not there
    found = results(told.out)
    methods = ["none", "sam", "prompt-lookup", "peer:transformers"]
    for method in methods:
        for category in ("overall", "qa", "writing"):
            one = found[method, category]
            assert one["identical"] == 1.0
            assert one["tokens_per_second"] > 0
            assert one["speedup"] > 0
        overall = found[method, "overall"]
        assert overall["answers"] == 8
        assert overall["speedup_low"] is None  # of four questions
        assert overall["peak_bytes"] > 1e6
    assert found["none", "overall"]["speedup"] == found["none", "overall"]["mean_accepted_tokens"] == 1
    assert found["sam", "overall"]["mean_accepted_tokens"] > 1.1  # this model repeats itself
    assert found["peer:vllm-ngram", "overall"]["failed"].startswith("vLLM wants an environment")

    answers = list(read_answers(out / "answers.jsonl"))
    assert len(answers) == len(methods) * len(QUESTIONS) * 2
    for answer in answers:
        for turn in answer.turns:
            assert (sum(turn.lengths or []), turn.times) == (len(turn.tokens), sorted(turn.times or []))
            assert turn.seconds >= (turn.times or [0])[-1]
            assert answer.method.startswith("peer:") or "".join(text for _, text, _ in turn.runs).strip() == turn.text
    assert (out / "spec-bench" / "model_answer").is_dir()
    described = json.loads((out / "run.json").read_text())
    assert described["environment"]["command"] == "paceline bench 'a model'"
    assert [m["method"] for m in described["methods"]] == [*methods, "peer:vllm-ngram"]

    before = (out / "answers.jsonl").read_bytes()
    again = command(*arguments)  # nothing is left to answer
    assert (again.code, (out / "answers.jsonl").read_bytes()) == (1, before)  # what was asked for is not all there
    assert "peer:vllm-ngram did not take part: vLLM wants an environment of its own" in again.out
    assert "too few questions for an interval" in again.out
    assert max(map(len, again.out.split("speed-up: all tokens")[0].splitlines())) <= 180

    assert command("report", out).code == 0
    assert "sam" in (out / "report.html").read_text()
    assert "| `sam` |" in command("report", out, "--markdown").out


def test_a_run_goes_on_and_another_is_refused(command, tiny, suite, tmp_path):
    out = tmp_path / "run"
    arguments = ["bench", tiny, "-d", "sam", "--suite", suite, "-n", 8, "--warm-up", 0,
                 "--out", out, "--json"]  # fmt: skip
    assert command(*arguments).code == 0
    lines = (out / "answers.jsonl").read_bytes().splitlines(keepends=True)
    (out / "answers.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:40])  # as if it had been killed
    assert command(*arguments).code == 0
    now = (out / "answers.jsonl").read_bytes().splitlines(keepends=True)
    assert (now[:3], len(now)) == (lines[:3], len(lines))
    for changed in (["-n", "9"], ["-d", "prompt-lookup"], ["--temperature", "0.5"]):
        refused = command(*arguments, *changed)
        assert refused.code == 2
        assert "holds another run: its options was" in refused.err
        assert "starting" not in refused.err


def test_answers_that_are_cut_off_are_named(command, tiny, suite, tmp_path):
    arguments = ["bench", tiny, "-d", "sam", "--suite", suite, "-n", 8, "--warm-up", 0]
    told = command(*arguments, "--out", tmp_path / "run")
    assert told.code == 0
    assert "were cut off too early to tell" in told.out  # after 8 tokens


def test_a_batch(command, tiny, suite, tmp_path):
    told = command("bench", tiny, "-d", "sam", "--suite", suite, "-n", 12, "--batch", 2, "--warm-up", 0,
                   "--peer", "transformers-lookup", "--out", tmp_path / "run", "--json")  # fmt: skip
    assert told.code == 1
    found = results(told.out)
    assert found["sam", "overall"]["identical"] == 1.0
    assert "--batch is 2" in found["peer:transformers-lookup", "overall"]["failed"]
    assert "peer:transformers-lookup failed: answers 1 at a time, and --batch is 2" in told.err


def test_schedules_are_compared(command, tiny, suite, tmp_path):
    out = tmp_path / "run"
    arguments = ["bench", "schedules", tiny, "-d", "sam", "--suite", suite, "-n", 12,
                 "--schedule", "ragged,equal,grouped:3", "--batch", "1,2", "--warm-up", 0, "--dtype", "float32",
                 "--out", out]  # fmt: skip
    told = command(*arguments, "--json")
    assert told.code == 0, told.err
    found = results(told.out)
    methods = {f"sam {schedule} {batch}" for schedule in ("ragged", "equal", "grouped:3") for batch in (1, 2)}
    assert {method for method, _ in found} == {"none", "none ragged 2", *methods}
    for (method, category), one in found.items():
        assert one["identical"] == one["partial_match"] == 1.0, (method, category)
        assert one["answers"] == 4  # first turns
        assert 0 < one["latency_p50"] <= one["latency_p99"]
        assert method == "none" or 0 <= one["idle_slots"] < 1
    assert found["sam ragged 2", "overall"]["moved_bytes"] == 0 < found["sam equal 2", "overall"]["moved_bytes"]
    assert found["sam equal 1", "overall"]["group_rate"] == 1
    before = (out / "answers.jsonl").read_bytes()
    again = command(*arguments)
    assert (out / "answers.jsonl").read_bytes() == before
    assert "sam grouped:3 2" in again.out
    assert command("report", out).code == 0
    assert "Schedules and batch sizes" in (out / "report.html").read_text()


def test_what_servers_are_asked_is_what_was_said(command, suite, tmp_path, monkeypatch):
    seen = []

    def refuse(benchmark, watch):
        seen.append(benchmark)
        raise PacelineError("seen enough")

    monkeypatch.setattr("paceline.bench.endpoint.bench_endpoints", refuse)
    words = ("bench", "server", "http://a", "http://b#m", "--out", tmp_path, "-n", 3, "--ignore", "notes")
    for more in (("--log", suite, "--batch", 5), ("--suite", "demo", "--arrivals", 2)):
        assert "seen enough" in command(*words, *more).err
    logged, of_suite = seen
    assert (logged.load.server, logged.load.most, logged.suite) == ("http://a,http://b#m", 5, str(suite))
    assert (of_suite.load.arrivals, of_suite.suite) == (2, "demo")
    assert {(one.out, one.options.max_tokens, *one.ignore) for one in seen} == {(tmp_path, 3, "notes")}


def test_the_time_left_is_guessed_without_the_warm_up(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("paceline.cli.show.monotonic", lambda: now[0])
    steps = Steps("starting", unit="answers")
    steps.begin(100)
    for _ in range(20):
        steps.advance()  # found
    now[0] = 600.0  # the warm-up, and the first answer
    steps.advance()
    assert capsys.readouterr().err == ""
    for _ in range(7):
        now[0] += 10
        steps.advance()
    assert capsys.readouterr().err == "28 of 100 answers, 12 min left\n"


def test_a_disturbed_run_says_so(command, tiny, suite, tmp_path, monkeypatch):
    """The load average is one of its signs; a speed-up that cannot be is marked in the table as well."""
    monkeypatch.setattr("paceline.bench.runner.load", lambda: 7.0)
    monkeypatch.setattr("paceline.bench.checks.FACTOR", 0.0)
    out = tmp_path / "run"
    arguments = ["bench", tiny, "-d", "sam", "--suite", suite, "-n", 8, "--warm-up", 0, "--out", out]
    shown = command(*arguments).out
    (line,) = [line for line in shown.splitlines() if line.startswith("Timings are not reliable")]
    assert "the load average was 7.0" in line
    assert "sam has" in line
    assert next(row for row in shown.splitlines() if row.startswith("sam ")).split()[2] == "?"
    for said in ((out / "summary.json").read_text(), command(*arguments, "--json").out):
        facts = json.loads(said)
        assert facts["disturbed"] == [line]
