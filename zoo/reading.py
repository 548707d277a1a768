"""Reading: questions about one passage or several numbered ones, summaries, and copying out of a text."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from zoo.german import german_sentence
from zoo.words import ITEMS, NAMES, Pair, capitalized, lines, words

SURNAMES, TOWNS, BUILDINGS, MONTHS = (words(name) for name in ("surnames", "towns", "buildings", "months"))
MATERIALS, KNOWN_FOR = lines("materials"), lines("known_for")


@dataclass(frozen=True)
class Place:
    """A building that does not exist, and everything a question can be asked about it."""

    what: str
    year: int
    person: str
    material: str
    known_for: str
    visitors: int
    opens: int

    def sentences(self) -> list[str]:
        return [
            f"{capitalized(self.what)} was built in {self.year}.",
            f"It was designed by {self.person}.",
            f"It is made of {self.material}.",
            f"It is known for {self.known_for}.",
            f"About {self.visitors} people visit it every month.",
            f"It opens at {self.opens} in the morning.",
        ]

    def questions(self) -> list[tuple[str, str, int]]:
        """(question, answer, which sentence holds it)"""
        return [
            (f"When was {self.what} built?", f"{capitalized(self.what)} was built in {self.year}.", 0),
            (f"Who designed {self.what}?", f"{capitalized(self.what)} was designed by {self.person}.", 1),
            (f"What is {self.what} made of?", f"{capitalized(self.what)} is made of {self.material}.", 2),
            (f"What is {self.what} known for?", f"{capitalized(self.what)} is known for {self.known_for}.", 3),
            (
                f"How many people visit {self.what} every month?",
                f"About {self.visitors} people visit {self.what} every month.",
                4,
            ),
            (f"When does {self.what} open?", f"{capitalized(self.what)} opens at {self.opens} in the morning.", 5),
        ]


def place(rng: random.Random) -> Place:
    """A building by chance."""
    return Place(
        what=f"the {rng.choice(BUILDINGS)} of {rng.choice(TOWNS)}",
        year=rng.randint(1600, 2020),
        person=f"{rng.choice(NAMES)} {rng.choice(SURNAMES)}",
        material=rng.choice(MATERIALS),
        known_for=rng.choice(KNOWN_FOR),
        visitors=rng.randint(2, 99) * 100,
        opens=rng.randint(6, 11),
    )


def _passage(rng: random.Random, about: Place, keep: int, length: int) -> str:
    """`length` of the sentences in order, the naming one and sentence `keep` always among them."""
    others = [i for i in range(1, 6) if i != keep]
    chosen = sorted({0, keep, *rng.sample(others, min(length - 1, len(others)))})
    sentences = about.sentences()
    return " ".join(sentences[i] for i in chosen)


def passage_question(rng: random.Random) -> Pair:
    """A short passage and a question that one of its sentences answers."""
    about = place(rng)
    question, answer, keep = rng.choice(about.questions())
    passage = _passage(rng, about, keep, rng.randint(2, 5))
    form = rng.choice(["{p}\n\n{q}", "{q}\n\n{p}", "Passage: {p}\n\nQuestion: {q}", "Read the passage.\n\n{p}\n\n{q}"])
    return form.format(p=passage, q=question), answer


def retrieval(rng: random.Random, passages: Sequence[str] = (), facts: Sequence[tuple[str, str, str]] = ()) -> Pair:
    """Several numbered passages, one of which holds the answer.

    `facts` are (question, answer, passage) from a data set, `passages` distractors; without them all is generated."""
    count = rng.randint(2, 5)
    if facts and rng.random() < 0.4:
        question, answer, held = rng.choice(facts)
        texts = [p for p in rng.sample(list(passages), count) if p != held][: count - 1]
    else:
        places = [place(rng) for _ in range(count)]
        question, answer, keep = rng.choice(places[0].questions())
        held = _passage(rng, places[0], keep, rng.randint(2, 4))
        texts = [_passage(rng, p, rng.randint(1, 5), rng.randint(2, 3)) for p in places[1:] if p.what != places[0].what]
        if passages and texts and rng.random() < 0.5:
            texts[-1] = rng.choice(passages)
    where = rng.randint(0, len(texts))
    texts.insert(where, held)
    label = rng.choice(["Passage {}: ", "[{}] ", "{}. "])
    listing = "\n".join(label.format(i) + text for i, text in enumerate(texts, start=1))
    if rng.random() < 0.5:
        answer = f"Passage {where + 1}: {answer}"
        ask = "Name the passage, then answer"
    else:
        ask = "Answer from the passages"
    form = rng.choice(["{l}\n\n{a}: {q}", "{a}: {q}\n\n{l}"])
    return form.format(l=listing, a=ask, q=question), answer


def summary(rng: random.Random, passages: Sequence[str] = ()) -> Pair:
    """The lead of a text is its summary: crude, and a real baseline for news and encyclopaedia text."""
    if passages and rng.random() < 0.6:
        text = rng.choice(passages)
        answer = sentences_of(text)[0]
    else:
        about = place(rng)
        text = " ".join(about.sentences())
        answer = (
            f"{capitalized(about.what)} was built in {about.year}, designed by {about.person}, "
            f"and is known for {about.known_for}."
        )
    form = rng.choice(
        ["Summarize: {}", "Summarize: {}", "Summarize this text in one sentence.\n\n{}", "{}\n\nSummarize the text."]
    )
    return form.format(text), answer


def copy(rng: random.Random, passages: Sequence[str] = ()) -> Pair:
    """Repeat, or pick one thing out of, a short text."""
    name, surname, town = rng.choice(NAMES), rng.choice(SURNAMES), rng.choice(TOWNS)
    day, month, room = rng.randint(1, 28), rng.choice(MONTHS), rng.randint(100, 999)
    phone = " ".join(str(rng.randint(100, 999)) for _ in range(3))
    code = "".join(rng.choice("ABCDEFGHJKLMNPRSTUVWXYZ") for _ in range(3)) + f"-{rng.randint(1000, 9999)}"
    note = (
        f"Hello, this is {name} {surname} from {town}. I would like to see you on {month} {day} in room {room}. "
        f"My order number is {code}. Please call me at {phone}."
    )
    fields = [
        ("name", f"{name} {surname}"), ("town", town), ("date", f"{month} {day}"), ("room", f"room {room}"),
        ("order number", code), ("phone number", phone),
    ]  # fmt: skip
    kind = rng.choice(["repeat", "field", "field", "list", "all"])
    if kind == "repeat":
        text = sentences_of(rng.choice(passages))[0] if passages and rng.random() < 0.6 else german_sentence(rng)[1]
        return rng.choice(["Repeat this sentence: {}", "Copy exactly: {}"]).format(text), text
    if kind == "field":
        label, value = rng.choice(fields)
        return rng.choice([f"{note}\n\nWhat is the {label}?", f"Find the {label} in this note: {note}"]), value
    if kind == "all":
        chosen = rng.sample(fields, 3)
        wanted = ", ".join(label for label, _ in chosen)
        return f"Extract the {wanted}.\n\n{note}", "\n".join(f"{label}: {value}" for label, value in chosen)
    words = rng.sample([*ITEMS, *BUILDINGS], rng.randint(3, 6))
    return f"Write this list, one item a line: {', '.join(words)}", "\n".join(f"- {word}" for word in words)


def sentences_of(text: str) -> list[str]:
    """Split at sentence ends; at least one element."""
    return [s.strip() for s in re.split(r"(?<=[.!?])\s+(?=[A-Z\"'])", text.strip()) if s.strip()] or [""]
