"""Cleaner text: remains of a data set's format, and paragraphs that return, are removed before training.

A small model that has read the same boilerplate a hundred times repeats it for ever; to remove it is one of the means
against loops (zoo/README.md has the others)."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from paceline.train.data import Document

BOILERPLATE = 60
"""Characters of the shortest paragraph that is kept only once for each source; shorter ones may be headings."""


def clean(documents: Iterable[Document]) -> Iterator[Document]:
    """Documents of one source, cleaned; empty ones are dropped."""
    seen: set[int] = set()
    for document in documents:
        if document.messages:
            yield replace(
                document, messages=tuple({**m, "content": clean_answer(m["content"])} for m in document.messages)
            )
        elif text := without_repeats(clean_text(document.text), seen):
            yield replace(document, text=text)


def clean_answer(text: str) -> str:
    """Worked sums as people write them: GSM8K's calculator marks are removed, its last line becomes a sentence."""
    text = re.sub(r"<<[^<>]*>>", "", text)
    return re.sub(r"\n####\s*(.+)$", r"\nThe answer is \1.", text)


def clean_text(text: str) -> str:
    """Prose as it is written: WikiText's spaced-out punctuation is joined, lines that are only mark-up are removed."""
    text = re.sub(r"^[ \t]*</?[A-Za-z][^<>]*>[ \t]*$", "", text, flags=re.MULTILINE)
    if " @-@ " in text or "<unk>" in text:
        text = join_wikitext(text)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


def join_wikitext(text: str) -> str:
    """Undo WikiText's tokenisation; sentences with a word that it dropped (`<unk>`) are removed."""
    lines = []
    for line in text.split("\n"):
        kept = [s for s in re.split(r"(?<= [.!?]) ", line) if "<unk>" not in s]
        lines.append(" ".join(kept))
    text = "\n".join(lines)
    text = re.sub(r" @([-,.])@ ", r"\1", text)
    text = re.sub(r" ([,.;:!?)\]%]|n't|'(?:s|re|ve|ll|d|m)\b)", r"\1", text)
    text = re.sub(r"([(\[$]) ", r"\1", text)
    text = re.sub(r'" ([^"\n]*?) "', r'"\1"', text)
    return re.sub(r" +\n", "\n", re.sub(r"\n +", "\n", text)).strip(" ")


def without_repeats(text: str, seen: set[int]) -> str:
    """`text` without the longer paragraphs that an earlier document had; `seen` remembers them."""
    kept = []
    for paragraph in re.split(r"\n\s*\n", text):
        if len(paragraph) >= BOILERPLATE:
            key = hash(paragraph.strip())
            if key in seen:
                continue
            seen.add(key)
        kept.append(paragraph)
    return "\n\n".join(kept).strip("\n")
