"""A sorted draft: what its loss is, that every exit learns, and that what is written drafts for several targets."""

import copy
import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.core.sampling import SamplingParams
from paceline.draft.methods.s2d import Sorted, exits_in_use
from paceline.engine.engine import Engine
from paceline.errors import PacelineError
from paceline.formats.adapter import Adapter
from paceline.target.load import load, quantise_folder
from paceline.train.data import split_rows
from paceline.train.loop import LoopConfig, read_log
from paceline.train.loss import IGNORE, LmLoss
from paceline.train.s2d import SortedConfig, SortedLoss, cut, measure, train_sorted
from paceline.train.trainer import Training
from tests import models
from tests.train.conftest import following_answers

LAYERS = 4
SMALL = {"num_hidden_layers": LAYERS, "hidden_size": 32, "intermediate_size": 48}


def batch(seed=0):
    ids = torch.from_numpy(np.random.default_rng(seed).integers(4, 288, (3, 13)))
    labels = ids[:, 1:].clone()
    labels[:, ::3] = IGNORE
    return ids[:, :-1], labels


def grads(loss):
    loss.zero_grad()
    loss(*batch()).backward()
    return {name: p.grad.clone() for name, p in loss.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["llama2", "qwen3"])
def test_with_the_last_exit_alone_it_is_ordinary_cross_entropy(family):
    model = models.model(family, **SMALL)
    assert torch.equal(SortedLoss(model, [LAYERS])(*batch()), LmLoss(model)(*batch()))


def test_the_loss_is_the_mean_over_exits_and_deep_layers_learn_from_their_own_exit(tmp_path):
    model = models.model("llama2", **SMALL)
    loss = SortedLoss(model, [1, 2, LAYERS])
    each = [loss(*batch(), torch.full((3,), number)) for number in range(3)]
    torch.testing.assert_close(loss(*batch()), torch.stack(each).mean())
    for layers, one in zip((1, 2, LAYERS), each, strict=True):  # each is the loss of a model of so many layers
        shorter = copy.deepcopy(model)
        shorter.model.layers = shorter.model.layers[:layers]
        shorter.config.num_hidden_layers = layers
        torch.testing.assert_close(one, LmLoss(shorter)(*batch()))
    together, last = grads(loss), grads(SortedLoss(model, [LAYERS]))
    for name in together:
        alike = torch.allclose(3 * together[name], last[name], rtol=1e-4, atol=1e-6)
        assert alike == any(f"layers.{layer}." in name for layer in (2, 3)), name


def test_a_teacher_adds_the_distance_to_it():
    model = models.model("llama2", **SMALL)
    same, other = copy.deepcopy(model), models.model("llama2", seed=1, **SMALL)
    plain = SortedLoss(model, [2, LAYERS])(*batch())
    own = SortedLoss(model, [2, LAYERS], same)
    assert own(*batch()) > plain  # behind two layers the model is not its own teacher
    torch.testing.assert_close(SortedLoss(model, [LAYERS], same)(*batch()), SortedLoss(model, [LAYERS])(*batch()))
    assert SortedLoss(model, [2, LAYERS], other)(*batch()) > own(*batch())
    assert not any("_teacher" in name for name, _ in own.named_parameters())
    own(*batch()).backward()
    assert all(p.grad is None for p in same.parameters())


def test_a_cut_keeps_the_first_layers(tmp_path):
    folder = models.make("qwen3", tmp_path, **SMALL)
    whole, part = AutoModelForCausalLM.from_pretrained(folder), cut(folder, 2)
    assert part.config.num_hidden_layers == len(part.model.layers) == 2
    known = dict(whole.named_parameters())
    assert all(torch.equal(p, known[name]) for name, p in part.named_parameters())


def test_depths():
    for config, layers, expected in (
        (SortedConfig(), 8, (4, (2, 3, 4))), (SortedConfig(), 3, (1, (1,))),
        (SortedConfig(layers=12), 32, (12, (6, 9, 12))), (SortedConfig(layers=4, exits=(1, 4)), 8, (4, (1, 4))),
    ):
        assert config.depths(layers) == expected
    with pytest.raises(PacelineError, match="--layers is 9; the target has 8"):
        SortedConfig(layers=9).depths(8)
    for exits in ((0, 4), (2, 2, 4), (1, 3), (3, 1, 4)):
        with pytest.raises(PacelineError, match="ascend from 1 or more to the draft's last layer, 4"):
            SortedConfig(layers=4, exits=exits).depths(8)


