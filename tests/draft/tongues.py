"""Small tokenizers that split the same text differently, and models that know a text, each in its own tokens."""

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from paceline.formats.tokenizer import Tokenizer
from tests.draft.drafting import DraftTable
from tests.fakes import TableTarget

STORY = "the cat sat on the mat, and the other cat: größer, naïve. 日本語の猫 😀 the end of the cat\n\n  and more"


def byte_level(texts, size, special=("<s>", "</s>")):
    """BPE over bytes, trained on `texts`; puts the first of the special tokens in front of a prompt."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[*special], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = processors.TemplateProcessing(single=f"{special[0]} $A", special_tokens=[(special[0], 0)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>"), "bytes")


def pieces():
    """As Llama 2: words begin with ▁, which is put before every text, and bytes spell what has no token."""
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("a", "t"), ("▁", "c"), ("▁c", "at"), ("n", "d")]
    letters = [*"▁abcdefghijklmnopqrstuvwxyz", *(one + other for one, other in merges)]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    vocab = {name: id for id, name in enumerate(names)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    inner = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return Tokenizer(inner, "pieces")


def letters(*names, merges=()):
    """Tokens that are these texts."""
    backend = Backend(models.BPE(vocab={name: id for id, name in enumerate(names)}, merges=[*merges]))
    backend.decoder = decoders.Fuse()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), "letters")


def tongues():
    """Three tokenizers with different tokens, ids and words for the same text."""
    return {
        "bytes": byte_level(["the cat and the dog", "the other größer 日本語 😀 mat and the end"], 300),
        "more bytes": byte_level(["the cats of the other mats", "the größte 日本 at"], 310, ("<pad>", "</s>", "<s>")),
        "pieces": pieces(),
    }


def spelled(tokenizer, tokens):
    """The bytes of tokens."""
    each = [tokenizer.spelling(token) for token in tokens]
    return b"".join(one.encode() if isinstance(one, str) else one for one in each)


class Knowing(DraftTable):
    """A draft model that goes on with STORY wherever it stands, in the longest of its tokens that fits."""

    def __init__(self, tokenizer, sureness=9.0):
        size = len(tokenizer.inner)
        self.kept = np.arange(size)
        self._pieces = [spelled(tokenizer, [id]) for id in range(size)]
        self._sureness = sureness
        super().__init__(size, order=None, logits=self._knows)

    def _knows(self, prefix):
        story, said = STORY.encode(), b"".join(self._pieces[id] for id in prefix).removeprefix(b" ")
        at = story.find(said[-12:]) + len(said[-12:])
        fits = [len(self._pieces[id]) * story.startswith(self._pieces[id], at) for id in self.kept]
        logits = np.random.default_rng([len(prefix), *prefix]).normal(size=len(self.kept))
        logits[int(np.argmax(fits))] += self._sureness
        return logits

    def trim_head(self, keep):
        """Trim its head."""
        self.kept = keep.numpy()
        self._table.clear()


def telling(tokenizer, sureness=9.0):
    """A target that tells STORY in its tokenizer's own tokens, by their number."""
    ids = tokenizer.encode_text(STORY)
    size = len(tokenizer.inner) + 5

    def logits(prefix):
        out = np.random.default_rng([len(prefix), *prefix[-2:]]).normal(size=size)
        out[ids[len(prefix) % len(ids)]] += sureness
        return out

    target = TableTarget(size, order=None, logits=logits)
    target.tokenizer = tokenizer
    return target
