"""Corpus stores, of a tokenizer called "letters", for drafters that read one."""

import numpy as np

from paceline.draft.text import ngrams, suffix_array
from paceline.draft.text.store import writing
from tests.draft.rows import tokens

ALL = (ngrams, suffix_array)


def corpus(folder, documents, end=".", dtype=np.uint16, parts=(suffix_array,)):
    """A store of `documents`, a letter a token, each closed with `end`."""
    return corpus_of(folder, [tokens(one) for one in documents], ord(end), dtype, parts)


def corpus_of(folder, documents, eos, dtype=np.uint16, parts=ALL):
    """A store of documents of tokens, each closed with `eos`. parts: the modules whose arrays it has."""
    text = np.array([token for one in documents for token in [*one, eos]], dtype)
    ends = np.cumsum([len(one) + 1 for one in documents], dtype=np.int64)
    with writing(folder, kind="corpus", tokenizer="letters", tokenizer_name="letters", eos=eos) as store:
        store.add("text", text)
        store.add("ends", ends)
        for part in parts:
            for name, array in part.build_part(text, ends, max(256, int(text.max(initial=0)) + 1)).items():
                store.add(name, array)
    return str(folder)


def locked(*arrays):
    """`arrays`, which nothing can be written into any more, as those mapped from disk: all is compiled once."""
    for array in arrays:
        array.setflags(write=False)
    return arrays
