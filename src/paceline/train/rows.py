"""From text to batches: documents of several sources become rows of tokens, and a mixture of them.

Documents are laid end to end, every token learnt, or conversations are packed whole into rows, of which what the
assistant says is learnt. Conversations are written in the chat template either way. A mixture draws rows of the sources
by weight.

Doesn't know: models, stages. Test splits stay out because nobody passes them in.
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from paceline.errors import PacelineError
from paceline.train import synth
from paceline.train.clean import clean
from paceline.train.loop import Batch
from paceline.train.loss import IGNORE
from paceline.train.sources import Document, Source, assistant, read, split, user
from paceline.train.tokenizer import DOCUMENT, END, SPECIAL, token_id

Rows = tuple[np.ndarray, np.ndarray]  # input ids and labels, int32 [num_rows, length]
Build = Callable[[str, list[Document]], dict[str, Rows]]  # rows by group, from the documents of one source


@dataclass(frozen=True)
class DataConfig:
    """What a batch is made of. A source that `weights` does not name weighs `other`, its plain text beside its
    conversations ("text/NAME") a quarter of that."""

    length: int  # tokens a row
    rows: int  # rows a batch
    weights: dict[str, float]
    decay_weights: dict[str, float]  # the mixture after `decay_from` of the budget
    other: float = 0.1
    decay_from: float = 0.75
    short: int | None = None  # until `decay_from`, rows are cut into rows of so many tokens: attention costs less
    characters: int = 30_000_000  # read at most so many of one source
    generated: int = 150_000  # examples from synth.py
    longest_answer: int = 120  # tokens; chat stage: longer answers of single-turn records are left out
    held_out: float = 0.01
    validation_rows: int = 16
    seed: int = 0


PRETRAIN = DataConfig(
    length=1024,
    short=256,
    rows=16,
    weights={"sgd": 0.12, "dolly": 0.2, "books": 0.2, "wikitext": 0.01, "gsm8k": 0.07, "docs": 0.2, "synth": 0.2},
    decay_weights={
        "sgd": 0.1, "dolly": 0.28, "books": 0.1, "wikitext": 0.01, "gsm8k": 0.1, "docs": 0.11, "synth": 0.3,
    },
)  # fmt: skip
# A quarter is the text of pretraining again: tuned on answers alone, the model forgets how to read it.
CHAT = DataConfig(
    length=512,
    rows=16,
    weights={
        "sgd": 0.08, "dolly": 0.1, "reading": 0.2, "gsm8k": 0.06, "synth": 0.32,
        "text/books": 0.05, "text/docs": 0.07, "text/dolly": 0.06, "text/wikitext": 0.01, "text/gsm8k": 0.02,
        "text/sgd": 0.01, "text/synth": 0.02,
    },
    decay_weights={
        "sgd": 0.07, "dolly": 0.1, "reading": 0.22, "gsm8k": 0.06, "synth": 0.31,
        "text/books": 0.05, "text/docs": 0.07, "text/dolly": 0.06, "text/wikitext": 0.01, "text/gsm8k": 0.02,
        "text/sgd": 0.01, "text/synth": 0.02,
    },
    decay_from=0.7,
)  # fmt: skip


# --- text to rows ------------------------------------------------------------------------------------------------


def render(tokenizer: PreTrainedTokenizerFast, documents: Sequence[Document]) -> list[tuple[list[int], list[bool]]]:
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
            # The newline after the role belongs to the prompt; the one after the end is nobody's.
            learn += [False] * (1 + len(newline)) + [answer] * (len(text) - len(newline) + 1) + [False] * len(newline)
        rendered.append((ids, learn))
    return rendered


def lay_end_to_end(rendered: Iterable[tuple[list[int], list[bool]]], length: int) -> Rows:
    """Documents one after another, cut every `length` tokens; every token is learnt."""
    flat = np.fromiter((i for ids, _ in rendered for i in ids), dtype=np.int32)
    count = max(len(flat) - 1, 0) // length
    return flat[: count * length].reshape(count, length), flat[1 : count * length + 1].reshape(count, length)


def pack_whole(rendered: Iterable[tuple[list[int], list[bool]]], length: int, pad: int) -> Rows:
    """Conversations packed whole into rows; one longer than a row is cut, and left out when no answer survives."""
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
    """Batches of rows drawn from several sources by weight; every source is read through before it repeats."""

    def __init__(self, rows: dict[str, Rows], config: DataConfig) -> None:
        self.rows = {name: r for name, r in rows.items() if len(r[0])}
        if not self.rows:
            raise PacelineError("the sources hold less text than one row; add sources or shorten the rows")
        self.config = config
        self.step = 0
        self.taken: Counter[str] = Counter()
        self._order: dict[str, tuple[int, np.ndarray]] = {}

    def next(self, progress: float) -> Batch:
        config = self.config
        chosen = config.weights if progress < config.decay_from else config.decay_weights
        names = sorted(self.rows)
        rng = random.Random(f"{config.seed}/{self.step}")
        weights = [chosen.get(n, config.other / (4 if n.startswith("text/") else 1)) for n in names]
        picked = [self._row(name) for name in rng.choices(names, weights, k=config.rows)]
        self.step += 1
        ids, labels = (torch.from_numpy(np.stack(side)).long() for side in zip(*picked, strict=True))
        if config.short and progress < config.decay_from:
            ids, labels = ids.reshape(-1, config.short), labels.reshape(-1, config.short)
        return {"input_ids": ids, "labels": labels}

    def _row(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        ids, labels = self.rows[name]
        epoch, place = divmod(self.taken[name], len(ids))
        if self._order.get(name, (-1, None))[0] != epoch:
            rng = np.random.default_rng([self.config.seed, epoch, *name.encode()])
            self._order[name] = (epoch, rng.permutation(len(ids)))
        self.taken[name] += 1
        index = self._order[name][1][place]
        return ids[index], labels[index]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "taken": dict(self.taken)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.taken = state["step"], Counter(state["taken"])
        self._order = {}


# --- sources to documents ----------------------------------------------------------------------------------------


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
        size, most = 0, len(documents)
        for index, document in enumerate(documents):
            size += len(document.plain())
            if size > config.characters:
                most = index + 1
                break
        training[name] = documents[:most]
    if config.generated:
        made = synth.generate(config.generated, config.seed, *reading_material(training))
        training["synth"], valid["synth"] = split(made, config.held_out)
    return training, valid


def reading_material(documents: dict[str, list[Document]]) -> tuple[list[str], list[tuple[str, str, str]]]:
    """Short passages, and (question, answer, passage) whose answer stands in the passage, for synth.py."""
    passages: list[str] = []
    facts: list[tuple[str, str, str]] = []
    for document in (d for group in documents.values() for d in group if d.context):
        sentences = synth.sentences_of(re.sub(r"\s+", " ", document.context))
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


def short_answers(
    rendered: Iterable[tuple[list[int], list[bool]]], longest: int, length: int
) -> Iterable[tuple[list[int], list[bool]]]:
    """Single-turn conversations that fit a row and whose answer is short."""
    for ids, learn in rendered:
        if len(ids) <= length and sum(learn) <= longest:
            yield ids, learn


def reading_record(rng: random.Random, document: Document) -> Document:
    """A record with a passage, in one of the forms such prompts come in."""
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
        rng = random.Random(data.seed)
        groups: dict[str, list[Document]] = {}
        for document in documents:
            if document.context:
                groups.setdefault("reading", []).append(reading_record(rng, document))
            elif document.messages:
                groups.setdefault(name, []).append(document)
        rows = {f"text/{name}": lay_end_to_end(render(tokenizer, documents), data.length)}
        for group, members in groups.items():
            rendered: Iterable[tuple[list[int], list[bool]]] = render(tokenizer, members)
            if all(len(d.messages) == 2 for d in members):
                rendered = short_answers(rendered, data.longest_answer, data.length)
            rows[group] = pack_whole(rendered, data.length, pad)
        return rows

    return build
