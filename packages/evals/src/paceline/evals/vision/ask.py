"""Ask generative models about cases, in chat messages with pictures; read the replies; work out the figures.

choice     one picture and K lettered captions; one caption and K pictures, each a picture of its own, because a montage
           has a top left corner of its own. Letters are in a random order for each query
circular   the same K times, the order moved on by one each time (MMBench, Liu et al. 2024)
yesno      does this caption fit this picture, for all K x K of a case
question   how many or where, for count and absolute position

If only the captions change, the picture comes first, so that servers can reuse its keys and values. Replies are
appended to replies.jsonl as they come, and their questions are not asked again."""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paceline.errors import PacelineError
from paceline.evals.vision import child
from paceline.evals.vision.captions import NUMBERS, PLACES, VALUES
from paceline.evals.vision.dataset import Case, Data, data_url, values_of
from paceline.evals.vision.options import EndpointOptions
from paceline.evals.vision.scores import summarise
from paceline.net.client import Retry
from paceline.net.completion import Completion, CompletionError
from paceline.net.endpoint import Body, Remote, answer_all
from paceline.net.keys import Keys
from paceline.runs.runs import Lines

PROMPTS = 2  # Version of the wordings below: other wordings are other questions.
YES_NO = 'Does this caption fit the picture? "{caption}"\nAnswer yes or no.'
DIRECT = {
    "count": "How many of this are in the picture: {thing}? Answer with a number.",
    "absolute_spatial": "Where in the picture is the {thing}? Answer with one of: " + ", ".join(PLACES) + ".",
}
"""Questions without options, about the first object of a case."""
LETTERS = "ABCDEFGHI"
GREY = (127, 127, 127)
REPLIES = "replies.jsonl"
RETRY = Retry(tries=5)
TOP_TOKENS = 20  # Tokens to ask for if probabilities are scores.
FAILURES = 3  # Asking ends if so many first questions fail.

Part = dict[str, Any]  # text or a picture of a message
Reply = dict[str, Any]  # a row of replies.jsonl
Read = list[tuple[Reply, Any]]
"""Replies and their meanings: a key's number, a score or a value's number; None for an invalid reply."""


@dataclass(frozen=True)
class Question:
    """One request. `order`: the number of the key behind each letter; empty without letters."""

    case: str
    subset: str
    way: str  # i2t, t2i, yesno or question
    query: int
    order: tuple[int, ...]
    content: Callable[[], list[Part]]  # Called when the question is sent, because pictures are large.

    def key(self, **more: Any) -> str:
        """A digest that is equal for equal questions. more: further settings that count."""
        identity = [self.subset, self.case, self.way, self.query, self.order, PROMPTS, more]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]


def questions(case: Case, picture: Callable[[str], Image.Image], options: EndpointOptions) -> Iterator[Question]:
    """All questions of a case. picture: reads one by its path."""
    ask, question = options.ask, partial(Question, case.id, case.subset)

    def part(i: int) -> Part:
        shown = picture(case.images[i])
        url = data_url(Image.new("RGB", shown.size, GREY) if options.blind else shown)
        return {"type": "image_url", "image_url": {"url": url, "detail": options.detail}}

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
            first = child(options.seed, case.subset, case.id, way, query).permutation(case.k).tolist()
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


