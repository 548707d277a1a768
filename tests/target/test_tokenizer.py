"""Tokens to text and back; above all that text handed out token by token is the text of all tokens."""

import builtins
import io
import logging
from collections.abc import Callable
from time import perf_counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import models
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers
from tokenizers import models as backends
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from paceline.errors import ModelError, PromptError
from paceline.formats.tokenizer import QUICK, SentencePiece, Tokenizer, WindowDetokenizer, fingerprint
from paceline.target.load import load_tokenizer

TEXT = "Once upon a time, a wölf 狼 met 🐺🐾;\n\n  he said: “naïve”.\t 한국어 ü"
RANDOM = settings(max_examples=150)
Ids = Callable[[st.DataObject], list[int]]


@pytest.fixture(scope="module")
def tiny():
    return Tokenizer(models.tokenizer(), "tiny")


@pytest.fixture(scope="module")
def sentencepiece(stories):
    """A leading space on every text, single bytes for what is not among its 512 pieces."""
    return load_tokenizer(stories)


@pytest.fixture(scope="module")
def gpt2(shared):
    return load_tokenizer(shared / "models" / "gpt2-tokenizer")


@pytest.fixture(scope="module", params=["tiny", "sentencepiece", "gpt2"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


def streamed(tokenizer, ids, prompt=None):
    detokenizer = tokenizer.detokenizer(prompt or [])
    return [detokenizer.push(i) for i in ids] + [detokenizer.flush()]


@RANDOM
@given(data=st.data())
def test_any_tokens_in_pieces_are_the_whole(tokenizer, data):
    # Ids behind the vocabulary too: models have rows without a token. Low ids are bytes, where characters break.
    low = st.integers(0, 270)
    ids = data.draw(st.lists(low | st.integers(0, tokenizer.vocab_size + 5), max_size=24))
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@RANDOM
@given(text=st.text(max_size=30))
def test_any_text_survives(tokenizer, text):
    ids = tokenizer.encode(text)
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if not {"<", "▁"} & set(text):  # which could spell a special token, or mean a space
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


def test_characters_come_whole(tokenizer):
    pieces = streamed(tokenizer, tokenizer.encode(TEXT))
    assert "".join(pieces) == TEXT
    assert "🐺" in "".join(pieces)
    assert len([p for p in pieces if p]) > 10, "text must come while tokens come, not at the end"


def test_text_comes_as_soon_as_it_is_certain(tiny, sentencepiece):
    a, umlaut = tiny.encode("a")[1:], tiny.encode("ü")[1:]
    assert len(umlaut) == 2
    assert streamed(tiny, [*a, *umlaut, *a]) == ["a", "", "ü", "a", ""]
    # Sentencepiece: one broken byte spoils its whole run, so a run is certain when it has ended.
    assert streamed(sentencepiece, sentencepiece.encode("a狼a")[1:])[-3:] == ["", "狼a", ""]


def test_the_answer_keeps_its_first_space(sentencepiece):
    prompt, whole = sentencepiece.encode("Once upon"), sentencepiece.encode("Once upon a time")
    answer = whole[len(prompt) :]
    assert "".join(streamed(sentencepiece, answer)) == "a time"
    assert "".join(streamed(sentencepiece, answer, prompt)) == " a time"
    bos = prompt[:1]
    assert "".join(streamed(sentencepiece, whole[1:], bos)) == "Once upon a time"


def test_special_tokens_never_show(tokenizer):
    end = tokenizer.inner.eos_token_id
    ids = tokenizer.encode("dog")
    assert "".join(streamed(tokenizer, [end, *ids, end, *ids[-1:], end])) == tokenizer.decode([*ids, *ids[-1:]])


def test_special_tokens_that_are_looked_for_show():
    made = Tokenizer(models.tokenizer())
    ids = [*made.encode("the cat"), 2, 3, *made.encode_text("and")]
    assert made.decode(ids) == "the catand"
    assert made.spelling(2) == b""
    made.show(["<|user|>", "<tool_call>"])  # the second is no token
    made.show(["<tool_call>"])
    detokenizer = made.detokenizer(ids[:1])
    assert made.decode(ids) == "the cat<|user|>and"
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == "the cat<|user|>and"


def word_pieces():
    words = ["[UNK]", "the", "dog", "##s", "sat", "un", "##like", "##ly", ".", "ü"]
    backend = Backend(backends.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"))


def metaspace():
    words = ["[UNK]", "▁the", "▁dog", "s", "▁", "sat", "狼"]
    backend = Backend(backends.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"))


@pytest.mark.parametrize("make", [word_pieces, metaspace])
@settings(max_examples=100)
@given(data=st.data())
def test_other_kinds_of_tokenizers(make, data):
    tokenizer = make()
    ids = data.draw(st.lists(st.integers(1, tokenizer.vocab_size - 1), max_size=20))
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if ids:
        assert "".join(streamed(tokenizer, ids[1:], ids[:1])) == tokenizer.decode(ids)[len(tokenizer.decode(ids[:1])) :]


def test_broken_bytes_are_not_held_back_for_ever(tiny):
    detokenizer = WindowDetokenizer(tiny.decode, set(), [])
    broken = tiny.encode("ü")[1]
    pieces = [detokenizer.push(broken) for _ in range(100)]
    assert sum(map(len, pieces)) >= 100 - WindowDetokenizer.HOLD


def test_a_token_costs_the_same_early_and_late(tokenizer):
    ids = tokenizer.encode(TEXT * 20)

    def microseconds(tokens, before):
        detokenizer = tokenizer.detokenizer()
        for i in range(before):
            detokenizer.push(ids[i % len(ids)])
        start = perf_counter()
        for i in tokens:
            detokenizer.push(i)
        return (perf_counter() - start) / len(tokens) * 1e6

    early = min(microseconds(ids, 0) for _ in range(5))
    late = min(microseconds(ids, 50_000) for _ in range(3))
    assert late < 3 * early + 1
    assert early < 20  # measured: 0.3 to 0.7


def test_encoding(tiny, gpt2):
    ids = tiny.encode("the cat")
    assert ids[0] == models.BOS
    assert models.BOS not in ids[1:]
    assert all(type(i) is int for i in ids)
    assert gpt2.encode("Hello") == [15496]  # GPT-2 has no beginning token
    assert (tiny.vocab_size, gpt2.vocab_size) == (288, 50257)


def test_a_long_text_is_nothing_to_warn_of(gpt2):
    logger, heard = logging.getLogger("transformers"), io.StringIO()
    handler = logging.StreamHandler(heard)
    logger.addHandler(handler)
    try:
        assert len(gpt2.encode("cat " * 1100)) > 1024  # the tokenizer's own limit; the engine has the model's
    finally:
        logger.removeHandler(handler)
    assert not heard.getvalue()


def test_an_end_token_put_behind_every_text_is_left_off():
    inner = models.tokenizer()
    inner.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", models.BOS), ("</s>", models.EOS)]
    )
    tokenizer = Tokenizer(inner)
    assert tokenizer.encode("dog") == Tokenizer(models.tokenizer()).encode("dog")
    for one in (tokenizer, Tokenizer(models.tokenizer())):  # the second puts none there
        assert one.encode("dog</s>")[-1] == models.EOS


def test_chat(tiny, sentencepiece):
    assert tiny.has_chat_template
    ids = tiny.encode_chat([{"role": "user", "content": "hi"}])
    assert tiny.inner.decode(ids) == "<s><|user|>hi</s><|assistant|>"
    assert ids.count(models.BOS) == 1
    assert not sentencepiece.has_chat_template
    with pytest.raises(ModelError, match="stories260K has no chat template: give it plain text"):
        sentencepiece.encode_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_chat_template_may_refuse_or_fail(template, why):
    inner = models.tokenizer()
    inner.chat_template = template
    with pytest.raises(PromptError, match=f"tiny refuses these messages: {why}"):
        Tokenizer(inner, "tiny").encode_chat([{"role": "user", "content": "hi"}])


# A prompt before it is tokenized: what is no text, and what is too long by its bytes ------------------------------


def test_a_long_prompt_is_refused_by_its_beginning(monkeypatch):
    tokenizer = Tokenizer(models.tokenizer())
    encode, sizes = tokenizer.inner.encode, []
    monkeypatch.setattr(tokenizer.inner, "encode", lambda text, **more: sizes.append(len(text)) or encode(text, **more))
    for prompt in ("word " * 2_000_000, [{"role": "user", "content": "word " * 2_000_000}]):
        with pytest.raises(PromptError, match=r"at least \d+ tokens, and this model's context holds 128"):
            tokenizer.refuse_long(prompt, 128)
    tokenizer.refuse_long("word " * 10, 128)
    assert sizes == [QUICK * 128] * 2


def test_a_long_prompt_of_blanks_is_refused_by_its_beginning(monkeypatch):
    """A token may stand for many blanks; and what is long may be the role."""
    backend = Backend(backends.WordLevel({"?": 0, " " * 16: 1}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(" " * 16, "isolated")
    made = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?"))
    seen = []
    encode = made.encode_text
    monkeypatch.setattr(made, "encode_text", lambda text: (seen.append(len(text)), encode(text))[1])
    with pytest.raises(PromptError, match="context holds 128") as caught:
        made.refuse_long(" " * 4_000_000, 128)
    assert max(seen) <= QUICK * 128 * 2
    assert caught.value.code == "context_length_exceeded"
    made.refuse_long(" " * 16 * 120, 128)


@pytest.mark.parametrize("named", [False, True])
def test_a_role_that_no_template_knows(named):
    made = Tokenizer(models.tokenizer(), "tiny")
    if named:
        made.inner.chat_template += "{% if messages[0].role == 'wizard' %}!{% endif %}"
    ask = [{"role": "wizard", "content": "hi"}]
    if named:
        assert "wizard" in made.render_chat(ask)
    for role in (None, 3, "robot", *(() if named else ("wizard",))):
        for render in (made.encode_chat, made.render_chat):
            with pytest.raises(PromptError, match=r"messages\.0: role is .*it can be system, user, assistant, tool"):
                render([{"role": role, "content": "hi"}])


def test_a_developer_is_the_system_where_a_template_does_not_know_him():
    made = Tokenizer(models.tokenizer(), "tiny")
    assert made.render_chat([{"role": "developer", "content": "hi"}]).startswith("<s><|system|>hi")
    made.inner.chat_template += '{% if messages[0].role == "developer" %}!{% endif %}'
    assert made.render_chat([{"role": "developer", "content": "hi"}]).startswith("<s><|developer|>hi")


def test_a_text_that_begins_with_bos_gets_no_second_one(tiny, sentencepiece):
    for made in (tiny, sentencepiece):
        begin = made.inner.bos_token
        assert made.encode(f"{begin}a") == [made.inner.bos_token_id, *made.encode_text("a")]
        assert made.encode(f"{begin}{begin}a")[:3].count(made.inner.bos_token_id) == 2  # as it was written


def test_half_a_surrogate_pair(tiny):
    for attempt in (tiny.encode, tiny.encode_text, lambda text: tiny.encode_chat([{"role": "user", "content": text}])):
        with pytest.raises(PromptError, match=r"at character 2 stands \\udcff"):
            attempt("ab\udcff")


# SentencePiece files


def test_a_conversion_has_the_fingerprint_of_its_sentencepiece_file(shared):
    """Hugging Face's conversion keeps tokens and ids; only the order in which they are listed is its own."""
    pytest.importorskip("sentencepiece")
    ours = load_tokenizer(shared / "data/tokenizers/llama/tokenizer.model")
    converted = dict(reversed(ours.inner.get_vocab().items()))
    assert fingerprint(converted) == ours.fingerprint
    assert fingerprint(converted | {"<pad>": 32_000}) != ours.fingerprint


def test_a_broken_sentencepiece_file(tmp_path):
    pytest.importorskip("sentencepiece")
    (tmp_path / "tokenizer.model").write_text("no model")
    with pytest.raises(ModelError, match="cannot be read as a SentencePiece model"):
        load_tokenizer(tmp_path / "tokenizer.model")


def test_sentencepiece_is_not_installed(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_text("")
    real = builtins.__import__

    def without(name, *rest):
        if name == "sentencepiece":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModelError, match="pip install sentencepiece, or name a folder with"):
        load_tokenizer(tmp_path / "tokenizer.model")


class Nameless(list[str]):
    """A SentencePiece processor over these pieces, of which none begins or ends a text."""

    id_to_piece = list.__getitem__

    def bos_id(self):
        return -1

    eos_id = bos_id

    def is_control(self, id):
        return False

    def is_unknown(self, id):
        return id == 0

    def encode(self, text):
        return [self.index(letter) for letter in text]


def test_a_sentencepiece_model_without_beginning_and_end():
    tokenizer = Tokenizer(SentencePiece(Nameless(["<unk>", "a", "b"])))
    assert tokenizer.encode("ab") == tokenizer.encode_text("ab") == [1, 2]
    assert tokenizer.eos_token_id is None
