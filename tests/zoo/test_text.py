"""Text to rows: the chat template, labels, and packing."""

import numpy as np
import pytest
import torch

from paceline.train.data import Document, assistant, pack_whole, user
from paceline.train.loss import IGNORE
from zoo.text import DataConfig, StageMixture, chat_rows, held_out, lay_end_to_end, render, split
from zoo.tokenizer import train_tokenizer

STORY = "The cat sat on the mat. The dog sat by the door. The bird sang in the tree. "
TALK = (user("Where is the cat?"), assistant("On the mat."), user("And the dog?"), assistant("By the door."))


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([STORY] * 20, vocabulary=320)


def test_render_is_the_chat_template(tokenizer):
    documents = [
        Document("a", messages=TALK),
        Document("a", messages=(user("  1. Sum:\n\n2 + 2  "), assistant("\n= 4\n\n"))),
        Document("a", messages=({"role": "system", "content": "Be brief."}, user("Hi"), assistant("..."))),
    ]
    for document, (ids, learn) in zip(documents, render(tokenizer, documents), strict=True):
        out = tokenizer.apply_chat_template(
            list(document.messages), return_dict=True, return_assistant_tokens_mask=True
        )
        assert (ids, learn) == (out["input_ids"], [bool(wanted) for wanted in out["assistant_masks"]])


def test_labels_cover_just_what_the_assistant_says(tokenizer):
    rendered = render(tokenizer, [Document("a", messages=TALK)] * 3)
    ids, labels = pack_whole(rendered, length=2 * len(rendered[0][0]), pad=0)
    assert ids.shape[0] == 2  # two whole conversations in the first row, one in the second
    learnt = labels[0][labels[0] != IGNORE]
    assert tokenizer.decode(learnt) == "On the mat.<|end|>By the door.<|end|>" * 2
    where = np.flatnonzero(labels[0][:-1] != IGNORE)
    same = where[ids[0][where + 1] == labels[0][where]]
    assert len(same) == len(where)  # a label is the next input


def test_a_conversation_without_room_for_an_answer_is_left_out(tokenizer):
    ids, _ = pack_whole(render(tokenizer, [Document("a", messages=(user(STORY * 9), assistant("x")))]), 16, 0)
    assert len(ids) == 0


def test_chat_rows_hold_answers_by_kind_and_the_text_whole(tokenizer):
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


def test_the_split_depends_on_content_alone():
    documents = [Document("a", text=f"document number {i}") for i in range(3000)]
    train, valid = split(documents)
    assert 10 <= len(valid) <= 60  # 1 % of 3000, and luck
    assert not {d.text for d in train} & {d.text for d in valid}
    assert {d.text for d in documents[::-1] if held_out(d)} == {d.text for d in valid}


def test_end_to_end_labels_are_the_next_token():
    ids, labels = lay_end_to_end([(list(range(10)), [True] * 10), ([7, 8, 9], [True] * 3)], 4)
    assert ids.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 7, 8]]
    assert labels.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 7, 8, 9]]


def test_text_nobody_named_weighs_a_quarter():
    rows = {n: (np.full((9, 2), v), np.full((9, 2), v)) for n, v in (("a", 1), ("text/a", 2))}
    mix = StageMixture(rows, DataConfig(2, 100, {}, {}))
    drawn = torch.cat([mix.next(0.0)["input_ids"] for _ in range(50)])[:, 0]
    assert (drawn == 2).float().mean().item() == pytest.approx(0.2, abs=0.03)


def test_a_stage_decays_to_other_weights_and_whole_rows():
    rows = {n: (np.full((c, 8), v), np.full((c, 8), v)) for n, c, v in (("a", 5, 1), ("b", 3, 2), ("c", 4, 3))}
    mix = StageMixture(rows, DataConfig(8, 8, {"a": 3, "b": 1}, {"b": 1}, other=0.0, decay_from=0.5, short=4))
    early = torch.cat([mix.next(0.1)["input_ids"] for _ in range(100)])
    assert early.shape == (1600, 4)
    assert 0.68 < (early[:, 0] == 1).float().mean() < 0.82
    assert not (early == 3).any()
    late = mix.next(0.9)["input_ids"]
    assert late.shape == (8, 8)
    assert (late == 2).all()