async def ask_all(
    data: Data, options: EndpointOptions, folder: Path, progress: Callable[[int, int], None] = lambda done, total: None,
    keys: Keys = Keys(),
) -> list[Reply]:  # fmt: skip
    """The replies to all questions that could be answered. Failures become problems of `data`.

    Raises PacelineError if no question at all could be answered."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {name: getattr(options, name) for name in ("model", "blind", "detail", "max_tokens")}
    wanted: dict[str, Question] = {}
    for subset in VALUES:
        cases = [case for case in data.cases if case.subset == subset]
        for case in cases[: options.cases or len(cases)]:
            wanted |= {question.key(**settings): question for question in questions(case, data.picture, options)}
    failures: list[str] = []
    endpoint = Remote(
        f"{options.checkpoint}#{options.model}", key=keys.of(options.checkpoint),
        slots=options.concurrency, timeout=options.timeout, retry=RETRY,
    )  # fmt: skip
    with Lines(folder / REPLIES) as replies:
        done = sum(key in replies for key in wanted)

        async def asked(body: Body) -> Completion:
            nonlocal done
            if len(failures) >= FAILURES and not done:
                raise CompletionError(failures[0])
            question = wanted[body["key"]]
            try:
                completion = await endpoint.complete(_body(question, options))
            except PacelineError as error:
                failures.append(f"{question.subset}/{question.case}, {question.way} {question.query}: {error}")
                raise CompletionError(failures[-1]) from None
            replies.append(_row(body["key"], question, completion))
            done += 1
            progress(done, len(wanted))
            return completion

        try:
            await answer_all(asked, [{"key": key} for key in wanted if key not in replies], options.concurrency)
        finally:
            await endpoint.aclose()
        if failures and not done:
            raise PacelineError(failures[0])
        data.problems += failures
        return [reply for key in wanted if (reply := replies.get(key)) is not None]


def _body(question: Question, options: EndpointOptions) -> dict[str, Any]:
    messages = [{"role": "user", "content": question.content()}]
    body = {"temperature": 0, "max_tokens": options.max_tokens, "messages": messages}
    return body | ({"logprobs": True, "top_logprobs": TOP_TOKENS} if options.ask == "yesno" else {})


def _row(key: str, question: Question, completion: Completion) -> Reply:
    return {
        "key": key,
        **{name: getattr(question, name) for name in ("subset", "case", "way", "query", "order")},
        "text": completion.text,
        "finish": completion.finish_reason,
        "tops": completion.logprobs[0].get("top_logprobs", []) if completion.logprobs else [],
        "prompt_tokens": completion.usage.get("prompt_tokens") or 0,
        "tokens": completion.usage.get("completion_tokens") or 0,
    }


def _meaning(reply: Reply, case: Case) -> Any:
    if reply["finish"] == "length":
        return None
    if reply["way"] == "yesno":
        return read_yes_no(reply["text"], reply["tops"])
    if reply["way"] == "question":
        return read_direct(case.subset, reply["text"])
    return read_choice(reply["text"], reply["order"], case.captions if reply["way"] == "i2t" else ())


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
    return {_place(place): n for n, place in enumerate(PLACES)}.get(_place(said))


def _plain(text: str) -> str:
    return text.strip().rstrip(".").lower()


def _place(text: str) -> str:
    """A place without the words that vary: "in the top-left corner" is "top left"."""
    vary = ["in", "at", "on", "the", "corner", "side", "of", "image", "picture", "middle", "center"]
    return " ".join(word for word in re.findall("[a-z]+", text.lower()) if word not in vary) or "center"


def figures(data: Data, replies: list[Reply], options: EndpointOptions) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns each subset's figures, and counts of letters, invalid replies and tokens."""
    cases, read = {case.name: case for case in data.cases}, dict[str, Read]()
    for reply in replies:
        name = f"{reply['subset']}/{reply['case']}"
        read.setdefault(name, []).append((reply, _meaning(reply, cases[name])))
    results = [
        _subset(subset, answered, options.ask)
        for subset in VALUES
        if (answered := [(cases[name], pairs) for name, pairs in read.items() if cases[name].subset == subset])
    ]
    return results, _habits([pair for pairs in read.values() for pair in pairs])


def _subset(subset: str, answered: list[tuple[Case, Read]], ask: str) -> dict[str, Any]:
    """The figures of a subset's cases."""
    values = values_of(subset, [case for case, _ in answered])
    if ask == "yesno":
        return summarise(subset, [_scores(case.k, pairs) for case, pairs in answered], values)
    to_text, to_image = (
        [_choices(case.k, pairs, "question" if ask == "question" else way) for case, pairs in answered]
        for way in ("i2t", "t2i")
    )
    one = summarise(subset, to_text, values, to_image=to_image)
    if ask == "question":
        one["question"] = one["i2t"]
        return {key: one[key] for key in ("subset", "cases", "k", "values", "chance", "question") if key in one}
    if ask == "circular":
        # `way`: over all rotations. `circular_way`: a query is right if it is right in all of them.
        for way in ("i2t", "t2i"):
            queries = [_by_query(pairs, way) for _, pairs in answered]
            right = [np.mean([np.mean([key == query for key in keys]) for query, keys in of.items()]) for of in queries]
            one[f"circular_{way}"] = one.pop(way)
            one[way] = round(100 * float(np.mean(right)), 4)
        one["circular"] = one["mean"]
        one["mean"] = (one["i2t"] + one["t2i"]) / 2
    return one


def _scores(k: int, pairs: Read) -> np.ndarray:
    """Scores, (K, K), picture by caption; -inf if the reply cannot be read."""
    scores = np.full((k, k), -np.inf)
    for reply, meaning in pairs:
        if meaning is not None:
            scores[divmod(reply["query"], k)] = meaning
    return scores


def _by_query(pairs: Read, way: str) -> dict[int, list[Any]]:
    """The meanings of the replies to each query in one direction."""
    meanings: dict[int, list[Any]] = {}
    for reply, meaning in pairs:
        if reply["way"] == way:
            meanings.setdefault(reply["query"], []).append(meaning)
    return meanings


def _choices(k: int, pairs: Read, way: str) -> np.ndarray:
    """Choices, (K, K): row q has 1 at the key chosen for query q. The row is NaN if no key, or several, were chosen."""
    table = np.full((k, k), np.nan)
    for query, keys in _by_query(pairs, way).items():
        if len(set(keys)) == 1 and keys[0] is not None:
            table[query] = 0.0
            table[query, keys[0]] = 1.0
    return table


def _habits(pairs: Read) -> dict[str, Any]:
    """Letters chosen and letters that were right, invalid replies, tokens."""
    lettered = [(reply, meaning) for reply, meaning in pairs if reply["order"]]
    chosen = Counter(LETTERS[reply["order"].index(key)] for reply, key in lettered if key is not None)
    right = Counter(LETTERS[reply["order"].index(reply["query"])] for reply, _ in lettered)
    return {
        "replies": len(pairs),
        "invalid": sum(meaning is None for _, meaning in pairs),
        "cut_off": sum(reply["finish"] == "length" for reply, _ in pairs),
        "letters": dict(sorted(chosen.items())),
        "right_letters": dict(sorted(right.items())),
        "prompt_tokens": sum(reply["prompt_tokens"] for reply, _ in pairs),
        "tokens": sum(reply["tokens"] for reply, _ in pairs),
    }
