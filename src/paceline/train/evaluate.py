"""What a trained family is worth on text it has not seen: loss against a 5-gram model, agreement of the draft.

The held-out documents are those that training left out (a hash of their content decides), so the same sources give the
same text. The 5-gram model has the same tokenizer and learns from the same training documents, each read once.

Doesn't know: how the models were trained.

    python -m paceline.train evaluate models/demo sgd=dialogues.jsonl.gz dolly=dolly.jsonl.gz --draft models/demo-draft
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from paceline.train.loss import IGNORE
from paceline.train.ngram import NgramModel
from paceline.train.rows import DataConfig, Rows, lay_end_to_end, load_documents, pack_whole, render
from paceline.train.sources import Document, Message, Source
from paceline.train.tokenizer import DOCUMENT, token_id


@dataclass(frozen=True)
class SourceLoss:
    """Held-out loss in nats a token; `answers` over what assistants say, otherwise over all tokens."""

    source: str
    answers: bool
    tokens: int
    model: float
    ngram: float


@dataclass(frozen=True)
class Agreement:
    """How a draft's distribution q fits the target's p over held-out answers and text, at temperature 1.

    overlap  mean of sum min(p, q): the chance that a token drawn from q is accepted. top1: both prefer one token."""

    source: str
    tokens: int
    overlap: float
    top1: float


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
    found = []
    for answers, group in ((False, held.text), (True, held.answers)):
        for name, (ids, labels) in group.items():
            kept = labels != IGNORE
            own = -_log_probs(model, ids, labels)[kept].mean()
            rows = [np.append(row, label[-1:].clip(0)) for row, label in zip(ids, labels, strict=True)]
            base = -np.stack([ngram.log_probs(row) for row in rows])[kept].mean()
            found.append(SourceLoss(name, answers, int(kept.sum()), float(own), float(base)))
    return found


@torch.no_grad()
def _log_probs(model: Any, ids: np.ndarray, labels: np.ndarray, batch: int = 4) -> np.ndarray:
    """log p of every label, [rows, length]; 0 where there is none."""
    out = np.zeros(ids.shape)
    for start in range(0, len(ids), batch):
        logits = model(input_ids=torch.from_numpy(ids[start : start + batch]).long()).logits.float()
        wanted = torch.from_numpy(labels[start : start + batch]).long()
        logs = torch.log_softmax(logits, -1).gather(-1, wanted.clamp_min(0)[..., None])[..., 0]
        out[start : start + batch] = torch.where(wanted == IGNORE, 0.0, logs).numpy()
    return out


@torch.no_grad()
def agreement(target: Any, draft: Any, rows: Mapping[str, Rows], batch: int = 4) -> list[Agreement]:
    """By source, over the labelled positions; the last entry, "all", weighs every source alike."""
    found = []
    for name, (ids, labels) in rows.items():
        overlap, same, count = 0.0, 0.0, 0
        for start in range(0, len(ids), batch):
            tokens = torch.from_numpy(ids[start : start + batch]).long()
            kept = torch.from_numpy(labels[start : start + batch] != IGNORE)
            p, q = (torch.softmax(m(input_ids=tokens).logits.float(), -1)[kept] for m in (target, draft))
            overlap += float(torch.minimum(p, q).sum())
            same += float((p.argmax(-1) == q.argmax(-1)).sum())
            count += len(p)
        found.append(Agreement(name, count, overlap / count, same / count))
    overlaps, tops = ([getattr(a, key) for a in found] for key in ("overlap", "top1"))
    total = sum(a.tokens for a in found)
    return [*found, Agreement("all", total, sum(overlaps) / len(found), sum(tops) / len(found))]


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
        other: Any = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32).eval()
        report["agreement"] = {
            "answers": [asdict(a) for a in agreement(model, other, held.answers)],
            "text": [asdict(a) for a in agreement(model, other, held.text)],
        }
    return report


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
