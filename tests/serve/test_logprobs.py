"""Log-probabilities: text, bytes and places of tokens, for every kind of tokenizer."""

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers import models as backends
from transformers import PreTrainedTokenizerFast

from paceline.core.sampling import TokenLogprob
from paceline.formats.tokenizer import Tokenizer
from paceline.serve.responses import Frame, Spelling
from tests import models

WORDS = ["</s>", "▁the", "▁dog", "s", "▁", "sat", "狼", "<0xC3>", "<0xA9>", "<0x73>"]
FALLBACK = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
DECODERS = {
    "metaspace": decoders.Metaspace(), "byte fallback": decoders.Sequence(FALLBACK),
    "byte fallback, strip": decoders.Sequence([*FALLBACK, decoders.Strip(" ", 1, 0)]),
}


def worded(decoder):
    backend = Backend(backends.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="</s>"))
    backend.decoder = DECODERS[decoder]
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))


@pytest.fixture(params=["bytes", *DECODERS])
def tokenizer(request):
    return Tokenizer(models.tokenizer()) if request.param == "bytes" else worded(request.param)


@pytest.mark.parametrize("prompted", [False, True])
def test_bytes_and_places_are_those_of_the_text(tokenizer, prompted):
    bare = [WORDS.index(word) for word in ("▁the", "▁dog", "s", "<0x73>", "▁", "狼", "sat", "▁the")]
    accent = [*bare[:3], *(WORDS.index(word) for word in ("<0xC3>", "<0xA9>") * 2 + ("▁dog", "s"))]
    texts = [accent, accent[:-2], bare]
    if tokenizer.vocab_size > 100:
        texts = [tokenizer.encode_text(text) for text in ("é\U0001f600 the cat", "\U0001f600é")]
    if isinstance(tokenizer.inner.backend_tokenizer.decoder, decoders.Metaspace):  # it knows no bytes
        texts = [[token for token in bare if token != WORDS.index("<0x73>")]]
    for ids in texts:
        prompt = ids[:1] if prompted else []
        spelling, detokenizer = Spelling(tokenizer, prompt), tokenizer.detokenizer(prompt)
        text = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
        made = [spelling.next(token) for token in [*ids, tokenizer.eos_token_id]]
        assert b"".join(raw or b"" for _, raw, _ in made).decode() == text
        assert made[-1][:2] == ("</s>", None)  # it has a log-probability, but no part in the text
        before = b""
        for word, raw, place in made[:-1]:
            assert word.startswith("bytes:\\x") or text[place : place + len(word)] == word == raw.decode()
            assert not word.startswith("bytes:\\x") or place == len(before.decode(errors="ignore")), (word, place)
            before += raw or b""
        assert made[-1][2] == len(text)


def test_every_alternative_is_kept(tokenizer):
    """Halves of characters, and two tokens with one text."""
    if tokenizer.vocab_size > 100:
        ids = [token for token in range(tokenizer.vocab_size) if len(tokenizer.decode([token])) == 1]
    else:
        ids = list(range(len(WORDS)))
    logprobs = [TokenLogprob(ids[0], -1.0, tuple((token, -float(token)) for token in ids))]
    frame = Frame("text_completion", "tiny", tokenizer)
    (top,) = frame.columns(logprobs, Spelling(tokenizer, ids[1:3]), 0)["top_logprobs"]
    assert list(top.values()) == [-float(token) for token in ids]
    (entry,) = frame.entries(logprobs, Spelling(tokenizer, ids[1:3]))
    halves = [one for one in entry["top_logprobs"] if one["token"].startswith("bytes:")]
    assert all(bytes(one["bytes"]).decode(errors="replace") == "\ufffd" for one in halves)
