"""What a target writes itself, as text to train its drafters on: answers made by the engine, or recorded ones.

A drafter learns to say what its target would say, so it learns from the target's own answers (Zhou et al. 2024,
"DistillSpec", section 4.1). They are kept as a JSON Lines file of {"id", "source", "prompt_tokens", "tokens"}: made
once, many prompts at a time, and gone on with where they were interrupted.

    prompts = parse_sources(["sgd=train.jsonl.gz"])
    file = generated_rows("models/demo", prompts=prompts, count=2000, out=Path("own.jsonl"))
    ids, labels = rows_of(file, length=512)                  # labels on the target's own tokens alone

Doesn't know: drafters, training recipes.
"""

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor

from paceline.draft.neural.checkpoint import TargetFacts
from paceline.engine import Engine
from paceline.errors import PacelineError
from paceline.records import Appender, as_object, objects, write_whole
from paceline.replay.record import read_trace
from paceline.replay.tokens import Transcriber
from paceline.sampling import SamplingParams
from paceline.target.tokenizer import Tokenizer
from paceline.train.evaluate import Agreement, agreement
from paceline.train.rows import Rows, pack_whole
from paceline.train.sources import Document, Source, SourceError, read

BATCH = 32
"""Prompts answered at once."""
OPENING = (16, 64)
"""Tokens of a plain text that the target goes on from: at least, at most."""

Progress = Callable[[int, int], None]
"""Told how many answers there are, and how many there will be."""


@dataclass(frozen=True)
class Reply:
    """One answer of the target in token ids, with those of its prompt where they are known. source: its task."""

    source: str
    prompt: list[int] | None
    tokens: list[int]


# Making answers ---------------------------------------------------------------------------------------------------


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
        assert engine.tokenizer is not None  # made from a folder
        facts = TargetFacts.of(engine.target)
        room = engine.target.max_context - max_tokens
        asked = openings(prompts, engine.tokenizer, room, seed) if count > 0 else []
        there = _begin(
            out,
            {
                "target": facts.name, "weights": facts.weights_fingerprint, "tokenizer": facts.tokenizer_fingerprint,
                "prompts": [f"{s.name}={s.path}" for s in prompts or ()], "answers": [str(a) for a in answers],
                "max_tokens": max_tokens, "temperature": temperature, "seed": seed,
            },
        )  # fmt: skip
        recorded = (reply for file in answers for reply in _asked(file, engine.tokenizer))
        _append(out, ((f"recorded {n}", r) for n, r in enumerate(recorded) if f"recorded {n}" not in there))
        if temperature == 0:
            count = min(count, len(asked))  # asked again, the same prompt gets the same answer
        jobs: dict[str, tuple[str, list[int], SamplingParams]] = {}
        greedily: set[int] = set()
        for n in range(count):
            place = n % len(asked)
            source, prompt = asked[place]
            hot = float(n % 2 or place in greedily) if temperature is None else temperature
            if not hot:
                greedily.add(place)
            jobs[f"answer {n}"] = source, prompt, SamplingParams(max_tokens=max_tokens, temperature=hot, seed=seed + n)
        left = {name: job for name, job in jobs.items() if name not in there}
        _append(out, _answers(engine, left), progress, len(jobs) - len(left), len(jobs))
    return out


