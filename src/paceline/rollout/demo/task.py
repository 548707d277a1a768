"""Problems with worked answers that a program can check, and their alphabet.

sums   3+5+2+7+1+4?  ->  8,10,17,18,22;22      running totals, then the result
sort   73915?        ->  7,37,379,1379,13579;13579   the digits so far in order, then all of them
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

SPECIAL = ("<pad>", "<s>", "</s>")
PAD, BOS, EOS = range(len(SPECIAL))
ALPHABET = "0123456789+?,;"
VOCAB_SIZE = len(SPECIAL) + len(ALPHABET)
MAX_NEW = 30
"""Most tokens of an answer; worked answers have up to 26."""


class Problem(NamedTuple):
    """A question and its worked answer. The part after the semicolon is checked."""

    question: str
    worked: str

    @property
    def result(self) -> str:
        """The checked part."""
        return self.worked.rpartition(";")[2]

    @property
    def prompt(self) -> list[int]:
        """The question's token ids."""
        return [BOS, *encode(self.question)]

    def reward(self, tokens: list[int]) -> float:
        """1 for an answer that ended by itself and has the right result, else 0; the steps are not checked."""
        if not tokens or tokens[-1] != EOS:
            return 0.0
        return float(decode(tokens[:-1]).rpartition(";")[2] == self.result)


def encode(text: str) -> list[int]:
    """Token ids of a text, one for each character."""
    return [len(SPECIAL) + ALPHABET.index(character) for character in text]


def decode(tokens: list[int]) -> str:
    """The text of token ids; special tokens are left out."""
    return "".join(ALPHABET[token - len(SPECIAL)] for token in tokens if token >= len(SPECIAL))


def sums(rng: random.Random) -> Problem:
    """Six terms of one digit."""
    terms = [rng.randint(1, 9) for _ in range(6)]
    totals = [sum(terms[: n + 1]) for n in range(1, 6)]
    return Problem("+".join(map(str, terms)) + "?", ",".join(map(str, totals)) + f";{totals[-1]}")


def sort(rng: random.Random) -> Problem:
    """Five digits."""
    digits = [rng.choice("0123456789") for _ in range(5)]
    steps = ["".join(sorted(digits[: n + 1])) for n in range(5)]
    return Problem("".join(digits) + "?", ",".join(steps) + f";{steps[-1]}")


TASKS: dict[str, Callable[[random.Random], Problem]] = {"sums": sums, "sort": sort}


def problems(task: str, count: int, rng: random.Random, without: frozenset[str] = frozenset()) -> list[Problem]:
    """`count` different problems of a task, none of whose questions is among `without`."""
    chosen: dict[str, Problem] = {}
    while len(chosen) < count:
        problem = TASKS[task](rng)
        if problem.question not in without:
            chosen.setdefault(problem.question, problem)
    return list(chosen.values())
