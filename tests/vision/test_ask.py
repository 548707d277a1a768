"""Generative models over HTTP: every protocol against servers whose score is known, because they know the pictures of a
data set and answer by a rule."""

import base64
import json
import math
import re
from contextlib import contextmanager
from io import BytesIO

import pytest
from PIL import Image

from paceline.errors import PacelineError
from paceline.evals.vision import ask as asking
from paceline.evals.vision import child
from paceline.evals.vision.captions import VALUES
from paceline.evals.vision.evaluate import run
from paceline.evals.vision.options import RunOptions
from paceline.net.client import Retry
from tests.evals.endpoint import Scripted

from .sets import data, sample


class Eyes:
    """Which caption belongs to which picture, by the picture's pixels."""

    def __init__(self, data):
        self.captions = {}
        self.values = {}
        for case in data.cases:
            for image, caption, value in zip(case.images, case.captions, case.facts["values"], strict=True):
                pixels = data.picture(image).tobytes()
                self.captions[pixels], self.values[pixels] = caption, value


def look(part):
    """The pixels of an image_url part."""
    head, _, content = part["image_url"]["url"].partition(",")
    assert head == "data:image/png;base64"
    return Image.open(BytesIO(base64.b64decode(content))).convert("RGB").tobytes()


def parts(body):
    """Pictures and the whole text of a request."""
    content = body["messages"][0]["content"]
    texts = [part["text"] for part in content if part["type"] == "text"]
    return [look(part) for part in content if part["type"] == "image_url"], "\n".join(texts)


def oracle(eyes):
    """Always right, in whatever way it is asked."""

    def answer(body):
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
def serving(answer, refuse=""):
    """The server's address, and the requests it has answered. answer: a text, or a whole choice.

    refuse: a status for each request in turn, by its first digit; "." and those beyond the end are answered."""
    statuses = iter(refuse)
    troubles = {"4": "400", "5": "503"}
    with Scripted(answer, lambda body, attempt: troubles.get(next(statuses, "."))) as server:
        yield server.url, server.answered


@pytest.fixture(scope="module")
def eyes():
    return Eyes(data())


def _run(url, out=None, *, subsets=("existence", "relative_spatial"), **options):
    spec = f"{url}#eye,cases=2," + ",".join(f"{k}={v}" for k, v in options.items())
    return run(sample(), RunOptions(spec.rstrip(","), ",".join(subsets), batch=8, out=out))


@pytest.mark.parametrize("ask", ["choice", "circular", "yesno"])
def test_a_server_that_sees_is_always_right(eyes, ask):
    with serving(oracle(eyes)) as (url, asked):
        report = _run(url, ask=ask)
    assert [one["subset"] for one in report["results"]] == ["relative_spatial", "existence"]
    for one in report["results"]:
        assert ((one["i2t"], one["t2i"], one["mean"], one["group"]), one["cases"]) == ((100,) * 4, 2)
    each = {"choice": lambda k: 2 * k, "circular": lambda k: 2 * k * k, "yesno": lambda k: k * k}[ask]
    assert len(asked) == 2 * sum(each(k) for k in (4, 2)) == report["replies"]["replies"]
    assert (report["replies"]["invalid"], report["replies"]["tokens"]) == (0, len(asked))
    assert report["replies"]["sent"] == ["96 x 96"]
    assert all(body["temperature"] == 0 and body["model"] == "eye" for body in asked)


def test_direct_questions(eyes):
    with serving(oracle(eyes)) as (url, asked):
        report = _run(url, ask="question", subsets=("absolute_spatial", "count"))
    assert {one["subset"]: one["question"] for one in report["results"]} == {"absolute_spatial": 100, "count": 100}
    assert len(asked) == 36
    with serving(lambda body: "4" if "How many" in parts(body)[1] else "top left") as (url, _):
        report = _run(url, ask="question", subsets=("absolute_spatial", "count"))
    assert [one["question"] for one in report["results"]] == [pytest.approx(100 / 9, abs=1e-3)] * 2


