"""Prompts for a real model to answer, so that drafters can be trained on its answers: nine kinds, from data sets of
which none is an evaluation's.

A kind is a file of {"messages": [...]}. Kinds whose source is not given are left out. Prompts that share text with an
evaluation (`zoo.overlap`) are left out too."""

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from paceline.errors import PacelineError
from paceline.outputs import write_whole
from paceline.textfiles import objects
from paceline.train.data import Document, Message, Source, assistant, read, user
from zoo.german import german_sentence
from zoo.overlap import Overlap
from zoo.sums import arithmetic

Messages = list[Message]
Texts = Sequence[Document]

SUMMARIES = (
    "Summarize the following text in a few sentences.\n\n{}", "Summarize: {}", "{}\n\nWhat is this text about?",
    "Give the main points of this text as a list.\n\n{}", "{}\n\nTL;DR:", "Write a headline for this text, then one "
    "sentence that sums it up.\n\n{}",
)  # fmt: skip
READING = ("{context}\n\n{question}", "{question}\n\n{context}", "Answer with the text alone.\n\n{context}\n\n"
           "Question: {question}")  # fmt: skip
REWRITES = (
    "Rewrite this text in simpler words.\n\n{}", "Make this text sound more formal.\n\n{}",
    "Rewrite this as a short email to a colleague.\n\n{}", "Turn this text into a list of bullet points.\n\n{}",
    "Make this text half as long.\n\n{}", "Correct the grammar and spelling of this text.\n\n{}",
    "Repeat this text word for word.\n\n{}", "Rewrite this in the past tense.\n\n{}",
    "Translate this text to French.\n\n{}", "Say the same as a dialogue between two friends.\n\n{}",
)  # fmt: skip
FOLLOW_UPS = (
    "Can you say that in one sentence?", "Give me an example.", "Why is that so?", "Explain it to a child of ten.",
    "Are you sure? Check it again.", "Write it as a list.", "What else should I know about it?",
    "Translate your answer to Spanish.", "Now write a short poem about it.", "What would be a counterargument?",
)  # fmt: skip
COMPLETIONS = (
    "Complete this Python function.\n\n```python\n{head}\n    \"\"\"{text}\"\"\"\n```",
    "{head}\n    \"\"\"{text}\n\n    >>> {example}\n    \"\"\"\n\nWrite the body of the function.",
    "{text} Your code should pass this test:\n\n{test}",
    "{text}",
)  # fmt: skip
EDITS = (
    "Explain what this code does, line by line.\n\n```python\n{}\n```",
    "Add comments to the code.\n\n```python\n{}\n```", "Add type annotations.\n\n```python\n{}\n```",
    "Write three tests for this function.\n\n```python\n{}\n```",
    "Give all variables of this code longer names and print the new code.\n\n```python\n{}\n```",
    "Is there a mistake in this code?\n\n```python\n{}\n```",
    "Translate this code to JavaScript.\n\n```python\n{}\n```",
)  # fmt: skip
LANGUAGES = ("French", "German", "Spanish", "Italian")
TEST_TASKS = range(11, 511)
"""MBPP's own test split, by task_id: an evaluation of others, and left out."""
MOST = 1_600
"""Most characters of a passage."""


def _passages(dolly: Texts, *categories: str) -> list[Document]:
    return [d for d in dolly if d.fields["category"] in categories and 100 < len(d.context) <= MOST]


def summaries(dolly: Texts, rng: random.Random) -> Iterator[Messages]:
    for document in _passages(dolly, "summarization", "closed_qa"):
        yield [user(rng.choice(SUMMARIES).format(document.context))]


def reading(dolly: Texts, rng: random.Random) -> Iterator[Messages]:
    for document in _passages(dolly, "closed_qa", "information_extraction"):
        question = document.fields["instruction"]
        yield [user(rng.choice(READING).format(context=document.context, question=question))]


