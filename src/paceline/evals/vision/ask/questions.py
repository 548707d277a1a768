"""The questions of a case, as chat messages with pictures.

    for question in questions(case, picture, options):
        question.messages, question.order

choice     one picture and K lettered captions; one caption and K pictures, each a picture of its own: a montage would
           have a top left corner of its own. Letters in an order drawn for each query
circular   the same K times, the order moved on by one each time (MMBench, Liu et al. 2024)
yesno      does this caption fit this picture, for all K x K of a case
question   how many? where?, for count and absolute position

The picture comes first wherever it stays and the captions change, so that servers can keep its keys and values.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import product
from typing import Any

from PIL import Image

from paceline.evals.vision.dataset import Case
from paceline.evals.vision.seeds import child
from paceline.evals.vision.words import PLACES

PROMPTS = 2
"""Version of the wordings below; other wordings are other questions."""
LETTERS = "ABCDEFGHI"
GREY = (127, 127, 127)

Messages = list[dict[str, Any]]
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
    messages: Callable[[], Messages]
    """Made when it is sent: pictures are large."""

    def key(self, **more: Any) -> str:
        """What makes two questions the same."""
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

    def question(way: str, query: int, order: tuple[int, ...], content: Callable[[], list[Part]]) -> Question:
        return Question(case.id, case.subset, way, query, order, lambda: [{"role": "user", "content": content()}])

    def about(i: int, text: str) -> list[Part]:
        return [part(i), _text(text)]

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
            for order in _orders(case, way, query, ask == "circular", seed):
                yield question(way, query, order, partial(make, case, query, order, part))


def _orders(case: Case, way: str, query: int, circular: bool, seed: int) -> Iterator[tuple[int, ...]]:
    first = child(seed, case.subset, case.id, way, query).permutation(case.k).tolist()
    for turn in range(case.k if circular else 1):
        yield (*first[turn:], *first[:turn])


YES_NO = 'Does this caption fit the picture? "{caption}"\nAnswer yes or no.'
DIRECT = {
    "count": "How many of this are in the picture: {thing}? Answer with a number.",
    "absolute_spatial": "Where in the picture is the {thing}? Answer with one of: " + ", ".join(PLACES) + ".",
}
"""Questions without options; what each asks of is the first object."""


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
    """A picture as PNG in an address, pixel for pixel."""
    file = BytesIO()
    picture.save(file, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
