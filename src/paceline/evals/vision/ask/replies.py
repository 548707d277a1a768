"""What a reply means: a letter, yes or no, a number, a place; None where it means nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.evals.vision.ask.questions import LETTERS
from paceline.evals.vision.words import NUMBERS, PLACES


def choice(text: str, order: Sequence[int], captions: Sequence[str] = ()) -> int | None:
    """The key that a reply chooses: "B", "(B)", "B.", "Image B", or a caption word for word."""
    said = text.strip().strip("*\"'")
    letters = LETTERS[: len(order)]
    match = re.fullmatch(
        rf"(?:(?:the )?(?:answer|image|picture|caption)(?: is)?:?\s*)?\(?([{letters}])\)?[.:]?", said, re.IGNORECASE
    )
    if match is None and captions:  # "B. the kite is above the tree"
        match = re.fullmatch(rf"\(?([{letters}])[).:]\s*(.+?)\.?", said)
        if match is not None and _plain(match[2]) != _plain(captions[order[letters.index(match[1])]]):
            return None
    if match is not None:
        return order[letters.index(match[1].upper())]
    exact = [key for key in order if captions and _plain(captions[key]) == _plain(said)]
    return exact[0] if len(exact) == 1 else None


def _plain(text: str) -> str:
    return text.strip().rstrip(".").lower()


def yes_no(text: str, tops: Sequence[Mapping[str, Any]] = ()) -> float | None:
    """P(yes) - P(no) from the first token's likeliest ones, or +1 and -1 from the text where there are none."""
    shares = {"yes": 0.0, "no": 0.0}
    for top in tops:
        word = str(top["token"]).strip().lower().rstrip(".")
        if word in shares:
            shares[word] += math.exp(top["logprob"])
    if any(shares.values()):
        return shares["yes"] - shares["no"]
    match = re.match(r"\W*(yes|no)\b", text, re.IGNORECASE)
    return None if match is None else 1.0 if match[1].lower() == "yes" else -1.0


def direct(subset: str, text: str) -> int | None:
    """The number of the value that a reply to a direct question names."""
    said = _plain(text)
    if subset == "count":
        numbers = re.findall(r"\d+", said) or [
            str(NUMBERS.index(w) + 1) for w in re.findall(r"[a-z]+", said) if w in NUMBERS
        ]
        return int(numbers[0]) - 1 if len(numbers) == 1 and 1 <= int(numbers[0]) <= len(NUMBERS) else None
    names = {_place(place): n for n, place in enumerate(PLACES)}
    return names.get(_place(said))


def _place(text: str) -> str:
    """A place without what people vary: "in the top-left corner", "top left"."""
    words = re.sub(r"[^a-z]+", " ", text.lower()).split()
    kept = [
        word
        for word in words
        if word not in ("in", "at", "on", "the", "corner", "side", "of", "image", "picture", "middle", "center")
    ]
    return " ".join(kept) or "center"
