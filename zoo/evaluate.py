"""What a trained family is worth on text it has not seen: loss against a 5-gram model, agreement of the draft.

The held-out documents are those that training left out (a hash of their content decides), so the same sources give the
same text. The 5-gram model has the same tokenizer and learns from the same training documents, each read once.

Doesn't know: how the models were trained.

    python -m zoo evaluate models/demo sgd=dialogues.jsonl.gz dolly=dolly.jsonl.gz --draft models/demo-draft
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from paceline.train.data import Document, Message, Rows, Source, batches, pack_whole
from paceline.train.draft import DistilLoss
from paceline.train.loss import IGNORE
from paceline.train.measure import measure, rows_of
from zoo.ngram import NgramModel
from zoo.text import DataConfig, lay_end_to_end, load_documents, render
from zoo.tokenizer import DOCUMENT, token_id


@dataclass(frozen=True)
class SourceLoss:
    """Held-out loss in nats a token; `answers` over what assistants say, otherwise over all tokens."""

    source: str
    answers: bool
    tokens: int
    model: float
    ngram: float


@dataclass(frozen=True)
class HeldOut:
    """Held-out rows by source, and all training tokens as one sequence."""

    text: dict[str, Rows]
    answers: dict[str, Rows]
    training: np.ndarray


def held_out_rows(
    sources: Sequence[Source], tokenizer: PreTrainedTokenizerFast, data: DataConfig, length: int, most: int
) -> HeldOut:
    """At most `most` rows of `length` tokens of each source."""
    training, valid = load_documents(sources, data)
    pad = token_id(tokenizer, DOCUMENT)
    text, answers = {}, {}
    for name, documents in valid.items():
        rendered = render(tokenizer, documents)
        laid = lay_end_to_end(rendered, length)
        if len(laid[0]):
            text[name] = (laid[0][:most], laid[1][:most])
        spoken = [r for r, d in zip(rendered, documents, strict=True) if d.messages]
        packed = pack_whole(spoken, length, pad)
        if len(packed[0]):
            answers[name] = (packed[0][:most], packed[1][:most])
    flat = [np.array(ids, np.int32) for documents in training.values() for ids, _ in render(tokenizer, documents)]
    return HeldOut(text, answers, np.concatenate(flat))


def compare(model: Any, held: HeldOut, vocabulary: int) -> list[SourceLoss]:
    """The model and the 5-gram model on the same positions of every source."""
    ngram = NgramModel.fit(held.training, vocabulary)
    losses = []
    for answers, group in ((False, held.text), (True, held.answers)):
        for name, (ids, labels) in group.items():
            kept = labels != IGNORE
            own = -_log_probs(model, (ids, labels))[kept].mean()
            rows = [np.append(row, label[-1:].clip(0)) for row, label in zip(ids, labels, strict=True)]
            base = -np.stack([ngram.log_probs(row) for row in rows])[kept].mean()
            losses.append(SourceLoss(name, answers, int(kept.sum()), float(own), float(base)))
    return losses


@torch.no_grad()
def _log_probs(model: Any, rows: Rows) -> np.ndarray:
    """log p of every label, [rows, length]; 0 where there is none."""
    parts = []
    for ids, labels in batches(rows):
        logits = torch.log_softmax(model(input_ids=ids).logits.float(), -1)
        logs = logits.gather(-1, labels.clamp_min(0)[..., None])[..., 0]
        parts.append(torch.where(labels == IGNORE, 0.0, logs))
    return torch.cat(parts).numpy()


def evaluate(
    folder: Path,
    sources: Sequence[Source],
    data: DataConfig,
    draft: Path | None = None,
    length: int = 512,
    most: int = 32,
) -> dict[str, Any]:
    """Everything the model card says about held-out text."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    held = held_out_rows(sources, tokenizer, data, length, most)
    report: dict[str, Any] = {"loss": [asdict(loss) for loss in compare(model, held, len(tokenizer))]}
    if draft:
        other = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32).eval()
        student = DistilLoss(other, model, token_id(tokenizer, DOCUMENT))
        report["agreement"] = {"answers": agreement(student, held.answers), "text": agreement(student, held.text)}
    return report


def agreement(student: DistilLoss, held: Mapping[str, Rows]) -> list[dict[str, Any]]:
    """By source, and over all as "all": how far the draft's distribution is its target's for the next token."""
    first = {name: rows[0] for name, rows in rows_of(measure(student, held)).items()}
    return [
        {"source": name, "tokens": row["positions"], "overlap": row["overlap"], "top1": row["top1"]}
        for name, row in first.items()
    ]


def held_out_prompts(documents: Mapping[str, Sequence[Document]], count: int, seed: int = 0) -> list[list[Message]]:
    """`count` conversations that wait for an answer, an equal share from every source that has conversations.

    Of a longer dialogue a random number of turns is kept, so that openings and later turns both occur."""
    rng = random.Random(seed)
    groups = [[d for d in group if len(d.messages) > 1] for _, group in sorted(documents.items())]
    groups = [group for group in groups if group]
    prompts = []
    for place, group in enumerate(groups):
        share = count // len(groups) + (place < count % len(groups))
        for document in rng.sample(group, min(share, len(group))):
            turns = [i for i, m in enumerate(document.messages[:-1]) if m["role"] == "user"]
            prompts.append([dict(m) for m in document.messages[: rng.choice(turns[:4]) + 1]])
    return prompts
