"""`paceline generate`: one prompt or many, streaming or JSON, alone or against plain decoding."""

import json
import re
from contextlib import ExitStack
from time import sleep
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import paceline.target.load
from paceline.cli.compare import Compared, doubts, repeat
from paceline.cli.drive import Answer, Interrupt, drive
from paceline.cli.generate import _appended, _not_in
from paceline.cli.prompts import Job, from_file
from paceline.cli.run import Run
from paceline.cli.show import CONTROLS, Screen, statistics
from paceline.core.request import Row
from paceline.core.sampling import SamplingParams
from paceline.engine.budget import Budget
from paceline.engine.engine import Engine
from paceline.target.decoder import Decoder

LOOPS = "the cat and the dog and the cat and the dog and the cat"


def test_the_text_alone_is_on_standard_output_and_the_statistics_are_not(command, tiny):
    shown = command("generate", tiny, LOOPS, "--raw", "-n", 40, "--ignore-eos")
    told = command("generate", tiny, LOOPS, "--raw", "-n", 40, "--ignore-eos", "--json")
    record = json.loads(told.out)
    assert shown.code == told.code == 0
    assert shown.out.rstrip("\n") == record["text"].rstrip("\n")
    closing = r"40 new tokens in \d+ rounds, [\d.]+ mean accepted tokens, [\d.]+ tokens/s; max_tokens reached\n"
    assert re.fullmatch(closing, shown.err)


@pytest.mark.parametrize(("flags", "budgets"), [((), 1), (("--no-budget",), 0)])
def test_drafts_have_a_budget_unless_that_is_turned_off(command, tiny, flags, budgets, monkeypatch):
    made = []
    monkeypatch.setattr("paceline.engine.engine.Budget", lambda *args: made.append(args) or Budget(*args))
    shown = command("generate", tiny, LOOPS, "--raw", "-n", 20, "--ignore-eos", "--draft", "auto", *flags)
    assert (shown.code, len(made)) == (0, budgets)


def test_json_is_one_object_and_says_how_the_answer_came_about(command, tiny):
    result = command("generate", tiny, LOOPS, "-n", 60, "--ignore-eos", "--json")
    (line,) = result.out.splitlines()
    record = json.loads(line)
    assert ((result.err, record["index"], record["new_tokens"]), record["finish_reason"]) == (("", 0, 60), "length")
    assert record["rounds"] < 60
    assert record["mean_accepted_tokens"] == pytest.approx(60 / record["rounds"], abs=1e-3)
    assert record["tokens_per_second"] == pytest.approx(60 / record["seconds"], rel=1e-2)
    assert sum(record["seconds_by_part"].values()) == pytest.approx(record["seconds"], rel=0.2)
    assert 0 < record["accepted_by_depth"][0] <= 1


def test_sampling_options_reach_the_sampler(command, tiny):
    def text(*more):
        return str(json.loads(command("generate", tiny, "the", "-n", 30, "--ignore-eos", "--json", *more).out)["text"])

    greedy = text()
    assert text("-t", 3, "--seed", 1) != greedy
    assert text("-t", 3, "--seed", 1) == text("-t", 3, "--seed", 1) != text("-t", 3, "--seed", 2)
    assert text("-t", 3, "--top-k", 1) == text("-t", 3, "--top-p", 1e-9) == text("-t", 3, "--min-p", 1) == greedy
    assert text("--repetition-penalty", 50) != greedy
    assert text("--stop", greedy[5:8]) == greedy[: greedy.index(greedy[5:8])]


