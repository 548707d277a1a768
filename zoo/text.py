"""From text to rows: documents of several sources in the chat template, and what a batch of every stage is made of
(stages.toml).

Documents are laid end to end, every token learnt, or conversations are packed whole into rows, of which what the
assistant says is learnt."""

import hashlib
import random
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import accumulate
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from paceline.train.data import Document, Mixture, Rendered, Rows, Source, assistant, pack_whole, read, user
from paceline.train.loop import Batch
from zoo import synth
from zoo.clean import clean
from zoo.reading import sentences_of
from zoo.tokenizer import DOCUMENT, END, SPECIAL, token_id

Build = Callable[[str, list[Document]], dict[str, Rows]]
"""Rows by group, from the documents of one source."""


@dataclass(frozen=True)
class DataConfig:
    """What a batch of a stage is made of, and how much text is read for it. A source that `weights` does not name
    weighs `other`, its text "text/NAME" a quarter."""

    length: int  # tokens a row
    rows: int  # rows a batch
    weights: dict[str, float]
    decay_weights: dict[str, float]  # the mixture after `decay_from` of the budget
    other: float = 0.1
    decay_from: float = 0.75
    short: int | None = None  # tokens a row until `decay_from`: attention costs less
    seed: int = 0
    characters: int = 30_000_000  # most characters of one source
    generated: int = 150_000  # examples from synth.py
    longest_answer: int = 120  # tokens; chat stage: longer answers of single-turn records are left out
    held_out: float = 0.01
    validation_rows: int = 16


STAGE_FILE: dict[str, Any] = tomllib.loads(files(__package__).joinpath("stages.toml").read_text("utf-8"))
PRETRAIN, CHAT, SETTLE, DISTIL = (DataConfig(**STAGE_FILE[stage]) for stage in ("pretrain", "chat", "settle", "distil"))


class StageMixture(Mixture):
    """The mixture of a stage, which changes towards its end."""

    def __init__(self, rows: dict[str, Rows], config: DataConfig) -> None:
        super().__init__(rows, config.rows, config.seed)
        self.config = config

    def weight(self, name: str, progress: float) -> float:
        config = self.config
        weights = config.weights if progress < config.decay_from else config.decay_weights
        return weights.get(name, config.other / (4 if name.startswith("text/") else 1))

    def next(self, progress: float) -> Batch:
        batch, config = super().next(progress), self.config
        if config.short and progress < config.decay_from:
            return {name: side.reshape(-1, config.short) for name, side in batch.items()}
        return batch


def plain(document: Document) -> str:
    """The document as plain text, one paragraph per message."""
    return document.text or "\n\n".join(m["content"] for m in document.messages)


