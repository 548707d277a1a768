"""Training data: sources of text, answers of a target, and both as rows of tokens and batches of rows.

A source is `NAME=PATH`, or a path whose stem is the name. Files are .txt and .jsonl, packed or not;
`NAME=hf:OWNER/DATA:CONFIG@SPLIT` is a data set of the Hugging Face hub (:CONFIG and @SPLIT may be left out). Records
have the forms that `logs.conversations` reads."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import PacelineError, install
from paceline.formats.tokenizer import Tokenizer
from paceline.logs import conversations
from paceline.logs.formats import FORMS, Conversation, conversation
from paceline.logs.transcript import Transcriber
from paceline.textfiles import MAYBE_PACKED, PACKED, text_of
from paceline.train.loop import Batch
from paceline.train.loss import IGNORE

Message = dict[str, str]  # {"role": one of ROLES, "content": text}
ROLES = ("system", "user", "assistant")
HUB = "hf:"
TEXT_CHUNK = 8000  # Least characters of a document cut from a plain-text file, at a paragraph.


@dataclass(frozen=True)
class Source:
    """A file, or a data set of the hub as `hf:OWNER/DATA:CONFIG@SPLIT`. name: in reports."""

    name: str
    path: Path | str


@dataclass(frozen=True)
class Document:
    """A document: the `messages` of a conversation, or `text`.

    context  the passage that the answer is based on, if the record has one.
    fields   of a record with one prompt and its answer: its texts by key, and its category."""

    source: str
    text: str = ""
    messages: tuple[Message, ...] = ()
    context: str = ""
    fields: dict[str, str] = field(default_factory=dict)


def parse_source(spec: str) -> Source:
    """`NAME=PATH` or `PATH` -> Source."""
    name, equals, path = spec.partition("=")
    if not equals:
        name, path = re.sub(rf"\.(txt|jsonl){MAYBE_PACKED}", "", Path(spec).name), spec
    if not name or not path:
        raise PacelineError(f"{spec!r} is not a source: write NAME=PATH, for example books=alice.txt.gz")
    if path.startswith(HUB):
        if not re.fullmatch(r"hf:[\w.-]+/[\w.-]+(:[\w.-]+)?(@[\w.-]+)?", path):
            raise PacelineError(f"source {name!r}: {path} is not hf:OWNER/DATA, hf:OWNER/DATA:CONFIG or ...@SPLIT")
        return Source(re.split("[/:@]", path)[2] if not equals else name, path)
    file = Path(path).expanduser()
    if not file.is_file():
        raise PacelineError(f"source {name!r}: no such file: {file}")
    if not re.search(rf"\.(txt|jsonl){MAYBE_PACKED}", file.name):
        packed = ", ".join(PACKED)
        raise PacelineError(f"source {name!r}: {file.name} is not .txt or .jsonl, plain or packed ({packed})")
    return Source(name, file)


def parse_sources(specs: Iterable[str]) -> list[Source]:
    """The sources of several specs. Several files may share a name."""
    return [parse_source(spec) for spec in specs]


def read(source: Source) -> Iterator[Document]:
    """All documents of one source, in file order."""
    if isinstance(source.path, str):
        for number, row in enumerate(_hub_rows(source), start=1):
            yield _document(source, conversation(row, where=f"{source.path}, row {number}"))
    elif re.search(rf"\.jsonl{MAYBE_PACKED}", source.path.name):
        for one in conversations.read(source.path):
            yield _document(source, one)
    else:
        yield from _plain_text(source)


def _hub_rows(source: Source) -> Iterable[Any]:
    """Rows of a data set on the hub, or of its copy on this disk."""
    try:
        import datasets
    except ImportError:
        raise PacelineError(
            f"source {source.name!r}: {source.path} needs the package datasets; {install('packages/train')}"
        ) from None
    name, _, split = str(source.path).removeprefix(HUB).partition("@")
    name, _, config = name.partition(":")
    try:
        return datasets.load_dataset(name, config or None, split=split or "train")
    except (OSError, ValueError, RuntimeError) as error:  # The hub or the data may be missing, or a name wrong.
        why = " ".join(str(error).split())[:200]
        raise PacelineError(
            f"source {source.name!r}: {source.path} cannot be loaded from the hub ({why}); "
            f"give a file instead: {source.name}=PATH"
        ) from None


def _plain_text(source: Source) -> Iterator[Document]:
    """Documents of whole paragraphs, so that a book is not held out or trained on as a whole."""
    assert isinstance(source.path, Path)
    paragraphs: list[str] = []
    size = 0
    for block in re.split(r"\n\s*\n", text_of(source.path, PacelineError).replace("\r\n", "\n")):
        if block.strip():
            paragraphs.append(block.strip("\n"))
            size += len(block)
        if size > TEXT_CHUNK:
            yield Document(source.name, text="\n\n".join(paragraphs))
            paragraphs, size = [], 0
    if paragraphs:
        yield Document(source.name, text="\n\n".join(paragraphs))


def _document(source: Source, one: Conversation) -> Document:
    if one.tokens is not None:
        raise PacelineError(f"{one.where}: token ids and no text; a line is {FORMS}")
    parts = {key: text.strip() for key, text in one.parts.items()}
    if not one.messages:
        return Document(source.name, "\n\n".join(filter(None, (parts.get("title"), one.text.strip()))))
    if one.has_response and parts:
        *asked, answer = parts.values()
        fields = parts | {"category": one.category}
        context = fields.pop("context", "")
        return Document(
            source.name,
            messages=(user("\n\n".join(filter(None, asked))), assistant(answer)),
            context=context,
            fields=fields,
        )
    for message in one.messages:
        if message["role"] not in ROLES:
            raise PacelineError(f"{one.where}: the role {message['role']!r} is none of {', '.join(ROLES)}")
        if set(message) != {"role", "content"}:
            raise PacelineError(f"{one.where}: a message with tool calls, or with parts that are no text")
    # Of a question with several turns and no answers, only the first turn can be asked.
    chosen = one.messages if one.answers else one.first_prompt
    messages = tuple({"role": message["role"], "content": message["content"].strip()} for message in chosen)
    return Document(source.name, messages=messages)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


# Answers of a target ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """An answer of the target, in token ids. prompt: its token ids, None if unknown. source: name of the data."""

    source: str
    prompt: list[int] | None
    tokens: list[int]


def read_examples(
    file: Path, tokenizer: Tokenizer, questions: Path | None = None, *, need_prompts: bool = False
) -> Iterator[Example]:
    """The answers in a JSON Lines file, in any form that `logs.conversations` reads. A record that is one text is
    an answer without a known prompt. A record may have a "source" or a "category".

    questions     Spec-Bench's question.jsonl, which has the prompts and categories of its answers.
    need_prompts  PacelineError for an answer without its prompt.

    PacelineError also if there are no answers."""
    count = 0
    transcriber = Transcriber(tokenizer) if tokenizer.has_chat_template else None
    for one in conversations.read(file, questions, ignore=()):
        source = str(one.record.get("source") or one.category or _stem(file))
        for prompt, tokens in _answers(one, tokenizer, transcriber):
            count += 1
            if prompt is None and need_prompts:
                raise PacelineError(f'{file}: answer {count} has no prompt: give it a "prompt" or "messages"')
            if tokens:
                yield Example(source, prompt, tokens)
    if not count:
        raise PacelineError(f"{file} holds no answers")


def _answers(
    one: Conversation, tokenizer: Tokenizer, transcriber: Transcriber | None
) -> Iterator[tuple[list[int] | None, list[int]]]:
    """(prompt, answer) in token ids, for every answer in a conversation."""
    end = [] if one.is_cut or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if one.tokens is not None:
        prompt, tokens = one.tokens
        yield None if prompt is None else list(prompt), list(tokens)
    elif not one.messages:
        yield None, [*tokenizer.encode_text(one.text), *end]
    elif not one.answers:
        raise PacelineError(f"{one.where}: no answer (keys: {', '.join(one.record)})")
    elif one.answers[0] == 0 or transcriber is None:
        for at in one.answers:
            prompt = encoded(one.messages[:at], tokenizer) if one.answers[0] else None
            yield prompt, [*tokenizer.encode_text(one.messages[at]["content"]), *end]
    else:
        for turn in transcriber.conversation(one).turns:
            tokens = turn.answer.tolist()
            yield turn.prompt.tolist(), tokens[:-1] if one.is_cut else tokens


def _stem(file: Path) -> str:
    return re.sub(rf"\.jsonl?{MAYBE_PACKED}", "", file.name)


def encoded(messages: Sequence[Mapping[str, str]], tokenizer: Tokenizer) -> list[int]:
    """Token ids of a conversation, ready for the assistant's answer; of plain text if there is no chat template."""
    if tokenizer.has_chat_template:
        return tokenizer.encode_chat(messages)
    return tokenizer.encode("\n\n".join(message["content"] for message in messages))


