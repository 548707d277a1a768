"""Kangaroo's adapter is trained by itself, on what the target says, aligned; and then it drafts better than nothing."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.core.sampling import SamplingParams
from paceline.core.segment import Segment
from paceline.draft.methods.kangaroo import Adapter
from paceline.engine.engine import Engine
from paceline.formats.heads.checkpoint import TargetFacts, open_drafter
from paceline.target.load import load
from paceline.train.kangaroo import AdapterModule, KangarooConfig, KangarooLoss
from paceline.train.loop import LoopConfig
from paceline.train.loss import IGNORE
from paceline.train.measure import measure
from paceline.train.saving import save_drafter
from paceline.train.trainer import Training, train_head
from tests import models, native

EXIT = 1


def network(seed=0, family="llama2"):
    return models.model(family, seed, tie_word_embeddings=False)


@pytest.mark.parametrize("family", ["llama1", "llama2", "llama3", "qwen3", "mistral"])
def test_what_is_trained_is_what_drafts(family):
    """The module over whole texts and the adapter behind a cache say the same, for early states of either decoder."""
    model = network(family=family)
    module = KangarooLoss(model, KangarooConfig(exit=EXIT))
    models.randomize(module.adapter)
    target = native.of(model)
    adapter = Adapter(dict(module.adapter.named_parameters()), target)
    text = np.random.default_rng(0).integers(4, models.VOCAB_SIZE, 20)
    early, last = module.states(torch.from_numpy(text)[None])
    slot, mine = target.add_row(20), adapter.cache.add_row(20)
    states = target.run_layers([Segment.chunk(slot, text, last=False)], EXIT)
    torch.testing.assert_close(states, early[0], atol=1e-4, rtol=1e-4)
    measured = []
    for begin, end in ((0, 7), (7, 8), (8, 20)):
        part = Segment(mine, text[begin:end], np.arange(-1, end - begin - 1), num_logits=end - begin)
        measured.append(adapter(states[begin:end], [part]))
        adapter.cache.commit(mine, range(end - begin))
    torch.testing.assert_close(torch.cat(measured), module.drafted(early)[0].detach(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(target.head(last[0]), model(torch.from_numpy(text)[None]).logits[0].detach())


def test_positions_are_aligned_and_only_the_targets_own_tokens_count():
    """The loss of one labelled position is that of p and q behind the token before it, and nothing else moves it."""
    model = network()
    module = KangarooLoss(model, KangarooConfig(exit=EXIT))
    ids = torch.randint(4, models.VOCAB_SIZE, (1, 9))
    labels = torch.full_like(ids, IGNORE)
    labels[0, 4] = ids[0, 5]
    p = model(ids).logits[0, 4].softmax(-1)
    q = model.lm_head(module.drafted(module.states(ids)[0]))[0, 4].log_softmax(-1)
    torch.testing.assert_close(module(ids, labels).detach(), -(p * q).sum().detach(), atol=1e-5, rtol=1e-5)
    later = ids.clone()
    later[0, 5:] = 7  # not seen from position 4
    torch.testing.assert_close(module(later, labels), module(ids, labels))
    earlier = ids.clone()
    earlier[0, 0] = 7  # the first token is seen
    assert abs(module(earlier, labels).item() - module(ids, labels).item()) > 1e-4
    assert module(ids, torch.full_like(ids, IGNORE)).item() == 0


LOOP = LoopConfig(tokens=24 * 16 * 60, optimiser="adamw", peak_lr=1e-2, warmup_steps=10, mixed_precision="no")
CONFIG = KangarooConfig(exit=EXIT, length=24, rows=16)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A target whose last layer is attention that matters, texts, and the adapter that learnt from them in a few
    seconds. With soft labels any text will do."""
    root = tmp_path_factory.mktemp("kangaroo")
    model = models.model("llama2", num_hidden_layers=2, tie_word_embeddings=False)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.zero_()
        model.model.layers[1].self_attn.o_proj.weight *= 2
    model.save_pretrained(root / "target")
    models.tokenizer().save_pretrained(root / "target")
    texts = np.random.default_rng(0).integers(4, 288, (400, 24)).tolist()
    rows = [{"source": "own", "prompt_tokens": text[:4], "tokens": text[4:]} for text in texts]
    answers = root / "answers.jsonl"
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert train_head(Training(root / "target", answers, root / "adapter", root / "run", LOOP), CONFIG)
    return root / "target", answers, root / "adapter"


def test_a_trained_adapter_beats_none(trained):
    folder, _, out = trained
    target = load(folder, device="cpu")
    config, _ = open_drafter(out, "kangaroo", target)
    assert config["exit_layer"] == EXIT
    [after, *_], [before, *_] = config["held_out"]["all"], config["untrained"]["all"]
    assert after["positions"] == 20 * 19
    assert after["entropy"] < after["soft_ce"] < before["soft_ce"] - 0.3
    assert after["overlap"] > before["overlap"] + 0.05
    assert config["accepted_length"] > 1 + after["sampled"] == 1 + after["overlap"]
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors", "training.jsonl"]


def test_it_drafts_better_than_none_at_the_same_lengths(trained, tmp_path):
    folder, _, out = trained
    target = load(folder, device="cpu")
    baseline = AdapterModule(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)).state_dict()
    facts = TargetFacts.of(target)
    save_drafter(tmp_path / "none", "kangaroo", config={"exit_layer": EXIT}, tensors=baseline, target=facts)
    prompts = np.random.default_rng(5).integers(4, 288, (24, 4)).tolist()
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=1, ignore_eos=True)

    def rounds(path):
        done = Engine(target, f"kangaroo:{path},stop=fixed,draft=2").generate(prompts, params)
        return sum(one.rounds for one in done)

    assert rounds(out) < 0.95 * rounds(tmp_path / "none")


def test_held_out_figures_are_those_of_the_distributions(trained):
    folder, _, _ = trained
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = np.random.default_rng(2).integers(4, 288, (5, 6))
    labels = ids.copy()
    labels[:, :3] = IGNORE
    student = KangarooLoss(model, KangarooConfig(exit=EXIT))  # which begins as the target's own norm and head
    measured = measure(student, {"a": (ids[:3], labels[:3]), "b": (ids[3:], labels[3:])})
    assert [measured[name][0].row["positions"] for name in ("a", "b", "all")] == [6, 4, 10]
    with torch.no_grad():
        out = model(torch.from_numpy(ids), output_hidden_states=True)
        p = out.logits[:, 4:].softmax(-1)
        q = model.lm_head(model.model.norm(out.hidden_states[EXIT]))[:, 4:].softmax(-1)
    row, text = measured["all"][0].row, torch.from_numpy(ids)[:, 4:, None]
    assert row == pytest.approx({
        "positions": 10, "reached": 10, "entropy": float(-(p * p.log()).sum(-1).mean()),
        "soft_ce": float(-(p * q.log()).sum(-1).mean()), "loss": float(-q.log().gather(-1, text).mean()),
        "overlap": float(torch.minimum(p, q).sum(-1).mean()),
        "top1": float((p.argmax(-1) == q.argmax(-1)).float().mean()),
        "sampled": float(torch.minimum(p, q).sum(-1).mean()),
        "accepted": float((p.argmax(-1) == q.argmax(-1)).float().mean()),
        "top5": float((q.topk(5).indices == p.argmax(-1)[..., None]).any(-1).float().mean()),
    }, abs=2e-4)  # fmt: skip


def test_the_default_exit_is_near_the_papers_best():
    exits = [KangarooConfig().exit_of(layers) for layers in (1, 4, 8, 16, 32)]
    assert exits == [0, 1, 1, 2, 4]