def held_out(document: Document, share: float = 0.01) -> bool:
    """Whether the document belongs to the validation split. Depends on its content only."""
    digest = hashlib.sha256(plain(document).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < share


def split(documents: Iterable[Document], share: float = 0.01) -> tuple[list[Document], list[Document]]:
    """(training documents, held-out documents)."""
    train: list[Document] = []
    valid: list[Document] = []
    for document in documents:
        (valid if held_out(document, share) else train).append(document)
    return train, valid


def lay_end_to_end(rendered: Iterable[Rendered], length: int) -> Rows:
    """Documents one after another, cut every `length` tokens. Every token is trained on."""
    flat = np.fromiter((i for ids, _ in rendered for i in ids), dtype=np.int32)
    count = max(len(flat) - 1, 0) // length
    return flat[: count * length].reshape(count, length), flat[1 : count * length + 1].reshape(count, length)


def render(tokenizer: PreTrainedTokenizerFast, documents: Sequence[Document]) -> list[Rendered]:
    """Token ids, and which of them the model must learn in the chat stage (all, for plain text).

    Equal to the chat template (a test compares them), without running it: that would take minutes.
    """
    special = {token: token_id(tokenizer, token) for token in SPECIAL}
    segments: list[str] = []
    for document in documents:
        segments += ["\n" + m["content"].strip() for m in document.messages] or [document.text]
    encoded = iter(tokenizer.backend_tokenizer.encode_batch(segments, add_special_tokens=False))
    newline = tokenizer.encode("\n", add_special_tokens=False)
    rendered = []
    for document in documents:
        ids, learn = [special[DOCUMENT]], [False]
        if not document.messages:
            text = next(encoded).ids
            ids, learn = ids + text, learn + [True] * len(text)
        for message in document.messages:
            answer = message["role"] == "assistant"
            text = next(encoded).ids
            ids += [special[f"<|{message['role']}|>"], *text, special[END], *newline]
            # The newline after the role belongs to the prompt; the one after the end is not learnt either.
            learn += [False] * (1 + len(newline)) + [answer] * (len(text) - len(newline) + 1) + [False] * len(newline)
        rendered.append((ids, learn))
    return rendered


def load_documents(
    sources: Sequence[Source], config: DataConfig
) -> tuple[dict[str, list[Document]], dict[str, list[Document]]]:
    """Training and held-out documents by source name; generated examples come under "synth"."""
    training: dict[str, list[Document]] = {}
    valid: dict[str, list[Document]] = {}
    for source in sources:
        kept, held = split(clean(read(source)), config.held_out)
        random.Random(config.seed).shuffle(kept)
        training.setdefault(source.name, []).extend(kept)
        valid.setdefault(source.name, []).extend(held)
    for name, documents in training.items():
        sizes = accumulate(len(plain(document)) for document in documents)
        last = next((i for i, size in enumerate(sizes) if size > config.characters), len(documents))
        training[name] = documents[: last + 1]
    if config.generated:
        made = synth.generate(config.generated, config.seed, *reading_material(training))
        training["synth"], valid["synth"] = split(made, config.held_out)
    return training, valid


def reading_material(documents: dict[str, list[Document]]) -> tuple[list[str], list[tuple[str, str, str]]]:
    """Short passages, and (question, answer, passage) where the passage contains the answer, for synth.py."""
    passages: list[str] = []
    facts: list[tuple[str, str, str]] = []
    for document in (d for group in documents.values() for d in group if d.context):
        sentences = sentences_of(re.sub(r"\s+", " ", document.context))
        answer = document.fields["response"]
        holding = [i for i, s in enumerate(sentences) if answer.rstrip(".") in s]
        first = max(holding[0] - 1, 0) if holding else 0
        window = " ".join(sentences[first : first + 3])
        if not 60 <= len(window) <= 450:
            continue
        if holding and len(answer) <= 120:
            facts.append((document.fields["instruction"], answer, window))
        passages.append(window)
    return passages, facts


def short_answers(rendered: Iterable[Rendered], longest: int, length: int) -> Iterable[Rendered]:
    """Single-turn conversations that fit a row and whose answer is short."""
    for ids, learn in rendered:
        if len(ids) <= length and sum(learn) <= longest:
            yield ids, learn


def reading_record(rng: random.Random, document: Document) -> Document:
    """A record with a passage, in one of the usual forms of such prompts."""
    instruction, context = document.fields["instruction"], document.context
    forms = [
        f"{instruction}\n\n{context}",
        f"{context}\n\n{instruction}",
        f"Passage: {context}\n\nQuestion: {instruction}",
    ]
    if document.fields.get("category") == "summarization":
        forms += [f"Summarize: {context}"] * 2
    return Document(
        document.source,
        messages=(user(rng.choice(forms)), assistant(document.fields["response"])),
        context=context,
        fields=document.fields,
    )


def chat_rows(tokenizer: PreTrainedTokenizerFast, data: DataConfig) -> Build:
    """Conversations of a source packed into rows; records with a passage make the group "reading". Everything that the
    source holds is also laid end to end as "text/NAME"."""
    pad = token_id(tokenizer, DOCUMENT)

    def build(name: str, documents: list[Document]) -> dict[str, Rows]:
        """Rows by group from the documents of one source."""
        rng = random.Random(data.seed)
        groups: dict[str, list[Document]] = {}
        for document in documents:
            if document.context:
                groups.setdefault("reading", []).append(reading_record(rng, document))
            elif document.messages:
                groups.setdefault(name, []).append(document)
        rows = {f"text/{name}": lay_end_to_end(render(tokenizer, documents), data.length)}
        for group, members in groups.items():
            rendered: Iterable[Rendered] = render(tokenizer, members)
            if all(len(d.messages) == 2 for d in members):
                rendered = short_answers(rendered, data.longest_answer, data.length)
            rows[group] = pack_whole(rendered, data.length, pad)
        return rows

    return build
