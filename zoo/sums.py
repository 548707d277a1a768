"""Sums with a short worked answer, bare or as word problems."""

import random

from zoo.words import ITEMS, NAMES, Pair


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
