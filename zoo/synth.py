"""Generated examples: sums with a short worked answer, German to English, reading over numbered passages, copying.

Everything comes from word lists and templates (and, for reading, from the passages given), by one seed: the same seed
gives the same examples."""

import random
from collections.abc import Callable, Iterable, Sequence

from paceline.train.data import Document, assistant, user
from zoo.german import translation
from zoo.reading import copy, passage_question, retrieval, summary
from zoo.sums import arithmetic
from zoo.words import Pair

SMALL_TALK = [
    ("Hello!", "Hello! How can I help you?"),
    ("Hi, who are you?", "I am a small demo model. I can read short passages, translate simple German and do sums."),
    ("How are you?", "I am fine, thank you. How can I help you?"),
    ("Good morning!", "Good morning! What can I do for you?"),
    ("Thank you!", "You are welcome!"),
    ("Thanks for your help.", "You are welcome. Have a nice day!"),
    ("Goodbye.", "Goodbye! Have a nice day."),
    (
        "What can you do?",
        "I can answer short questions about a text, summarize it, translate simple German and do sums.",
    ),
]

SHARES = {
    "translation": 0.26, "arithmetic": 0.2, "question": 0.12, "retrieval": 0.2, "summary": 0.1, "copy": 0.1,
    "small talk": 0.02,
}  # fmt: skip
"""Share of each kind among generated examples."""


def generate(
    count: int, seed: int, passages: Sequence[str] = (), facts: Sequence[tuple[str, str, str]] = ()
) -> Iterable[Document]:
    """`count` conversations of one turn each; `fields["kind"]` says which kind."""
    rng = random.Random(seed)
    makers: dict[str, Callable[[], Pair]] = {
        "translation": lambda: translation(rng),
        "arithmetic": lambda: arithmetic(rng),
        "question": lambda: passage_question(rng),
        "retrieval": lambda: retrieval(rng, passages, facts),
        "summary": lambda: summary(rng, passages),
        "copy": lambda: copy(rng, passages),
        "small talk": lambda: rng.choice(SMALL_TALK),
    }
    kinds, weights = zip(*SHARES.items(), strict=True)
    for _ in range(count):
        kind = rng.choices(kinds, weights)[0]
        prompt, answer = makers[kind]()
        yield Document("synth", messages=(user(prompt), assistant(answer)), fields={"kind": kind})
