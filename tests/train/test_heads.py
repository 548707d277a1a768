"""Heads learn what the target says at several depths, aligned; then their trees are measured, and they draft."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.draft.registry import create
from paceline.draft.shapes import SLOTS_FILE, read_accuracies
from paceline.engine.engine import Engine
from paceline.errors import PacelineError
from paceline.target.load import load
from paceline.train.data import Example
from paceline.train.heads import HeadsConfig, MedusaConfig, MedusaLoss
from paceline.train.loop import LoopConfig
from paceline.train.loss import IGNORE
from paceline.train.measure import Fit, measure, measure_heads, write_slots
from paceline.train.student import StateCache, decoder_states, known_depths, target_states
from paceline.train.trainer import begin_with, worth_compiling
from tests import models
from tests.draft.head_worlds import HEADS, World

TEXT = SamplingParams(max_tokens=24, temperature=1.0, seed=5, ignore_eos=True)


def labels_of(own):
    return torch.tensor([[3 if here else IGNORE for here in own]])


def test_a_short_training_is_not_compiled(monkeypatch):
    for compiler in ("/usr/bin/g++", None):
        monkeypatch.setattr("shutil.which", lambda name, found=compiler: found)
        assert worth_compiling(LoopConfig(tokens=10**7)) == worth_compiling(LoopConfig(minutes=60)) == bool(compiler)
        assert not worth_compiling(LoopConfig(tokens=1000))
        assert not worth_compiling(LoopConfig(minutes=1))


def test_a_depth_counts_where_every_token_up_to_it_is_the_targets_own():
    labels = labels_of([False, True, True, True, False, True])
    assert known_depths(labels, 2)[0].tolist() == [
        [False, False], [True, True], [True, False], [False, False], [False, False], [False, False],
    ]


def test_depth_k_learns_what_the_target_says_k_plus_one_tokens_later():
    """The loss by hand; and head 0 is not trained on the token that it is given."""
    world = World()
    module = world.module("medusa")
    module.config = HeadsConfig(depth=HEADS, decay=0.5)
    ids = torch.tensor([world.prompts[0]])
    labels = torch.full_like(ids, IGNORE)
    labels[0, 6:] = torch.roll(ids, -1, 1)[0, 6:]
    labels[0, -1] = IGNORE
    with torch.no_grad():
        states = world.model.model(ids).last_hidden_state[0]
        logits = world.model(ids).logits[0]
        losses = []
        for k, head in enumerate(module.network):
            at = torch.arange(6, ids.shape[1] - 2 - k)
            q = world.model.lm_head(head(states[at])).log_softmax(-1)
            losses.append(-(logits[at + k + 1].softmax(-1) * q).sum(-1).mean())
        module.eval()
        module.config = HeadsConfig(depth=HEADS, decay=0.5, share=1.0)
        expected = sum(0.5**k * loss for k, loss in enumerate(losses)) / 1.75
        torch.testing.assert_close(module(ids, labels), expected, atol=1e-4, rtol=1e-4)


def test_hard_labels_and_output_heads_of_their_own():
    world = World()
    ids = torch.tensor([world.prompts[0]])
    labels = torch.roll(ids, -1, 1)
    for own, soft in ((False, 0.5), (True, 0.5), (True, 1.0)):
        torch.manual_seed(0)
        module = MedusaLoss(world.model, MedusaConfig(depth=2, share=1.0, soft=soft, own_heads=own))
        module(ids, labels).backward()
        moved = {name for name, weight in module.named_parameters() if weight.grad is not None and weight.grad.any()}
        assert moved == {name for name, _ in module.named_parameters()}
        assert not any(parameter.requires_grad for parameter in world.model.parameters())


def test_training_goes_on_from_heads_of_the_same_make_alone(tmp_path):
    world = World()
    before, after = world.module("medusa"), world.module("medusa")
    with torch.no_grad():
        for number, weight in enumerate(before.saved().values(), 1):
            weight.fill_(number)
    world.save(before, "medusa", tmp_path, {})
    begin_with(after, tmp_path)
    assert all(torch.equal(weight, before.saved()[name]) for name, weight in after.saved().items())
    world.save(before, "medusa", tmp_path, {**before.facts(), "older": {"a": 1}})
    begin_with(after, tmp_path)
    world.save(before, "medusa", tmp_path, {**before.facts(), "medusa_num_layers": 7})
    with pytest.raises(PacelineError, match="another make: its medusa_num_layers is 7"):
        begin_with(after, tmp_path)
    world.save(before, "medusa", tmp_path, {})
    with pytest.raises(PacelineError, match="another make"):
        begin_with(world.module("medusa", own_heads=True), tmp_path)
    with pytest.raises(PacelineError, match="kind medusa where hydra is wanted"):
        begin_with(world.module("hydra"), tmp_path)
    with pytest.raises(PacelineError, match="there is no folder"):
        begin_with(after, tmp_path / "nowhere")


def test_entries_of_an_older_head_that_nobody_reads_do_not_matter(tmp_path):
    world = World()
    heads = world.module("amphista")
    (network,) = heads.facts().values()
    world.save(heads, "amphista", tmp_path, {"network": {**network, "sight": "full"}})
    begin_with(world.module("amphista"), tmp_path)
    world.save(heads, "amphista", tmp_path, {"network": {**network, "heads": 9}})
    with pytest.raises(PacelineError, match="another make: its network is"):
        begin_with(world.module("amphista"), tmp_path)


def test_states_are_kept_for_other_trainings(tmp_path):
    teacher = World().model
    rows = np.random.default_rng(0).integers(4, models.VOCAB_SIZE, (6, 12)).astype(np.int32)
    ran = []

    def run(ids, layers):
        ran.append(len(ids))
        return target_states(teacher, ids, layers)

    def cache(weights="weights"):
        return StateCache.open(tmp_path, weights, run, rows[:4], 64)

    ids, last = torch.from_numpy(rows).long(), teacher.config.num_hidden_layers
    want = target_states(teacher, ids, (0, 1, last)).bfloat16().float()
    assert torch.equal(cache()(ids[[1, 3]], (0, last)), want[[1, 3]][:, :, [0, 2]])
    assert torch.equal(cache()(ids[[3, 0, 1]], (0, last)), want[[3, 0, 1]][:, :, [0, 2]])
    assert torch.equal(cache()(ids[[5, 0]], (last,)), want[[5, 0]][:, :, [2]]), "a row that is not among them is run"
    assert torch.equal(cache()(ids[[5]], (last,)), want[[5]][:, :, [2]])
    assert ran == [2, 1, 1, 1]
    assert torch.equal(cache()(ids[[1, 3]], (1, 0)), want[[1, 3]][:, :, [1, 0]]), "a layer that no one read before"
    assert torch.equal(cache("other weights")(ids[[1]], (last,)), want[[1]][:, :, [2]])
    assert ran == [2, 1, 1, 1, 2, 1]
    with torch.no_grad():
        out = teacher.model(input_ids=ids, output_hidden_states=True)
    torch.testing.assert_close(target_states(teacher, ids, (0, 1)), torch.stack(out.hidden_states[:2], -2))
    normed = teacher.model.norm(target_states(teacher, ids, (last,))[..., 0, :])
    torch.testing.assert_close(normed.detach(), out.last_hidden_state)


def test_states_of_our_decoder_are_transformers(tmp_path):
    world = World()
    ids = torch.from_numpy(np.random.default_rng(0).integers(4, models.VOCAB_SIZE, (2, 12)))
    last = world.model.config.num_hidden_layers
    world.model.save_pretrained(tmp_path)
    ours = decoder_states(load(tmp_path))(ids, (1, last, 0))
    torch.testing.assert_close(ours, target_states(world.model, ids, (1, last, 0)), atol=1e-4, rtol=1e-4)


def test_rows_are_marked_when_their_states_are_on_the_disk(tmp_path, monkeypatch):
    rows = np.arange(24, dtype=np.int32).reshape(4, 6)
    synced = []

    def fsync(number):
        name = Path(f"/dev/fd/{number}").resolve()
        assert name.with_suffix(".rows").read_bytes() == bytes(4)
        assert np.fromfile(name, np.int16).any()
        synced.append(name.name[-5:])

    monkeypatch.setattr(os, "fsync", fsync)
    cache = StateCache.open(tmp_path, "weights", lambda ids, layers: torch.ones(*ids.shape, len(layers), 8), rows, 8)
    cache(torch.from_numpy(rows[1:3]).long(), (0, 2))
    assert synced == ["0.bin", "2.bin"]
    for file in tmp_path.glob("*.rows"):
        assert file.read_bytes() == bytes([0, 1, 1, 0])


def test_every_depth_is_divided_by_its_own_count(tmp_path):
    first, second = Fit(), Fit()
    first.rank(torch.tensor([[5, 6], [5, 6], [6, 5], [1, 2]]), torch.tensor([5, 6, 6, 3]))
    second.rank(torch.tensor([[5, 6]]), torch.tensor([5]))
    assert [fit.ranks[:3] for fit in (first, second)] == [[0.5, 0.25, 0], [1.0, 0.0, 0]]
    write_slots(tmp_path, [first, second])
    assert read_accuracies(str(tmp_path)) == [first.ranks, second.ranks]
    saved = json.loads((tmp_path / SLOTS_FILE).read_text())
    assert (saved["positions"], saved["trees"]["8"][:3]) == ([4, 1], ["0", "0-0", "1"])


@pytest.mark.parametrize("kind", ["medusa", "hydra", "amphista"])
def test_a_tree_measured_afterwards_is_the_one_measured_in_training(kind, tmp_path):
    """By the module over rows, and by the drafter over answers with its cache: the same counts."""
    world = World()
    module = world.module(kind)
    drafter = create(f"{world.save(module, kind, tmp_path)},tree=4")
    drafter.bind(world.target)
    drafter.model.use_ranks()
    done = Engine(world.target).generate(world.prompts[:3], TEXT)
    replies = [Example("a", prompt, one.tokens) for prompt, one in zip(world.prompts, done, strict=False)]
    measured = measure_heads(world.target, drafter.model, replies)
    want = [Fit() for _ in range(HEADS)]
    for reply in replies:
        text = np.array([[*(reply.prompt or ()), *reply.tokens]], np.int32)
        labels = np.roll(text, -1, 1)
        labels[0, : len(reply.prompt or ()) - 1] = labels[0, -1] = IGNORE
        want = [sum(pair, Fit()) for pair in zip(want, measure(module, {"a": (text, labels)})["all"], strict=True)]
    assert [fit.row["positions"] for fit in measured] == [fit.row["positions"] for fit in want]
    assert [fit.ranks for fit in measured] == [fit.ranks for fit in want]
    assert all(sum(fit.ranks) > 0 for fit in want)