def split_rows(
    file: Path, length: int, pad: int = 0, held_out: float = 0.05
) -> tuple[dict[str, Rows], dict[str, Rows]]:
    """(training rows, held-out rows) by source, from a file that `generated_rows` wrote.

    A hash of the prompt decides, so that all answers to a prompt are on one side. With two prompts or more, at least
    one is held out. Texts written without a prompt are divided by a hash of the text."""
    examples = []
    for one in conversations.read(file):
        prompt, tokens = one.tokens or (None, ())
        if prompt is None:
            raise PacelineError(f'{one.where}: "prompt_tokens" and "tokens" must be lists of token ids')
        examples.append(Example(str(one.record.get("source", "")), list(prompt), list(tokens)))
    keys = sorted({_key(example) for example in examples})
    held = set(keys[: max(round(held_out * len(keys)), int(len(keys) > 1))])
    sides: tuple[dict[str, list[Example]], dict[str, list[Example]]] = ({}, {})
    for example in examples:
        sides[_key(example) in held].setdefault(example.source, []).append(example)
    training, valid = (
        {name: rows for name, group in side.items() if len((rows := rows_of(group, length, pad))[0])} for side in sides
    )
    return training, valid


def rows_of(examples: Sequence[Example], length: int, pad: int = 0) -> Rows:
    """Input ids and labels, int32 [rows, length]: several conversations packed into a row, which `pad` fills up. The
    label of a position is the next token if the target wrote it, else IGNORE."""
    rendered: list[Rendered] = []
    for example in examples:
        prompt = example.prompt or []
        if len(prompt) + len(example.tokens) > 1:
            rendered.append((prompt + example.tokens, [False] * len(prompt) + [True] * len(example.tokens)))
    return pack_whole(rendered, length, pad)


