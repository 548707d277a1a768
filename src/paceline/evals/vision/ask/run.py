"""Ask a generative model about a data set, and work the figures out from its replies.

    lines = asyncio.run(ask_all(data, options, folder))
    results, habits = figures(data, lines, options)

Replies are appended to replies.jsonl as they come; a question whose reply is there is not asked again.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import PacelineError
from paceline.evals.vision.ask import replies
from paceline.evals.vision.ask.questions import LETTERS, Question, questions
from paceline.evals.vision.dataset import Case, Data
from paceline.evals.vision.models.names import EndpointOptions
from paceline.evals.vision.scores import summarise
from paceline.evals.vision.words import VALUES
from paceline.jsonl import Appender, write_whole
from paceline.workbench.client import Client, Completion, Retry

REPLIES = "replies.jsonl"
RETRY = Retry(tries=5)
TOP_TOKENS = 20
"""Likeliest tokens asked for where probabilities are scores."""
Lines = dict[str, dict[str, Any]]


def chosen_cases(data: Data, options: EndpointOptions) -> list[Case]:
    """The first cases of each subset, as many as are to be asked."""
    kept: list[Case] = []
    for subset in VALUES:
        cases = [case for case in data.cases if case.subset == subset]
        kept += cases[: options.cases or len(cases)]
    return kept


def _all_questions(data: Data, options: EndpointOptions) -> Iterator[tuple[str, Question]]:
    settings = {"model": options.model, "blind": options.blind, "detail": options.detail}
    for case in chosen_cases(data, options):
        listed = questions(
            case, data.picture, options.ask, seed=options.seed, blind=options.blind, detail=options.detail
        )
        for question in listed:
            yield question.key(**settings, max_tokens=options.max_tokens), question


async def ask_all(
    data: Data, options: EndpointOptions, folder: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> Lines:
    """A line for each question that was answered, by its key. Failures become problems of `data`.

    Raises PacelineError if no question at all could be answered."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = read_replies(folder / REPLIES)
    wanted = dict(_all_questions(data, options))
    waiting = iter([(key, question) for key, question in wanted.items() if key not in kept])
    done = sum(key in kept for key in wanted)
    failures: list[str] = []
    secret = os.environ.get(options.key)
    async with Client(
        [options.checkpoint], key=secret, slots=options.concurrency, timeout=options.timeout, retry=RETRY
    ) as client:
        with Appender.open(folder / REPLIES) as lines:

            async def work() -> None:
                nonlocal done
                for key, question in waiting:
                    try:
                        completion = await client.complete(_body(question, options))
                    except PacelineError as error:
                        failures.append(f"{question.subset}/{question.case}, {question.way} {question.query}: {error}")
                        if len(failures) >= 3 and not done:
                            return
                        continue
                    line = {
                        "key": key, "subset": question.subset, "case": question.case, "way": question.way,
                        "query": question.query, "order": question.order, **_facts(completion),
                    }  # fmt: skip
                    kept[key] = line
                    lines.append([line])
                    done += 1
                    progress(done, len(wanted))

            await asyncio.gather(*(work() for _ in range(options.concurrency)))
    if failures and not done:
        raise PacelineError(failures[0])
    data.problems += failures
    return {key: kept[key] for key in wanted if key in kept}


def _body(question: Question, options: EndpointOptions) -> dict[str, Any]:
    body = {"model": options.model, "temperature": 0, "max_tokens": options.max_tokens}
    scored = {"logprobs": True, "top_logprobs": TOP_TOKENS} if options.ask == "yesno" else {}
    return body | {"messages": question.messages()} | scored


def _facts(completion: Completion) -> dict[str, Any]:
    """What a line keeps of a reply. tops: the first token's likeliest, {"token", "logprob"}."""
    usage = completion.usage
    return {
        "text": completion.text,
        "finish": completion.finish_reason,
        "tops": completion.logprobs[0].get("top_logprobs", []) if completion.logprobs else [],
        "prompt_tokens": usage.get("prompt_tokens") or 0,
        "tokens": usage.get("completion_tokens") or 0,
    }


