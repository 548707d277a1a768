"""What a training is expected to bring, at this machine's costs, and a night of it."""

import itertools
import json
import os

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from paceline.cli.train import app
from paceline.draft.cost import forward_times
from paceline.train import generated, options, outlook
from paceline.train.eagle import EagleLoss
from paceline.train.loop import read_log
from paceline.train.measure import Fit
from paceline.train.outlook import Outlook, time_forwards, tokens_a_round, tokens_of_a_tree
from tests import models, native
from tests.draft.head_worlds import World
from tests.train.conftest import following_answers

SMALL = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("night")
    models.make("llama2", folder / "target", **SMALL, tie_word_embeddings=False)
    following_answers(folder / "answers.jsonl")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"count {i}"}) + "\n" for i in range(40)))
    return folder


def fits(*accepted):
    made = [Fit() for _ in accepted]
    for fit, share in zip(made, accepted, strict=True):
        fit.sums |= {"reached": 100, "accepted": 100 * share, "positions": 100}
    return made


def test_tokens_of_a_chain():
    assert tokens_a_round(fits(0.5, 0.5, 0.8)) == pytest.approx([1, 1.5, 1.75, 1.95])


def test_tokens_of_a_tree():
    one, two = Fit(), Fit()
    one.rank(torch.tensor([[5, 6], [5, 6], [6, 5], [1, 2]]), torch.tensor([5, 5, 5, 3]))
    two.rank(torch.tensor([[5, 6], [6, 5]]), torch.tensor([5, 5]))
    assert tokens_of_a_tree([one], 1) == pytest.approx(1 + 1 / 2)
    assert tokens_of_a_tree([one, two], 3) == pytest.approx(1 + 1 / 2 + 1 / 4 + 1 / 4)
    assert tokens_of_a_tree([one, two], 99) == pytest.approx(1 + 3 / 4 + 3 / 4)


def looked(monkeypatch, accepted, forward, each, seen=(), read=1000):
    """`each` in plain forwards."""
    monkeypatch.setattr(outlook, "measure", lambda student, held: {"all": fits(*accepted)})
    times = forward_times(forward)
    of = Outlook(None, {}, times, lambda: times, 0.0, each, list(seen))
    return of.look(read)


def test_the_chain_that_pays_most_here_is_named(monkeypatch):
    cheap, dear = {1: 0.010, 8: 0.0107}, {1: 0.010, 8: 0.080}
    figures, line = looked(monkeypatch, (0.8, 0.7, 0.5), cheap, 0.1)
    assert figures["chain"] == 3
    expected = (1 + 0.8 + 0.56 + 0.28) / ((0.0103 + 0.003) / 0.010)
    assert figures["speedup"] == pytest.approx(expected, abs=1e-3)
    assert line.startswith(f"expected: 2.64 tokens a round with chains of 3, about {expected:.2f} times plain decoding")
    figures, line = looked(monkeypatch, (0.8, 0.7, 0.5), dear, 0.1)
    assert (figures["chain"], figures["speedup"]) == (0, 1.0)
    assert "no chain pays yet" in line


def test_a_busy_start_does_not_decide(monkeypatch):
    """Forwards are timed each time, and the least counts."""
    monkeypatch.setattr(outlook, "measure", lambda student, held: {"all": fits(0.8)})
    busy, quiet = (forward_times({1: 0.010, 8: longer}) for longer in (0.300, 0.010))
    times = iter([busy, quiet, busy])
    of = Outlook(None, {}, busy, lambda: next(times), 0.0, 0.0)
    assert [of.look(read)[0]["chain"] for read in (1, 2, 3)] == [0, 1, 1]


def test_few_rows_of_every_source_are_measured_each_time(root):
    """The whole of what is held out would take minutes of every ten."""
    loss = EagleLoss(AutoModelForCausalLM.from_pretrained(root / "target"))
    held = {name: (np.zeros((200, 32)), np.zeros((200, 32))) for name in "ab"}
    few = Outlook.of(loss, held, root / "target", []).held
    assert {name: len(ids) for name, (ids, _) in few.items()} == {"a": 64, "b": 64}
    assert all(len(ids) == len(labels) for ids, labels in few.values())


