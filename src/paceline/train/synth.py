"""Generated examples: sums with a short worked answer, German to English, reading over numbered passages, copying.

Everything comes from the word lists and templates below (and, for reading, from the passages given), by one seed:
the same seed gives the same examples. The German is a small grammar (case, gender, adjective endings, verb-second
order), so that every pair is correct by construction.

Doesn't know: tokenizers, models, files.

    python -m paceline.train synth --count 12 --seed 0
"""

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from paceline.train.sources import Document, assistant, user

Pair = tuple[str, str]  # (prompt, answer)


# --- German to English -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noun:
    gender: str  # m, f, n
    german: str
    english: str


def _words(text: str, between: str = " ") -> list[str]:
    return text.split(between)


def _entries(text: str, between: str = " ") -> list[tuple[str, ...]]:
    return [tuple(entry.split("/")) for entry in text.split(between)]


def _nouns(gender: str, words: str) -> list[Noun]:
    return [Noun(gender, german, english) for german, english in _entries(words)]


PEOPLE = _nouns(
    "m",
    "Mann/man Lehrer/teacher Arzt/doctor Vater/father Bruder/brother Sohn/son Freund/friend "
    "Koch/cook Bäcker/baker Gärtner/gardener Fahrer/driver Maler/painter Onkel/uncle Großvater/grandfather",
)
PEOPLE += _nouns(
    "f",
    "Frau/woman Lehrerin/teacher Ärztin/doctor Mutter/mother Schwester/sister Tochter/daughter Nachbarin/neighbour "
    "Freundin/friend Tante/aunt Großmutter/grandmother Königin/queen Bäuerin/farmer Sängerin/singer",
)
PEOPLE += _nouns("n", "Kind/child Mädchen/girl")
THINGS = _nouns(
    "m",
    "Apfel/apple Brief/letter Tisch/table Stuhl/chair Schlüssel/key Garten/garden Hut/hat Koffer/suitcase Ball/ball "
    "Kuchen/cake Schirm/umbrella Ring/ring Korb/basket Teller/plate Mantel/coat Stein/stone Zug/train Baum/tree",
)
THINGS += _nouns(
    "f",
    "Zeitung/newspaper Tasche/bag Lampe/lamp Uhr/clock Tür/door Flasche/bottle Karte/map Blume/flower "
    "Suppe/soup Kamera/camera Brücke/bridge Straße/street Maschine/machine Gitarre/guitar Tasse/cup Katze/cat",
)
THINGS += _nouns(
    "n",
    "Buch/book Haus/house Auto/car Bild/picture Fenster/window Brot/bread Fahrrad/bicycle Pferd/horse Glas/glass "
    "Messer/knife Boot/boat Hemd/shirt Kleid/dress Geschenk/present Zimmer/room Telefon/telephone Heft/notebook",
)
ADJECTIVES = _entries(
    "alt/old neu/new klein/small groß/big schön/beautiful rot/red blau/blue grün/green schwarz/black "
    "weiß/white gelb/yellow lang/long kurz/short schwer/heavy leicht/light billig/cheap einfach/simple "
    "wichtig/important seltsam/strange warm/warm kalt/cold jung/young reich/rich freundlich/friendly "
    "ruhig/quiet stark/strong"
)
THING_ADJECTIVES, PERSON_ADJECTIVES = ADJECTIVES[:21], [*ADJECTIVES[:4], *ADJECTIVES[21:]]
# infinitive / present he-form / past he-form / participle (all with haben) / English: base, he-form, past
VERBS = _entries(
    "kaufen/kauft/kaufte/gekauft/buy/buys/bought sehen/sieht/sah/gesehen/see/sees/saw "
    "suchen/sucht/suchte/gesucht/look_for/looks_for/looked_for finden/findet/fand/gefunden/find/finds/found "
    "nehmen/nimmt/nahm/genommen/take/takes/took bringen/bringt/brachte/gebracht/bring/brings/brought "
    "verkaufen/verkauft/verkaufte/verkauft/sell/sells/sold "
    "zeichnen/zeichnet/zeichnete/gezeichnet/draw/draws/drew "
    "brauchen/braucht/brauchte/gebraucht/need/needs/needed holen/holt/holte/geholt/fetch/fetches/fetched "
    "verlieren/verliert/verlor/verloren/lose/loses/lost tragen/trägt/trug/getragen/carry/carries/carried "
    "malen/malt/malte/gemalt/paint/paints/painted vergessen/vergisst/vergaß/vergessen/forget/forgets/forgot "
    "zeigen/zeigt/zeigte/gezeigt/show/shows/showed "
    "bezahlen/bezahlt/bezahlte/bezahlt/pay_for/pays_for/paid_for "
    "wählen/wählt/wählte/gewählt/choose/chooses/chose lieben/liebt/liebte/geliebt/love/loves/loved"
)
PLACES = _entries(
    "im Garten/in the garden;in der Stadt/in the city;auf dem Markt/at the market;"
    "in der Küche/in the kitchen;im Park/in the park;im Wald/in the forest;am See/at the lake;"
    "in der Schule/at school;zu Hause/at home;auf der Straße/in the street;im Büro/in the office;"
    "am Bahnhof/at the station;in der Bibliothek/in the library;im Krankenhaus/in the hospital;"
    "auf dem Berg/on the mountain;am Strand/on the beach;im Hotel/in the hotel;in Berlin/in Berlin;"
    "in Wien/in Vienna;in München/in Munich;neben der Kirche/next to the church;"
    "hinter dem Haus/behind the house;vor dem Theater/in front of the theatre;"
    "unter der Brücke/under the bridge",
    ";",
)
PRESENT_TIMES = _entries(
    "heute/today;jetzt/now;jeden Tag/every day;oft/often;immer/always;am Morgen/in the morning;"
    "am Abend/in the evening;manchmal/sometimes;am Montag/on Monday;am Freitag/on Friday;"
    "am Sonntag/on Sunday;im Sommer/in summer;im Winter/in winter",
    ";",
)
PAST_TIMES = _entries(
    "gestern/yesterday;vor zwei Tagen/two days ago;letzte Woche/last week;letztes Jahr/last year;"
    "vor einer Stunde/an hour ago;vor vielen Jahren/many years ago;am Dienstag/on Tuesday;im März/in March",
    ";",
)
NAMES = _words(
    "Anna Ben Clara David Emma Felix Greta Hannah Jonas Julia Karl Lena Lukas Maria Max Nina Oskar Paul Sarah Tom"
)
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


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def german_sentence(rng: random.Random) -> Pair:
    """One (German, English) pair."""

    def subject() -> Pair:
        if rng.random() < 0.25:
            return (rng.choice(NAMES),) * 2
        adjective = rng.choice(PERSON_ADJECTIVES) if rng.random() < 0.4 else None
        return noun_phrase(rng.choice(PEOPLE), rng.choice(["the", "the", "the", "my", "a"]), "nom", adjective)

    def thing(case: str) -> Pair:
        adjective = rng.choice(THING_ADJECTIVES) if rng.random() < 0.5 else None
        return noun_phrase(rng.choice(THINGS), rng.choice(["the", "the", "a", "a", "my", "her"]), case, adjective)

    s, o = subject(), thing("acc")
    o2 = thing("acc")
    n, n2 = thing("nom"), subject()
    infinitive, present, past, participle, base, presents, pasts = (w.replace("_", " ") for w in rng.choice(VERBS))
    place, now, then = rng.choice(PLACES), rng.choice(PRESENT_TIMES), rng.choice(PAST_TIMES)
    adjective, person = rng.choice(THING_ADJECTIVES), rng.choice(PERSON_ADJECTIVES)
    other = rng.choice([a for a in THING_ADJECTIVES if a != adjective])
    name = rng.choice([n for n in NAMES if n not in s[0]])
    count, german_count = rng.choice([(2, "zwei"), (3, "drei"), (4, "vier"), (5, "fünf"), (10, "zehn")])
    templates: list[Callable[[], Pair]] = [
        lambda: (f"{s[0]} {present} {o[0]}.", f"{s[1]} {presents} {o[1]}."),
        lambda: (f"{s[0]} {past} {o[0]}.", f"{s[1]} {pasts} {o[1]}."),
        lambda: (f"{s[0]} hat {o[0]} {participle}.", f"{s[1]} has {_participle(base)} {o[1]}."),
        lambda: (f"{s[0]} {present} {o[0]} {place[0]}.", f"{s[1]} {presents} {o[1]} {place[1]}."),
        lambda: (f"{s[0]} {past} {o[0]} {place[0]}.", f"{s[1]} {pasts} {o[1]} {place[1]}."),
        lambda: (f"{now[0]} {present} {s[0]} {o[0]}.", f"{now[1]} {s[1]} {presents} {o[1]}."),
        lambda: (f"{then[0]} {past} {s[0]} {o[0]}.", f"{then[1]} {s[1]} {pasts} {o[1]}."),
        lambda: (f"{place[0]} {past} {s[0]} {o[0]}.", f"{place[1]} {s[1]} {pasts} {o[1]}."),
        lambda: (f"{s[0]} will {o[0]} {infinitive}.", f"{s[1]} wants to {base} {o[1]}."),
        lambda: (f"{s[0]} kann {o[0]} {infinitive}.", f"{s[1]} can {base} {o[1]}."),
        lambda: (f"{s[0]} muss {now[0]} {o[0]} {infinitive}.", f"{s[1]} must {base} {o[1]} {now[1]}."),
        lambda: (f"{s[0]} wird {o[0]} {infinitive}.", f"{s[1]} will {base} {o[1]}."),
        lambda: (f"{n[0]} ist {adjective[0]}.", f"{n[1]} is {adjective[1]}."),
        lambda: (f"{n[0]} war {adjective[0]}.", f"{n[1]} was {adjective[1]}."),
        lambda: (f"{n[0]} ist {adjective[0]} und {other[0]}.", f"{n[1]} is {adjective[1]} and {other[1]}."),
        lambda: (f"{n[0]} ist nicht {adjective[0]}.", f"{n[1]} is not {adjective[1]}."),
        lambda: (f"ist {n[0]} {adjective[0]}?", f"is {n[1]} {adjective[1]}?"),
        lambda: (f"{s[0]} ist {place[0]}.", f"{s[1]} is {place[1]}."),
        lambda: (f"{then[0]} war {s[0]} {place[0]}.", f"{then[1]} {s[1]} was {place[1]}."),
        lambda: (f"{s[0]} wohnt {place[0]}.", f"{s[1]} lives {place[1]}."),
        lambda: (f"{s[0]} arbeitet {now[0]} {place[0]}.", f"{s[1]} works {place[1]} {now[1]}."),
        lambda: (f"wo ist {n[0]}?", f"where is {n[1]}?"),
        lambda: (f"wer {past} {o[0]}?", f"who {pasts} {o[1]}?"),
        lambda: (f"warum {present} {s[0]} {o[0]}?", f"why does {s[1]} {base} {o[1]}?"),
        lambda: (f"{n[0]} gehört {name}.", f"{n[1]} belongs to {name}."),
        lambda: (f"{s[0]} {past} {o[0]} und {o2[0]}.", f"{s[1]} {pasts} {o[1]} and {o2[1]}."),
        lambda: (f"{name} gibt {o[0]} nicht zurück.", f"{name} does not give {o[1]} back."),
        lambda: (f"{s[0]} denkt, dass {n[0]} {adjective[0]} ist.", f"{s[1]} thinks that {n[1]} is {adjective[1]}."),
        lambda: (
            f"{s[0]} wartet seit {german_count} Stunden {place[0]}.",
            f"{s[1]} has been waiting {place[1]} for {count} hours.",
        ),
        lambda: (f"{s[0]} ist {person[0]}, aber {n2[0]} ist müde.", f"{s[1]} is {person[1]}, but {n2[1]} is tired."),
        lambda: (f"es gibt {o[0]} {place[0]}.", f"there is {o[1]} {place[1]}."),
        lambda: (f"ich habe {o[0]} {participle}.", f"I have {_participle(base)} {o[1]}."),
        lambda: (f"wir haben {german_count} Bücher {place[0]}.", f"we have {count} books {place[1]}."),
        lambda: (f"weil es regnet, bleibt {s[0]} zu Hause.", f"because it is raining, {s[1]} stays at home."),
    ]
    german, english = rng.choice(templates)()
    return _upper(german), _upper(english)