def test_a_prediction_reaches_its_drafter(command, tiny, tmp_path, monkeypatch):
    """In front of any drafter, as on the server; a prompt of a file may bring its own."""
    file, prompts = tmp_path / "old.txt", tmp_path / "prompts.jsonl"
    file.write_text("the old dog", "utf-8")
    prompts.write_text('{"prompt": "the", "prediction": "the cat"}\n{"prompt": "the", "max_tokens": 2}\n')
    found = []
    add = Engine.add

    def spied(engine, prompt, params):
        found.append((engine.drafter.name, engine.tokenizer.decode(list(params.prediction))))
        return add(engine, prompt, params)

    monkeypatch.setattr(Engine, "add", spied)
    asks = [
        (("the",), [("suffix", "")]),
        (("the", "--prediction", file), [("prediction+suffix", "the old dog")]),
        (("the", "--prediction", file, "-d", "prediction,draft=4+sam"), [("prediction+sam", "the old dog")]),
        (("the", "--prediction", file, "-d", "none"), [("none", "the old dog")]),
        (("-p", prompts), [("prediction+suffix", "the cat"), ("prediction+suffix", "")]),
        (
            ("-p", prompts, "--prediction", file),
            [("prediction+suffix", "the cat"), ("prediction+suffix", "the old dog")],
        ),
    ]
    for more, expected in asks:
        found.clear()
        assert (command("generate", tiny, *more, "-n", 2).code, found) == (0, expected)
    prompts.write_text('{"messages": [{"role": "wizard", "content": "the"}]}')
    assert "line 1: messages.0: role is 'wizard'; it can be" in command("generate", tiny, "-p", prompts).err
    prompts.write_text('{"prompt": "the", "prediction": 3}')
    assert (
        'line 1: "prediction" must be a text that is not empty, not 3' in command("generate", tiny, "-p", prompts).err
    )


@pytest.mark.usefixtures("_few_turns")
def test_a_prediction_that_is_missing_is_said(command, tiny):
    said = "prediction drafted nothing: prediction needs a prediction with the request, as --prediction FILE gives\n"
    for more in ((), ("--json",), ("--compare", "--json")):
        result = command("generate", tiny, LOOPS, "-n", 4, "-d", "prediction", *more)
        assert result.code == 0
        assert result.err.endswith(said)


def test_a_prompt_from_standard_input(command, tiny):
    piped = command("generate", tiny, "-", "--raw", "-n", 9, "--json", stdin="the cat\n")
    given = command("generate", tiny, "the cat", "--raw", "-n", 9, "--json")
    one, other = json.loads(piped.out), json.loads(given.out)
    assert (one["text"], one["prompt_tokens"]) == (other["text"], other["prompt_tokens"])


def test_the_chat_template_is_the_default_where_there_is_one(command, tiny):
    lengths = [
        json.loads(command("generate", tiny, "hello", *how, "-n", 1, "--json").out)["prompt_tokens"]
        for how in ((), ("--chat",), ("--raw",))
    ]
    assert lengths[0] == lengths[1] > lengths[2]


def test_colours_are_accepted_runs_and_the_text_stays_the_same(command, tiny):
    plain = command("generate", tiny, LOOPS, "--raw", "-n", 60, "--ignore-eos")
    painted = command("generate", tiny, LOOPS, "--raw", "-n", 60, "--ignore-eos", "--color")
    assert re.sub(r"\x1b\[[\d;]*m", "", painted.out) == plain.out.translate(CONTROLS)
    assert "\x1b[32m" in painted.out
    assert "\x1b" not in plain.out
    assert "drafted by suffix and accepted" in painted.err
    nothing = command("generate", tiny, LOOPS, "--raw", "-n", 60, "--ignore-eos", "--color", "--draft", "none")
    assert "\x1b" not in nothing.out
    assert "drafted" not in nothing.err


def test_a_profile_adds_up(command, tiny):
    result = command("generate", tiny, LOOPS, "-n", 20, "--ignore-eos", "--profile")
    rows = dict(re.findall(r"^(\w+)\s+([\d.]+)\s+[\d.]+%", result.err, re.MULTILINE))
    whole = float(rows.pop("all"))
    assert {"draft", "accept", "commit"} <= set(rows)
    assert whole > 0
    assert sum(map(float, rows.values())) == pytest.approx(whole, abs=0.001 * len(rows))


