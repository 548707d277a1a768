"""What a target writes itself, as text to train its drafters on: answers made by the engine, many at a time.

A drafter learns to say what its target would say, so it learns from the target's own answers (Zhou et al. 2024,
"DistillSpec", section 4.1). They are kept as a JSON Lines file of {"id", "source", "prompt_tokens", "tokens"}; an
interrupted call goes on where it stopped.

    prompts = parse_sources(["sgd=train.jsonl.gz"])
    file = generated_rows("models/demo", prompts=prompts, count=2000, out=Path("own.jsonl"))

Doesn't know: drafters, training recipes.
"""

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from paceline.draft.neural.checkpoint import TargetFacts
from paceline.engine.engine import Engine
from paceline.engine.sampling import SamplingParams
from paceline.errors import PacelineError
from paceline.jsonl import Appender, as_object, objects, write_whole
from paceline.target.tokenizer import Tokenizer
from paceline.train.replies import Reply, encoded, with_prompts
from paceline.train.sources import Document, Source, SourceError, read

BATCH = 32
"""Prompts answered at once."""
OPENING = (16, 64)
"""The least and the most tokens of a plain text that the target goes on from."""

Progress = Callable[[int, int], None]
"""Called with the number of answers so far, and of all answers."""

Job = tuple[str, list[int], SamplingParams]
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
    answers      recorded answers of this target with their prompts, as `read_replies` reads them.
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
        known = _begin(out, settings)
        recorded = enumerate(reply for file in answers for reply in with_prompts(file, tokenizer))
        _append(out, ((f"recorded {n}", reply) for n, reply in recorded if f"recorded {n}" not in known))
        jobs = _jobs(starts, count, max_tokens, temperature, seed)
        left = {name: job for name, job in jobs.items() if name not in known}
        _append(out, _answers(engine, left), progress, len(jobs) - len(left), len(jobs))
    return out


def _jobs(
    starts: Sequence[tuple[str, list[int]]], count: int, max_tokens: int, temperature: float | None, seed: int
) -> dict[str, Job]:
    """What to answer, by name: the prompts in turn, again and again, but none twice greedily."""
    if temperature == 0:
        count = min(count, len(starts))
    jobs: dict[str, Job] = {}
    greedy: set[int] = set()
    for n in range(count):
        place = n % len(starts)
        source, prompt = starts[place]
        heat = float(n % 2 or place in greedy) if temperature is None else temperature
        if not heat:
            greedy.add(place)
        jobs[f"answer {n}"] = source, prompt, SamplingParams(max_tokens=max_tokens, temperature=heat, seed=seed + n)
    return jobs


def _answers(engine: Engine, jobs: Mapping[str, Job]) -> Iterator[tuple[str, Reply]]:
    """(name, answer) of every job, as they end."""
    names = list(jobs)
    for delta in engine.follow([engine.add(prompt, params) for _, prompt, params in jobs.values()]):
        if delta.row.error:
            raise PacelineError(delta.row.error)
        if delta.finished:
            source, prompt, _ = jobs[names[delta.index]]
            yield names[delta.index], Reply(source, prompt, delta.row.new_tokens.tolist())


def _begin(out: Path, settings: dict[str, Any]) -> set[str]:
    """Names of the answers that `out` holds; a line that a kill cut off is dropped. PacelineError if they were made
    with other settings."""
    record = out.with_name(f"{out.stem}.settings.json")
    if not out.exists() or not out.stat().st_size:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(record, json.dumps(settings, indent=2) + "\n")
        return set()
    before = as_object(record.read_bytes(), "settings") if record.exists() else {}
    for key, setting in settings.items():
        if before.get(key) != setting:
            raise PacelineError(
                f"{out} was made with {key} {before.get(key)!r} and not {setting!r}: delete it, or choose another file"
            )
    content = out.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        out.write_bytes(whole)
    return {str(row.get("id")) for _, row in objects(out, PacelineError, "an answer")}


def _append(
    out: Path, replies: Iterable[tuple[str, Reply]], progress: Progress | None = None, done: int = 0, total: int = 0
) -> None:
    with Appender.open(out, then="; the same command goes on from there") as lines:
        for more, (name, reply) in enumerate(replies, 1):
            row = {"id": name, "source": reply.source, "prompt_tokens": reply.prompt, "tokens": reply.tokens}
            lines.append([row])
            if progress is not None:
                progress(done + more, total)


def openings(
    sources: Sequence[Source] | None, tokenizer: Tokenizer, room: int, seed: int = 0
) -> list[tuple[str, list[int]]]:
    """(source, token ids) of prompts with at most `room` tokens, the sources taking turns, each in a seeded order.

    A conversation is cut before one of the assistant's turns, a plain text after its first few tokens. PacelineError
    if there are none."""
    if not sources:
        return [("free", [_first_token(tokenizer)])]
    rng = random.Random(seed)
    groups: dict[str, list[list[int]]] = {}
    for source in sources:
        beginnings = (_opening(document, tokenizer, rng) for document in prompts_of(source))
        groups.setdefault(source.name, []).extend(ids for ids in beginnings if ids and len(ids) <= room)
    for name, group in groups.items():
        if not group:
            raise PacelineError(f"source {name!r} has no prompt of at most {room} tokens")
        rng.shuffle(group)
    longest = max(map(len, groups.values()))
    return [(name, group[i]) for i in range(longest) for name, group in groups.items() if i < len(group)]


def prompts_of(source: Source) -> Iterator[Document]:
    """Documents of a source: any that `sources.read` knows, prompt files of `paceline generate` (lines of {"prompt"}
    or {"messages"}), and Spec-Bench's questions ({"turns": [text]})."""
    path = source.path
    rows = partial(objects, path, PacelineError, "a prompt")
    if isinstance(path, str) or ".jsonl" not in path.name or not any(_is_prompt(row) for _, row in rows()):
        yield from read(source)
        return
    for where, record in rows():
        if "messages" in record:
            yield Document(source.name, messages=tuple(record["messages"]))
            continue
        text = record["turns"][0] if _is_question(record) else record.get("prompt")
        if not isinstance(text, str) or not text:
            raise SourceError(f'{where}: "prompt" must be a text that is not empty')
        yield Document(source.name, messages=({"role": "user", "content": text},))


def _is_prompt(record: Mapping[str, Any]) -> bool:
    return "prompt" in record or _is_question(record)


def _is_question(record: Mapping[str, Any]) -> bool:
    turns = record.get("turns")
    return isinstance(turns, list) and bool(turns) and isinstance(turns[0], str)


def _opening(document: Document, tokenizer: Tokenizer, rng: random.Random) -> list[int]:
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
