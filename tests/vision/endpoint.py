"""A scripted OpenAI-compatible server that sees: it knows the pictures of a data set and answers by a rule."""

import base64
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO

from PIL import Image

from paceline.evals.vision.dataset import Data
from tests.evals.endpoint import Scripted


class Eyes:
    """Which caption belongs to which picture, by the picture's pixels."""

    def __init__(self, data: Data):
        self.captions: dict[bytes, str] = {}
        self.values: dict[bytes, str] = {}
        for case in data.cases:
            for image, caption, value in zip(case.images, case.captions, case.facts["values"], strict=True):
                pixels = data.picture(image).tobytes()
                self.captions[pixels], self.values[pixels] = caption, value


def look(part: dict) -> bytes:
    """The pixels of an image_url part."""
    head, _, content = part["image_url"]["url"].partition(",")
    assert head == "data:image/png;base64"
    return Image.open(BytesIO(base64.b64decode(content))).convert("RGB").tobytes()


def parts(body: dict) -> tuple[list[bytes], str]:
    """Pictures and the whole text of a request."""
    content = body["messages"][0]["content"]
    texts = [part["text"] for part in content if part["type"] == "text"]
    return [look(part) for part in content if part["type"] == "image_url"], "\n".join(texts)


def oracle(eyes: Eyes) -> Callable[[dict], str]:
    """Always right, in whatever way it is asked."""

    def answer(body: dict) -> str:
        pictures, text = parts(body)
        caption = eyes.captions.get(pictures[0], "")
        if text.startswith("Which caption"):
            options = dict(re.findall(r"^([A-I])\. (.*)$", text, re.MULTILINE))
            return next((f"({letter})" for letter, option in options.items() if option == caption), "A")
        if text.startswith("Which picture"):
            asked = re.search(r'"(.*)"', text)[1]
            return next("ABCDEFGHI"[n] for n, picture in enumerate(pictures) if eyes.captions[picture] == asked)
        if text.startswith("Does this caption"):
            return "Yes." if re.search(r'"(.*)"', text)[1] == caption else "No"
        return eyes.values[pictures[0]]

    return answer


@contextmanager
def serving(answer: Callable[[dict], str | dict], refuse: str = "") -> Iterator[tuple[str, list[dict]]]:
    """The server's address, and the requests it has answered. answer: a text, or a whole choice.

    refuse: a status for each request in turn, by its first digit; "." and those beyond the end are answered."""
    statuses = iter(refuse)
    troubles = {"4": "400", "5": "503"}
    with Scripted(answer, lambda body, attempt: troubles.get(next(statuses, "."))) as server:
        yield server.url, server.answered