def test_pictures_are_sent_one_by_one_and_come_first(eyes):
    """No montage: its own top left would compete with the picture's. A picture that stays comes before what changes."""
    with serving(oracle(eyes)) as (url, asked):
        _run(url, ask="choice", subsets=("absolute_spatial",))
    for body in asked:
        pictures, text = parts(body)
        assert all(len(pixels) == 96 * 96 * 3 for pixels in pictures)
        content = body["messages"][0]["content"]
        if text.startswith("Which caption"):
            assert (content[0]["type"], len(pictures)) == ("image_url", 1)
        else:
            assert (len(pictures), len(set(pictures))) == (9, 9)
            assert [p["text"] for p in content[1:-1:2]] == [f"Image {letter}:" for letter in "ABCDEFGHI"]


def _expected(letter, way, subset):
    """Share of queries whose right key stands at `letter`, from the orders that the seed gives."""
    cases = [case for case in data().cases if case.subset == subset][:2]
    k = len(VALUES[subset])
    places = [
        child(0, subset, case.id, way, query).permutation(k).tolist().index(query)
        for case in cases
        for query in range(k)
    ]
    return 100 * sum(place == ord(letter) - ord("A") for place in places) / len(places)


def test_a_server_that_always_says_b(eyes):
    """Plainly it scores what its letter happens to hit; in every rotation it is right once in K, and never in all."""
    with serving(lambda body: "B") as (url, _):
        plain, circular = _run(url, ask="choice"), _run(url, ask="circular")
    for one, other in zip(plain["results"], circular["results"], strict=True):
        for way in ("i2t", "t2i"):
            assert one[way] == pytest.approx(_expected("B", way, one["subset"]), abs=1e-3)
            assert other[way] == pytest.approx(100 / one["k"], abs=1e-3)
            assert other[f"circular_{way}"] == 0 <= other[way]
    assert set(plain["replies"]["letters"]) == {"B"}
    assert len(plain["replies"]["right_letters"]) > 1


def test_a_constant_yes_ties_everything(eyes):
    with serving(lambda body: "yes") as (url, _):
        report = _run(url, ask="yesno")
    for one in report["results"]:
        assert one["i2t"] == one["t2i"] == pytest.approx(100 / one["k"], abs=1e-3)


def test_a_blank_picture_is_at_chance(eyes):
    """Captions alone give nothing away: a server that reads them but sees grey gets 1/K over all rotations."""
    grey = bytes([127]) * 96 * 96 * 3
    with serving(lambda body: "A" if set(parts(body)[0]) == {grey} else "nothing") as (url, _):
        report = _run(url, ask="circular", blind="true")
    assert report["replies"]["invalid"] == 0
    assert report["replies"]["blind"]
    for one in report["results"]:
        assert one["i2t"] == one["t2i"] == pytest.approx(100 / one["k"], abs=1e-3)


def test_probabilities_are_scores(eyes):
    """yes and no equally likely in text, told apart by their probabilities alone."""
    right = oracle(eyes)

    def unsure(body):
        yes = 0.4 if right(body).startswith("Yes") else 0.3
        tops = [{"token": "Yes", "logprob": math.log(yes)}, {"token": " no", "logprob": math.log(0.5)}]
        return {
            "message": {"content": "No"}, "finish_reason": "stop", "logprobs": {"content": [{"top_logprobs": tops}]},
        }

    with serving(unsure) as (url, asked):
        report = _run(url, ask="yesno")
    assert report["mean"]["mean"] == 100
    assert all(body["logprobs"] for body in asked)


