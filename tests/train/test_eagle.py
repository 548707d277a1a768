"""EAGLE and EAGLE-3 are trained on what they meet in a draft: unrolled, they are the drafter run with forced tokens;
only the head learns, aligned; and what is written drafts better than what training begins with."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from paceline.core.segment import Segment
from paceline.draft.methods.eagle import EagleNetwork
from paceline.draft.methods.eagle3 import Eagle3Network
from paceline.errors import PacelineError
from paceline.formats.heads.checkpoint import TargetFacts, open_drafter
from paceline.formats.heads.eagle import Flags
from paceline.target.decoder import Decoder
from paceline.target.load import load
from paceline.train import unrolled
from paceline.train.data import counts_of
from paceline.train.eagle import (
    Eagle3Config,
    Eagle3Loss,
    EagleConfig,
    EagleLoss,
    FlagOptions,
    layer_config,
    speculators_config,
)  # fmt: skip
from paceline.train.loop import LoopConfig, read_log
from paceline.train.loss import IGNORE
from paceline.train.measure import accepted_length, measure
from paceline.train.saving import save_drafter
from paceline.train.student import Student, decoder_states
from paceline.train.trainer import Training, begin_with, total_spent, train_head
from tests import models, native
from tests.pairs import paired
from tests.train.conftest import rounds

METHODS = ("eagle", "eagle3")
KEEP = torch.arange(3, 300, 2)
PLAIN = FlagOptions(norm_output=False)
FACTS = TargetFacts("any", "", "", 64, 3, models.VOCAB_SIZE)
STEPS = 4
VARIANTS = {
    "eagle": None, "eagle3": Flags(), "eagle3.1": Flags(fc_norm=True, norm_output=True),
    "eagle3, normed": Flags(norm_before_residual=True, norm_before_fc=True, norm_output=True),
}


def network(seed=0, layers=4, family="llama2"):
    return models.model(family, seed, num_hidden_layers=layers, tie_word_embeddings=False)


def loss_of(model, variant):
    flags = VARIANTS[variant]
    loss = EagleLoss(model) if flags is None else Eagle3Loss(model, KEEP, Eagle3Config(flags=flags))
    models.randomize(loss.module)
    return loss.eval()


def taps_and_head(loss, ids):
    return loss.states(ids)[0], loss.teacher.lm_head if isinstance(loss, EagleLoss) else loss.module.lm_head


def drafting(loss, model):
    """The same head as a drafter runs it."""
    target, tensors = native.of(model), {name: t.detach() for name, t in loss.module.named_parameters()}
    if isinstance(loss, EagleLoss):
        return EagleNetwork("x", layer_config(model.config), tensors, target)
    config = speculators_config(model.config, loss.reads, len(KEEP), loss.config.flags)
    return Eagle3Network("x", config, tensors | {"d2t": KEEP - torch.arange(len(KEEP))}, target)


@torch.inference_mode()
def forced(head, taps, text, pairs):
    """Logits of a draft after `pairs` pairs of a text whose tokens are the text's own, step by step."""
    slot, logits = head.cache.add_row(len(text)), []
    tokens = text[1 : pairs + 1].tolist()
    features = head.first(taps[:pairs])
    for step in range(min(STEPS, len(text) - pairs)):
        done = pairs - 1 + step if step else 0
        segment = Segment(slot, np.array(tokens), np.arange(-1, len(tokens) - 1), start=done, num_logits=1)
        embedded = head.embedded(torch.tensor(tokens[done:]))
        out, read = head.forward(embedded, features, [segment])
        logits.append(head.head(read)[0])
        features = out[-1:]
        if pairs + 1 + step < len(text):
            tokens.append(int(text[pairs + 1 + step]))
    head.cache.drop_row(slot)
    return logits


