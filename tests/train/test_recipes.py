"""What every recipe must do: train, report and draft; stop at Ctrl-C and end with the same bits; refuse in one line."""

import json
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from paceline.cli.train import app
from paceline.core.sampling import SamplingParams
from paceline.draft.shapes import SLOTS_FILE, read_accuracies
from paceline.engine.engine import Engine
from paceline.errors import MethodError, PacelineError
from paceline.formats.heads.checkpoint import TargetFacts
from paceline.target.load import load
from paceline.train.loop import Reporter, read_log
from paceline.train.trainer import Trainer
from tests import gguf_files, models
from tests.train.conftest import following_answers

SMALL = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48}
RECIPES = {
    "model": (["--hidden", "64", "--layers", "1", "--no-compiled"], "model:{out}"),
    "s2d": (["--exits", "1,2", "--layers", "2", "--no-compiled"], "s2d:{out}"),
    "jacobi": (["--noise", "3-6", "--every", "8", "--no-compiled"], "jacobi:{out},tree=8,retrieve=none"),
    "kangaroo": (["--exit", "0", "--loss", "kl+tv"], "kangaroo:{out}"),
    "medusa": (["--heads", "3", "--own-heads"], "medusa:{out},tree=5"),
    "hydra": (["--heads", "3", "--layers", "2", "--states", "STATES", "--stored", "int8"], "hydra:{out},tree=5"),
    "amphista": (["--heads", "3", "--no-encoder-ffn"], "amphista:{out},tree=5"),
    "eagle": ([], "eagle:{out}"),
    "eagle3": (["--taps", "0,1,2", "--vocab", "200"], "eagle3:{out}"),
    "dflash": (["--block", "3", "--vocab", "200", "--markov", "32", "--confidence"], "dflash:{out}"),
    "dflash2": (["--block", "3", "--rank", "8", "--best", "4"], "dflash:{out}"),
    "mtp": (["--steps", "2"], "mtp:{out}"),
}
"""Options of each command, and the drafter that it makes."""
STAGES = {"model": "draft", "s2d": "sorted", "jacobi": "noise", "dflash2": "dflash"}  # as files call them
TREES = ("medusa", "hydra", "amphista")
HEADS = ("kangaroo", "eagle", "eagle3", "dflash", "dflash2", "mtp", *TREES)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A target, a draft model for it, and answers in which every token but the first follows from the one before."""
    folder = tmp_path_factory.mktemp("recipes")
    models.make("llama2", folder / "target", **SMALL, tie_word_embeddings=False)
    models.make("llama2", folder / "draft", **SMALL | {"num_hidden_layers": 2})
    models.make("gpt2", folder / "gpt2")
    lines = following_answers(folder / "answers.jsonl").read_text().splitlines()
    (folder / "one.jsonl").write_text(lines[0] + "\n")
    return folder


def run(root, recipe, out, *more, target="target", data="answers"):
    folders = {"DRAFT": str(root / "draft"), "STATES": str(root / "states")}
    options = [folders.get(option, option) for option in RECIPES[recipe][0]]
    places = [str(root / target), "--data", str(root / f"{data}.jsonl"), "--out", str(out)]
    return CliRunner().invoke(app, [recipe, *places, "--length", "32", "--rows", "4", *options, *more])


def weights(folder):
    return {file.name + name: t for file in folder.rglob("*.safetensors") for name, t in load_file(file).items()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_stops_goes_on_reports_and_drafts(recipe, root, tmp_path, monkeypatch):
    whole, out, handler = tmp_path / "whole", tmp_path / "out", signal.getsignal(signal.SIGTERM)
    budget = ("--tokens", str(5 * 4 * 32))
    assert run(root, recipe, whole, *budget).exit_code == 0
    of_loop = Reporter.step

    def interrupted(self, progress, *args):
        of_loop(self, progress, *args)
        if progress.step == 2:
            signal.raise_signal(signal.SIGTERM if recipe in TREES else signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Reporter, "step", interrupted)
        stopped = run(root, recipe, out, *budget)
    assert (stopped.exit_code, signal.getsignal(signal.SIGTERM)) == (130, handler)
    assert "stopped at step 3; the same command goes on from there" in stopped.output
    assert (tmp_path / "out-run" / "checkpoint.pt").exists()
    assert not (out / "config.json").exists()
    done = run(root, recipe, out, *budget)
    assert done.exit_code == 0, done.output
    assert "resumed at step 3" in done.output
    assert "wrote" in done.output
    one, other = weights(whole), weights(out)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)

    log = read_log(tmp_path / "out-run" / "log.jsonl")
    assert (log[-1]["step"], log[-1]["tokens"]) == (5, 640)
    assert all(np.isfinite(loss) for loss in log[-1]["valid"].values())
    config = json.loads((out / ("noise.json" if recipe == "jacobi" else "config.json")).read_text())
    if recipe != "jacobi":
        assert config["held_out"].keys() == {"made", "all"}
        assert 0 < config["held_out"]["all"][0]["overlap"] < 1
    assert (config["recipe"]["stage"], config["data"]) == (STAGES.get(recipe, recipe), ["answers.jsonl"])
    assert config["recipe"]["loop"]["tokens"] == 640
    target = load(root / "target", dtype="float32", device="cpu")
    made_for, weights_of = config["tuned_from" if recipe == "jacobi" else "target"], TargetFacts.of(target)
    assert (made_for["name"], made_for["weights_fingerprint"]) == ("target", weights_of.weights_fingerprint)
    if recipe in HEADS or recipe == "model":
        assert config["recipe"]["config"]["loss"] == ("kl+tv" if recipe in ("model", "kangaroo") else "soft")
        assert {t.dtype for t in other.values() if t.is_floating_point()} == {torch.bfloat16}
    if recipe in HEADS:
        assert (out / "training.jsonl").read_text() == (tmp_path / "out-run" / "log.jsonl").read_text()

    if recipe in TREES:
        assert len(config["held_out"]["all"]) == len(read_accuracies(str(out))) == 3

    prompts, params = [[5, 6, 7], [8], [30] * 9], SamplingParams(max_tokens=12)
    model = load(out, dtype="float32", device="cpu") if recipe == "jacobi" else target
    spec = RECIPES[recipe][1].format(out=out)
    plain, drafted = ([one.tokens for one in Engine(model, d).generate(prompts, params)] for d in ("none", spec))
    assert drafted == plain
    if recipe == "jacobi":  # whose config.json is the model's own
        assert run(root, recipe, out, *budget).exit_code == 0, "what a training has written may be written again"
    if recipe == "medusa":
        (out / SLOTS_FILE).unlink()
        words = ["tools", "tree", str(root / "target"), f"medusa:{out}", "--data", str(root / "answers.jsonl")]
        assert (CliRunner().invoke(app, words).exit_code, len(read_accuracies(str(out)))) == (0, 3)


@pytest.mark.parametrize(("recipe", "more", "where", "says"), [
    ("model", ["--tokens", "64", "--minutes", "1"], {}, "--minutes and --tokens are budgets for one training"),
    ("mtp", ["--tokens", "64"], {"data": "one"}, "too few answers"),
    ("kangaroo", ["--tokens", "64"], {"target": "gpt2"}, "the native decoder cannot run it"),
    ("model", ["--tokens", "64"], {"target": "gpt2"}, "a gpt2 keeps its layers in another place"),
    ("model", ["--tokens", "64", "--hidden", "100"], {}, "--hidden is 100; heads are 64 wide"),
    ("kangaroo", ["--tokens", "64", "--exit", "3"], {}, "has 3 layers: it is 0 to 2"),
    ("eagle3", ["--tokens", "64", "--taps", "2,3"], {}, "ascending numbers of 0 to 2, such as 0,1,2"),
    ("eagle3", ["--tokens", "64", "--taps", "x"], {}, "--taps is 'x'; it must be layers with commas between"),
    ("s2d", ["--tokens", "64", "--layers", "9"], {}, "--layers is 9; the target has 3, so 1 to that"),
    ("s2d", ["--tokens", "64", "--exits", "one"], {}, "--exits is 'one'; it must be layers with commas between"),
    ("jacobi", ["--tokens", "64", "--noise", "some"], {}, "--noise is 'some'; it must be a number of tokens"),
])
def test_what_cannot_be_trained_is_one_line(recipe, more, where, says, root, tmp_path):
    error = run(root, recipe, tmp_path / "out", *more, **where).exception
    assert isinstance(error, PacelineError)
    assert says in str(error)
    assert "\n" not in str(error)
    assert not (tmp_path / "out").exists()


def test_a_target_in_a_file_is_trained_for_as_one_in_a_folder(root, tmp_path, monkeypatch):
    """The head is known by the file's weights: it drafts for the file expanded and in its blocks, and for no other."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    models.make("llama2", tmp_path / "target", **SMALL | {"intermediate_size": 64}, tie_word_embeddings=False)
    files = [gguf_files.write(tmp_path / "target", tmp_path / f"{kind}.gguf", kind) for kind in ("Q8_0", "Q4_0")]
    done = run(tmp_path, "eagle3", tmp_path / "head", "--tokens", "256", target=files[0].name, data=root / "answers")
    assert done.exit_code == 0, done.output
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert (config["target"]["name"], config["recipe"]["stage"]) == ("Q8_0", "eagle3")
    prompts, params = [[5, 6, 7], [8]], SamplingParams(max_tokens=12)
    for dtype in ("float32", "auto"):
        target = load(files[0], dtype=dtype, device="cpu", exact=True)
        specs = ("none", f"eagle3:{tmp_path / 'head'}")
        plain, drafted = ([one.tokens for one in Engine(target, d).generate(prompts, params)] for d in specs)
        assert drafted == plain
    with pytest.raises(MethodError, match="same shape, other weights"):
        Engine(load(files[1], device="cpu"), f"eagle3:{tmp_path / 'head'}")


@pytest.mark.parametrize("recipe", ["medusa", "eagle", "kangaroo", "model"])
def test_the_loss_may_compare_a_few_tokens(recipe, root, tmp_path):
    options = ("--tokens", "256", "--loss-vocab", "40", "--states", str(tmp_path / "states"))
    done = run(root, recipe, tmp_path / "out", *options)
    assert done.exit_code == 0, done.output
    assert "40 tokens in the loss: 100.00% of the held-out answers" in done.output
    facts = json.loads((tmp_path / "out" / "config.json").read_text())
    assert facts["recipe"]["config"]["loss_vocab"] == 40


@pytest.mark.parametrize("family", ["gpt-oss", "gemma4", "glm-flash", "qwen3-moe"])
def test_a_drafter_is_recorded_for_the_weights_that_are_loaded(family, tmp_path):
    """Buffers and stacks of experts count as they do when a model is loaded."""
    folder = models.make(family, tmp_path / "target")
    asked = SimpleNamespace(
        teacher=models.model(family), training=SimpleNamespace(target=folder), tokenizer=SimpleNamespace(fingerprint="")
    )
    assert Trainer.target_facts(asked).weights_fingerprint == load(folder).weights_fingerprint