_PARTICIPLES = {
    "see": "seen", "take": "taken", "draw": "drawn", "forget": "forgotten", "show": "shown", "choose": "chosen",
}  # fmt: skip
_PASTS = {verb[4].replace("_", " "): verb[6].replace("_", " ") for verb in VERBS}


def _participle(base: str) -> str:
    return _PARTICIPLES.get(base, _PASTS[base])


def translation(rng: random.Random) -> Pair:
    pairs = [german_sentence(rng) for _ in range(rng.choice([1, 1, 1, 2]))]
    german, english = (" ".join(side) for side in zip(*pairs, strict=True))
    prompts = ("Translate German to English: {}", "Translate into English: {}", "What does this mean in English? {}")
    return rng.choice((prompts[0], *prompts)).format(german), english


# --- arithmetic --------------------------------------------------------------------------------------------------


def arithmetic(rng: random.Random) -> Pair:
    """A bare sum or a one- or two-step word problem; every answer states the sum and its result."""
    return rng.choice([_bare_sum, _word_problem])(rng)


def _bare_sum(rng: random.Random) -> Pair:
    kind = rng.choice("++--*/")
    if kind == "+":
        a, b = rng.randint(2, 99), rng.randint(2, 99)
        tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
        worked = f"{tens} + {ones} = {a + b}, so {a} + {b} = {a + b}." if tens and ones else f"{a} + {b} = {a + b}."
    elif kind == "-":
        b, a = sorted((rng.randint(2, 99), rng.randint(2, 99)))
        worked = f"{a} - {b} = {a - b}."
    elif kind == "*":
        a, b = rng.randint(2, 12), rng.randint(2, 12)
        worked = f"{a} * {b} = {a * b}."
    else:
        b, result = rng.randint(2, 12), rng.randint(2, 12)
        a = b * result
        worked = f"{a} / {b} = {result}, because {result} * {b} = {a}."
    ask = rng.choice(["What is {}?", "Calculate {}.", "How much is {}?"])
    return ask.format(f"{a} {kind} {b}"), worked