@pytest.mark.parametrize(("variant", "family"), paired(VARIANTS, ["llama2", "llama3"]))
def test_every_step_of_training_is_a_step_of_drafting(variant, family):
    """Step 0 reads what the target said, step s what the head said itself: at every position, with forced tokens."""
    model = network(family=family)
    loss = loss_of(model, variant)
    text = np.random.default_rng(0).integers(4, models.VOCAB_SIZE, 14)
    ids = torch.from_numpy(text)[None]
    with torch.no_grad():
        taps, head = taps_and_head(loss, ids)
        table = model.get_input_embeddings().weight
        unrolled = [head(read)[0] for read in loss.module.unroll(taps, ids, table, STEPS)]
    drafter, checked = drafting(loss, model), 0
    rounding = 2e-5 * max(float(logits.abs().max()) for logits in unrolled)  # what has no norm grows from step to step
    for pairs in range(1, len(text)):
        for step, logits in enumerate(forced(drafter, taps[0], text, pairs)):
            torch.testing.assert_close(logits, unrolled[step][pairs - 1], atol=rounding, rtol=0)
            checked += 1
    assert checked == 13 + 12 + 11 + 10


def test_a_step_sees_the_text_up_to_its_place_and_what_is_above_it():
    """Nothing else: later tokens of the text do not reach an earlier draft."""
    model = network()
    loss = loss_of(model, "eagle3")
    ids = torch.randint(4, models.VOCAB_SIZE, (1, 12))
    table = model.get_input_embeddings().weight

    def drafts(ids):
        with torch.no_grad():
            return list(loss.module.unroll(taps_and_head(loss, ids)[0], ids, table, 3))

    other = ids.clone()
    other[0, 8] = (other[0, 8] + 1) % models.VOCAB_SIZE
    before, after = drafts(ids), drafts(other)
    for step in range(3):  # position t of step s reads tokens up to t + 1 + s
        first = 8 - 1 - step
        torch.testing.assert_close(before[step][:, :first], after[step][:, :first])
        assert (before[step][:, first] - after[step][:, first]).abs().max() > 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
def test_positions_that_are_not_drafted_below_change_nothing(variant):
    """Drafts below some positions are those that all positions get, step by step."""
    loss = loss_of(model := network(), variant)
    ids = torch.randint(4, models.VOCAB_SIZE, (2, 17))
    table, at = model.get_input_embeddings().weight, torch.tensor([2, 3, 9, 13, 15, 16])
    with torch.no_grad():
        taps = taps_and_head(loss, ids)[0]
        whole, few = (list(loss.module.unroll(taps, ids, table, 4, here)) for here in (None, at))
    for step, (one, other) in enumerate(zip(whole, few, strict=True)):
        here = at[at < 16 - step]
        rounding = 2e-5 * float(one.abs().max())  # what has no norm grows from step to step
        torch.testing.assert_close(one[:, here], other, atol=rounding, rtol=0)


def test_the_loss_drafts_only_below_the_positions_that_it_is_of():
    loss, ids = loss_of(network(), "eagle3"), torch.randint(4, models.VOCAB_SIZE, (2, 40))
    labels = torch.full_like(ids, IGNORE)
    labels[:, 20:24] = loss.tokens[0]
    read = []
    loss.module.layers[0].mlp.register_forward_pre_hook(lambda module, given: read.append(given[0].shape[1]))
    loss(ids, labels).backward()
    assert read == [6, 6, 6]  # the tokens at 20 to 23 are drafted one, two and three steps below 17 to 22


def test_blocks_of_positions_change_nothing(monkeypatch):
    model = network()
    loss = loss_of(model, "eagle3")
    ids = torch.randint(4, models.VOCAB_SIZE, (2, 17))
    table, taps = model.get_input_embeddings().weight, taps_and_head(loss, ids)[0]
    with torch.no_grad():
        whole = list(loss.module.unroll(taps, ids, table, 4))
        monkeypatch.setattr(unrolled, "BLOCK", 5)
        for one, other in zip(whole, loss.module.unroll(taps, ids, table, 4), strict=True):
            torch.testing.assert_close(one, other)