def test_what_twice_the_training_adds(monkeypatch):
    costs = {1: 0.010, 8: 0.011}
    _, line = looked(monkeypatch, (0.5,), costs, 0.0, seen=[(100, 1.1), (500, 1.3), (900, 1.45)])
    assert line.endswith("twice the training would add about 0.20 tokens")
    _, line = looked(monkeypatch, (0.5,), costs, 0.0, seen=[(500, 1.495)])
    assert line.endswith("so more is hardly worth it")
    assert "twice" not in looked(monkeypatch, (0.5,), costs, 0.0, seen=[(900, 1.45)])[1]
    _, line = looked(monkeypatch, (0.5, 0.5), {1: 0.010, 8: 0.020}, 0.35, seen=[(500, 1.3)])
    assert "tokens a round with chains of 1" in line
    assert line.endswith("twice the training would add about 0.45 tokens to chains of 2")


@pytest.mark.parametrize("recipe", ["eagle3", "medusa", "kangaroo"])
def test_a_training_says_what_it_expects(recipe, root, tmp_path):
    words = [recipe, str(root / "target"), "--log", str(root / "answers.jsonl"), "--out", str(tmp_path / "out")]
    more = {"eagle3": ["--taps", "0,1,2", "--vocab", "200"], "kangaroo": ["--exit", "1"]}.get(recipe, [])
    done = CliRunner().invoke(app, [*words, "--length", "32", "--rows", "4", "--tokens", "640", *more])
    assert done.exit_code == 0, done.output
    assert "expected: " in done.output
    (row,) = (row["expected"] for row in read_log(tmp_path / "out-run" / "log.jsonl") if "expected" in row)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    accepted = [depth["accepted"] for depth in config["held_out"]["all"]]
    assert row["tokens"] == pytest.approx(1 + np.cumprod(accepted).sum(), abs=0.02)
    assert row["speedup"] > 0


def test_a_night(root, tmp_path, monkeypatch):
    """Answers have a third of it, however many were asked for; what they took is not trained; nothing else waits."""
    niced, loops, ticks = [], [], itertools.count()
    monkeypatch.setattr(os, "nice", niced.append)
    monkeypatch.setattr("paceline.train.trainer.train", lambda *args, **named: loops.append(args[2]) or False)
    for module in (options, generated):  # a twentieth of a second for each answer
        monkeypatch.setattr(module, "monotonic", lambda: 0.05 * next(ticks))
    words = ["eagle3", str(root / "target"), "--prompts", f"q={root / 'prompts.jsonl'}", "--generate", "3000"]
    words += ["--max-tokens", "16", "--out", str(tmp_path / "out"), "--hours", "0.01", "--length", "32", "--rows", "4"]
    assert CliRunner().invoke(app, words).exit_code == 130
    assert niced == [19]
    answers = tmp_path / "out-run" / "answers.jsonl"
    count, spent = len(answers.read_text().splitlines()), json.loads(
        (tmp_path / "out-run" / "answers.seconds.json").read_text()
    )["seconds"]
    assert 200 < count < 260
    assert loops[0].minutes == pytest.approx((36 - spent) / 60, abs=0.01)
    assert CliRunner().invoke(app, words).exit_code == 130
    assert len(answers.read_text().splitlines()) == count, "the time for answers was over"
    assert loops[1].minutes < loops[0].minutes
    refused = CliRunner().invoke(app, [*words, "--minutes", "3"])
    assert refused.exit_code != 0
    assert "--hours and --minutes are budgets for one training" in str(refused.exception)
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun sets it; each process would have another budget
    refused = CliRunner().invoke(app, words)
    assert "--hours is a budget of one process" in str(refused.exception)


@pytest.mark.parametrize(
    ("note", "answers", "says"),
    [
        ('{"seconds": 13}', "--generate", "no answer was ready in a third of --hours"),
        ('{"seconds": 40}', "--data", "the answers took all of --hours"),
        ('{"second": 1}', "--data", "does not say how long answers took"),
        ("{", "--data", "does not say how long answers took"),
    ],
)
def test_a_night_that_comes_to_nothing_is_one_line(note, answers, says, root, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "nice", lambda more: None)
    (tmp_path / "out-run").mkdir()
    (tmp_path / "out-run" / "answers.seconds.json").write_text(note)
    given = {"--generate": "9", "--data": str(root / "answers.jsonl")}[answers]
    words = ["medusa", str(root / "target"), answers, given, "--out", str(tmp_path / "out"), "--hours", "0.01"]
    refused = CliRunner().invoke(app, [*words, "--max-tokens", "16", "--length", "32", "--rows", "4"])
    assert says in str(refused.exception)
    assert not (tmp_path / "out").exists()


def test_forwards_are_timed_and_nothing_is_changed():
    target = native.of(World().model)
    times = time_forwards(target)
    assert (times[[1, 2, 4, 8, 16, 32, 64, 4000]] > 0).all()
    assert target.length(target.add_row(4)) == 0