def test_invalid_replies_are_wrong_and_counted(eyes):
    """Refusals and answers that were cut off."""
    right = oracle(eyes)

    def odd(body):
        if "Which picture" in parts(body)[1]:
            return {"message": {"content": None, "refusal": "I cannot help with that."}, "finish_reason": "stop"}
        there = "above" not in parts(body)[1]
        return {"message": {"content": right(body)}, "finish_reason": "stop" if there else "length"}

    with serving(odd) as (url, _):
        report = _run(url, ask="choice")
    assert [(one["i2t"], one["t2i"]) for one in report["results"]] == [(0, 0), (100, 0)]
    assert (report["replies"]["invalid"], report["replies"]["cut_off"]) == (12 + 8, 8)


def test_a_run_goes_on_without_asking_twice(eyes, tmp_path):
    """Refused after five questions, then asked again: what was answered is kept, a line that was cut off is not."""
    with serving(oracle(eyes), refuse="." * 5 + "4" * 19) as (url, asked):
        report = _run(url, tmp_path, ask="choice", concurrency=1)
        assert (len(asked), len(report["problems"])) == (5, 19)
        assert "answered 400" in report["problems"][0]
        with (tmp_path / "replies.jsonl").open("a") as file:
            file.write('{"key": "cut o')
        report = _run(url, tmp_path, ask="choice")
        assert (len(asked), report["mean"]["group"]) == (24, 100)
        assert not report["problems"]
        assert (_run(url, tmp_path, ask="choice")["results"], len(asked)) == (report["results"], 24)
    kept = [json.loads(line)["key"] for line in (tmp_path / "replies.jsonl").read_text().splitlines()]
    assert len(kept) == len(set(kept)) == 24


def test_a_server_that_refuses_the_first_questions_is_asked_no_more(eyes):
    with serving(oracle(eyes), refuse="4" * 9) as (url, asked):
        with pytest.raises(PacelineError, match="answered 400"):
            _run(url, ask="choice", concurrency=1)
        assert not asked


def test_a_busy_server_is_asked_again(eyes, monkeypatch):
    monkeypatch.setattr(asking, "RETRY", Retry(5, 0.001, 0.01))
    with serving(oracle(eyes), refuse="..5" * 20) as (url, _):
        report = _run(url, ask="choice", subsets=("existence",))
    assert report["mean"]["mean"] == 100
    assert not report["problems"]


def test_no_server_is_one_line(monkeypatch):
    monkeypatch.setattr(asking, "RETRY", Retry(5, 0.001, 0.01))
    with pytest.raises(PacelineError, match=r"existence/00000, \w+ \d: .*broke off: .*after 5 tries"):
        _run("http://127.0.0.1:9/v1", subsets=("existence",))


@pytest.mark.parametrize(("text", "key"), [
    ("B", 2), ("(b)", 2), ("B.", 2), ("**B**", 2), ("The answer is B", 2), ("Image B", 2), (" a\n", 0),
    ("B. the cat is small", 2), ("the cat is small.", 2), ("B. the cat is large", None), ("D", None), ("", None),
    ("A or B", None), ("I cannot say", None), ("Beautiful", None),
])
def test_replies_to_choices(text, key):
    captions = ["the cat is large", "the cat is medium-sized", "the cat is small"]
    assert asking.read_choice(text, [0, 2, 1], captions) == key


@pytest.mark.parametrize(("subset", "text", "value"), [
    ("count", "3", 2), ("count", "There are three.", 2), ("count", "two or three", None), ("count", "12", None),
    ("absolute_spatial", "in the top-left corner", 0), ("absolute_spatial", "Top left.", 0),
    ("absolute_spatial", "at the top", 1), ("absolute_spatial", "At the middle left.", 3),
    ("absolute_spatial", "center left", 3), ("absolute_spatial", "center", 4),
    ("absolute_spatial", "in the middle", 4),
    ("absolute_spatial", "On the right side of the image", 5), ("absolute_spatial", "somewhere", None),
])
def test_replies_to_direct_questions(subset, text, value):
    assert asking.read_direct(subset, text) == value
