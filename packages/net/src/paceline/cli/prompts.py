"""Read prompts from the command line, standard input, or a file with one JSON object a line.

A line is {"prompt": "text"} or {"messages": [{"role": "user", "content": "text"}]}. It may have an "id", a "prediction"
(text that the answer is expected to be much like) and fields of SamplingParams ("max_tokens": 64), which override the
command line's. Bodies of requests to OpenAI's API, lines of its batches and questions of one turn are lines too, and
recorded answers, of which the prompt alone is asked. Knows nothing of models or tokenizers."""

import io
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from paceline.core.params import SamplingParams, token_id
from paceline.errors import PacelineError, PromptError, meant, shortened
from paceline.jsonl import as_object
from paceline.logs.bodies import METADATA
from paceline.logs.formats import RESPONSES, conversation
from paceline.textfiles import opened, records

PREDICTION = "prediction"
OF_NO_MATTER = ("stream", "stream_options", "store")  # Keys that change no answer, like those of METADATA.

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Job:
    """One prompt to answer.

    prompt    text, or chat messages; params how to answer it.
    where     "file, line 3" for error messages, "" on the command line; id as in the file.
    expected  text that the answer is expected to be much like, for drafters; "": none.
    key       what it is found by in a file of answers; "": it is not written to one.
    said      names of the parameters that its line has."""

    index: int
    prompt: str | Messages
    params: SamplingParams
    where: str = ""
    id: Any = None
    expected: str = ""
    key: str = ""
    said: frozenset[str] = frozenset()

    def with_defaults(self, values: Mapping[str, Any]) -> "Job":
        """The job with these parameters where its line does not say."""
        unsaid = {name: value for name, value in values.items() if name not in self.said}
        return replace(self, params=replace(self.params, **unsaid))

    @property
    def name(self) -> str:
        """Its heading."""
        return str(self.id) if self.id is not None else f"prompt {self.index + 1}"


def keyed(jobs: Sequence[Job], asked: Any) -> list[Job]:
    """The jobs with keys: the same for the same job of a command that is the same in all that is `asked`."""
    return [
        replace(job, key=sha256(json.dumps(
            [asked, job.index, job.prompt, job.expected, asdict(job.params)], default=str
        ).encode()).hexdigest()[:16])
        for job in jobs
    ]  # fmt: skip


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
    jobs: list[Job] = []
    broken: list[PromptError] = []
    source = io.BytesIO(sys.stdin.buffer.read()) if path == "-" else Path(path)
    with opened(source, PromptError, name) as file:
        for where, line in records(file, name, PromptError):
            try:
                jobs.append(_job(len(jobs) + len(broken), line, params, where, expected))
            except PacelineError as error:
                broken.append(PromptError(f"{where}: {error}"))
    if not jobs and not broken:
        raise PromptError(f'{name} holds no prompts; write one JSON object a line: {{"prompt": "text"}}')
    return jobs, broken


def _job(index: int, line: Any, params: SamplingParams, where: str, expected: str) -> Job:
    fields = _asked(as_object(line, 'such as {"prompt": "text"}'))
    known = ("prompt", "messages", "id", PREDICTION, *SamplingParams.option_names())
    for key in fields:
        if key not in known and key not in METADATA and key not in OF_NO_MATTER:
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
    return Job(index, prompt, replace(params, **own), where, fields.get("id"), expected, said=frozenset(own))


def _asked(fields: dict[str, Any]) -> dict[str, Any]:
    """Reduce a batch line, a question or a recorded answer to its prompt and options."""
    if isinstance(body := fields.get("body"), dict) and "custom_id" in fields:
        fields = {"id": fields["custom_id"], **body}
    if any(key in fields for key in RESPONSES):  # The line is a recorded answer.
        fields = {key: value for key, value in fields.items() if key in ("id", "prompt", "messages", PREDICTION)}
    if "max_completion_tokens" in fields:
        fields["max_tokens"] = fields.pop("max_completion_tokens")
    match fields:
        case {"turns": [str() as turn]}:
            return {"prompt": turn, **{key: value for key, value in fields.items() if key != "turns"}}
        case {"turns": _}:
            raise PromptError("several turns, which paceline bench asks one after another; one prompt a line is wanted")
    return fields


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str) or not value:
        raise PromptError(f'"{key}" must be a text that is not empty, not {shortened(json.dumps(value))}')
    return value


def _logit_bias(value: Any) -> Any:
    """JSON's keys are text; token ids are numbers."""
    with suppress(AttributeError, ValueError):
        return {token_id(key): bias for key, bias in value.items()}
    raise PromptError('"logit_bias" must be an object of token ids and numbers, such as {"42": -1.5}')
