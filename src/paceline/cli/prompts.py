"""Read prompts from the command line, standard input, or a file with one JSON object a line.

A line is {"prompt": "text"} or {"messages": [{"role": "user", "content": "text"}]}. It may have an "id", a "prediction"
(text that the answer is expected to be much like) and fields of SamplingParams ("max_tokens": 64), which override the
command line's. Knows nothing of models or tokenizers."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.engine.sampling import SamplingParams
from paceline.errors import PacelineError, PromptError, meant, shortened
from paceline.jsonl import as_object, numbered
from paceline.workbench.conversations import conversation

PREDICTION = "prediction"

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Job:
    """One prompt to answer.

    prompt    text, or chat messages; params how to answer it.
    where     "file, line 3" for error messages, "" on the command line; id as in the file.
    expected  text that the answer is expected to be much like, for drafters; "": none."""

    index: int
    prompt: str | Messages
    params: SamplingParams
    where: str = ""
    id: Any = None
    expected: str = ""

    @property
    def name(self) -> str:
        """Its heading."""
        return str(self.id) if self.id is not None else f"prompt {self.index + 1}"


def from_words(text: str, params: SamplingParams, expected: str = "") -> Job:
    """The prompt given on the command line; "-" reads it from standard input."""
    if text == "-":
        try:
            text = sys.stdin.buffer.read().decode().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise PromptError(f"not UTF-8 at byte {error.start}") from None
    if not text:
        raise PromptError("The prompt is empty; give it at least one token.")
    return Job(0, text, params, expected=expected)


def from_file(path: str, params: SamplingParams, expected: str = "") -> tuple[list[Job], list[PromptError]]:
    """Every prompt of a JSON Lines file ("-": standard input), and an error for every broken line.

    Blank lines are skipped. `Job.index` counts the prompts, broken ones included, from 0. expected: the default."""
    name = "standard input" if path == "-" else path
    try:
        content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise PromptError(f"the prompts file {path} cannot be read: {error.strerror}") from None
    jobs: list[Job] = []
    broken: list[PromptError] = []
    for number, line in numbered(content.split(b"\n")):
        where = f"{name}, line {number}"
        try:
            jobs.append(_job(len(jobs) + len(broken), line, params, where, expected))
        except PacelineError as error:
            broken.append(PromptError(f"{where}: {error}"))
    if not jobs and not broken:
        raise PromptError(f'{name} holds no prompts; write one JSON object a line: {{"prompt": "text"}}')
    return jobs, broken


def _job(index: int, line: bytes, params: SamplingParams, where: str, expected: str) -> Job:
    fields = as_object(line, 'such as {"prompt": "text"}')
    known = ("prompt", "messages", "id", PREDICTION, *SamplingParams.option_names())
    for key in fields:
        if key not in known:
            raise PromptError(f"unknown key {key!r}.{meant(key, known)} Keys: {', '.join(known)}.")
    if ("prompt" in fields) == ("messages" in fields):
        raise PromptError('exactly one of "prompt" and "messages" is wanted')
    prompt: str | Messages
    if "prompt" in fields:
        prompt = _text(fields["prompt"], "prompt")
    else:
        prompt = list(conversation(fields).messages)
        if any(set(message) != {"role", "content"} for message in (*fields["messages"], *prompt)):
            raise PromptError('"messages" must be a list of {"role": "user", "content": "text"}')
    own = {key: fields[key] for key in SamplingParams.option_names() if key in fields}
    if "logit_bias" in own:
        own["logit_bias"] = _logit_bias(own["logit_bias"])
    expected = _text(fields[PREDICTION], PREDICTION) if PREDICTION in fields else expected
    return Job(index, prompt, replace(params, **own), where, fields.get("id"), expected)


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str) or not value:
        raise PromptError(f'"{key}" must be a text that is not empty, not {shortened(json.dumps(value))}')
    return value


def _logit_bias(value: Any) -> Any:
    """JSON's keys are text; token ids are numbers."""
    if isinstance(value, dict) and all(key.isdecimal() for key in value):
        return {int(key): bias for key, bias in value.items()}
    raise PromptError('"logit_bias" must be an object of token ids and numbers, such as {"42": -1.5}')