@pytest.mark.usefixtures("_few_turns")
def test_compare_loads_one_model_and_reports_both_speeds(command, tiny, monkeypatch):
    loads = []
    load = paceline.target.load.load
    monkeypatch.setattr(paceline.target.load, "load", lambda *a, **k: loads.append(a) or load(*a, **k))
    result = command("generate", tiny, LOOPS, "-n", 60, "--ignore-eos", "--json", "--compare")
    record = json.loads(result.out)
    assert len(loads) == 1
    assert record["identical"] is True
    assert record["first_difference"] is None
    assert record["rounds"] < 60
    assert record["speedup"] == pytest.approx(
        record["tokens_per_second"] / record["baseline_tokens_per_second"], rel=1e-2
    )


@pytest.mark.usefixtures("_few_turns")
@pytest.mark.parametrize("more", [(), ("-t", 0.9), ("-t", 0.9, "--seed", 5, "-d", "recycling", "--no-budget")])
def test_compare_in_words(command, tiny, more):
    """A seed gives the same tokens with drafts as without."""
    result = command("generate", tiny, LOOPS, "-n", 100, "--ignore-eos", "--dtype", "float32", "--compare", *more)
    drafter = "recycling" if len(more) > 2 else "suffix"
    assert re.search(rf"plain [\d.]+ tokens/s, {drafter} [\d.]+ tokens/s, ratio [\d.]+ \(median", result.err)
    assert "; outputs identical, token for token" in result.err


def _compared(ours, theirs, *ratios, rounds=1, **sampling):
    """A job answered with these tokens, once for each ratio of speeds."""
    job = Job(0, "x", SamplingParams(**sampling))

    def answer(tokens, seconds):
        row = Row(0, [1], job.params, max_context=99)
        row.extend(tokens)
        row.stats.rounds, row.finish_reason = rounds, "stop"
        return Answer(job, row, seconds=seconds)

    return Compared(job, [(answer(ours, 1.0), answer(theirs, ratio)) for ratio in ratios or (1.0,)])


def test_outputs_that_differ_are_said_to_differ_and_where():
    assert _compared([5, 6, 7], [5, 6, 7]).first_difference is None
    assert _compared([5, 6, 7], [5, 9, 7]).first_difference == 1
    assert _compared([5, 6, 7], [5, 6]).first_difference == 2
    both = _compared([5, 6, 7], [5, 9, 7], 2.0)
    assert both.speedup == 2
    assert both.record()["identical"] is False
    assert both.record()["first_difference"] == 1
    text = " ".join(both.lines("sam", torch.float32))
    assert "differ from new token 1" in text
    assert "9 7" in text
    assert "6 7" in text
    assert "identical" not in text
    assert "--exact rules that out" in " ".join(both.lines("sam", torch.bfloat16))
    for dtype in (torch.float32, torch.bfloat16):  # naming float32 would expand the blocks: another model
        text = " ".join(both.lines("sam", dtype, "Q8_0, 8.5 bits a weight"))
        assert "rounded to eight bits, so two nearly equal logits can swap; --exact rules that out" in text
        assert "float32" not in text
    assert "--exact rules that out" in " ".join(_compared([5], [6], temperature=1).lines("sam", torch.bfloat16))


def test_a_comparison_has_turns_until_it_is_stopped_or_takes_long(monkeypatch):
    for answers, patience, turns in (([True] * 9, 9, 6), ([True, True, False, True], 9, 3), ([True] * 9, 0, 1)):
        monkeypatch.setattr("paceline.cli.compare.PATIENCE", patience)
        seen, going = [], iter(answers)
        repeat(lambda number, seen=seen, going=going: seen.append(number) or next(going))
        assert seen == [*range(turns)]


def test_a_ratio_is_the_median_and_one_that_scatters_is_not_believed():
    tokens = [1, 2, 3, 4]
    found = _compared(tokens, tokens, 1.5, 1.52, 1.49, 1.5, 1.51, rounds=2)
    assert (found.speedup, found.record()["reliable"]) == (1.5, True)
    assert "ratio 1.50 (median of 5, 1.49 to 1.52)" in found.lines("sam", torch.float32)[0]
    wild = _compared(tokens, tokens, *[0.3, 1.9] * 8, rounds=2)
    assert ("another process is using the processor" in wild.doubts[0], wild.record()["reliable"]) == (True, False)


