"""Rebuild the tokenizer in a GGUF file.

The file has tokens, and merges or scores, but only the name of the rule that splits text into words. RULES are the
rules of the original tokenizers. Rebuilt tokenizers agree with the originals token for token on a corpus of difficult
texts (tests/target/test_gguf_tokenizer.py). Other names are refused: with another rule, the model would silently get
worse."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from paceline.errors import ModelError, shortened
from paceline.formats.gguf import CONTROL
from paceline.formats.gguf_file import GGUF
from paceline.formats.place import one_line
from paceline.formats.tokenizer import Tokenizer, vocabulary
from paceline.kernels.blocks import within

USER_DEFINED, UNUSED = 4, 5
"""Types of tokens: words that are matched before text is split, and padding."""

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[LETTERS]+|\p{{N}}DIGITS| ?[^\sLETTERS\p{{N}}]+[\r\n]*|{_SPACES}"


_CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]MOST[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_HUMPS = f"{_CASED.replace('MOST', '*')}+ENDING|{_CASED.replace('MOST', '+')}*ENDING"
_NEWER = rf"{_HUMPS}|\p{{N}}DIGITS| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
"""A word ends before a capital letter that follows small ones. ENDING: what may follow it, such as a contraction."""


def _split(digits: str, letters: str = r"\p{L}", rule: str = _WORDS, ending: str = "") -> Any:
    rule = rule.replace("DIGITS", digits).replace("LETTERS", letters).replace("ENDING", ending)
    words = pre_tokenizers.Split(Regex(rule), "isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
RULES: dict[str, Any] = {
    "gpt-2": _GPT2,
    "llama-bpe": _split("{1,3}"),
    "qwen2": _split(""),
    "qwen35": _split("", r"\p{L}\p{M}"),
    "dbrx": _split("{1,3}"),
    "gpt-4o": _split("{1,3}", rule=_NEWER, ending=f"{_CONTRACTION}?"),
    "tekken": _split("", rule=_NEWER),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2]),
}
"""Rules by which byte-level tokenizers split text, by tokenizer.ggml.pre."""
_WHOLE_FIRST = ("llama-bpe", "tekken")
"""By these rules a word that is a token is never split, and texts begin with BOS."""
_NORMAL_FORM = ("qwen2", "qwen35")  # rules that first compose characters (NFC)
_SAME = {
    "deepseek-r1-qwen": "qwen2", "llama3": "llama-bpe", "llama-v3": "llama-bpe", "smaug-bpe": "dbrx",
    "glm4": "dbrx", "chatglm-bpe": "dbrx",
    "refact": "smollm", "starcoder": "smollm",
}  # fmt: skip
"""Other names of rules."""


def tokenizer_of(file: GGUF, name: str) -> Tokenizer:
    """Rebuild the tokenizer in `file`. ModelError if that cannot be done exactly."""
    facts = _facts(file)
    kind = facts.get("model")
    if kind not in ("gpt2", "llama", "gemma4"):
        raise _refused(
            file, f"is of kind {shortened(repr(kind))}, and llama (SentencePiece), gpt2 (bytes) and gemma4 are known"
        )
    for key in ("tokens", "token_type", "scores" if kind == "llama" else "merges"):
        if not isinstance(facts.get(key), list):
            raise _refused(file, f"has no {key}")
    if kind == "gpt2" and facts.get("pre") not in RULES:
        known = ", ".join(RULES)
        raise _refused(file, f"splits text by the rule {shortened(repr(facts.get('pre')))}, and {known} are known")
    try:
        backend = _bytes(facts) if kind == "gpt2" else _sentencepiece(facts)
        inner = _complete(backend, facts)
    except Exception as error:  # The library raises many kinds of errors.
        raise _refused(file, f"cannot be rebuilt ({shortened(one_line(error))})") from None
    return as_in(file, Tokenizer(inner, name))


def as_in(file: GGUF, tokenizer: Tokenizer) -> Tokenizer:
    """Let `tokenizer` begin conversations as `file` says. Returns `tokenizer`."""
    tokenizer.begins = _adds_bos(_facts(file)) and bool(getattr(tokenizer.inner, "bos_token", None))
    return tokenizer


def _refused(file: GGUF, why: str) -> ModelError:
    return ModelError(f"the tokenizer in {file.path} {why}: name a folder with the model's tokenizer, --tokenizer PATH")


def _facts(file: GGUF) -> dict[str, Any]:
    facts = within(file.metadata, "tokenizer.ggml.")
    pre = facts.get("pre")
    rule = {"pre": _SAME.get(pre, pre) if isinstance(pre, str) else None}
    named = within(file.metadata, "tokenizer.chat_template.")
    others = {name: text for name, text in named.items() if isinstance(text, str)}
    template = file.metadata.get("tokenizer.chat_template")
    if others:  # If tools are given, transformers takes the template tool_use.
        template = others if template is None else {"default": template, **others}
    return facts | rule | {"chat_template": template}


def _adds_bos(facts: Mapping[str, Any]) -> bool:
    """Whether texts begin with BOS. If the file does not say it, llama.cpp's default holds."""
    return bool(facts.get("add_bos_token", facts.get("model") == "llama" or facts.get("pre") in _WHOLE_FIRST))


