"""Corpus stores out of letters, for drafters that read one."""

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

from paceline.draft.text import suffix_array
from paceline.draft.text.store import writing
from tests.draft.rows import tokens


def corpus(
    folder: Path,
    documents: list[str],
    end: str = ".",
    dtype: type = np.uint16,
    parts: Sequence[ModuleType] = (suffix_array,),
) -> str:
    """A store of `documents`, a letter a token, each closed with `end`; of a tokenizer called "letters".

    parts  the modules whose arrays it has."""
    text = np.array(tokens("".join(one + end for one in documents)), dtype)
    ends = np.cumsum([len(one) + 1 for one in documents], dtype=np.int64)
    with writing(folder, kind="corpus", tokenizer="letters", tokenizer_name="letters") as store:
        store.add("text", text)
        store.add("ends", ends)
        for part in parts:
            for name, array in part.build_part(text, ends, 256).items():
                store.add(name, array)
    return str(folder)
