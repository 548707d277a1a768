"""Tuning a running server: made-up times of which the right configuration is known, and the command on fakes."""

import json
import shlex
from itertools import takewhile

import numpy as np
import pytest

from paceline.cli import main
from paceline.replay.advice import (
    DRAWS,
    Choice,
    Costs,
    Drafts,
    Goals,
    Method,
    choose,
    configuration,
    methods,
    not_chosen,
    ranges,
)
from paceline.replay.server import DRAFTS, PLAIN, ServerTuning, bins_of, costs_of
from tests import models
from tests.served import Served

LOADS = (1, 4, 16)
TOKENS = 32


def visit(role, load, gap, length=0, wait=0.0, each=1, **drafting):
    """2 * load requests of which `each` tokens come every `gap` seconds, with every eighth round `wait` longer."""
    gaps = [gap + (wait if i % 8 == 7 else 0.0) for i in range(1, TOKENS // each)]
    times = np.cumsum([0.05, *gaps]).tolist()
    tokens = 1 + each * (len(times) - 1)
    answers = [
        {"request": str(i), "began": times[-1] * (i // load), "prompt": 100, "tokens": tokens, "times": times}
        for i in range(2 * load)
    ]
    counts = {"engine": "vllm", "tokens": 2 * load * tokens, **drafting} if drafting else None
    return {"role": role, "load": load, "length": length, "seconds": 1.0, "drafting": counts, "answers": answers}


def costs(gap):
    return costs_of([visit(PLAIN, load, gap(load)) for load in LOADS], "vllm")[0]


def drafts(k, accepted, method=0):
    """Twenty answers of which every round has k drafted tokens and `accepted` are accepted."""
    rounds = np.full(20, 30.0)
    return Drafts(methods("vllm")[method], k, rounds * (1 + accepted), rounds, rounds * k)


def best(gap, goals=Goals(), version="0.32.0"):
    several = [drafts(1, 0.6), drafts(4, 1.2), drafts(8, 1.4)]
    choice = choose(costs(gap), several, goals)[0]
    return choice, configuration(choice, version)


def test_where_rounds_are_free_the_longest_drafts_are_chosen():
    choice, written = best(lambda load: 0.01)
    assert choice.schedule == dict.fromkeys(LOADS, 8)
    assert choice.expected[0].gain == pytest.approx(2.4)
    assert choice.expected[0].low == pytest.approx(2.4)
    config = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": 8}
    assert written["speculative_config"] == config


def test_where_every_token_costs_a_round_it_says_off():
    choice, written = best(lambda load: 0.01 * load)
    assert (set(choice.schedule.values()), choice.fixed) == ({0}, 0)
    assert (written["speculative_config"], written["method"]) == (None, "off")
    assert (written["flags"], choice.expected[0].gain) == ("no --speculative-config", 1)
    lines = not_chosen(choice)
    best_drafts = "the best drafts, ngram, 1 to 3 tokens looked up, 1 drafted, would have"
    assert lines[0].startswith(f"Off at 1 at once: {best_drafts}")
    assert lines[-1] == "At no load that was measured would drafts gain."


def test_flags_have_the_number_of_tokens_in_the_servers_own_count():
    written = [configuration(Choice(one, {1: 4}, 4, [], {}), "")["flags"] for one in methods("sglang")]
    own = Method("sglang", "its own", "", "", "")
    written.append(configuration(Choice(own, {1: 4}, 4, [], {}), "")["flags"])
    assert all("--speculative-num-draft-tokens 5" in flags for flags in written)  # with the target's own
    assert "--speculative-num-steps 4" in written[-1]
    llama = Choice(own._replace(engine="llamacpp"), {1: 4}, 4, [], {})
    assert "--spec-draft-n-max 4" in configuration(llama, "")["flags"]


def test_a_schedule_by_load_where_the_server_has_it():
    choice, written = best(lambda load: 0.01 if load < 16 else 0.08)
    assert choice.schedule == {1: 1, 4: 0, 16: 0}
    at_4, at_16, ends = not_chosen(choice)
    assert (at_4[:16], at_16[:17]) == ("Off at 4 at once", "Off at 16 at once")
    assert ends.startswith("Their gain ends at about ")
    assert 1 <= int(ends.split()[-3]) <= 4
    config = written["speculative_config"]
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 2, 1], [3, 16, 0]]
    assert config["num_speculative_tokens"] == 1
    _, older = best(lambda load: 0.01 if load < 16 else 0.08, version="0.20.1")
    assert "num_speculative_tokens_per_batch_size" not in (older["speculative_config"] or {})
    assert ranges({1: 5, 2: 5, 8: 3, 32: 0}) == [[1, 4, 5], [5, 16, 3], [17, 32, 0]]


def test_goals_decide_before_the_gain():
    choice, _ = best(lambda load: 0.01, Goals(token_ms=6.0))
    assert (choice.expected[0].goodput, choice.plain_goodput[1]) == (1, 0)
    never, _ = best(lambda load: 0.01, Goals(first_ms=1.0))
    assert never.expected[0].goodput == 0


def test_prompts_of_others_are_not_sped_up():
    free, _, _ = costs_of([visit(PLAIN, load, 0.01, wait=0.08) for load in LOADS], "vllm")
    assert free.plain[0, 0, 0] == pytest.approx(0.01)
    assert free.waits[0, 0, 0] == pytest.approx(0.08 * 4 / 31)
    gain = choose(free, [drafts(8, 1.4)])[0].expected[0].gain
    wait = 0.08 * 4 / 31
    assert gain == pytest.approx((0.01 + wait) / (0.01 / 2.4 + wait))


def test_measured_rounds_with_drafts_correct_the_cost():
    def gap(load):
        return 0.01 + 0.001 * load

    def measured(share):
        visits = [visit(PLAIN, load, gap(load)) for load in LOADS]
        for load in LOADS:
            rounds = 2 * load * (TOKENS // 2 - 1)
            seconds = gap(load) + share * (gap(3 * load) - gap(load))
            counts = {"drafts": rounds, "drafted": 2 * rounds, "accepted": rounds, "by_position": [rounds, 0.0]}
            visits.append(visit(DRAFTS, load, seconds, each=2, **counts))
        found, own, notes = costs_of(visits, "vllm")
        assert [one.k for one in own] == [1, 2]
        assert own[0].tokens.sum() / own[0].rounds.sum() == pytest.approx(2)
        assert own[0].drafted.sum() / own[0].rounds.sum() == pytest.approx(1)
        assert not notes
        return found

    assert measured(0.5).share[0] == pytest.approx(0.5, abs=1e-3)
    assert measured(1.0).share[0] == pytest.approx(1.0)


def test_a_few_uncertain_rounds_do_not_make_drafts_free():
    """With drafts rounds seemed shorter than without, by far less than they scatter."""
    plain = np.tile([[0.010], [0.011], [0.013]], (DRAWS, 1, 1))
    costs = Costs([1, 2, 4], [100.0], plain, np.zeros_like(plain))
    seen = np.random.default_rng(0).normal(0.0095, 0.002, DRAWS)
    costs.calibrate([(0, 0, 1.0, seen)])
    assert 0.7 < costs.share[0] < 1.3


def test_intervals_hold_what_differs():
    rounds, tokens = np.full(20, 30.0), 30.0 * np.array([1.0, 2.0] * 10)
    mixed = Drafts(methods("vllm")[0], 4, tokens, rounds, 4 * rounds)
    found = choose(costs(lambda load: 0.01), [mixed])[0].expected[0]
    assert found.low < 1.4
    assert found.high > 1.6
    assert found.gain == pytest.approx(1.5)


def test_prompts_of_three_lengths():
    assert set(bins_of([100] * 40)) == {0}
    assert bins_of([10] * 10 + [100] * 10 + [1000] * 10) == [0] * 10 + [1] * 10 + [2] * 10
    visits = [visit(PLAIN, load, 0.01 * (1 + length), length) for load in LOADS for length in (0, 1)]
    found, _, _ = costs_of(visits, "vllm")
    assert found.plain[0, 0].tolist() == pytest.approx([0.01, 0.02])
    choice = choose(found, [drafts(8, 1.4)])[0]
    assert [one.context for one in choice.expected[:3]] == [None, 116.0, 116.0]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return models.make_repetitive(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def log(tmp_path):
    line = {"prompt": "the little cat and the dog", "response": "the cat and the dog sat on the mat. " * 3}
    (tmp_path / "log.jsonl").write_text((json.dumps(line) + "\n") * 8)
    return tmp_path / "log.jsonl"


@pytest.fixture
def _in_one_turn(monkeypatch):
    """Every load is visited once, however much time there is."""
    plan = ServerTuning._plan
    first = lambda visit: visit[0].endswith(" 0")  # noqa: E731
    monkeypatch.setattr(ServerTuning, "_plan", lambda tuning: takewhile(first, plan(tuning)))


def tuned(tiny, fakes, out, *more):
    arguments = ["tune", "server", fakes[0].url, "--tokenizer", tiny, "-o", out, "--batch", "1,4"]
    arguments += ["-n", 8, "--minutes", 0.1]
    arguments += ["--against", fakes[1].url] if len(fakes) > 1 else []
    code = main([str(one) for one in (*arguments, *more)])
    file = out / "configuration.json"
    return code, json.loads(file.read_text()) if file.exists() else {}


@pytest.mark.usefixtures("_in_one_turn")
def test_the_command_writes_a_configuration(tiny, log, tmp_path, capsys):
    with Served(seconds=lambda n: 0.02, accepted=(2, 1)) as drafting, Served(seconds=lambda n: 0.02) as plain:
        code, facts = tuned(tiny, [drafting, plain], tmp_path / "out", "--log", log)
        assert code == 0
        [written] = facts["configurations"]
        assert written["version"] == "0.32.0"
        assert written["speculative_config"]["num_speculative_tokens"] > 1
        assert facts["expected"][0]["low"] > 1
        assert (drafting.most_running, plain.most_running) == (4, 4)
        assert f"bench server {plain.url} URL_OF_THE_NEW_ONE" in facts["check"][0]
        check = facts["check"][0].replace("URL_OF_THE_NEW_ONE", drafting.url)
        assert main([*shlex.split(check)[1:], "--limit", "4"]) == 0
        assert "--speculative-config" in capsys.readouterr().out
        assert '"text"' not in (tmp_path / "out" / "visits.jsonl").read_text()
        asked = len(plain.asked)
        assert tuned(tiny, [drafting, plain], tmp_path / "out", "--log", log)[0] == 0
        assert len(plain.asked) == asked  # the time is spent
        assert main(["watch", plain.url, "--once", "--tuned", str(tmp_path / "out")]) == 0


@pytest.mark.usefixtures("_in_one_turn")
def test_the_command_says_off(tiny, log, tmp_path, capsys):
    with Served(seconds=lambda n: 0.01 * n**1.5) as plain:
        code, facts = tuned(tiny, [plain], tmp_path / "out", "--log", log)
    assert (code, facts["configurations"][0]["method"]) == (0, "off")
    assert set(facts["configurations"][0]["tokens_by_load"].values()) == {0}
    assert any(note.startswith("Off at ") for note in facts["notes"])


@pytest.mark.usefixtures("_in_one_turn")
def test_a_server_of_ours_gets_a_table(tiny, tmp_path, capsys):
    with Served("paceline", lambda n: 0.02, accepted=(2,)) as fake:
        (tmp_path / "prompts.jsonl").write_text('{"prompt": "the cat"}\n' * 4)
        code, facts = tuned(tiny, [fake], tmp_path / "out", "--log", tmp_path / "prompts.jsonl")
        assert any(body.get("draft") == "none" for body in fake.asked)
    assert code == 0
    table = tmp_path / "out" / "tune.json"
    flags = shlex.split(facts["configurations"][0]["flags"])
    assert flags[1].endswith(f"table={table}")
    assert main(["generate", str(tiny), "the little", "-n", "8", *flags]) == 0


def test_what_plain_rounds_take_must_be_known(tiny, log, tmp_path, capsys):
    with Served(accepted=(2,)) as fake:
        assert tuned(tiny, [fake], tmp_path / "out", "--log", log)[0] == 2
    assert "--against URL" in capsys.readouterr().err


@pytest.mark.usefixtures("_in_one_turn")
def test_a_server_that_refuses_a_load_is_not_asked_for_more(tiny, log, tmp_path, capsys):
    with Served(seconds=lambda n: 0.02) as fake:
        fake.fails = lambda number: 16 < number <= 28 and number % 2 == 0
        code, _ = tuned(tiny, [fake], tmp_path / "out", "--log", log, "--batch", "1,2,4,8")
        assert fake.most_running == 4
    assert code == 0
