"""Tokenizers rebuilt from GGUF files against those that they stand for, on texts that tell rules apart."""

import gzip
import io
import json
from types import SimpleNamespace

import pytest
import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from paceline.formats.gguf_tokenizer import _SAME, RULES, tokenizer_of
from paceline.formats.tokenizer import Tokenizer as Ours

AWKWARD = [
    "", " ", "  ", "\n", "\n\n\n", "\r\n", "\t\tx", " leading", "  two before", "behind  ", "a  b   c    d",
    "I'm you're HE'S WE'LL they'd 'tis ''s don't'Ve", "1 12 123 1234 12345 3.14159 1,000,000 ½ ²", "x=1;y=22;zz=333",
    "émoji 😀👨‍👩‍👧 漢字かな 한국어 العربية हिन्दी ไทย", "e\u0301 \u212b ﬁ Å",
    "def f(x):\n    return x  # !\n\n\nclass A:\n\tpass",
    "http://a.b/c?d=e&f=%20#g", "...!!!???\u2014\u2013“quoted” \u2018x\u2019 (a)[b]{c}",
    "\u00a0no\u2003break\u200bzero", "<s> </s> <unk> <|im_end|>",
    "▁under▁score", "ALLCAPS mixedCase snake_case kebab-case", "\x00\x01\x7f", "a" * 200, "ab" * 100, " \n \n x \n",
]  # fmt: skip
TRAINING = [
    "The cat's 123 mats, isn't it? We'll see.",
    "naïve café 漢字 漢字 ありがとう",
    "def main():\n    return 42",
    "  x  y",
    "हिन्दी हिन्दी mixedCase",
] * 50


def texts(shared):
    """Awkward ones, and some in twelve languages where the optional data is there."""
    file = shared / "data" / "xquad" / "paragraphs.parallel.jsonl.gz"
    more = []
    if file.exists():
        rows = [json.loads(line) for line in gzip.decompress(file.read_bytes()).decode().splitlines()[:25]]
        more = [text for row in rows for text in row.values() if isinstance(text, str)]
    return AWKWARD + more


def agree(ours, encode, decode, all_texts):
    for text in all_texts:
        ids = encode(text)
        assert ours.encode_text(text) == ids, text
        assert ours.decode(ids) == decode(ids), text


# SentencePiece -------------------------------------------------------------------------------------------------------


def of_sentencepiece(processor, **more):
    """What llama.cpp's converter writes of a SentencePiece model, rebuilt."""
    size = len(processor)
    special = [(processor.is_unknown, 2), (processor.is_control, 3), (processor.is_byte, 6)]
    facts = {
        "model": "llama",
        "tokens": [processor.id_to_piece(i) for i in range(size)],
        "scores": [processor.get_score(i) for i in range(size)],
        "token_type": [next((kind for test, kind in special if test(i)), 1) for i in range(size)],
        "bos_token_id": processor.bos_id(),
        "eos_token_id": processor.eos_id(),
        "unknown_token_id": processor.unk_id(),
        **more,
    }
    return tokenizer_of(file_of(facts), "m")


def file_of(facts):
    return SimpleNamespace(path="m.gguf", metadata={f"tokenizer.ggml.{key}": value for key, value in facts.items()})


def without_special(all_texts):
    """SentencePiece does not look for special tokens in text."""
    return [text for text in all_texts if "<s>" not in text and "\x00" not in text]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_token_for_token(prefix):
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TRAINING), model_writer=made, vocab_size=420, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=prefix, minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    processor = sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())
    ours = of_sentencepiece(processor, add_space_prefix=prefix)
    agree(ours, processor.encode, processor.decode, without_special(AWKWARD))
    assert ours.encode("x")[0] == processor.bos_id()
    assert ours.eos_token_id == processor.eos_id()


def test_llamas_own_tokenizer_on_a_corpus(shared):
    file = shared / "data" / "tokenizers" / "llama" / "tokenizer.model"
    if not file.exists():
        pytest.skip(f"{file} not found")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
    agree(of_sentencepiece(processor), processor.encode, processor.decode, without_special(texts(shared)))


# Bytes ---------------------------------------------------------------------------------------------------------------

