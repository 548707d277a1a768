"""Answers of a target, read from records of several kinds, and as rows to train on.

    training, held = split_rows(file, length=512)            # labels on the target's own tokens alone

Doesn't know: drafters, training recipes, how answers are made.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.jsonl import objects
from paceline.replay.record import read_trace
from paceline.target.tokenizer import Tokenizer
from paceline.train.rows import Rendered, Rows, pack_whole
from paceline.workbench.transcript import Transcriber


@dataclass(frozen=True)
class Reply:
    """One answer of the target in token ids, with those of its prompt if they are known. source: where it is from."""

    source: str
    prompt: list[int] | None
    tokens: list[int]


def read_replies(file: Path, tokenizer: Tokenizer, questions: Path | None = None) -> Iterator[Reply]:
    """Answers in a JSON Lines file, gzipped or not. A line is one of

        {"prompt_tokens": [ids], "tokens": [ids]}         what `generated_rows` writes
        {"text": answer, "finish_reason": ...}            what `paceline generate --json` writes; with the prompt if
                                                          the line has a "prompt" or "messages"
        {"choices": [{"turns": [answer, ...]}]}           Spec-Bench's answers; their prompts are not known
        {"prompt": ..., "response": ...}, {"messages": [...]}   a server's log

    and may have a "source" or a "category". PacelineError, one line, for anything else.

    questions  Spec-Bench's question.jsonl, which has the prompts and categories of its answers."""
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
        prompt = record.get("messages") or record.get("prompt")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        ended = record.get("finish_reason", "stop") == "stop"
        ids = _ended(record["text"], tokenizer) if ended else tokenizer.encode_text(record["text"])
        yield encoded(messages, tokenizer) if messages else None, ids


def _ended(text: str, tokenizer: Tokenizer) -> list[int]:
    """An answer that the model ended itself."""
    end = tokenizer.eos_token_id
    return [*tokenizer.encode_text(text), *([] if end is None else [end])]


def _logged(file: Path, tokenizer: Tokenizer, questions: Path | None) -> Iterator[Reply]:
    transcriber = Transcriber(tokenizer) if tokenizer.has_chat_template else None
    for exchange in read_trace(file, questions=questions):
        source = exchange.category or _stem(file)
        if transcriber is None:
            for at in exchange.answers:
                prompt = encoded(exchange.messages[:at], tokenizer)
                yield Reply(source, prompt, _ended(exchange.messages[at]["content"], tokenizer))
        else:
            for turn in transcriber.conversation(exchange).turns:
                yield Reply(source, turn.prompt.tolist(), turn.answer.tolist())


def _stem(file: Path) -> str:
    return re.sub(r"\.jsonl?(\.gz)?$", "", file.name)


def with_prompts(file: Path, tokenizer: Tokenizer) -> Iterator[Reply]:
    """The answers of a file, all of which must come with their prompts: a drafter reads those too."""
    for number, reply in enumerate(read_replies(file, tokenizer), 1):
        if reply.prompt is None:
            raise PacelineError(f'{file}: answer {number} has no prompt: give it a "prompt" or "messages"')
        yield reply


def encoded(messages: Sequence[Mapping[str, str]], tokenizer: Tokenizer) -> list[int]:
    """A conversation up to where the assistant speaks; plain text for a model without a chat template."""
    if tokenizer.has_chat_template:
        return tokenizer.encode_chat(messages)
    return tokenizer.encode("\n\n".join(message["content"] for message in messages))


def split_rows(
    file: Path, length: int, pad: int = 0, held_out: float = 0.05
) -> tuple[dict[str, Rows], dict[str, Rows]]:
    """Rows to train on and held-out rows by source, from a file that `generated_rows` wrote.

    A hash of the prompt decides, so that all answers to one prompt are on one side; of two prompts at least one is held
    out. Texts that the target wrote freely are divided by a hash of their own."""
    replies = _read(file)
    keys = sorted({_key(reply) for reply in replies})
    held = set(keys[: max(round(held_out * len(keys)), int(len(keys) > 1))])
    sides: tuple[dict[str, list[Reply]], dict[str, list[Reply]]] = ({}, {})
    for reply in replies:
        sides[_key(reply) in held].setdefault(reply.source, []).append(reply)
    training, valid = (
        {name: rows for name, group in side.items() if len((rows := rows_of(group, length, pad))[0])} for side in sides
    )
    return training, valid


def rows_of(replies: Sequence[Reply], length: int, pad: int = 0) -> Rows:
    """Input ids and labels, int32 [rows, length], several conversations packed into a row; `pad` fills it up. The label
    of a position is the next token if the target wrote that one, else IGNORE."""
    rendered: list[Rendered] = []
    for reply in replies:
        prompt = reply.prompt or []
        if len(prompt) + len(reply.tokens) > 1:
            rendered.append((prompt + reply.tokens, [False] * len(prompt) + [True] * len(reply.tokens)))
    return pack_whole(rendered, length, pad)


def _read(file: Path) -> list[Reply]:
    replies = []
    for where, record in objects(file, PacelineError, "an answer"):
        prompt, tokens = record.get("prompt_tokens"), record.get("tokens")
        if not isinstance(prompt, list) or not isinstance(tokens, list):
            raise PacelineError(f'{where}: "prompt_tokens" and "tokens" must be lists of token ids')
        replies.append(Reply(str(record.get("source", "")), prompt, tokens))
    return replies


def _key(reply: Reply) -> str:
    text = reply.prompt if reply.prompt and len(reply.prompt) > 1 else reply.tokens
    return hashlib.sha256(json.dumps(text).encode()).hexdigest()