def several_passages(dolly: Texts, rng: random.Random) -> Iterator[Messages]:
    """A question on one of three passages, as after a search."""
    found = [d for d in _passages(dolly, "closed_qa") if len(d.context) <= MOST // 2]
    for document in found:
        passages = [document.context, *(other.context for other in rng.sample(found, 2))]
        rng.shuffle(passages)
        numbered = "\n\n".join(f"[{n}] {text}" for n, text in enumerate(passages, 1))
        yield [user(f"{numbered}\n\nUse these passages to answer: {document.fields['instruction']}")]


def translations(dolly: Texts, rng: random.Random) -> Iterator[Messages]:
    for document in dolly:
        sentence = re.split(r"(?<=[.!?])\s", document.fields["response"])[0]
        if 30 < len(sentence) < 200:
            yield [user(f"Translate to {rng.choice(LANGUAGES)}: {sentence}")]
            yield [user(f"Translate German to English: {german_sentence(rng)[0]}")]


def maths(gsm8k: Texts, rng: random.Random) -> Iterator[Messages]:
    for number, document in enumerate(gsm8k):
        yield [document.messages[0]] if number % 4 else [user(arithmetic(rng)[0])]


def code(mbpp: Path, rng: random.Random) -> Iterator[Messages]:
    """To complete a function from its head and docstring, as HumanEval asks; to write, explain and change code."""
    for _, row in objects(mbpp, PacelineError, "a task of MBPP"):
        if row["task_id"] in TEST_TASKS or not (head := re.search(r"^def .*:", row["code"], re.M)):
            continue
        source, test = row["code"].replace("\r", ""), row["test_list"][0]
        example = test.removeprefix("assert ").partition("==")[0].strip()
        for template in rng.sample(COMPLETIONS, 2):
            yield [user(template.format(head=head[0].strip(), text=row["text"], example=example, test=test))]
        for template in rng.sample(EDITS, 2):
            yield [user(template.format(source))]


def rewriting(dolly: Texts, rng: random.Random) -> Iterator[Messages]:
    for document in dolly:
        if 150 < len(text := document.fields["response"]) < MOST // 2:
            yield [user(rng.choice(REWRITES).format(text))]


def chats(dolly: Texts, rng: random.Random) -> Iterator[Messages]:
    """Two turns; the first answer is the data set's."""
    for document in dolly:
        if not document.context and len(answer := document.fields["response"]) < MOST // 2:
            yield [document.messages[0], assistant(answer), user(rng.choice(FOLLOW_UPS))]


DOLLY: dict[str, Callable[[Texts, random.Random], Iterator[Messages]]] = {
    "question": lambda dolly, rng: ([document.messages[0]] for document in dolly if not document.context),
    "summary": summaries,
    "reading": reading,
    "passages": several_passages,
    "translation": translations,
    "rewriting": rewriting,
    "chat": chats,
}
"""Kinds that are made of Dolly's records."""
KINDS = (*DOLLY, "maths", "code")


def make(
    sources: Mapping[str, Source], evaluation: Overlap, count: int, seed: int = 0
) -> tuple[dict[str, list[Messages]], int]:
    """(at most `count` prompts of every kind, in a seeded order; how many were left out because they share text with
    the evaluation). PacelineError without a source that is known."""
    made: dict[str, Iterator[Messages]] = {}
    if "dolly" in sources:
        dolly = list(read(sources["dolly"]))
        made |= {kind: maker(dolly, random.Random(f"{seed}/{kind}")) for kind, maker in DOLLY.items()}
    if "gsm8k" in sources:
        made["maths"] = maths(list(read(sources["gsm8k"])), random.Random(f"{seed}/maths"))
    if "mbpp" in sources:
        made["code"] = code(Path(sources["mbpp"].path), random.Random(f"{seed}/code"))
    if not made:
        raise PacelineError("no source that prompts are made of: name some of dolly=FILE, gsm8k=FILE and mbpp=FILE")
    chosen: dict[str, list[Messages]] = {}
    dropped = 0
    for kind, prompts in made.items():
        every, chosen[kind] = list(prompts), []
        random.Random(f"{seed}/order/{kind}").shuffle(every)
        for prompt in every:
            if len(chosen[kind]) == count:
                break
            if any(evaluation.shared(message["content"]) for message in prompt):
                dropped += 1
            else:
                chosen[kind].append(prompt)
    return chosen, dropped


def write(prompts: Mapping[str, Sequence[Messages]], out: Path) -> None:
    """A file for every kind."""
    out.mkdir(parents=True, exist_ok=True)
    for kind, some in prompts.items():
        lines = (json.dumps({"messages": messages}, ensure_ascii=False) for messages in some)
        write_whole(out / f"{kind}.jsonl", "".join(line + "\n" for line in lines))