def test_eagle_learns_the_next_state_where_the_target_wrote_the_next_token():
    model = network()
    loss = loss_of(model, "eagle")
    ids = torch.randint(4, models.VOCAB_SIZE, (1, 9))
    labels = torch.full_like(ids, IGNORE)
    labels[0, 4] = ids[0, 5]
    with torch.no_grad():
        states, _ = loss.states(ids)
        (predicted,) = loss.module.unroll(states, ids, model.get_input_embeddings().weight, 1)
        p, q = (model.lm_head(x).softmax(-1) for x in (states[0, 4], predicted[0, 3]))
        wanted = F.smooth_l1_loss(predicted[0, 3], states[0, 4]) - 0.1 * (p * q.log()).sum()
    torch.testing.assert_close(loss(ids, labels).detach(), wanted, atol=1e-4, rtol=1e-4)
    noisy = copy.deepcopy(loss).train()
    assert noisy(ids, labels).item() != pytest.approx(float(wanted), abs=1e-5)


def test_eagle3_learns_over_its_own_tokens_where_it_has_the_texts_one():
    model = network()
    loss = loss_of(model, "eagle3")
    ids = torch.randint(4, models.VOCAB_SIZE, (2, 24))
    taps, last = loss.states(ids)
    drafted = torch.isin(ids, KEEP)  # the labels below
    assert drafted.any()
    assert not drafted.all()
    total = torch.zeros(())
    for step, read in enumerate(loss.module.unroll(taps, ids, model.get_input_embeddings().weight, 3)):
        p = (model.lm_head(last[:, 1 + step :])[..., KEEP]).softmax(-1)
        q = loss.module.lm_head(read).log_softmax(-1)
        total = total + 0.8**step * -(p * q).sum(-1)[drafted[:, 1 + step :]].mean()
    torch.testing.assert_close(loss(ids, ids).detach(), total.detach(), atol=1e-3, rtol=1e-4)


def test_acceptance_by_depth_counts_drafts_that_the_text_follows():
    ids = np.array([[5, 1, 2, 3, 4, 0]])
    labels = np.array([[1, 2, 3, 4, 0, IGNORE]])

    class Fixed(Student):
        def drafts(self, ids, depths):
            p = F.one_hot(torch.from_numpy(labels).clamp_min(0), 6).float()
            first = F.one_hot(torch.tensor([[2, 3, 5, 0, 5]]), 6).float()  # right at places 0, 1, 3
            second = F.one_hot(torch.tensor([[3, 5, 0, 5]]), 6).float()  # below those with a next token: right at 0
            return p, iter([first, second, F.one_hot(torch.full((1, 3), 5), 6).float()][:depths])

        def target_probs(self, last):
            return last

        def probs(self, hidden, depth):
            return hidden

    head = Fixed(network(), "soft")
    head.depths = 3
    fits = measure(head, {"a": (ids, labels)})["a"]
    rows = [fit.row for fit in fits]
    assert [(row["positions"], row["reached"]) for row in rows] == [(4, 4), (3, 2), (2, 1)]  # the last has no label
    assert [row["accepted"] for row in rows] == [row["overlap"] for row in rows] == [3 / 4, 1 / 2, 0]
    assert [row["top1"] for row in rows] == [0.75, 0.6667, 0]
    assert accepted_length(fits) == pytest.approx(1 + 3 / 4 + 1 / 3, abs=1e-4)


# The whole recipe ---------------------------------------------------------------------------------------------------

LOOP = LoopConfig(tokens=24 * 16 * 50, peak_lr=2e-2, warmup_steps=5, mixed_precision="no")
NOTHING = LoopConfig(tokens=0, mixed_precision="no")
ROWS = {"length": 24, "rows": 16}


def train(method, lesson, out, loop, **options):
    folder, answers = lesson
    training = Training(folder, answers, out, out.with_suffix(".run"), loop)
    config = EagleConfig(**ROWS) if method == "eagle" else Eagle3Config(**ROWS, **{"vocab": 200, **options})
    assert train_head(training, config)


