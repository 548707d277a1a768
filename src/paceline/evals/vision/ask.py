"""Ask a generative model about a data set, and work the figures out from its replies.

    replies = asyncio.run(ask_all(data, options, folder))
    results, habits = figures(data, replies, options)

Replies are appended to replies.jsonl as they come; a question whose reply is there is not asked again.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import PacelineError
from paceline.evals.vision.captions import VALUES
from paceline.evals.vision.dataset import Case, Data, values_of
from paceline.evals.vision.options import EndpointOptions
from paceline.evals.vision.questions import LETTERS, Question, questions, read_choice, read_direct, read_yes_no
from paceline.evals.vision.scores import summarise
from paceline.workbench.client import Client, Completion, Retry
from paceline.workbench.runs import Lines

REPLIES = "replies.jsonl"
RETRY = Retry(tries=5)
TOP_TOKENS = 20
"""Most probable tokens that are asked for where probabilities are scores."""
FAILURES = 3
"""Questions in a row that fail at the beginning before no more are asked."""

Reply = dict[str, Any]
"""A row of replies.jsonl."""
Read = list[tuple[Reply, Any]]
"""Replies and their meanings: a key's number, a score or a value's number; None for an invalid reply."""


def _wanted(data: Data, options: EndpointOptions) -> dict[str, Question]:
    """The questions of the first cases of each subset, by their keys."""
    settings = {"model": options.model, "blind": options.blind, "detail": options.detail}
    wanted: dict[str, Question] = {}
    for subset in VALUES:
        cases = [case for case in data.cases if case.subset == subset]
        for case in cases[: options.cases or len(cases)]:
            listed = questions(
                case, data.picture, options.ask, seed=options.seed, blind=options.blind, detail=options.detail
            )
            wanted |= {question.key(**settings, max_tokens=options.max_tokens): question for question in listed}
    return wanted


async def ask_all(
    data: Data, options: EndpointOptions, folder: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Reply]:
    """The replies to all questions that could be answered. Failures become problems of `data`.

    Raises PacelineError if no question at all could be answered."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = _wanted(data, options)
    failures: list[str] = []
    client = Client(
        [options.checkpoint],
        key=os.environ.get(options.key),
        slots=options.concurrency,
        timeout=options.timeout,
        retry=RETRY,
    )
    with Lines(folder / REPLIES) as replies:
        waiting = iter([(key, question) for key, question in wanted.items() if key not in replies])
        done = sum(key in replies for key in wanted)

        async def work() -> None:
            nonlocal done
            for key, question in waiting:
                try:
                    completion = await client.complete(_body(question, options))
                except PacelineError as error:
                    failures.append(f"{question.subset}/{question.case}, {question.way} {question.query}: {error}")
                    if len(failures) >= FAILURES and not done:
                        return
                    continue
                replies.append(_row(key, question, completion))
                done += 1
                progress(done, len(wanted))

        async with client:
            await asyncio.gather(*(work() for _ in range(options.concurrency)))
        if failures and not done:
            raise PacelineError(failures[0])
        data.problems += failures
        return [reply for key in wanted if (reply := replies.get(key)) is not None]


def _body(question: Question, options: EndpointOptions) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": options.model,
        "temperature": 0,
        "max_tokens": options.max_tokens,
        "messages": [{"role": "user", "content": question.content()}],
    }
    return body | ({"logprobs": True, "top_logprobs": TOP_TOKENS} if options.ask == "yesno" else {})


def _row(key: str, question: Question, completion: Completion) -> Reply:
    return {
        "key": key,
        "subset": question.subset,
        "case": question.case,
        "way": question.way,
        "query": question.query,
        "order": question.order,
        "text": completion.text,
        "finish": completion.finish_reason,
        "tops": completion.logprobs[0].get("top_logprobs", []) if completion.logprobs else [],
        "prompt_tokens": completion.usage.get("prompt_tokens") or 0,
        "tokens": completion.usage.get("completion_tokens") or 0,
    }


def figures(data: Data, replies: list[Reply], options: EndpointOptions) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Each subset's figures, and what else is known of the replies: letters, invalid ones, tokens."""
    by_case: dict[tuple[str, str], list[Reply]] = {}
    for reply in replies:
        by_case.setdefault((reply["subset"], reply["case"]), []).append(reply)
    read = {
        case.name: (case, [(reply, _meaning(reply, case)) for reply in by_case[case.subset, case.id]])
        for case in data.cases
        if (case.subset, case.id) in by_case
    }
    results = []
    for subset in VALUES:
        there = [pair for pair in read.values() if pair[0].subset == subset]
        if there:
            results.append(_subset(subset, there, options.ask))
    return results, _habits([pair for _, pairs in read.values() for pair in pairs])


def _meaning(reply: Reply, case: Case) -> Any:
    if reply["finish"] == "length":
        return None
    if reply["way"] == "yesno":
        return read_yes_no(reply["text"], reply["tops"])
    if reply["way"] == "question":
        return read_direct(case.subset, reply["text"])
    return read_choice(reply["text"], reply["order"], case.captions if reply["way"] == "i2t" else ())


def _subset(subset: str, there: list[tuple[Case, Read]], ask: str) -> dict[str, Any]:
    """The figures of a subset's cases."""
    values = values_of(subset, [case for case, _ in there])
    if ask == "yesno":
        return summarise(subset, [_scores(case.k, pairs) for case, pairs in there], values)
    to_text, to_image = (
        [_choices(case.k, pairs, "question" if ask == "question" else way) for case, pairs in there]
        for way in ("i2t", "t2i")
    )
    one = summarise(subset, to_text, values, to_image=to_image)
    if ask == "question":
        one["question"] = one["i2t"]
        return {key: one[key] for key in ("subset", "cases", "k", "values", "chance", "question") if key in one}
    if ask == "circular":
        # `way`: over all rotations. `circular_way`: a query is right if it is right in all of them.
        for way in ("i2t", "t2i"):
            right = [_right(pairs, way) for _, pairs in there]
            one[f"circular_{way}"] = one.pop(way)
            one[way] = round(100 * float(np.mean(right)), 4)
        one["circular"] = one["mean"]
        one["mean"] = (one["i2t"] + one["t2i"]) / 2
    return one


def _scores(k: int, pairs: Read) -> np.ndarray:
    """(K, K): picture by caption, -inf where the reply means nothing."""
    scores = np.full((k, k), -np.inf)
    for reply, meaning in pairs:
        if meaning is not None:
            scores[divmod(reply["query"], k)] = meaning
    return scores


def _right(pairs: Read, way: str) -> float:
    """Share of right replies, the mean over queries."""
    right: dict[int, list[bool]] = {}
    for reply, meaning in pairs:
        if reply["way"] == way:
            right.setdefault(reply["query"], []).append(meaning == reply["query"])
    return float(np.mean([np.mean(replies) for replies in right.values()]))


def _choices(k: int, pairs: Read, way: str) -> np.ndarray:
    """(K, K): row q has 1 at the key that query q chose; a row of NaN where it chose none, or not always the same."""
    table = np.full((k, k), np.nan)
    chosen: dict[int, set[Any]] = {}
    for reply, meaning in pairs:
        if reply["way"] == way:
            chosen.setdefault(reply["query"], set()).add(meaning)
    for query, keys in chosen.items():
        if len(keys) == 1 and None not in keys:
            table[query] = 0.0
            table[query, keys.pop()] = 1.0
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
