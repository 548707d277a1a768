"""Questions to generative models about a case, as chat messages with pictures, and what the replies mean.

    for question in questions(case, data.picture, "choice"):
        question.messages(), question.order

choice     one picture and K lettered captions; one caption and K pictures, each a picture of its own, because a montage
           has a top left corner of its own. Letters are in a random order for each query
circular   the same K times, the order moved on by one each time (MMBench, Liu et al. 2024)
yesno      does this caption fit this picture, for all K x K of a case
question   how many or where, for count and absolute position

Where the picture stays and the captions change, the picture comes first, so that servers can reuse its keys and values.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import product
from typing import Any

from PIL import Image

from paceline.evals.vision import child
from paceline.evals.vision.captions import NUMBERS, PLACES
from paceline.evals.vision.dataset import Case

PROMPTS = 2
"""Version of the wordings below; other wordings are other questions."""
YES_NO = 'Does this caption fit the picture? "{caption}"\nAnswer yes or no.'
DIRECT = {
    "count": "How many of this are in the picture: {thing}? Answer with a number.",
    "absolute_spatial": "Where in the picture is the {thing}? Answer with one of: " + ", ".join(PLACES) + ".",
}
"""Questions without options, about the first object of a case."""
LETTERS = "ABCDEFGHI"
GREY = (127, 127, 127)

Part = dict[str, Any]
"""Text or a picture of a message."""


@dataclass(frozen=True)
class Question:
    """One request. `order`: the number of the key behind each letter; empty without letters."""

    case: str
    subset: str
    way: str
    """i2t, t2i, yesno or question."""
    query: int
    order: tuple[int, ...]
    content: Callable[[], list[Part]]
    """Called when the question is sent, because pictures are large."""

    def key(self, **more: Any) -> str:
        """What makes two questions the same, as a digest. more: what else does."""
        identity = [self.subset, self.case, self.way, self.query, self.order, PROMPTS, more]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]


def questions(
    case: Case,
    picture: Callable[[str], Image.Image],
    ask: str,
    *,
    seed: int = 0,
    blind: bool = False,
    detail: str = "high",
) -> Iterator[Question]:
    """All questions of a case. picture: reads one by its path."""

    def part(i: int) -> Part:
        shown = picture(case.images[i])
        url = data_url(Image.new("RGB", shown.size, GREY) if blind else shown)
        return {"type": "image_url", "image_url": {"url": url, "detail": detail}}

    def about(i: int, text: str) -> list[Part]:
        return [part(i), _text(text)]

    question = partial(Question, case.id, case.subset)
    if ask == "question" and case.subset in DIRECT:
        text = DIRECT[case.subset].format(thing=case.facts["objects"][0] if case.facts else "object")
        for i in range(case.k):
            yield question("question", i, (), partial(about, i, text))
    elif ask == "yesno":
        for i, j in product(range(case.k), repeat=2):
            text = YES_NO.format(caption=case.captions[j])
            yield question("yesno", i * case.k + j, (), partial(about, i, text))
    elif ask in ("choice", "circular"):
        for query, way in product(range(case.k), ("i2t", "t2i")):
            make = _which_caption if way == "i2t" else _which_picture
            first = child(seed, case.subset, case.id, way, query).permutation(case.k).tolist()
            for turn in range(case.k if ask == "circular" else 1):
                order = (*first[turn:], *first[:turn])
                yield question(way, query, order, partial(make, case, query, order, part))


def _which_caption(case: Case, query: int, order: tuple[int, ...], part: Callable[[int], Part]) -> list[Part]:
    listed = "\n".join(f"{LETTERS[n]}. {case.captions[key]}" for n, key in enumerate(order))
    return [part(query), _text(f"Which caption fits the picture?\n{listed}\nAnswer with one letter.")]


def _which_picture(case: Case, query: int, order: tuple[int, ...], part: Callable[[int], Part]) -> list[Part]:
    content = [_text(f'Which picture fits this caption? "{case.captions[query]}"')]
    for n, key in enumerate(order):
        content += [_text(f"Image {LETTERS[n]}:"), part(key)]
    return [*content, _text("Answer with one letter.")]


def _text(text: str) -> Part:
    return {"type": "text", "text": text}


def data_url(picture: Image.Image) -> str:
    """A picture as a data URL: PNG, pixel for pixel."""
    file = BytesIO()
    picture.save(file, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def read_choice(text: str, order: Sequence[int], captions: Sequence[str] = ()) -> int | None:
    """The key that a reply chooses, as "B", "(B)", "B.", "Image B", or a caption word for word; None: no key."""
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


def read_yes_no(text: str, tops: Sequence[Mapping[str, Any]] = ()) -> float | None:
    """P(yes) - P(no) from the first token's most probable ones, or else +1 or -1 from the text; None: neither.

    tops: {"token", "logprob"} each."""
    shares = {"yes": 0.0, "no": 0.0}
    for top in tops:
        word = str(top["token"]).strip().lower().rstrip(".")
        if word in shares:
            shares[word] += math.exp(top["logprob"])
    if any(shares.values()):
        return shares["yes"] - shares["no"]
    match = re.match(r"\W*(yes|no)\b", text, re.IGNORECASE)
    return None if match is None else 1.0 if match[1].lower() == "yes" else -1.0


def read_direct(subset: str, text: str) -> int | None:
    """The number of the value that a reply to a direct question names; None: no value."""
    said = _plain(text)
    if subset == "count":
        words = [str(NUMBERS.index(word) + 1) for word in re.findall(r"[a-z]+", said) if word in NUMBERS]
        numbers = re.findall(r"\d+", said) or words
        return int(numbers[0]) - 1 if len(numbers) == 1 and 1 <= int(numbers[0]) <= len(NUMBERS) else None
    names = {_place(place): n for n, place in enumerate(PLACES)}
    return names.get(_place(said))


def _plain(text: str) -> str:
    return text.strip().rstrip(".").lower()


def _place(text: str) -> str:
    """A place without the words that vary: "in the top-left corner" is "top left"."""
    vary = ["in", "at", "on", "the", "corner", "side", "of", "image", "picture", "middle", "center"]
    return " ".join(word for word in re.findall("[a-z]+", text.lower()) if word not in vary) or "center"
