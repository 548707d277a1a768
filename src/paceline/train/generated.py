"""What a target writes itself, as text to train its drafters on: answers made by the engine, many at a time.

A drafter learns to say what its target would say, so it learns from the target's own answers (Zhou et al. 2024,
"DistillSpec", section 4.1). They are kept as a JSON Lines file of {"id", "source", "prompt_tokens", "tokens"}, beside
it in NAME.settings.json how they were made; an interrupted call goes on where it stopped.

    prompts = parse_sources(["sgd=train.jsonl.gz"])
    file = generated_rows("models/demo", prompts=prompts, count=2000, out=Path("own.jsonl"))
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from paceline.draft.neural.checkpoint import TargetFacts
from paceline.engine.engine import Engine
from paceline.engine.sampling import SamplingParams
from paceline.errors import PacelineError
from paceline.jsonl import as_object, write_whole
from paceline.target.tokenizer import Tokenizer
from paceline.train.data import Document, Example, Source, encoded, read, read_examples
from paceline.workbench.runs import Lines, check_identity

BATCH = 32
"""Prompts answered at once."""
OPENING = (16, 64)
"""The least and the most tokens of a plain text that the target goes on from."""

Progress = Callable[[int, int], None]
"""Called with the number of answers so far, and of all answers."""

Question = tuple[str, list[int], SamplingParams]
"""Source, prompt, and how to answer it."""


def generated_rows(
    target_folder: str | Path,
    *,
    prompts: Sequence[Source] | None = None,
    answers: Sequence[Path] = (),
    count: int = 1000,
    max_tokens: int = 128,
    temperature: float | None = None,
    seed: int = 0,
    out: Path,
    progress: Progress | None = None,
) -> Path:
    """Write the recorded `answers` and `count` new ones of the target to the JSON Lines file `out`; returns it.

    prompts      sources of prompts, an equal share from each; None: the target writes freely from its first token.
    answers      recorded answers of this target with their prompts, as `read_examples` reads them.
    temperature  of the new answers; None: half of them greedy, half at temperature 1.

    What `out` holds already is not made again, so an interrupted call goes on; of several processes the first one
    writes. Raises PacelineError if `out` was made in another way, or if there is nothing to answer."""
    if count < 1 and not answers:
        raise PacelineError("there is nothing to train on: give recorded answers, or say how many to generate")
    with PartialState(cpu=not torch.cuda.is_available()).main_process_first():
        engine = Engine(target_folder, max_batch=BATCH, prefill_chunk=2048)
        tokenizer = engine.tokenizer
        assert tokenizer is not None  # made from a folder
        facts = TargetFacts.of(engine.target)
        settings = {
            "target": facts.name, "weights": facts.weights_fingerprint, "tokenizer": facts.tokenizer_fingerprint,
            "prompts": [f"{s.name}={s.path}" for s in prompts or ()], "answers": [str(a) for a in answers],
            "max_tokens": max_tokens, "temperature": temperature, "seed": seed,
        }  # fmt: skip
        starts = openings(prompts, tokenizer, engine.target.max_context - max_tokens, seed) if count > 0 else []
        with _begin(out, settings) as lines:
            recorded = (
                example for file in answers for example in read_examples(file, tokenizer, need_prompts=True)
            )
            for number, example in enumerate(recorded):
                if f"recorded {number}" not in lines:
                    _append(lines, f"recorded {number}", example)
            questions = _questions(starts, count, max_tokens, temperature, seed)
            left = {name: question for name, question in questions.items() if name not in lines}
            for done, (name, example) in enumerate(_answers(engine, left), len(questions) - len(left) + 1):
                _append(lines, name, example)
                if progress is not None:
                    progress(done, len(questions))
    return out


def _questions(
    starts: Sequence[tuple[str, list[int]]], count: int, max_tokens: int, temperature: float | None, seed: int
) -> dict[str, Question]:
    """What to answer, by name: the prompts in turn, again and again, but none twice greedily."""
    if temperature == 0:
        count = min(count, len(starts))
    questions: dict[str, Question] = {}
    greedy: set[int] = set()
    for n in range(count):
        place = n % len(starts)
        source, prompt = starts[place]
        heat = float(n % 2 or place in greedy) if temperature is None else temperature
        if not heat:
            greedy.add(place)
        params = SamplingParams(max_tokens=max_tokens, temperature=heat, seed=seed + n)
        questions[f"answer {n}"] = source, prompt, params
    return questions


def _answers(engine: Engine, questions: Mapping[str, Question]) -> Iterator[tuple[str, Example]]:
    """(name, answer) of every question, as they end."""
    names = list(questions)
    for delta in engine.follow([engine.add(prompt, params) for _, prompt, params in questions.values()]):
        if delta.row.error:
            raise PacelineError(delta.row.error)
        if delta.finished:
            source, prompt, _ = questions[names[delta.index]]
            yield names[delta.index], Example(source, prompt, delta.row.new_tokens.tolist())


def _begin(out: Path, settings: Mapping[str, Any]) -> Lines:
    """The answers that `out` holds, by their ids. PacelineError if they were made with other settings."""
    record = out.with_name(f"{out.stem}.settings.json")
    if out.exists() and out.stat().st_size:
        before = as_object(record.read_bytes(), "settings") if record.exists() else {}
        check_identity(before, settings, str(out), "delete it, or choose another file")
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(record, json.dumps(settings, indent=2) + "\n")
    return Lines(out, key="id")


def _append(lines: Lines, id: str, example: Example) -> None:
    lines.append(
        {"id": id, "source": example.source, "prompt_tokens": example.prompt, "tokens": example.tokens}
    )


def openings(
    sources: Sequence[Source] | None, tokenizer: Tokenizer, most: int, seed: int = 0
) -> list[tuple[str, list[int]]]:
    """(source, token ids) of prompts with at most `most` tokens, the sources taking turns, each in a seeded order.

    A conversation is cut before one of the assistant's turns, a plain text after its first few tokens. PacelineError
    if there are none."""
    if not sources:
        return [("free", [_first_token(tokenizer)])]
    rng = random.Random(seed)
    groups: dict[str, list[list[int]]] = {}
    for source in sources:
        beginnings = (_opening(document, tokenizer, rng) for document in read(source))
        groups.setdefault(source.name, []).extend(ids for ids in beginnings if ids and len(ids) <= most)
    for name, group in groups.items():
        if not group:
            raise PacelineError(f"source {name!r} has no prompt of at most {most} tokens")
        rng.shuffle(group)
    longest = max(map(len, groups.values()))
    return [(name, group[i]) for i in range(longest) for name, group in groups.items() if i < len(group)]


def _opening(document: Document, tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """The prompt that a document gives, in token ids; none if nobody asks in it."""
    if not document.messages:
        ids = tokenizer.encode(document.text)
        return ids[: rng.randint(*OPENING)]
    turns = [i for i, message in enumerate(document.messages) if message["role"] == "user"]
    if not turns:
        return []
    return encoded(document.messages[: rng.choice(turns[:4]) + 1], tokenizer)


def _first_token(tokenizer: Tokenizer) -> int:
    """The token that a text begins with; the end token for a tokenizer without one."""
    ids = tokenizer.encode("")
    first = ids[0] if ids else tokenizer.eos_token_id
    if first is None:
        raise PacelineError(f"{tokenizer.name} has no token that a text begins with; give prompts")
    return first
