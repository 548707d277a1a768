"""Texts that must not be trained on, and how to find them in prompts.

    evaluation = Overlap(texts_of("spec-bench.jsonl"))
    evaluation.shared(prompt)                         # the words that both have, or None

A prompt overlaps with a text of an evaluation if both have the same RUN words in a row, whatever their case and
punctuation. A shorter text must be in the prompt as a whole, and one of less than SHORT words ("Explain your
answer.") must be all of it."""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator

from paceline.bench.suites import SUITES, read_suite
from paceline.logs import conversations

RUN = 10
"""Words in a row that two texts must not share. GPT-3's check took 13 (Brown et al. 2020, appendix C)."""
SHORT = 5
"""Least words of a whole text that must not be in a prompt."""

Words = tuple[str, ...]


def words(text: str) -> Words:
    """The words and numbers of a text, in lower case, without accents' encodings, punctuation and white space."""
    return tuple(re.findall(r"\w+", unicodedata.normalize("NFKC", text).lower()))


def runs(text: Words, length: int) -> Iterator[Words]:
    """All runs of `length` words."""
    return (text[i : i + length] for i in range(len(text) - length + 1))


class Overlap:
    """Runs of words of an evaluation's texts."""

    def __init__(self, texts: Iterable[str]):
        every = {words(text) for text in texts} - {()}
        self.whole = every
        self.runs: dict[int, set[Words]] = defaultdict(set)
        for text in every:
            if len(text) >= SHORT:
                length = min(len(text), RUN)
                self.runs[length].update(runs(text, length))

    def shared(self, text: str) -> str | None:
        """Words that the text shares with the evaluation; None: too few to matter."""
        own = words(text)
        if own in self.whole:
            return " ".join(own)
        for length, known in self.runs.items():
            for run in runs(own, length):
                if run in known:
                    return " ".join(run)
        return None


def texts_of(suite: str) -> list[str]:
    """The texts that a suite of `paceline bench` asks, by its name or file; or the texts of any file of
    conversations."""
    if suite in SUITES or "HumanEval" in suite:
        return [turn for question in read_suite(suite).questions for turn in question.turns]
    return [text for one in conversations.read(suite, ignore=("prediction",)) for text in one.texts()]