def test_a_ratio_above_the_mean_accepted_tokens_is_not_believed():
    """A round that verifies takes no less than one that does not: 4 tokens in 2 rounds are at most twice as fast."""
    assert doubts(2.1, 2.0) == []
    text = " ".join(_compared([1, 2, 3, 4], [1, 2, 3, 4], 54.91, rounds=2).lines("sam", torch.float32))
    assert "a ratio of 54.91 at 2.00 mean accepted tokens is impossible" in text
    assert "another process is using the processor, and timings are not reliable" in text
    quiet = _compared([1, 2, 3, 4], [1, 2, 3, 4], 1.9, rounds=2).lines("sam", torch.float32)
    assert "impossible" not in " ".join(quiet)


def test_a_looping_answer_is_said_to_loop():
    for tokens, loops in (([5, 6] * 32, True), (list(range(64)), False)):
        both = _compared(tokens, tokens)
        assert ("runs into a loop" in " ".join(both.lines("sam", torch.float32))) == loops
        assert both.record()["looping"] is loops


@pytest.mark.usefixtures("_few_turns")
def test_a_repetition_meets_a_drafter_that_has_not_seen_the_answer(command, tiny):
    """ngram-pool and the like would otherwise draft an answer that they have learnt by heart."""
    options = ("-n", 60, "--ignore-eos", "--json", "--draft", "ngram-pool")
    alone = json.loads(command("generate", tiny, LOOPS, *options).out)
    compared = json.loads(command("generate", tiny, LOOPS, *options, "--compare").out)
    assert (compared["rounds"], len(compared["speedups"])) == (alone["rounds"], 2)


def _file(folder, *lines):
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("batch", [1, 3])
def test_a_file_of_prompts(command, tiny, tmp_path, batch):
    path = _file(
        tmp_path, '{"prompt": "the cat", "id": "a"}', "",
        '{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "ignore_eos": true}',
        '{"prompt": "the dog", "temperature": 1.5, "seed": 4, "id": 7}',
        '{"prompt": "and then", "max_tokens": 3, "ignore_eos": true, "logprobs": 1}',
    )
    result = command("generate", tiny, "-p", path, "--json", "-n", 8, "--batch", batch)
    records = {r["index"]: r for r in map(json.loads, result.out.splitlines())}
    assert (result.code, sorted(records)) == (0, [0, 1, 2, 3])
    assert ([records[i].get("id") for i in range(4)], records[1]["new_tokens"]) == (["a", None, 7, None], 5)
    assert records[2]["seed"] == 4
    assert "seed" not in records[0]
    assert records[3]["new_tokens"] == 3
    assert [entry["top"][0][1] for entry in records[3]["logprobs"]] == [e["logprob"] for e in records[3]["logprobs"]]
    assert "logprobs" not in records[0]
    alone = json.loads(command("generate", tiny, "the cat", "-n", 8, "--json").out)
    assert records[0]["text"] == alone["text"]


def test_a_file_of_prompts_in_words(command, tiny, tmp_path):
    path = _file(tmp_path, '{"prompt": "the cat", "id": "first"}', '{"prompt": "the dog"}')
    for batch in (1, 2):
        result = command("generate", tiny, "-p", path, "-n", 8, "--batch", batch)
        assert re.findall(r"^--- (.*)$", result.out, re.MULTILINE) == ["first", "prompt 2"]
        assert result.err.count("new tokens in") == 2


@pytest.mark.usefixtures("_few_turns")
@pytest.mark.parametrize("schedule", ["equal", "grouped"])
def test_a_schedule_changes_no_answer(command, tiny, tmp_path, schedule):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("the cat", "a dog and a", "mat")))
    arguments = ["generate", tiny, "-p", path, "--json", "-n", 8, "--dtype", "float32"]
    plain = command(*arguments)
    told = command(*arguments, "--batch", 2, "--schedule", schedule, "--compare")
    assert told.code == 0, told.err
    answers = {record["index"]: record["text"] for record in map(json.loads, plain.out.splitlines())}
    records = [json.loads(line) for line in told.out.splitlines()]
    assert {record["index"]: record["text"] for record in records} == answers
    assert all(record["identical"] for record in records)


