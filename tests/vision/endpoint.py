"""A scripted OpenAI-compatible server that sees: it knows the pictures of a data set and answers by a rule."""

import base64
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO

from PIL import Image

from paceline.evals.vision.dataset import Data


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
def serving(
    answer: Callable[[dict], str | dict], refuse: Callable[[int], int] = lambda n: 0
) -> Iterator[tuple[str, list[dict]]]:
    """The server's address, and the requests it has answered. answer: a text, or a whole choice.

    refuse: the status of request number n, 0 to answer it."""
    asked: list[dict] = []
    seen = [0]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen[0] += 1
            status = refuse(seen[0])
            if status:
                reply: dict = {"error": {"message": "not now"}}
            else:
                asked.append(body)
                choice = answer(body)
                if isinstance(choice, str):
                    choice = {"message": {"content": choice}, "finish_reason": "stop"}
                reply = {"choices": [choice], "usage": {"prompt_tokens": 100, "completion_tokens": 1}}
            content = json.dumps(reply).encode()
            self.send_response(status or 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        server.server_close()