def _answers(
    engine: Engine, jobs: Mapping[str, tuple[str, list[int], SamplingParams]]
) -> Iterator[tuple[str, Reply]]:
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
    noted = out.with_name(f"{out.stem}.settings.json")
    if not out.exists() or not out.stat().st_size:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(noted, json.dumps(settings, indent=2) + "\n")
        return set()
    before = as_object(noted.read_bytes(), "settings") if noted.exists() else {}
    other = [key for key in settings if before.get(key) != settings[key]]
    if other:
        raise PacelineError(
            f"{out} was made with {other[0]} {before.get(other[0])!r} and not {settings[other[0]]!r}: delete it, or "
            "choose another file"
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


# Prompts ----------------------------------------------------------------------------------------------------------


def openings(
    sources: Sequence[Source] | None, tokenizer: Tokenizer, room: int, seed: int = 0
) -> list[tuple[str, list[int]]]:
    """(source, token ids) of prompts with at most `room` tokens, the sources taking turns, each in a seeded order.

    A conversation is cut before one of the assistant's turns, a plain text behind its first few tokens. PacelineError
    if there are none."""
    if not sources:
        return [("free", [_first_token(tokenizer)])]
    rng = random.Random(seed)
    groups: dict[str, list[list[int]]] = {}
    for source in sources:
        found = (_opening(document, tokenizer, rng) for document in prompts_of(source))
        groups.setdefault(source.name, []).extend(ids for ids in found if ids and len(ids) <= room)
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
    asked = [i for i, message in enumerate(document.messages) if message["role"] == "user"]
    if not asked:
        return []
    messages = document.messages[: rng.choice(asked[:4]) + 1]
    return _encoded(messages, tokenizer)


def _encoded(messages: Sequence[Mapping[str, str]], tokenizer: Tokenizer) -> list[int]:
    """A conversation up to where the assistant speaks; plain text for a model without a chat template."""
    if tokenizer.has_chat_template:
        return tokenizer.encode_chat(messages)
    return tokenizer.encode("\n\n".join(message["content"] for message in messages))


def _first_token(tokenizer: Tokenizer) -> int:
    """What a text begins with: the beginning token, or the end token where there is none."""
    ids = tokenizer.encode("")
    first = ids[0] if ids else tokenizer.eos_token_id
    if first is None:
        raise PacelineError(f"{tokenizer.name} has no token that a text begins with; give prompts")
    return first


# Recorded answers -------------------------------------------------------------------------------------------------


def read_replies(file: Path, tokenizer: Tokenizer, questions: Path | None = None) -> Iterator[Reply]:
    """Answers in a JSON Lines file, gzipped or not. A line is one of

        {"prompt_tokens": [ids], "tokens": [ids]}         what `generated_rows` writes
        {"text": answer, "finish_reason": ...}            what `paceline generate --json` writes, with the prompt if a
                                                          "prompt" or "messages" stand beside it
        {"choices": [{"turns": [answer, ...]}]}           Spec-Bench's answers; their prompts are not known
        {"prompt": ..., "response": ...}, {"messages": [...]}   a server's log

    with a "source" or a "category" beside it. questions: Spec-Bench's question.jsonl, from which its answers then have
    their prompts and categories. PacelineError, one line, for anything else."""
    first = next(objects(file, PacelineError, "an answer"), None)
    if first is None:
        raise PacelineError(f"{file} holds no answers")
    if not {"tokens", "text", "choices"} & first[1].keys() or ("choices" in first[1] and questions is not None):
        yield from _logged(file, tokenizer, questions if "choices" in first[1] else None)
        return
    for where, record in objects(file, PacelineError, "an answer"):
        source = str(record.get("source") or record.get("category") or _stem(file))
        try:
            yield from (Reply(source, prompt, ids) for prompt, ids in _reply(record, tokenizer) if ids)
        except (KeyError, TypeError, ValueError, IndexError):
            raise PacelineError(f"{where}: not an answer (keys: {', '.join(record)})") from None


def _reply(record: Mapping[str, Any], tokenizer: Tokenizer) -> Iterator[tuple[list[int] | None, list[int]]]:
    if "tokens" in record:
        prompt = record.get("prompt_tokens")
        yield [int(i) for i in prompt] if isinstance(prompt, list) else None, [int(i) for i in record["tokens"]]
    elif "choices" in record:
        yield from ((None, _ended(text, tokenizer)) for text in record["choices"][0]["turns"])
    else:
        asked = record.get("messages") or record.get("prompt")
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        ended = record.get("finish_reason", "stop") == "stop"
        ids = _ended(record["text"], tokenizer) if ended else tokenizer.encode_text(record["text"])
        yield _encoded(messages, tokenizer) if messages else None, ids


def _ended(text: str, tokenizer: Tokenizer) -> list[int]:
    """An answer that the model ended itself."""
    end = tokenizer.eos_token_id
    return [*tokenizer.encode_text(text), *([] if end is None else [end])]


def _logged(file: Path, tokenizer: Tokenizer, questions: Path | None) -> Iterator[Reply]:
    transcriber = Transcriber(tokenizer) if tokenizer.has_chat_template else None
    for exchange in read_trace(file, questions):
        source = exchange.category or _stem(file)
        if transcriber is None:
            for at in exchange.answers:
                prompt = _encoded(exchange.messages[:at], tokenizer)
                yield Reply(source, prompt, _ended(exchange.messages[at]["content"], tokenizer))
        else:
            for turn in transcriber.conversation(exchange).turns:
                yield Reply(source, turn.prompt.tolist(), turn.answer.tolist())


def _asked(file: Path, tokenizer: Tokenizer) -> Iterator[Reply]:
    """The answers of a file, all of which must come with their prompts: a drafter reads those too."""
    for number, reply in enumerate(read_replies(file, tokenizer), 1):
        if reply.prompt is None:
            raise PacelineError(f'{file}: answer {number} has no prompt: a "prompt" or "messages" must stand beside it')
        yield reply


def _stem(file: Path) -> str:
    return re.sub(r"\.jsonl?(\.gz)?$", "", file.name)


# Rows to train on -------------------------------------------------------------------------------------------------


def rows_of(file: Path, length: int, pad: int = 0) -> Rows:
    """Every answer of a file that `generated_rows` wrote: input ids and labels, int32 [rows, length], several
    conversations packed into a row; `pad` fills it up. The label of a position is the token behind it if the target
    wrote that one, else IGNORE."""
    return _rows(_read(file), length, pad)


def split_rows(
    file: Path, length: int, pad: int = 0, held_out: float = 0.05
) -> tuple[dict[str, Rows], dict[str, Rows]]:
    """Rows to train on and held-out rows, as `rows_of`, by source. A hash of the prompt decides, so that all answers
    to one prompt are on one side; of two prompts at least one is held out. Texts that the target wrote freely, from a
    first token that says nothing, go by their own hash."""
    replies = _read(file)
    keys = sorted({_key(reply) for reply in replies})
    held = set(keys[: max(round(held_out * len(keys)), int(len(keys) > 1))])
    sides: tuple[dict[str, list[Reply]], dict[str, list[Reply]]] = ({}, {})
    for reply in replies:
        sides[_key(reply) in held].setdefault(reply.source, []).append(reply)
    training, valid = ({name: _rows(group, length, pad) for name, group in side.items()} for side in sides)
    return _filled(training), _filled(valid)


def _read(file: Path) -> list[Reply]:
    replies = []
    for where, record in objects(file, PacelineError, "an answer"):
        prompt, tokens = record.get("prompt_tokens"), record.get("tokens")
        if not isinstance(prompt, list) or not isinstance(tokens, list):
            raise PacelineError(f'{where}: "prompt_tokens" and "tokens" must be lists of token ids')
        replies.append(Reply(str(record.get("source", "")), prompt, tokens))
    return replies


def _key(reply: Reply) -> str:
    said = reply.prompt if reply.prompt and len(reply.prompt) > 1 else reply.tokens
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def _rows(replies: Sequence[Reply], length: int, pad: int) -> Rows:
    rendered = [
        (prompt + reply.tokens, [False] * len(prompt) + [True] * len(reply.tokens))
        for reply in replies
        for prompt in [reply.prompt or []]
        if len(prompt) + len(reply.tokens) > 1
    ]
    return pack_whole(rendered, length, pad)


def _filled(rows: dict[str, Rows]) -> dict[str, Rows]:
    return {name: r for name, r in rows.items() if len(r[0])}


# How well a drafter fits ------------------------------------------------------------------------------------------

Logits = Callable[[Tensor], Tensor]
"""Token ids [B, T] to logits [B, T, V] of the token behind each."""


def acceptance(target: Logits, draft: Logits, held: Mapping[str, Rows]) -> list[Agreement]:
    """How far a drafter's distribution q fits the target's p over the labelled positions of held-out rows, by source:
    mean of sum min(p, q), the rate at which drawn tokens are accepted, and how often both prefer one token. The last
    entry, "all", weighs every source alike."""
    one, other = (_Model(logits) for logits in (target, draft))
    return agreement(one, other, held)


class _Model:
    """A function of token ids, called as transformers models are."""

    def __init__(self, logits: Logits):
        self._logits = logits

    def __call__(self, input_ids: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self._logits(input_ids))


def told(found: Sequence[Agreement]) -> list[str]:
    """`acceptance` or `agreement` in lines for a reader."""
    width = max(len(a.source) for a in found)
    return [
        f"{a.source:{width}}  accepted {a.overlap:6.1%}  same best token {a.top1:6.1%}  ({a.tokens:,} tokens)"
        for a in found
    ]
