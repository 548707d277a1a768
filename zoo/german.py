"""German sentences and their English translations, from a lexicon and a small grammar (case, gender, adjective endings,
verb-second order), so that every pair is correct by construction."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from zoo.words import NAMES, Pair, capitalized, lines, words


@dataclass(frozen=True)
class Noun:
    """A German noun in the nominative, and its translation."""

    gender: str  # m, f, n
    german: str
    english: str


def _entries(texts: list[str]) -> list[tuple[str, ...]]:
    return [tuple(text.split("/")) for text in texts]


PEOPLE, THINGS = ([Noun(*entry) for entry in _entries(words(name))] for name in ("people", "things"))
ADJECTIVES, VERBS = _entries(words("adjectives")), _entries(words("verbs"))
THING_ADJECTIVES, PERSON_ADJECTIVES = ADJECTIVES[:21], [*ADJECTIVES[:4], *ADJECTIVES[21:]]
PLACES, PRESENT_TIMES, PAST_TIMES = (_entries(lines(name)) for name in ("places", "present_times", "past_times"))
SENTENCES = [sentence.split(" | ") for sentence in lines("sentences")]
NUMBERS = [(2, "zwei"), (3, "drei"), (4, "vier"), (5, "fünf"), (10, "zehn")]
DETERMINERS = {  # nominative and accusative, by gender; ending of the adjective that follows
    ("the", "nom"): {"m": ("der", "e"), "f": ("die", "e"), "n": ("das", "e")},
    ("the", "acc"): {"m": ("den", "en"), "f": ("die", "e"), "n": ("das", "e")},
    ("a", "nom"): {"m": ("ein", "er"), "f": ("eine", "e"), "n": ("ein", "es")},
    ("a", "acc"): {"m": ("einen", "en"), "f": ("eine", "e"), "n": ("ein", "es")},
    ("my", "nom"): {"m": ("mein", "er"), "f": ("meine", "e"), "n": ("mein", "es")},
    ("my", "acc"): {"m": ("meinen", "en"), "f": ("meine", "e"), "n": ("mein", "es")},
    ("her", "nom"): {"m": ("ihr", "er"), "f": ("ihre", "e"), "n": ("ihr", "es")},
    ("her", "acc"): {"m": ("ihren", "en"), "f": ("ihre", "e"), "n": ("ihr", "es")},
}


def noun_phrase(noun: Noun, determiner: str, case: str, adjective: Sequence[str] | None) -> Pair:
    """(German, English), for example ("den alten Tisch", "the old table")."""
    article, ending = DETERMINERS[determiner, case][noun.gender]
    german, english = noun.german, noun.english
    if determiner in ("my", "her"):  # "my woman" is not what a German means
        english = {"man": "husband", "woman": "wife"}.get(english, english)
    if adjective:
        german, english = f"{adjective[0]}{ending} {german}", f"{adjective[1]} {english}"
    if determiner == "a":
        determiner = "an" if english[0] in "aeiou" else "a"
    return f"{article} {german}", f"{determiner} {english}"


_PARTICIPLES = {
    "see": "seen", "take": "taken", "draw": "drawn", "forget": "forgotten", "show": "shown", "choose": "chosen",
}  # fmt: skip
_PASTS = {verb[4].replace("_", " "): verb[6].replace("_", " ") for verb in VERBS}


def _participle(base: str) -> str:
    return _PARTICIPLES.get(base, _PASTS[base])


def _subject(rng: random.Random) -> Pair:
    if rng.random() < 0.25:
        return (rng.choice(NAMES),) * 2
    adjective = rng.choice(PERSON_ADJECTIVES) if rng.random() < 0.4 else None
    return noun_phrase(rng.choice(PEOPLE), rng.choice(["the", "the", "the", "my", "a"]), "nom", adjective)


def _thing(rng: random.Random, case: str) -> Pair:
    adjective = rng.choice(THING_ADJECTIVES) if rng.random() < 0.5 else None
    return noun_phrase(rng.choice(THINGS), rng.choice(["the", "the", "a", "a", "my", "her"]), case, adjective)


def german_sentence(rng: random.Random) -> Pair:
    """One (German, English) pair."""
    pairs: dict[str, Sequence[str]] = {"s": _subject(rng), "o": _thing(rng, "acc")}
    pairs |= {"o2": _thing(rng, "acc"), "n": _thing(rng, "nom"), "n2": _subject(rng)}
    infinitive, present, past, participle, base, presents, pasts = (w.replace("_", " ") for w in rng.choice(VERBS))
    for name, entries in (
        ("place", PLACES), ("now", PRESENT_TIMES), ("then", PAST_TIMES), ("adjective", THING_ADJECTIVES),
        ("person", PERSON_ADJECTIVES),
    ):  # fmt: skip
        pairs[name] = rng.choice(entries)
    pairs["other"] = rng.choice([a for a in THING_ADJECTIVES if a != pairs["adjective"]])
    pairs["name"] = (rng.choice([n for n in NAMES if n not in pairs["s"][0]]),) * 2
    count, german_count = rng.choice(NUMBERS)
    pairs["count"] = (german_count, str(count))
    german, english = rng.choice(SENTENCES)
    verb = {"infinitive": infinitive, "present": present, "past": past, "participle": participle}
    german = german.format(**{name: pair[0] for name, pair in pairs.items()}, **verb)
    verb = {"base": base, "presents": presents, "pasts": pasts, "participle": _participle(base)}
    english = english.format(**{name: pair[1] for name, pair in pairs.items()}, **verb)
    return capitalized(german), capitalized(english)


def translation(rng: random.Random) -> Pair:
    """One or two sentences to translate."""
    pairs = [german_sentence(rng) for _ in range(rng.choice([1, 1, 1, 2]))]
    german, english = (" ".join(side) for side in zip(*pairs, strict=True))
    prompts = ("Translate German to English: {}", "Translate into English: {}", "What does this mean in English? {}")
    return rng.choice((prompts[0], *prompts)).format(german), english