@pytest.mark.parametrize("method", METHODS)
def test_training_makes_a_head_that_drafts_better(method, lesson, tmp_path):
    train(method, lesson, tmp_path / "none", NOTHING)
    train(method, lesson, tmp_path / "head", LOOP)
    folder, _ = lesson
    before, after = (json.loads((tmp_path / name / "config.json").read_text())["held_out"] for name in ("none", "head"))
    assert after["all"][0]["top1"] > before["all"][0]["top1"] + 0.1
    assert len(after["own"]) == 5
    assert rounds(folder, f"{method}:{tmp_path / 'head'}") < 0.9 * rounds(folder, f"{method}:{tmp_path / 'none'}")


def test_what_is_written_is_in_the_speculators_format_and_comes_back_exactly(lesson, tmp_path):
    train("eagle3", lesson, tmp_path / "head", NOTHING)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["transformer_layer_config"]["num_hidden_layers"] == 1
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", "fc_norm.2.weight"} <= tensors.keys()
    assert {"layers.0.hidden_norm.weight", "layers.0.self_attn.q_proj.weight"} <= tensors.keys()
    offsets, members = tensors["d2t"], tensors["t2d"]
    keep = torch.arange(len(offsets)) + offsets
    assert (keep.tolist(), len(keep)) == (members.nonzero().flatten().tolist(), 200)
    target = load(lesson[0], dtype="float32")
    settings = {name: value for name, value in config.items() if name not in ("paceline_drafter", "target")}
    network = Eagle3Network("x", settings, tensors, target)  # without our own entries, as another's
    assert torch.equal(network.head.dense().bfloat16(), tensors["lm_head.weight"])
    assert torch.equal(network.fc.dense().bfloat16(), tensors["fc.weight"])
    assert network.columns is not None
    assert torch.equal(network.columns, keep)


def test_a_long_training_is_compiled_and_reads_states_of_our_decoder(lesson, tmp_path, monkeypatch):
    compiled, decoders = [], []

    def states(target):
        decoders.append(target)
        return decoder_states(target)

    monkeypatch.setattr("paceline.train.trainer.worth_compiling", lambda loop: True)
    monkeypatch.setattr("paceline.train.loss._compiled", lambda step: compiled.append(step) or step)
    monkeypatch.setattr("paceline.train.trainer.decoder_states", states)
    train("eagle3", lesson, tmp_path / "out", replace(LOOP, tokens=24 * 16), states=tmp_path / "states")
    assert compiled
    assert isinstance(*decoders, Decoder)
    assert all(np.fromfile(file, np.uint8).all() for file in (tmp_path / "states").glob("*.rows"))


