"""The recipe: rows, masks, mixtures, and that a run cut in the middle ends where an unbroken one does."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from paceline.errors import PacelineError
from paceline.train.lm import (
    DataConfig,
    Mixture,
    ModelConfig,
    chat,
    lay_end_to_end,
    pack_whole,
    pretrain,
    render,
)
from paceline.train.loop import LoopConfig, Progress, learning_rate, share_done
from paceline.train.loss import IGNORE
from paceline.train.sources import Document, Source, assistant, user
from paceline.train.tokenizer import train_tokenizer

STORY = "The cat sat on the mat. The dog sat by the door. The bird sang in the tree. "
TALK = (user("Where is the cat?"), assistant("On the mat."), user("And the dog?"), assistant("By the door."))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer([STORY] * 20, vocabulary=320)


def test_render_is_the_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    documents = [
        Document("a", messages=TALK),
        Document("a", messages=(user("  1. Sum:\n\n2 + 2  "), assistant("\n= 4\n\n"))),
        Document("a", messages=({"role": "system", "content": "Be brief."}, user("Hi"), assistant("..."))),
    ]
    for document, (ids, learn) in zip(documents, render(tokenizer, documents), strict=True):
        out = tokenizer.apply_chat_template(
            list(document.messages), return_dict=True, return_assistant_tokens_mask=True
        )
        assert ids == out["input_ids"]
        assert learn == [bool(wanted) for wanted in out["assistant_masks"]]


def test_labels_cover_just_what_the_assistant_says(tokenizer: PreTrainedTokenizerFast) -> None:
    rendered = render(tokenizer, [Document("a", messages=TALK)] * 3)
    ids, labels = pack_whole(rendered, length=2 * len(rendered[0][0]), pad=0)
    assert ids.shape[0] == 2  # two whole conversations in the first row, one in the second
    learnt = labels[0][labels[0] != IGNORE]
    assert tokenizer.decode(learnt) == "On the mat.<|end|>By the door.<|end|>" * 2
    where = np.flatnonzero(labels[0][:-1] != IGNORE)
    same = where[ids[0][where + 1] == labels[0][where]]
    assert len(same) == len(where)  # a label is the next input


def test_a_conversation_without_room_for_an_answer_is_left_out(tokenizer: PreTrainedTokenizerFast) -> None:
    ids, _ = pack_whole(render(tokenizer, [Document("a", messages=(user(STORY * 9), assistant("x")))]), 16, 0)
    assert len(ids) == 0


def test_end_to_end_labels_are_the_next_token() -> None:
    ids, labels = lay_end_to_end([(list(range(10)), [True] * 10), ([7, 8, 9], [True] * 3)], 4)
    assert ids.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 7, 8]]
    assert labels.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 7, 8, 9]]


def test_chat_rows_hold_answers_by_kind_and_the_text_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    from paceline.train.lm import chat_rows

    fields = {"instruction": "Where?", "response": "On the mat."}
    read = Document("a", messages=(user("Where?"), assistant("On the mat.")), context=STORY, fields=fields)
    documents = [Document("a", messages=TALK)] * 3 + [read] * 3 + [Document("a", text=STORY)] * 60
    build = chat_rows(tokenizer, DataConfig(length=96, rows=2, weights={}, decay_weights={}))
    rows = build("a", documents)
    assert set(rows) == {"a", "reading", "text/a"}
    answers = [labels[labels != IGNORE] for _, labels in (rows["a"], rows["reading"])]
    assert set(tokenizer.decode(answers[0]).split("<|end|>")) == {"On the mat.", "By the door.", ""}
    assert set(tokenizer.decode(answers[1]).split("<|end|>")) == {"On the mat.", ""}
    ids, labels = rows["text/a"]
    assert (labels != IGNORE).all()
    whole = tokenizer.decode(ids.ravel())
    assert all(part in whole for part in ("The bird sang", "Where is the cat?", "<|endoftext|>"))


def mixture(seed: int = 0) -> Mixture:
    rows = {n: (np.full((c, 2), v), np.full((c, 2), v)) for n, c, v in (("a", 5, 1), ("b", 3, 2), ("c", 4, 3))}
    config = DataConfig(
        length=2, rows=8, weights={"a": 3, "b": 1}, decay_weights={"b": 1}, other=0.0, decay_from=0.5, seed=seed
    )
    return Mixture(rows, config)


def test_text_nobody_named_weighs_a_quarter() -> None:
    rows = {n: (np.full((9, 2), v), np.full((9, 2), v)) for n, v in (("a", 1), ("text/a", 2))}
    mix = Mixture(rows, DataConfig(length=2, rows=100, weights={}, decay_weights={}))
    drawn = torch.cat([mix.next(0.0)["input_ids"] for _ in range(50)])[:, 0]
    assert (drawn == 2).float().mean().item() == pytest.approx(0.2, abs=0.03)


def test_mixture_follows_its_weights_and_resumes() -> None:
    one = mixture()
    early = torch.cat([one.next(0.1)["input_ids"] for _ in range(100)])[:, 0]
    assert 0.68 < (early == 1).float().mean() < 0.82
    assert not (early == 3).any()
    assert (one.next(0.9)["input_ids"] == 2).all()
    two = mixture()
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert torch.equal(one.next(0.1)["input_ids"], two.next(0.1)["input_ids"])


def test_schedule() -> None:
    config = LoopConfig(tokens=1000, peak_lr=1.0, warmup_steps=10, decay=0.2, final_lr=0.1)
    assert learning_rate(config, 0, 0.0) == pytest.approx(0.1)
    assert learning_rate(config, 9, 0.1) == learning_rate(config, 500, 0.8) == 1.0
    assert learning_rate(config, 500, 0.9) == pytest.approx(0.55)
    assert learning_rate(config, 500, 1.0) == pytest.approx(0.1)
    assert share_done(config, Progress(tokens=250)) == 0.25
    clock = LoopConfig(minutes=2)
    assert share_done(clock, Progress(seconds=60)) == 0.5
    assert share_done(clock, Progress(seconds=600)) == 1.0  # paused past its slot: over
    with pytest.raises(PacelineError, match="tokens or as minutes"):
        LoopConfig()


TINY = ModelConfig(hidden=16, layers=2, heads=2, kv_heads=1, intermediate=32, positions=64)
ROWS = DataConfig(
    length=16, rows=2, weights={"story": 1}, decay_weights={"story": 1}, generated=0, held_out=0.2, validation_rows=2
)


def story(folder: Path) -> list[Source]:
    path = folder / "story.jsonl"
    with path.open("w") as file:
        for i in range(40):
            file.write(json.dumps({"text": f"{i}: {STORY}"}) + "\n")
            file.write(json.dumps({"question": f"Where is cat {i}?", "answer": f"On mat {i}."}) + "\n")
    return [Source("story", path)]


def tiny_run(tokenizer: PreTrainedTokenizerFast, folder: Path, name: str, tokens: int = 320) -> bool:
    loop = LoopConfig(tokens=tokens, mixed_precision="no", warmup_steps=2, log_every=2)
    out, run = folder / name, folder / f"{name}-run"
    return pretrain(story(folder), tokenizer, out, run, loop, ROWS, TINY, compiled=False)


def test_a_resumed_run_equals_an_unbroken_one(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.train import lm, loop

    assert tiny_run(tokenizer, tmp_path, "whole")
    real = loop.train
    monkeypatch.setattr(lm, "train", lambda *args: real(*args, stop_after=4))
    assert not tiny_run(tokenizer, tmp_path, "broken")
    assert not (tmp_path / "broken").exists()
    monkeypatch.setattr(lm, "train", real)
    assert tiny_run(tokenizer, tmp_path, "broken")
    whole, broken = (load_file(tmp_path / n / "model.safetensors") for n in ("whole", "broken"))
    assert whole.keys() == broken.keys()
    assert all(torch.equal(whole[key], broken[key]) for key in whole)

    def losses(name: str) -> list[float]:
        rows = map(json.loads, (tmp_path / name / "training-pretrain.jsonl").read_text().splitlines())
        return [row["loss"] for row in rows if "loss" in row]

    assert losses("whole") == losses("broken")


def test_a_kill_while_saving_leaves_the_old_checkpoint(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.train import lm, loop

    real = loop.train
    monkeypatch.setattr(lm, "train", lambda *args: real(*args, stop_after=4))
    assert not tiny_run(tokenizer, tmp_path, "run")
    checkpoint = tmp_path / "run-run" / "checkpoint.safetensors"
    before = checkpoint.read_bytes()

    def torn(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half a file")
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "save_file", torn)
    monkeypatch.setattr(lm, "train", lambda *args: real(*args, stop_after=6))
    with pytest.raises(KeyboardInterrupt):
        tiny_run(tokenizer, tmp_path, "run")
    assert checkpoint.read_bytes() == before
    monkeypatch.undo()
    assert tiny_run(tokenizer, tmp_path, "run")


def test_a_signal_saves_and_stops(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    import os
    import signal

    from paceline.train.loop import train

    class Source:
        def next(self, progress: float) -> dict[str, torch.Tensor]:
            return {"input_ids": torch.ones(1, 2)}

        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    class Square(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2, 2))

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return (input_ids @ self.weight).square().sum()

    def at_step_three(progress: Progress, loss: float) -> None:
        if progress.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    handler = signal.getsignal(signal.SIGTERM)
    config = LoopConfig(minutes=10, mixed_precision="no")
    assert not train(Square(), Source(), config, tmp_path, on_step=at_step_three)
    assert (tmp_path / "checkpoint.safetensors").exists()
    assert signal.getsignal(signal.SIGTERM) == handler


def test_another_models_checkpoint_is_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    assert tiny_run(tokenizer, tmp_path, "one", tokens=32)
    loop = LoopConfig(tokens=64, mixed_precision="no")
    other = ModelConfig(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=32, positions=64)
    with pytest.raises(PacelineError, match="checkpoint of another model"):
        pretrain(story(tmp_path), tokenizer, tmp_path / "x", tmp_path / "one-run", loop, ROWS, other, compiled=False)


def test_both_stages_end_in_a_model_transformers_loads(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    assert tiny_run(tokenizer, tmp_path, "base", tokens=64)
    loop = LoopConfig(tokens=64, warmup_steps=1, mixed_precision="no")
    rows = DataConfig(length=32, rows=2, weights={}, decay_weights={}, generated=20, held_out=0.2, validation_rows=2)
    run, out = tmp_path / "chat-run", tmp_path / "chat"
    assert chat(story(tmp_path), tokenizer, tmp_path / "base", out, run, loop, rows, compiled=False)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id, tokenizer.bos_token_id]
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert {f.name for f in out.glob("training-*")} == {
        f"training-{stage}.{kind}" for stage in ("pretrain", "chat") for kind in ("json", "jsonl")
    }


def test_muon_has_the_matrices_inside_and_adamw_the_rest() -> None:
    from paceline.train.loop import make_optimisers

    module = torch.nn.ModuleDict(
        {"embed_tokens": torch.nn.Embedding(5, 4), "proj": torch.nn.Linear(4, 4), "norm": torch.nn.LayerNorm(4)}
    )
    muon, adamw = make_optimisers(module, LoopConfig(tokens=1))
    assert [p.shape for g in muon.param_groups for p in g["params"]] == [(4, 4)]
    decays = [(g["weight_decay"], len(g["params"])) for g in adamw.param_groups]
    assert decays == [(0.1, 1), (0.0, 3)]
    (alone,) = make_optimisers(module, LoopConfig(tokens=1, optimiser="adamw"))
    assert sum(len(g["params"]) for g in alone.param_groups) == 5
    with pytest.raises(PacelineError, match="no optimiser 'sgd'"):
        LoopConfig(tokens=1, optimiser="sgd")


def test_rows_are_cut_short_until_the_decay() -> None:
    config = DataConfig(length=8, rows=2, weights={"a": 1}, decay_weights={"a": 1}, short=4, decay_from=0.5)
    ids = np.arange(80).reshape(10, 8)
    mixture = Mixture({"a": (ids, ids + 1)}, config)
    early, late = mixture.next(0.0), mixture.next(0.6)
    assert (early["input_ids"].shape, late["input_ids"].shape) == ((4, 4), (2, 8))
    assert torch.equal(early["labels"], early["input_ids"] + 1)
