"""What a finished model answers: to the card's prompts, to examples of what it practised, and to held-out text."""

import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from paceline.bench.record import is_looping
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from zoo import synth

LONGEST = 160
"""Most tokens of an answer."""
PROMPTS: dict[str, list[str]] = tomllib.loads(files(__package__).joinpath("prompts.toml").read_text("utf-8"))
"""24 fixed prompts for the model card, four of each of six kinds."""


@dataclass(frozen=True)
class Answer:
    """What the model said to one prompt, and how it ended."""

    kind: str
    prompt: str
    text: str
    tokens: int
    ended: bool
    loops: bool


def answer_all(folder: Path, prompts: Mapping[str, Sequence[str | list[dict[str, str]]]] = PROMPTS) -> list[Answer]:
    """Greedy answers to texts or conversations."""
    engine = Engine(folder, max_batch=16)
    assert engine.tokenizer is not None
    pairs = [(kind, text) for kind, texts in prompts.items() for text in texts]
    rows = []
    for _, text in pairs:
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
        rows.append(engine.add(messages, SamplingParams(max_tokens=LONGEST)))
    engine.finish(rows)
    answers = []
    for (kind, text), row in zip(pairs, rows, strict=True):
        shown = text if isinstance(text, str) else "\n".join(f"{m['role']}: {m['content']}" for m in text)
        new, ended = row.new_tokens.tolist(), row.finish_reason == "stop"
        answers.append(Answer(kind, shown, row.text.strip(), len(new), ended, is_looping(new)))
    return answers


def practised(folder: Path, each: int = 20, seed: int = 1_000_003) -> str:
    """One Markdown table: fresh examples of what synth.py generates, and how many are answered word for word."""
    wanted: dict[str, dict[str, str]] = {kind: {} for kind in synth.SHARES if kind != "small talk"}
    for document in synth.generate(100 * each, seed):
        prompt, answer = (m["content"] for m in document.messages)
        held = wanted.get(document.fields["kind"], {})
        if document.fields["kind"] in wanted and len(held) < each:
            held[prompt] = answer
    answers = answer_all(folder, {kind: list(held) for kind, held in wanted.items()})
    lines = ["| kind | examples | answered word for word | ended |", "|---|---:|---:|---:|"]
    for kind, held in wanted.items():
        group = [a for a in answers if a.kind == kind]
        right = sum(a.text.strip() == held[a.prompt] for a in group)
        lines.append(f"| {kind} | {len(group)} | {right} | {sum(a.ended for a in group)} |")
    return "\n".join(lines)


def counts(answers: Sequence[Answer]) -> str:
    """One Markdown table: ended and looping answers by kind."""
    lines = [f"| kind | prompts | ended within {LONGEST} tokens | looping | mean tokens |", "|---|---:|---:|---:|---:|"]
    groups = {kind: [a for a in answers if a.kind == kind] for kind in dict.fromkeys(a.kind for a in answers)}
    for kind, group in [*groups.items(), ("all", list(answers))]:
        mean = sum(a.tokens for a in group) / len(group)
        ended, looping = sum(a.ended for a in group), sum(a.loops for a in group)
        lines.append(f"| {kind} | {len(group)} | {ended} | {looping} | {mean:.0f} |")
    return "\n".join(lines)


def drawn(prompts: Sequence[list[dict[str, str]]], count: int = 6, seed: int = 0) -> list[list[dict[str, str]]]:
    """Prompts for the samples, by a fixed seed."""
    return random.Random(seed).sample(list(prompts), min(count, len(prompts)))