def _key(example: Example) -> str:
    text = example.prompt if example.prompt and len(example.prompt) > 1 else example.tokens
    return hashlib.sha256(json.dumps(text).encode()).hexdigest()


Rows = tuple[np.ndarray, np.ndarray]
"""Input ids and labels, int32 [num_rows, length]; a label is the next token, or IGNORE."""

Rendered = tuple[list[int], list[bool]]  # token ids of a document, and for each whether it is trained on


def pack_whole(rendered: Iterable[Rendered], length: int, pad: int) -> Rows:
    """Conversations packed whole into rows. One that is longer than a row is cut, and left out if no answer is left."""
    bins: list[tuple[list[int], list[int]]] = []
    is_open: list[int] = []
    for ids, learn in rendered:
        inputs = ids[:-1][:length]
        labels = [i if wanted else IGNORE for i, wanted in zip(ids[1:], learn[1:], strict=True)][:length]
        if all(label == IGNORE for label in labels):
            continue
        for index in is_open:
            if len(bins[index][0]) + len(inputs) <= length:
                break
        else:
            index = len(bins)
            bins.append(([], []))
            is_open = [*is_open, index][-16:]
        bins[index][0].extend(inputs)
        bins[index][1].extend(labels)
    ids_out = np.full((len(bins), length), pad, dtype=np.int32)
    labels_out = np.full((len(bins), length), IGNORE, dtype=np.int32)
    for row, (inputs, labels) in enumerate(bins):
        ids_out[row, : len(inputs)] = inputs
        labels_out[row, : len(labels)] = labels
    return ids_out, labels_out