def test_every_exit_learns_and_the_draft_serves_several_targets(tmp_path):
    target = models.make("llama2", tmp_path / "target", **SMALL)
    out, run = tmp_path / "sorted", tmp_path / "run"
    loop = LoopConfig(tokens=40 * 128, mixed_precision="no", peak_lr=1e-2, warmup_steps=5, log_every=5)
    recipe = SortedConfig(layers=3, exits=(1, 2, 3), length=32, rows=4, held_out=0.2)
    made = following_answers(tmp_path / "answers.jsonl")
    assert train_sorted(Training(target, made, out, run, loop), recipe, compiled=False)
    config = json.loads((out / "config.json").read_text())
    assert (config["paceline_drafter"], config["exits"], config["num_hidden_layers"]) == ("s2d", [1, 2, 3], 3)
    assert (config["target"]["name"], len(config["thresholds"])) == ("target", 2)

    untrained = SortedLoss(cut(target, 3), (1, 2, 3)).eval()
    trained = SortedLoss(AutoModelForCausalLM.from_pretrained(out), (1, 2, 3)).eval()
    texts = [json.loads(line) for line in made.read_text().splitlines()]
    ids = torch.tensor([[*text["prompt_tokens"], *text["tokens"]] for text in texts])
    for number in range(3):
        one = torch.full((60,), number)
        before, after = (float(loss(ids[:, :-1], ids[:, 1:], one).detach()) for loss in (untrained, trained))
        assert after < before - 1
    assert config["held_out"].keys() == {"made", "all"}
    assert all(0 < row["loss"] < 6 for row in config["held_out"]["all"])
    assert len(config["held_out"]["all"]) == 3
    valid = [row["valid"] for row in read_log(run / "log.jsonl") if "valid" in row]
    assert set(valid[-1]) == {"made@1", "made@2", "made@3"}

    other = models.make("llama3", tmp_path / "other", num_hidden_layers=2, hidden_size=64, seed=3)
    prompts = [[5, 6, 7], [8], [30] * 9]
    for folder in (target, other):
        engines = [Engine(folder, spec, dtype="float32", device="cpu") for spec in ("none", f"s2d:{out}")]
        plain, drafted = ([d.tokens for d in e.generate(prompts, SamplingParams(max_tokens=12))] for e in engines)
        assert drafted == plain
        assert isinstance(engines[1].drafter, Sorted)
        used = [(section.last, section.threshold) for section in engines[1].drafter.sections]
        assert used == exits_in_use([1, 2, 3], config["thresholds"], 3)


def test_a_draft_may_be_an_adapter_of_the_first_layers(tmp_path):
    pytest.importorskip("peft")
    target = models.make("llama2", tmp_path / "target", **SMALL)
    out, made = tmp_path / "thin", following_answers(tmp_path / "answers.jsonl")
    loop = LoopConfig(tokens=40 * 128, mixed_precision="no", peak_lr=1e-2, warmup_steps=5, log_every=5)
    recipe = SortedConfig(layers=2, exits=(1, 2), length=32, rows=4, held_out=0.2, lora=8)
    assert train_sorted(Training(target, made, out, tmp_path / "run", loop), recipe, compiled=False)
    assert not (out / "model.safetensors").exists()
    losses = [row["loss"] for row in json.loads((out / "config.json").read_text())["held_out"]["all"]]
    untrained = cut(target, 2)
    network = load(out, dtype="float32")
    weights = Adapter.of(out).merged(dict(untrained.named_parameters()))
    assert network.num_layers == 2
    assert any("norm" in name and not torch.equal(w, weights[name]) for name, w in untrained.named_parameters())
    untrained.load_state_dict(weights, strict=False)
    made_ids, made_labels = split_rows(made, 32, 0, 0.2)[1]["made"]
    each = [
        float(SortedLoss(untrained, (1, 2)).eval()(*(torch.from_numpy(side).long() for side in (made_ids, made_labels)),
                                                    torch.full((len(made_ids),), number)).detach())
        for number in range(2)
    ]  # fmt: skip
    assert each == pytest.approx(losses, abs=0.02)
    engines = [Engine(target, spec, dtype="float32", device="cpu") for spec in ("none", f"s2d:{out}")]
    plain, drafted = (e.generate([[5, 6, 7]], SamplingParams(max_tokens=16)) for e in engines)
    assert drafted[0].tokens == plain[0].tokens
    assert drafted[0].mean_accepted_tokens > 1
    with pytest.raises(PacelineError, match="an adapter of a model's first layers alone"):
        quantise_folder(out, tmp_path / "int8", "int8")


def test_what_is_watched_of_every_exit(tmp_path):
    teacher = models.model("llama2", **SMALL).eval()
    draft = models.model("llama2", seed=1, **SMALL | {"num_hidden_layers": 3}).eval()
    rng = np.random.default_rng(0)
    held = {}
    for name, rows in (("one", 2), ("two", 5)):
        ids = rng.integers(4, 288, (rows, 9))
        labels = np.where(rng.random(ids.shape) < 0.5, ids, IGNORE)
        held[name] = ids, labels
    fits, seen = measure(draft, (1, 3), teacher, held)
    known = [labels != IGNORE for _, labels in held.values()]
    assert seen.sure.shape == seen.right.shape == (sum(int(one.sum()) for one in known), 2)
    assert [float(seen.share[: known[0].sum()].sum()), float(seen.share.sum())] == pytest.approx([0.5, 1])

    def said(model):
        of_each = [model(torch.from_numpy(ids)).logits for ids, _ in held.values()]
        return torch.cat([one[torch.from_numpy(k)] for one, k in zip(of_each, known, strict=True)]).detach()

    last, wanted = said(draft), said(teacher)  # the last exit is the draft itself
    right = torch.cat([torch.from_numpy(labels)[torch.from_numpy(labels) != IGNORE] for _, labels in held.values()])
    row, p, q = fits["all"][1].row, wanted.softmax(-1), last.softmax(-1)
    assert row["positions"] == sum(of_source[1].row["positions"] for of_source in (fits["one"], fits["two"])) == len(p)
    assert row["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(last, right)), abs=1e-4)
    assert row["overlap"] == pytest.approx(float(torch.minimum(p, q).sum(-1).mean()), abs=1e-4)
    assert row["top1"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()), abs=1e-4)
    np.testing.assert_allclose(seen.sure[:, 1], last.softmax(-1).amax(-1), rtol=1e-5)
    assert (seen.right[:, 1] == (last.argmax(-1) == wanted.argmax(-1)).numpy()).all()
    layers = [sum(p.numel() for p in layer.parameters()) for layer in teacher.model.layers]
    head = teacher.lm_head.weight.numel()
    assert seen.layers == pytest.approx([layers[0] / (sum(layers) + head), 3 * layers[0] / (sum(layers) + head)])
    assert seen.head == pytest.approx(head / (sum(layers) + head))
