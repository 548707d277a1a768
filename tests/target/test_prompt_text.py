"""A prompt's text before it is made into tokens: what is no text, and what is too long by its bytes alone."""

from pathlib import Path
from typing import Any

import pytest
from tests import models
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from paceline.errors import PromptError
from paceline.target.load import load_tokenizer
from paceline.target.tokenizer import fewest_tokens, longest_token

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(*more: str, **changes: Any) -> Tokenizer:
    """A byte-level tokenizer with tokens for runs of one character."""
    vocab = {token: i for i, token in enumerate([*ALPHABET, "aa", "aaaa", "aaaaaaaa"])}
    made = Tokenizer(BPE(vocab, [("a", "a"), ("aa", "aa"), ("aaaa", "aaaa")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    for name, value in changes.items():
        setattr(made, name, value)
    made.add_special_tokens(list(more))
    return made


TEXTS = ["a" * 64, "a" * 65, "ü" * 9, "<end>" * 7, "A\u030a" * 20, "\u212a" * 20, "a\n a  a\u3000", "\U0001f600", ""]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC(), normalizers.Replace("aaaa", "b")])
def test_no_text_has_fewer(text: str, normalizer: Any) -> None:
    made = byte_level("<end>", **({} if normalizer is None else {"normalizer": normalizer}))
    longest = longest_token(made)
    assert longest == 8
    assert fewest_tokens(made, text, longest) <= len(made.encode(text).ids)


def test_a_text_of_the_longest_tokens_has_no_more() -> None:
    made = byte_level()
    assert fewest_tokens(made, "a" * 64, 8) == len(made.encode("a" * 64).ids) == 8


def test_an_added_token_may_be_the_longest() -> None:
    assert longest_token(byte_level("<a very long end>")) == 17


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": normalizers.Strip()},
        {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.NFKC()])},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {"pre_tokenizer": pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex("b"), "removed"), pre_tokenizers.ByteLevel()]
        )},
    ],
    ids=str,
)  # fmt: skip
def test_where_text_may_be_left_out_nothing_is_known(changes: dict[str, Any]) -> None:
    assert longest_token(byte_level(**changes)) == 0


def test_where_a_token_may_take_more_along_nothing_is_known() -> None:
    made = byte_level()
    made.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    assert len(made.encode(" " * 1000 + "<mask>").ids) == 1
    assert longest_token(made) == 0
    unknown = Tokenizer(BPE({"a": 0, "?": 1}, [], unk_token="?", fuse_unk=True))
    assert len(unknown.encode("b" * 1000).ids) == 1
    assert longest_token(unknown) == 0


def test_ten_megabytes_are_refused_without_being_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models.make("qwen2", tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert longest_token(tokenizer.inner.backend_tokenizer) > 0
    monkeypatch.setattr(tokenizer.inner, "encode", None)
    for prompt in ("word " * 2_000_000, [{"role": "user", "content": "word " * 2_000_000}]):
        with pytest.raises(PromptError, match=r"at least \d+ tokens, and this model's context holds 128"):
            tokenizer.refuse_long(prompt, 128)
    tokenizer.refuse_long("word " * 10, 128)


def test_half_a_surrogate_pair(tmp_path: Path) -> None:
    models.make("llama2", tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for attempt in (
        lambda: tokenizer.encode("ab\udcff"),
        lambda: tokenizer.encode_text("ab\udcff"),
        lambda: tokenizer.encode_chat([{"role": "user", "content": "ab\udcff"}]),
    ):
        with pytest.raises(PromptError, match=r"at character 2 stands \\udcff"):
            attempt()


def test_a_template_that_divides_by_zero(tmp_path: Path) -> None:
    models.make("llama2", tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.inner.chat_template = "{{ 1 / 0 }}"
    with pytest.raises(PromptError, match="refuses these messages: ZeroDivisionError: division by zero"):
        tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