class Mixture:
    """Batches of `size` rows drawn from several sources by weight. A source repeats after all of its rows."""

    def __init__(self, rows: dict[str, Rows], size: int, seed: int = 0) -> None:
        self.rows = {name: r for name, r in rows.items() if len(r[0])}
        if not self.rows:
            raise PacelineError("the sources hold less text than one row; add sources or shorten the rows")
        self.size, self.seed = size, seed
        self.step = 0
        self.taken: Counter[str] = Counter()
        self._order: dict[str, tuple[int, np.ndarray]] = {}

    def weight(self, name: str, progress: float) -> float:
        """Of a source: how many rows it has."""
        return len(self.rows[name][0])

    def next(self, progress: float) -> Batch:
        names = sorted(self.rows)
        rng = random.Random(f"{self.seed}/{self.step}")
        weights = [self.weight(name, progress) for name in names]
        picked = [self._row(name) for name in rng.choices(names, weights, k=self.size)]
        self.step += 1
        ids, labels = (torch.from_numpy(np.stack(side)).long() for side in zip(*picked, strict=True))
        return {"input_ids": ids, "labels": labels}

    def _counts(self) -> dict[str, int]:
        return {name: len(ids) for name, (ids, _) in self.rows.items()}

    def _row(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        ids, labels = self.rows[name]
        epoch, place = divmod(self.taken[name], len(ids))
        if self._order.get(name, (-1, None))[0] != epoch:
            rng = np.random.default_rng([self.seed, epoch, *name.encode()])
            self._order[name] = (epoch, rng.permutation(len(ids)))
        self.taken[name] += 1
        index = self._order[name][1][place]
        return ids[index], labels[index]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "taken": dict(self.taken), "rows": self._counts()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. PacelineError if the sources had another number of rows then."""
        if (before := state.get("rows", self._counts())) != self._counts():
            raise PacelineError(
                f"the run began with other rows ({before}) than there are now ({self._counts()}); give it the same "
                "answers, or begin a new run with other --checkpoints"
            )
        self.step, self.taken = state["step"], Counter(state["taken"])
        self._order = {}


def batches(rows: Rows, size: int = 4) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids and labels, int64 [at most `size`, length] each, of all rows in order."""
    for start in range(0, len(rows[0]), size):
        ids, labels = (torch.from_numpy(side[start : start + size]).long() for side in rows)
        yield ids, labels


def first_batch(rows: Rows, most: int = 16) -> Batch:
    """At most `most` rows from the beginning, as a batch for the loop."""
    ids, labels = (torch.from_numpy(side[:most]).long() for side in rows)
    return {"input_ids": ids, "labels": labels}


def counts_of(texts: Mapping[str, Rows], vocab_size: int) -> Tensor:
    """How often the target wrote each token in the rows, int64 [V]."""
    counts = np.zeros(vocab_size, np.int64)
    for _, labels in texts.values():
        counts += np.bincount(labels[labels != IGNORE], minlength=vocab_size)
    return torch.from_numpy(counts)


def row_counts(rows: dict[str, Rows]) -> list[str]:
    """A line for each source: its rows, and how many of their tokens are trained on."""
    return [
        f"  {name:10} {len(ids):6} rows  {ids.size:>10,} tokens, {int((labels != IGNORE).sum()):>10,} learnt"
        for name, (ids, labels) in rows.items()
    ]