_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
REFERENCES = {
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "qwen2": _CASELESS + r"\p{N}" + _REST,
    "qwen35": _CASELESS.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+") + r"\p{N}" + _REST.replace(r"\p{L}", r"\p{L}\p{M}"),
    "llama-bpe": _CASELESS + r"\p{N}{1,3}" + _REST,
}
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_HUMP, _PATHS = r"[^\r\n\p{L}\p{N}]?" + _UPPER, r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
REFERENCES["tekken"] = f"{_HUMP}*{_LOWER}+|{_HUMP}+{_LOWER}*|" + r"\p{N}" + _PATHS
_END = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
REFERENCES["gpt-4o"] = f"{_HUMP}*{_LOWER}+{_END}|{_HUMP}+{_LOWER}*{_END}|" + r"\p{N}{1,3}" + _PATHS
REFERENCES["dbrx"] = REFERENCES["llama-bpe"]  # but words that are tokens may be split
REFERENCES["smollm"] = REFERENCES["gpt-2"]  # after digits have been cut out, one by one
REFERENCES |= {name: REFERENCES[rule] for name, rule in _SAME.items()}
"""The rules as their authors publish them, in one expression."""
WHOLE = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Rules by which a word that is a token stays whole, and texts begin with BOS."""


def trained(rule):
    """A byte-level tokenizer that splits by a rule of REFERENCES."""
    backend = Tokenizer(models.BPE(ignore_merges=rule in WHOLE))
    cuts = rule in ("smollm", "refact", "starcoder")
    digits = [pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")] if cuts else []
    words = pre_tokenizers.Split(Regex(REFERENCES[rule]), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*digits, words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    if rule in ("qwen2", "qwen35", "deepseek-r1-qwen"):
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TRAINING, trainer)
    return backend


def of_bytes(backend, rule):
    known = json.loads(backend.to_str())["model"]
    tokens = sorted(known["vocab"], key=known["vocab"].get)
    facts = {
        "model": "gpt2",
        "pre": rule,
        "tokens": tokens,
        "token_type": [3 if token == "<|end|>" else 1 for token in tokens],
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in known["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return tokenizer_of(file_of(facts), "m")


@pytest.mark.parametrize("rule", [*RULES, *_SAME])
def test_byte_level_rules_token_for_token(rule, shared):
    backend = trained(rule)
    inner = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    ours = of_bytes(backend, rule)
    agree(ours, lambda text: inner.encode(text, add_special_tokens=False), Ours(inner).decode, texts(shared))
    assert (ours.encode("x")[0] == 0) == (rule in WHOLE)
    assert ours.decode([0]) == ""


@pytest.mark.parametrize("rule", [*RULES, *_SAME])
def test_a_word_that_is_a_token_is_split_where_merges_do_not_make_it_but_by_some_rules(rule):
    tokens = ["<|end|>", "a", "b", "c", "ab", "abc"]
    facts = {"model": "gpt2", "pre": rule, "tokens": tokens, "token_type": [3, 1, 1, 1, 1, 1], "merges": ["a b"]}
    assert tokenizer_of(file_of(facts), "m").encode_text("abc") == ([5] if rule in WHOLE else [4, 3])


def test_words_of_users_are_text_and_control_tokens_are_none():
    """Both are found in text before it is split."""
    tokens = ["a", "b", "<think>", "<end>"]
    facts = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": [1, 1, 4, 3], "merges": []}
    ours = tokenizer_of(file_of(facts), "m")
    assert ours.encode("a<think>b<end>") == [0, 2, 1, 3]
    assert ours.decode([0, 2, 1, 3]) == "a<think>b"


def test_the_rules_are_told_apart_by_these_texts():
    """Else agreement would prove nothing."""
    backends = trained("gpt-2"), trained("qwen35")
    split = {rule: [of_bytes(one, rule).encode_text(text) for one in backends for text in AWKWARD] for rule in RULES}
    del split["dbrx"]  # which the test of whole words tells from llama-bpe
    for rule, tokens in split.items():
        assert all(tokens != others for other, others in split.items() if other != rule)


def test_gemmas_merges_are_in_the_files_order() -> None:
    """Whatever the scores say; what it does not know becomes bytes."""
    words = ["<unk>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "c", "ab", "bc", "▁a"]
    ids = {word: i for i, word in enumerate(words)}
    facts = {
        "model": "gemma4", "tokens": words, "token_type": [2, 3, *[6] * 256, *[1] * 7], "merges": ["b c", "▁ a", "a b"],
        "scores": [0.0] * len(words), "unknown_token_id": 0, "bos_token_id": 1, "add_space_prefix": False,
    }  # fmt: skip
    facts["scores"][ids["ab"]] = 9.0
    ours = tokenizer_of(file_of(facts), "m")
    said = ours.encode_text("abc ab é")
    assert said == [ids[word] for word in ("a", "bc", "▁a", "b", "▁", "<0xC3>", "<0xA9>")]
    assert ours.decode(said) == "abc ab é"