ITEMS = _words(
    "apples books coins cards eggs flowers letters marbles oranges pencils photos plates shells stamps tickets"
)


def _word_problem(rng: random.Random) -> Pair:
    name, other = rng.sample(NAMES, 2)
    item = rng.choice(ITEMS)
    a, b, c = rng.randint(5, 60), rng.randint(2, 40), rng.randint(2, 9)
    more, less = max(a, b), min(a, b)
    price, boxes = rng.randint(2, 12), rng.randint(2, 12)
    problems = [
        (
            f"{name} has {a} {item}. {other} gives {name} {b} more. How many {item} does {name} have now?",
            f"{name} has {a} + {b} = {a + b} {item}. The answer is {a + b}.",
        ),
        (
            f"{name} has {more} {item} and sells {less} of them. How many {item} are left?",
            f"There are {more} - {less} = {more - less} {item} left. The answer is {more - less}.",
        ),
        (
            f"{name} buys {boxes} boxes of {item}. There are {price} {item} in each box. How many {item} is that?",
            f"That is {boxes} * {price} = {boxes * price} {item}. The answer is {boxes * price}.",
        ),
        (
            f"{name} shares {boxes * c} {item} equally among {c} friends. How many {item} does each friend get?",
            f"Each friend gets {boxes * c} / {c} = {boxes} {item}. The answer is {boxes}.",
        ),
        (
            f"{name} buys {c} {item} for {price} dollars each and pays {b} dollars for a bag. How much is that?",
            f"The {item} cost {c} * {price} = {c * price} dollars. {name} pays {c * price} + {b} = {c * price + b} "
            f"dollars. The answer is {c * price + b}.",
        ),
        (
            f"{name} has {a} {item}. {other} has {c} more than {name}. How many {item} do they have together?",
            f"{other} has {a} + {c} = {a + c} {item}. Together they have {a} + {a + c} = {a + a + c} {item}. "
            f"The answer is {a + a + c}.",
        ),
    ]
    return rng.choice(problems)