def same_tokens(tokenizer: Tokenizer, file: GGUF, *, all_of_them: bool) -> bool:
    """Whether all tokens of `tokenizer` are in the file, with the same ids. If the file has no tokens, only their
    number is compared.

    all_of_them  whether the tokenizer must also have all of the file's tokens."""
    facts = _facts(file)
    tokens: Sequence[str] = found if isinstance(found := facts.get("tokens"), list) else []
    known = vocabulary(tokenizer.inner)
    highest = max(known.values(), default=0)
    if not tokens and not all_of_them:
        return highest < file.places["token_embd.weight"].shape[0]
    if highest >= len(tokens) or any(tokens[i] != text for text, i in known.items()):
        return False
    return not all_of_them or _ids(facts).keys() <= tokenizer.inner.get_vocab().keys()


def _bytes(facts: Mapping[str, Any]) -> Backend:
    """Make a byte-level BPE tokenizer."""
    pre, ids = facts["pre"], _ids(facts)
    backend = Backend(models.BPE(ids, _pairs(facts), ignore_merges=pre in _WHOLE_FIRST))
    if pre in _NORMAL_FORM:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = RULES[pre]
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(facts: Mapping[str, Any]) -> Backend:
    """Make SentencePiece's BPE, which always merges the neighbours whose joined piece scores best, in a
    Gemma 4 by the order of its merges. Unknown characters become bytes."""
    ids = _ids(facts)
    merges = _pairs(facts) if facts.get("model") == "gemma4" else _merges(ids, facts["scores"])
    unknown = facts["tokens"][facts.get("unknown_token_id", 0)]
    backend = Backend(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    if facts.get("add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("▁"))
    backend.normalizer = normalizers.Sequence(spaces)
    strip = [decoders.Strip(" ", 1, 0)] if facts.get("add_space_prefix", True) else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _ids(facts: Mapping[str, Any]) -> dict[str, int]:
    """Ids by token, without unused tokens."""
    types = facts.get("token_type") or []
    return {token: i for i, token in enumerate(facts["tokens"]) if i >= len(types) or types[i] != UNUSED}


def _pairs(facts: Mapping[str, Any]) -> list[Any]:
    return [tuple(merge.split(" ", 1)) for merge in facts["merges"]]


def _merges(ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All pairs of tokens that join to a token, ordered by the joined token's score, best first."""
    pairs = []
    for token, i in ids.items():
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs += [(-scores[i], ids[a], ids[b], a, b) for a, b in cuts if a in ids and b in ids]
    return [(a, b) for *_, a, b in sorted(pairs)]


class _Given:
    """A backend that nobody else has. transformers copies the one it is given, which takes half a second for 150,000
    tokens, and their memory once more."""

    def __init__(self, backend: Backend):
        self._backend = backend

    def __deepcopy__(self, memo: Any) -> Backend:
        return self._backend


def _complete(backend: Backend, facts: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Add special tokens, the beginning token and the chat template."""
    tokens = facts["tokens"]
    for token, of in zip(tokens, facts["token_type"], strict=True):
        if of in (CONTROL, USER_DEFINED):
            added = AddedToken(token, special=of == CONTROL, normalized=False)
            backend.add_special_tokens([added]) if of == CONTROL else backend.add_tokens([added])
    named = {key: facts.get(f"{key}_token_id") for key in ("bos", "eos", "padding", "unknown")}
    texts = {key: tokens[i] for key, i in named.items() if isinstance(i, int) and 0 <= i < len(tokens)}
    if _adds_bos(facts) and "bos" in texts:
        start = texts["bos"]
        template = processors.TemplateProcessing(
            single=f"{start} $A", pair=f"{start} $A {start} $B", special_tokens=[(start, named["bos"])]
        )
        backend.post_processor = template
    return PreTrainedTokenizerFast(
        tokenizer_object=_Given(backend),
        bos_token=texts.get("bos"),
        eos_token=texts.get("eos"),
        unk_token=texts.get("unknown"),
        chat_template=facts.get("chat_template"),
    )
