"""Generated examples: the same every time, correct sums, German that obeys its own grammar, answers that are there."""

import random
import re

from zoo import synth
from zoo.german import Noun, german_sentence, noun_phrase
from zoo.reading import copy, retrieval
from zoo.sums import arithmetic


def test_the_seed_decides():
    first, again, other = (list(synth.generate(300, seed)) for seed in (4, 4, 5))
    assert first == again
    assert first != other
    assert {d.fields["kind"] for d in first} == set(synth.SHARES)


def test_sums_are_right():
    rng = random.Random(0)
    for _ in range(500):
        _, answer = arithmetic(rng)
        equations = re.findall(r"(?<![\d+] )\b(\d+(?: [-+*/] \d+)+) = (\d+)", answer)
        assert equations, answer
        for left, right in equations:
            assert eval(left) == int(right), answer
        final = re.search(r"The answer is (\d+)\.$", answer)
        if final:
            assert final[1] == equations[-1][1]


def test_case_and_gender():
    table, lamp, book = Noun("m", "Tisch", "table"), Noun("f", "Lampe", "lamp"), Noun("n", "Buch", "book")
    old = ("alt", "old")
    assert noun_phrase(table, "the", "nom", old) == ("der alte Tisch", "the old table")
    assert noun_phrase(table, "the", "acc", old) == ("den alten Tisch", "the old table")
    assert noun_phrase(table, "a", "nom", old) == ("ein alter Tisch", "an old table")
    assert noun_phrase(lamp, "a", "acc", None) == ("eine Lampe", "a lamp")
    assert noun_phrase(book, "my", "nom", old) == ("mein altes Buch", "my old book")
    assert noun_phrase(Noun("f", "Frau", "woman"), "my", "nom", None) == ("meine Frau", "my wife")


def test_translations_are_sentences():
    rng = random.Random(1)
    pairs = {german_sentence(rng) for _ in range(2000)}
    assert len(pairs) > 1500
    for german, english in pairs:
        assert german[0].isupper()
        assert english[0].isupper()
        assert german[-1] == english[-1] in ".?"
        assert "_" not in english
        assert not re.search(r"\ba [aeiou]|\ban [^aeiou]", english), english


def test_reading_answers_stand_in_the_text():
    rng = random.Random(2)
    for _ in range(200):
        prompt, answer = retrieval(rng)
        number = re.match(r"Passage (\d): (.*)", answer)
        text = number[2] if number else answer
        value = text.rsplit(" ", 2)[-1].rstrip(".")
        if number:
            passage = re.search(rf"(?m)^(?:Passage {number[1]}: |\[{number[1]}\] |{number[1]}\. )(.*)", prompt)
            assert value in passage[1] or "visit" in text
        else:
            assert value in prompt
    for _ in range(200):
        prompt, answer = copy(rng)
        for line in answer.splitlines():
            assert line.removeprefix("- ").split(": ")[-1] in prompt


def test_passages_and_facts_are_used():
    passages = [f"The river {i} is long. It ends in the sea." for i in range(20)]
    facts = [("Where does river 3 end?", "In the sea", "River 3 ends. In the sea it ends.")]
    texts = [d.messages[0]["content"] for d in synth.generate(400, 0, passages, facts)]
    assert any("The river 7 is long." in text for text in texts)
    assert any("Where does river 3 end?" in text for text in texts)