# --- reading: passages, notes, copying ---------------------------------------------------------------------------

SURNAMES = _words(
    "Abbott Brandt Castillo Dietrich Eriksen Fischer Garnier Holloway Ibsen Jansen Keller Lindqvist Moreau "
    "Novak Okafor Petrov Quinn Rossi Silva Tanaka Ullman Vargas Weber Yilmaz Zeller"
)
TOWNS = _words(
    "Ashford Birkdale Carrow Dunmore Elmstead Fairhaven Glenrock Harlow Ironbridge Jasper Kirkwall Larkhill "
    "Millbrook Northam Oakdale Pinehurst Queensbury Redcliff Stonewell Thornton Upwell Westmere Yarrow"
)
BUILDINGS = _words("library museum theatre bakery school hospital station hotel harbour observatory mill castle")
MATERIALS = _words(
    "red brick;grey stone;glass and steel;oak wood;white marble;concrete",
    ";",
)
KNOWN_FOR = _words(
    "its long glass roof;a clock that runs backwards;its collection of old maps;the garden behind it;"
    "its painted ceiling;a bell made of silver;its view of the river;the oldest lift in the country;"
    "its honey cake;a family of owls",
    ";",
)
MONTHS = _words("January February March April May June July August September October November December")


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
            f"{_upper(self.what)} was built in {self.year}.",
            f"It was designed by {self.person}.",
            f"It is made of {self.material}.",
            f"It is known for {self.known_for}.",
            f"About {self.visitors} people visit it every month.",
            f"It opens at {self.opens} in the morning.",
        ]

    def questions(self) -> list[tuple[str, str, int]]:
        """(question, answer, which sentence holds it)"""
        return [
            (f"When was {self.what} built?", f"{_upper(self.what)} was built in {self.year}.", 0),
            (f"Who designed {self.what}?", f"{_upper(self.what)} was designed by {self.person}.", 1),
            (f"What is {self.what} made of?", f"{_upper(self.what)} is made of {self.material}.", 2),
            (f"What is {self.what} known for?", f"{_upper(self.what)} is known for {self.known_for}.", 3),
            (
                f"How many people visit {self.what} every month?",
                f"About {self.visitors} people visit {self.what} every month.",
                4,
            ),
            (f"When does {self.what} open?", f"{_upper(self.what)} opens at {self.opens} in the morning.", 5),
        ]


def place(rng: random.Random) -> Place:
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
    about = place(rng)
    question, answer, keep = rng.choice(about.questions())
    passage = _passage(rng, about, keep, rng.randint(2, 5))
    form = rng.choice(["{p}\n\n{q}", "{q}\n\n{p}", "Passage: {p}\n\nQuestion: {q}", "Read the passage.\n\n{p}\n\n{q}"])
    return form.format(p=passage, q=question), answer


def retrieval(rng: random.Random, passages: Sequence[str] = (), facts: Sequence[tuple[str, str, str]] = ()) -> Pair:
    """Several numbered passages, one of which holds the answer.

    `facts` are (question, answer, passage) from a data set, `passages` distractors; without them all is generated.
    """
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
            f"{_upper(about.what)} was built in {about.year}, designed by {about.person}, "
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

# share of each kind among generated examples
SHARES = {
    "translation": 0.26, "arithmetic": 0.2, "question": 0.12, "retrieval": 0.2, "summary": 0.1, "copy": 0.1,
    "small talk": 0.02,
}  # fmt: skip


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