def test_training_begins_with_a_head(lesson, tmp_path):
    """Its weights and its vocabulary, whatever the answers say; what it had learnt before is told."""
    first, again = tmp_path / "first", tmp_path / "again"
    train("eagle3", lesson, first, replace(LOOP, tokens=24 * 16 * 5), vocab=50, stored="int8")
    train("eagle3", lesson, again, NOTHING, vocab=None, begin=first)
    train("eagle3", lesson, tmp_path / "more", replace(LOOP, tokens=24 * 16), vocab=None, begin=first)
    one, two = (json.loads((folder / "config.json").read_text()) for folder in (first, again))
    assert two["recipe"]["begun_with"] == one["recipe"]
    assert two["recipe"]["spent"] == one["recipe"]["spent"], "nothing was added"
    assert one["recipe"]["spent"]["tokens"] == 24 * 16 * 5
    logs = [read_log(folder / "training.jsonl") for folder in (first, again)]
    assert logs[1][: len(logs[0])] == logs[0]
    assert [row["tokens"] for row in logs[1][len(logs[0]) :]] == [24 * 16 * 5], "what the first brings"
    more = read_log(tmp_path / "more" / "training.jsonl")[len(logs[0]) :]
    assert [row["tokens"] for row in more if "valid" in row] == [24 * 16 * 5, 24 * 16 * 6], "before and after"
    assert two["held_out"]["all"][0]["top1"] == pytest.approx(one["held_out"]["all"][0]["top1"], abs=0.02)
    (_, before), (_, after) = (open_drafter(folder, "eagle3", None) for folder in (first, again))
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    (first / "training.jsonl").write_text('{"loss": 1}\n')  # another trainer's
    train("eagle3", lesson, tmp_path / "third", NOTHING, vocab=None, begin=first)
    assert [row["tokens"] for row in read_log(tmp_path / "third" / "training.jsonl")] == [0]
    (first / "training.jsonl").write_text("{")
    with pytest.raises(PacelineError, match=r"training\.jsonl"):
        train("eagle3", lesson, tmp_path / "fourth", NOTHING, vocab=None, begin=first)
    assert not (tmp_path / "fourth").exists(), "it is said before the training"
    with pytest.raises(PacelineError, match=r"--vocab is 60, and the head in .*first drafts 50 tokens"):
        train("eagle3", lesson, tmp_path / "other", NOTHING, vocab=60, begin=first)
    for option, name in (({"taps": (0, 1, 1)}, "eagle_aux_hidden_state_layer_ids"), ({"flags": PLAIN}, "norm_output")):
        # The same tensors, which would mean something else.
        student = Eagle3Loss(network(layers=3), KEEP, Eagle3Config(taps=(0, 1, 2)))
        save_drafter(tmp_path / "head", "eagle3", config=student.facts(), tensors=student.saved(), target=FACTS)
        begin_with(student, tmp_path / "head")
        with pytest.raises(PacelineError, match=rf"another make: its {name} is "):
            begin_with(
                Eagle3Loss(network(layers=3), KEEP, Eagle3Config(**{"taps": (0, 1, 2), **option})), tmp_path / "head"
            )


@pytest.mark.parametrize(("before", "total"), [
    ({"spent": {"step": 1, "tokens": 100, "minutes": 0.5}}, {"step": 4, "tokens": 130, "minutes": 2.0}),
    ({}, {"step": 3, "tokens": 30, "minutes": 1.5}), ({"spent": [1]}, {"step": 3, "tokens": 30, "minutes": 1.5}),
    ({"spent": {"tokens": "many", "step": 1}}, {"step": 4, "tokens": 30, "minutes": 1.5}),
])  # fmt: skip
def test_a_recipe_of_another_program_does_not_fail_the_end_of_a_training(before, total):
    assert total_spent({"step": 3, "tokens": 30, "minutes": 1.5}, before) == total


def test_an_mlp_of_another_width(lesson, tmp_path):
    train("eagle3", lesson, tmp_path / "head", NOTHING, mlp=24)
    config, tensors = open_drafter(tmp_path / "head", "eagle3", None)
    assert config["transformer_layer_config"]["intermediate_size"] == 24
    assert tensors["layers.0.mlp.gate_proj.weight"].shape[0] == 24
    assert rounds(lesson[0], f"eagle3:{tmp_path / 'head'}") > 0


def test_the_vocabulary_is_what_the_target_wrote():
    ids = np.array([[1, 2, 3, 3], [3, 2, 2, 9]])
    labels = np.array([[2, 3, 3, IGNORE], [2, 2, 9, IGNORE]])
    counts = counts_of({"a": (ids[:1], labels[:1]), "b": (ids[1:], labels[1:])}, 10)
    assert counts.tolist() == [0, 0, 3, 2, 0, 0, 0, 0, 0, 1]


def test_taps_are_layers_of_the_target(lesson):
    for taps in ((2, 3, 4), (1, 0), ()):
        with pytest.raises(PacelineError, match=r"has 3 layers: ascending numbers of 0 to 2, such as 0,1,2$"):
            Eagle3Config(taps=taps).check(lesson[0])
