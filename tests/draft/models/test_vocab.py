"""VocabTrim: which tokens are kept, what a trimmed head computes, and that the output stays the target's."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import models, native
from tests.fakes import TableTarget

from paceline.core.segment import Segment
from paceline.errors import MethodError, ModelError
from paceline.formats.heads.vocab import (
    FILE,
    Vocabulary,
    kept_rows,
    kept_tokens,
    most_frequent,
    read_vocabulary,
    vocab_size,
)
from paceline.formats.tokenizer import Tokenizer
from paceline.kernels.linear import Linear
from paceline.target.hf import HFTarget
from paceline.target.load import load
from paceline.train.saving import must_keep, save_vocabulary

COUNTS = torch.tensor([5, 0, 9, 9, 1, 0, 7, 2])


# Which tokens -----------------------------------------------------------------------------------------------------


def test_the_most_frequent_tokens_are_kept_in_the_order_of_their_ids():
    assert most_frequent(COUNTS, 3).tolist() == [2, 3, 6]
    assert most_frequent(COUNTS, 1).tolist() == [2]  # of equal counts the lower id
    assert most_frequent(COUNTS, 7).tolist() == [0, 1, 2, 3, 4, 6, 7]
    assert most_frequent(COUNTS, 8).tolist() == list(range(8))


def test_what_must_be_kept_takes_at_most_half_of_the_places():
    must = [torch.tensor([5]), torch.tensor([1, 4])]
    assert most_frequent(COUNTS, 1, must).tolist() == [2]
    assert most_frequent(COUNTS, 2, must).tolist() == [2, 5]
    assert most_frequent(COUNTS, 5, must).tolist() == [0, 2, 3, 5, 6]
    assert most_frequent(COUNTS, 6, must).tolist() == [1, 2, 3, 4, 5, 6]


def test_what_must_be_kept_is_found_by_asking_the_tokenizer():
    tokenizer = Tokenizer(models.tokenizer())
    known = tokenizer.inner.get_vocab()
    ends, marks, bytes_ = must_keep(tokenizer, [known["</s>"], models.VOCAB_SIZE - 1])  # the last one is padding
    assert ends.tolist() == [known["</s>"]]
    for token in ("<|user|>", "<|assistant|>", "<s>", "0", "9", "Ġ", "Ċ", "ĉ"):
        assert known[token] in marks.tolist()
    assert known["a"] in bytes_.tolist()
    together = torch.cat([ends, marks, bytes_]).tolist()
    assert len(set(together)) == len(together)
    assert vocab_size(tokenizer) == 288
    assert known["Ġcat"] not in together


def test_byte_tokens_of_sentencepiece_are_kept():
    class Pieces:
        eos_token_id, added_tokens_decoder = 1, {}

        def get_vocab(self):
            return {"<unk>": 0, "</s>": 1, "<0x0A>": 2, "<0xFF>": 3, "▁": 4, "▁▁": 5, "▁7": 6, "▁seven": 7, "77": 8}

    ends, marks, bytes_ = must_keep(Tokenizer(Pieces()), [1])
    assert (ends.tolist(), marks.tolist(), bytes_.tolist()) == ([1], [4, 5, 6], [2, 3])


# Files ------------------------------------------------------------------------------------------------------------


def test_a_vocabulary_comes_back_from_its_file(tmp_path):
    made = Vocabulary(most_frequent(COUNTS, 3), COUNTS, [torch.tensor([5]), torch.tensor([1])], "abcd", {"texts": 3})
    save_vocabulary(tmp_path / "new" / FILE, made)
    found = read_vocabulary(tmp_path / "new" / FILE)
    assert found.keep.tolist() == [2, 3, 6]
    assert torch.equal(found.counts, COUNTS)
    assert [group.tolist() for group in found.must] == [[5], [1]]
    assert (found.tokenizer, found.facts, found.hash) == ("abcd", {"texts": 3}, made.hash)
    assert found.best(2).tolist() == [2, 5]
    assert [p.name for p in (tmp_path / "new" / FILE).parent.iterdir()] == [Path(FILE).name]
    assert not list((tmp_path / "new").glob("*.safetensors")), "servers would load it as weights"


def test_two_maps_of_equal_size_are_told_apart(tmp_path):
    one, other = Vocabulary(torch.tensor([1, 2])), Vocabulary(torch.tensor([1, 3]))
    assert one.hash != other.hash
    save_vocabulary(tmp_path / FILE, one)
    tensors = load_file(tmp_path / FILE)
    header = {"paceline": f'{{"hash": "{one.hash}"}}'}
    save_file(tensors | {"keep": other.keep}, tmp_path / FILE, metadata=header)
    with pytest.raises(MethodError, match="not those its hash was made of"):
        read_vocabulary(tmp_path / FILE)


def test_offsets_and_ids_are_the_same_map(tmp_path):
    keep = torch.tensor([0, 3, 4, 7])
    offsets = keep - torch.arange(4)
    members = torch.zeros(8, dtype=torch.bool)
    members[keep] = True
    save_file({"d2t": offsets, "t2d": members, "fc.weight": torch.zeros(2, 2)}, tmp_path / "head.safetensors")
    found = read_vocabulary(tmp_path / "head.safetensors")
    assert torch.equal(found.keep, keep)
    assert found.hash == Vocabulary(keep).hash
    save_file({"d2t": torch.zeros(4, dtype=torch.int64)}, tmp_path / "fresh.safetensors")
    assert read_vocabulary(tmp_path / "fresh.safetensors").keep.tolist() == [0, 1, 2, 3]
    save_file({"d2t": offsets, "t2d": ~members}, tmp_path / "wrong.safetensors")
    with pytest.raises(MethodError, match="d2t and t2d disagree"):
        read_vocabulary(tmp_path / "wrong.safetensors")


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"keep": torch.tensor([], dtype=torch.int64)}, "is empty"),
        ({"keep": torch.tensor([3, 2])}, "not sorted"),
        ({"keep": torch.tensor([2, 2])}, "not sorted"),
        ({"keep": torch.tensor([-1, 2])}, "not sorted"),
        ({"keep": torch.tensor([1, 9]), "counts": COUNTS}, "has token 9; the tokens are 0 to 7"),
        ({"d2t": torch.tensor([0, -2])}, "not sorted"),
        ({"weight": torch.zeros(2)}, "neither keep .* nor d2t"),
    ],
)
def test_a_file_that_is_no_map_is_refused(tmp_path, tensors, says):
    save_file(tensors, tmp_path / "v.safetensors")
    with pytest.raises(MethodError, match=says) as caught:
        read_vocabulary(tmp_path / "v.safetensors")
    assert str(tmp_path / "v.safetensors") in str(caught.value)


def test_a_file_that_is_missing_or_cut_off_is_refused(tmp_path):
    with pytest.raises(MethodError, match="there is no vocabulary file"):
        read_vocabulary(tmp_path / "none.safetensors")
    save_vocabulary(tmp_path / FILE, Vocabulary(torch.arange(100)))
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:200])
    with pytest.raises(MethodError, match="cannot be read as a vocabulary"):
        read_vocabulary(tmp_path / FILE)


def test_the_option_is_a_number_or_a_file(tmp_path):
    target = TableTarget(vocab_size=8)
    with pytest.raises(MethodError, match=r"vocab=3 needs counts .* there is no .*vocab.safetensors: make it with"):
        kept_tokens("3", tmp_path, target)
    save_vocabulary(tmp_path / FILE, Vocabulary(most_frequent(COUNTS, 4), COUNTS))
    assert kept_tokens("3", tmp_path, target).tolist() == [2, 3, 6]
    assert kept_tokens(str(tmp_path / FILE), "elsewhere", target).tolist() == [0, 2, 3, 6]
    with pytest.raises(MethodError, match="of 9 tokens is asked for; the tokenizer has 8"):
        kept_tokens("9", tmp_path, target)
    with pytest.raises(MethodError, match="of 0 tokens is asked for"):
        kept_tokens("0", tmp_path, target)
    save_vocabulary(tmp_path / "map.safetensors", Vocabulary(torch.tensor([1, 9])))
    with pytest.raises(MethodError, match=r"map.safetensors: .* has token 9; the tokens are 0 to 7"):
        kept_tokens(str(tmp_path / "map.safetensors"), "elsewhere", target)
    target.tokenizer = SimpleNamespace(fingerprint="here")
    save_vocabulary(tmp_path / FILE, Vocabulary(torch.tensor([1, 9]), tokenizer="0123"))
    with pytest.raises(MethodError, match="of another tokenizer"):
        kept_tokens(str(tmp_path / FILE), "elsewhere", target)
    save_vocabulary(tmp_path / FILE, Vocabulary(torch.tensor([1, 9])))
    with pytest.raises(MethodError, match="a map of 2 tokens without counts"):
        kept_tokens("1", tmp_path, target)


# Heads ------------------------------------------------------------------------------------------------------------


def test_of_a_head_with_tokens_of_its_own_the_rows_of_those_that_are_kept_stay(tmp_path):
    save_vocabulary(tmp_path / "map.safetensors", Vocabulary(torch.tensor([5, 9, 11])))
    target = SimpleNamespace(vocab_size=12, device="cpu", tokenizer=None)
    rows, tokens = kept_rows(torch.tensor([2, 5, 9]), str(tmp_path / "map.safetensors"), tmp_path, target)
    assert (rows.tolist(), tokens.tolist()) == ([1, 2], [5, 9])


@pytest.mark.parametrize("family", ["llama2", "qwen2-tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_trimmed_head_are_those_of_the_full_one(family, dtype):
    full, trimmed = (native.of(models.model(family), dtype) for _ in range(2))
    keep = torch.tensor([0, 1, 5, 17, 200, 319])
    trimmed.trim_head(keep)
    hidden = torch.randn(7, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    small = trimmed.head.dense()
    whole = full.head.dense()
    assert torch.equal(small, whole[keep])
    assert small.is_contiguous()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-1}[dtype]
    torch.testing.assert_close(trimmed.logits(hidden), full.logits(hidden)[:, keep], rtol=0, atol=tolerance)
    saved = (full.vocab_size - len(keep)) * full.hidden_size * dtype.itemsize
    assert full.weight_bytes - trimmed.weight_bytes == saved
    assert torch.equal(trimmed.embedding, full.embedding)


def test_a_head_with_a_bias_keeps_its_entries():
    head = Linear(torch.randn(6, 4), torch.randn(6))
    ids, x = torch.tensor([1, 4]), torch.randn(3, 4)
    torch.testing.assert_close(head.rows(ids)(x), head(x)[:, ids])


@pytest.mark.parametrize("family", ["gpt2", "gptj"])  # a tied head, one with a bias
def test_heads_of_transformers_are_trimmed_too(family, tmp_path):
    draft = models.make(family, tmp_path / "draft")
    save_vocabulary(draft / FILE, Vocabulary(torch.arange(4), torch.arange(models.VOCAB_SIZE)))
    full, trimmed = (load(draft, dtype="float32") for _ in range(2))
    assert isinstance(trimmed, HFTarget)
    keep = kept_tokens("40", draft, TableTarget(models.VOCAB_SIZE))
    trimmed.trim_head(keep)
    logits = []
    for model in (full, trimmed):
        segment = Segment.chunk(model.add_row(8), np.array([5, 300, 7, 30]), last=True)
        logits.append(model.verify([segment]).logits)
    torch.testing.assert_close(logits[1], logits[0][:, keep])
    bias = 4 if family == "gptj" else 0
    assert full.weight_bytes - trimmed.weight_bytes == (models.VOCAB_SIZE - 40) * (64 * 4 + bias)
    with pytest.raises(ModelError, match="has no output head that could be trimmed"):
        TableTarget(models.VOCAB_SIZE).trim_head(keep)