@pytest.mark.usefixtures("_few_turns")
def test_a_prompt_that_a_comparison_refuses_is_named_once(command, tiny, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("the " * 300, "the cat")))
    told = command("generate", tiny, "-p", path, "-n", 4, "--compare", "--json")
    assert (told.code, told.err.count("error: "), len(told.out.splitlines())) == (1, 1, 1)


def test_a_line_has_parameters_of_its_own(tmp_path):
    line = {"prompt": "a", "max_completion_tokens": 3, "logit_bias": {"42": -1.5}, "temperature": 0.5}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(line))
    ((job,), broken) = from_file(str(tmp_path / "prompts.jsonl"), SamplingParams(top_k=7))
    assert not broken
    assert job.params == SamplingParams(top_k=7, max_tokens=3, logit_bias={42: -1.5}, temperature=0.5)


def test_broken_lines_are_named_and_the_rest_is_done(command, tiny, tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [
        b'{"prompt": "the cat"}', b'{"prompt": "the cat"', b'{"prompt": 3}', b'{"prompt": ""}', b'["the cat"]',
        b'{"prompt": "a", "max_token": 3}', b'{"prompt": "a", "messages": []}', b'{"messages": [{"role": "user"}]}',
        b'{"prompt": "a", "temperature": -3}', b'{"prompt": "a", "max_tokens": "3"}',
        b'{"prompt": "a", "max_tokens": true}', b'{"prompt": "a", "logit_bias": {"a": 1}}', b'{"prompt": "\xff"}',
        json.dumps({"prompt": "the " * 300}).encode(), b'{"prompt": "the dog"}',
    ]
    path.write_bytes(b"\n".join(lines))
    result = command("generate", tiny, "-p", path, "--json", "-n", 4)
    assert (result.code, [json.loads(line)["index"] for line in result.out.splitlines()]) == (1, [0, 14])
    errors = result.err.splitlines()
    assert sorted(int(re.search(r"line (\d+): ", e)[1]) for e in errors) == list(range(2, 15))
    assert all(e.startswith(f"error: {path}, line ") for e in errors)
    said = dict(re.findall(r"line (\d+): (.*)", result.err))
    assert "column" in said["2"]
    assert "'max_tokens'" in said["6"]
    assert "exactly one" in said["7"]
    assert "temperature" in said["9"]
    assert "'3'" in said["10"]
    assert "UTF-8" in said["13"]
    assert "128" in said["14"]


def test_messages_need_the_chat_template(command, tiny, tmp_path):
    path = _file(tmp_path, '{"messages": [{"role": "user", "content": "hi"}]}', '{"prompt": "hi"}')
    result = command("generate", tiny, "-p", path, "--raw", "--json", "-n", 4)
    assert result.code == 1
    assert "--raw" in result.err
    assert [json.loads(line)["index"] for line in result.out.splitlines()] == [1]


def test_an_output_file_gets_the_objects_and_the_same_command_goes_on_in_it(command, tiny, tmp_path):
    prompts, out = _file(tmp_path, '{"prompt": "the cat"}', '{"prompt": "the dog"}'), tmp_path / "out.jsonl"
    result = command("generate", tiny, "-p", prompts, "-n", 4, "-o", out)
    assert (result.code, result.out) == (0, "")
    before = out.read_text()
    assert [json.loads(line)["index"] for line in before.splitlines()] == [0, 1]
    how = ("generate", tiny, "-p", prompts, "-n", 4, "-o", out)
    again = command(*how)
    assert (again.code, out.read_text()) == (0, before)
    assert "2 of 2 answers are in" in again.err
    first, second = before.splitlines(keepends=True)
    for left in (first, first + second.replace('"length"', '"abort"'), first + second[:30]):
        out.write_text(left)
        assert command(*how).code == 0
        found, wanted = ([json.loads(line) for line in text.splitlines()] for text in (out.read_text(), before))
        assert [(one["text"], one["finish_reason"]) for one in found] == [
            (one["text"], one["finish_reason"]) for one in wanted
        ]
        assert out.read_text().startswith(first)
    out.write_text(before)
    for other in ((*how, "-n", 5), (*how, "-d", "none"), ("generate", tiny, "the", "-o", out)):
        result = command(*other)
        assert result.code == 2
        assert "exists already and holds answers of another command" in result.err
        assert out.read_text() == before


@pytest.mark.parametrize("finish_reason", ["length", "abort"])
def test_a_second_process_does_not_write_into_the_same_file(command, tiny, tmp_path, monkeypatch, finish_reason):
    """abort: the first one has put another file in the place of that which it found."""
    prompts, out = _file(tmp_path, '{"prompt": "the cat"}', '{"prompt": "the dog"}'), tmp_path / "out.jsonl"
    how = ("generate", tiny, "-p", prompts, "-n", 4, "-o", out)
    command(*how)
    out.write_text(out.read_text().splitlines(keepends=True)[0].replace('"length"', f'"{finish_reason}"'))
    answer, others = Run.answer, []

    def meanwhile(run, jobs):
        others.append(command(*how))
        answer(run, jobs)

    monkeypatch.setattr(Run, "answer", meanwhile)
    assert command(*how).code == 0
    (other,) = others
    assert (other.code, other.out) == (2, "")
    assert other.err == f"error: another process is writing into {out}; wait for it, or name another file\n"
    assert sorted(json.loads(line)["index"] for line in out.read_text().splitlines()) == [0, 1]


def test_answers_that_failed_or_were_cut_off_are_asked_again(tmp_path):
    out, ends = tmp_path / "answers.jsonl", {"a": {"finish_reason": "stop"}, "b": {"finish_reason": "abort"}}
    ends["c"] = {"finish_reason": "error", "error": "too long"}
    records = [{"index": n, "key": key, **end} for n, (key, end) in enumerate(ends.items())]
    out.write_text("".join(json.dumps(record) + "\n" for record in records))
    with ExitStack() as stack:
        jobs = [Job(n, "hi", SamplingParams(), key=key) for n, key in enumerate("abcd")]
        left = _not_in(_appended(out, stack), out, jobs)
    assert [job.key for job in left] == ["b", "c", "d"]
    assert [json.loads(line)["key"] for line in out.read_text().splitlines()] == ["a"]


def test_a_document_stands_in_front_of_the_prompt(command, tiny, tmp_path, monkeypatch):
    file, how = tmp_path / "text.txt", ("-n", 4, "--json")
    file.write_text("the cat\n")
    typed = json.loads(command("generate", tiny, "the cat\n\nthe dog", *how).out)
    for words, stdin in (("the dog", ""), ("-", "the dog")):
        told = json.loads(command("generate", tiny, words, "--file", file, *how, stdin=stdin).out)
        assert (told["prompt"], told["text"]) == (typed["prompt"], typed["text"])
    assert 0 < told["prompt_seconds"] < told["seconds"]
    alone = json.loads(command("generate", tiny, "--file", file, *how).out)
    assert alone["prompt"] == "the cat"
    refused = command("generate", tiny, "--file", file, "-p", file)
    assert (refused.code, "leave one of them out" in refused.err) == (2, True)
    empty = tmp_path / "empty.txt"
    empty.touch()
    assert "is empty" in command("generate", tiny, "hi", "--file", empty).err
    # What it took to read a long one is apart from the writing.
    monkeypatch.setattr("paceline.cli.show.LONG_READING", 0.0)
    shown = command("generate", tiny, "the dog", "--file", file, "-n", 4)
    assert re.match(r"\d+ tokens read in \d+\.\d s; 4 new tokens in .*, \d+\.\d tokens/s after that; max", shown.err)


@pytest.mark.parametrize(("reading", "said"), [
    (2.0, "90 tokens read in 2.0 s; 11 new tokens in 5 rounds, 2.00 mean accepted tokens, 2.0 tokens/s after that"),
    (0.5, "11 new tokens in 5 rounds, 2.00 mean accepted tokens, 1.6 tokens/s"),
])
def test_what_a_long_prompt_took_is_not_in_the_speed_after_it(reading, said):
    stats = SimpleNamespace(rounds=5, mean_accepted_tokens=2.0)
    row = SimpleNamespace(num_new=11, prompt_length=100, reused=10, finish_reason="stop", stats=stats)
    assert statistics(Answer(None, row, seconds=7.0, reading=reading)) == f"{said}; the model ended it"


def test_a_run_that_fails_leaves_no_empty_file(command, tmp_path):
    result = command("generate", tmp_path / "nowhere", "hello", "-o", tmp_path / "out.jsonl")
    assert result.code == 2
    assert not (tmp_path / "out.jsonl").exists()
    assert command("generate", "x", "hello", "-o", tmp_path / "no" / "out.jsonl").code == 2


def test_control_sequences_of_a_model_do_not_reach_a_terminal(capsys):
    screen = Screen(color=True)
    screen.write([("", "a\x1b[2Jb\n\tc"), ("sam", "\x07\x9b")])
    out = capsys.readouterr().out
    assert "\x1b[2J" not in out
    assert "\x07" not in out
    assert "\x9b" not in out
    assert "a␛[2Jb\n\tc" in out


def test_threads(command, tiny, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    command("generate", tiny, "hi", "-n", 1, "--threads", 1)
    assert asked == [1]


def test_exact_reaches_the_target_or_is_refused_in_a_line(command, tiny, monkeypatch):
    made = []
    usual = Decoder.make_exact
    monkeypatch.setattr(Decoder, "exact_is_free", False)  # as on a processor where it is not the default
    monkeypatch.setattr(Decoder, "make_exact", lambda self: made.append(True) or usual(self))
    answers = [
        command("generate", tiny, LOOPS, "-n", 20, "--ignore-eos", "--exact", "-d", draft).out
        for draft in ("none", "sam")
    ]
    assert (answers[0], len(made)) == (answers[1], 2)
    assert (command("generate", tiny, LOOPS, "-n", 20, "--ignore-eos").out, len(made)) == (answers[0], 2)
    refused = command("generate", tiny, LOOPS, "--exact", "--dtype", "float16")
    assert refused.code != 0
    assert "needs bfloat16 or float32" in " ".join(refused.err.split())


def test_seconds_are_the_engine_s_alone(tiny):
    """Whatever a caller does between rounds costs the answer no time."""
    engine, naps = Engine(tiny), []
    job = Job(0, "the cat", SamplingParams(max_tokens=10, ignore_eos=True))
    (answer,) = drive(engine, [job], None, Interrupt(), lambda *_: None, lambda *_: naps.append(sleep(0.01)))
    assert (len(naps), answer.seconds) == (10, pytest.approx(engine.profile.seconds))
    assert np.array_equal(answer.row.new_tokens, engine.generate([[*answer.row.tokens[:-10]]], job.params)[0].tokens)


def test_ctrl_c_ends_a_run_between_two_rounds(tiny):
    """Of an answer under way what there is comes, even while its prompt is read; of one not begun nothing does."""
    jobs = [Job(i, "the cat " * 10, SamplingParams(max_tokens=30, ignore_eos=True)) for i in range(3)]
    engine, interrupt = Engine(tiny, max_batch=2, prefill_chunk=8), Interrupt()
    step, rounds = engine.step, iter(range(100))

    def press():
        interrupt.pressed = next(rounds) == 1
        return step()

    engine.step = press
    first, second = drive(engine, jobs, False, interrupt, lambda *_: None, lambda *_: None)
    assert (engine.rounds, [first.job.index, second.job.index]) == (2, [0, 1])
    assert {first.row.finish_reason, second.row.finish_reason, first.row.num_new} == {"abort", 0}
    assert first.seconds == second.seconds == engine.profile.seconds
    assert not engine.has_work


def test_seconds_begin_with_the_answer_s_own_first_round(tiny):
    """An answer that waits for room is not charged for those before it."""
    jobs = [Job(i, "the cat", SamplingParams(max_tokens=8, ignore_eos=True)) for i in range(4)]
    engine = Engine(tiny, max_batch=1)
    answers = list(drive(engine, jobs, None, Interrupt(), lambda *_: None, lambda *_: None))
    assert all(answer.seconds > 0 for answer in answers)
    assert sum(answer.seconds for answer in answers) == pytest.approx(engine.profile.seconds)