def read_replies(path: Path) -> Lines:
    """Lines by key; one that was cut off is dropped from the file."""
    if not path.exists():
        return {}
    text = path.read_text("utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        write_whole(path, whole)
    return {line["key"]: line for line in map(json.loads, whole.splitlines())}


def figures(data: Data, lines: Lines, options: EndpointOptions) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Each subset's figures, and what else is to be said of the replies."""
    by_case: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines.values():
        by_case.setdefault((line["subset"], line["case"]), []).append(line)
    cases = {(case.subset, case.id): case for case in data.cases}
    parsed = {key: [(line, _meaning(line, cases[key])) for line in own] for key, own in by_case.items()}
    results = []
    for subset, values in VALUES.items():
        there = [(case, parsed[key]) for key, case in cases.items() if key[0] == subset and key in parsed]
        if there:
            results.append(_subset(subset, values, there, options.ask))
    return results, _habits([pair for pairs in parsed.values() for pair in pairs])


def _meaning(line: dict[str, Any], case: Case) -> Any:
    """A key's number, a score or a value's number; None for an invalid reply, cut off ones included."""
    if line["finish"] == "length":
        return None
    if line["way"] == "yesno":
        return replies.yes_no(line["text"], line["tops"])
    if line["way"] == "question":
        return replies.direct(case.subset, line["text"])
    return replies.choice(line["text"], line["order"], case.captions if line["way"] == "i2t" else ())


Parsed = list[tuple[dict[str, Any], Any]]


def _subset(subset: str, values: tuple[str, ...], there: list[tuple[Case, Parsed]], ask: str) -> dict[str, Any]:
    known = values if all(case.facts.get("values") == list(values) for case, _ in there) else ()
    if ask == "question":
        tables = [_table(case.k, pairs, "question") for case, pairs in there]
        one = summarise(subset, tables, known, to_image=tables)
        return {key: one[key] for key in ("subset", "cases", "k", "values", "chance") if key in one} | {
            "question": one["i2t"]
        }
    if ask == "yesno":
        matrices = []
        for case, pairs in there:
            matrix = np.full((case.k, case.k), np.nan)
            for line, meaning in pairs:
                if meaning is not None:
                    matrix[divmod(line["query"], case.k)] = meaning
            matrices.append(np.where(np.isnan(matrix), -np.inf, matrix))
        return summarise(subset, matrices, known)
    to_text = [_table(case.k, pairs, "i2t") for case, pairs in there]
    to_image = [_table(case.k, pairs, "t2i") for case, pairs in there]
    one = summarise(subset, to_text, known, to_image=to_image)
    if ask == "circular":
        # Plain accuracy is over all rotations, and a query counts as right in the other figure when all of them are.
        for way in ("i2t", "t2i"):
            right = [pairs_right(pairs, way) for _, pairs in there]
            one[f"circular_{way}"] = one.pop(way)
            one[way] = round(100 * float(np.mean([np.mean([np.mean(r) for r in case.values()]) for case in right])), 4)
        one["circular"] = one["mean"]
        one["mean"] = (one["i2t"] + one["t2i"]) / 2
    return one


def pairs_right(pairs: Parsed, way: str) -> dict[int, list[bool]]:
    """Of each query, whether each of its replies was right."""
    right: dict[int, list[bool]] = {}
    for line, meaning in pairs:
        if line["way"] == way:
            right.setdefault(line["query"], []).append(meaning == line["query"])
    return right


def _table(k: int, pairs: Parsed, way: str) -> np.ndarray:
    """(K, K): row q has 1 at the key that query q chose; a row of NaN where it chose none, or not always the same."""
    table = np.full((k, k), np.nan)
    chosen: dict[int, set[Any]] = {}
    for line, meaning in pairs:
        if line["way"] == way:
            chosen.setdefault(line["query"], set()).add(meaning)
    for query, keys in chosen.items():
        if len(keys) == 1 and None not in keys:
            table[query] = 0.0
            table[query, keys.pop()] = 1.0
    return table


def _habits(pairs: Parsed) -> dict[str, Any]:
    """Letters chosen beside the letters that were right, invalid replies, tokens."""
    chosen, right = Counter[str](), Counter[str]()
    for line, meaning in pairs:
        if line["order"]:
            right[LETTERS[line["order"].index(line["query"])]] += 1
            if meaning is not None:
                chosen[LETTERS[line["order"].index(meaning)]] += 1
    invalid = sum(meaning is None for _, meaning in pairs)
    return {
        "replies": len(pairs),
        "invalid": invalid,
        "cut_off": sum(line["finish"] == "length" for line, _ in pairs),
        "letters": dict(sorted(chosen.items())),
        "right_letters": dict(sorted(right.items())),
        "prompt_tokens": sum(line["prompt_tokens"] for line, _ in pairs),
        "tokens": sum(line["tokens"] for line, _ in pairs),
    }
