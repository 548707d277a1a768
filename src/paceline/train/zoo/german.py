"""German sentences and their English translations, from a lexicon and a small grammar (case, gender, adjective endings,
verb-second order), so that every pair is correct by construction."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.train.zoo.words import NAMES, Pair, capitalized


@dataclass(frozen=True)
class Noun:
    """A German noun in the nominative, and its translation."""

    gender: str  # m, f, n
    german: str
    english: str


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
    return capitalized(german), capitalized(english)


_PARTICIPLES = {
    "see": "seen", "take": "taken", "draw": "drawn", "forget": "forgotten", "show": "shown", "choose": "chosen",
}  # fmt: skip
_PASTS = {verb[4].replace("_", " "): verb[6].replace("_", " ") for verb in VERBS}


def _participle(base: str) -> str:
    return _PARTICIPLES.get(base, _PASTS[base])


def translation(rng: random.Random) -> Pair:
    """One or two sentences to translate."""
    pairs = [german_sentence(rng) for _ in range(rng.choice([1, 1, 1, 2]))]
    german, english = (" ".join(side) for side in zip(*pairs, strict=True))
    prompts = ("Translate German to English: {}", "Translate into English: {}", "What does this mean in English? {}")
    return rng.choice((prompts[0], *prompts)).format(german), english
