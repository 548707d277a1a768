"""Write answers as OpenAI's objects, whole or as a stream of server-sent events, with vLLM's statistics of speculation.
A stream has the role, pieces, reason of the end, usage, [DONE]."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from time import time
from typing import Any, TypeVar
from uuid import uuid4

from paceline.core.request import Completion, Delta, RowStats
from paceline.core.sampling import TokenLogprob
from paceline.errors import PacelineError
from paceline.formats.tokenizer import Tokenizer
from paceline.serve import reading
from paceline.serve.chats import Chats
from paceline.serve.fields import ChatRequest, Common
from paceline.serve.prepare import Prompted, only_echo
from paceline.serve.reading import Piece, Reader
from paceline.serve.said import problem
from paceline.serve.streams import Form
from paceline.serve.worker import Job, Unavailable

MANY = 200  # So many log-probabilities or more are written in a thread.
Made = TypeVar("Made")
DONE = "data: [DONE]\n\n"
LEAST = -9999.0  # JSON has no -inf; this stands for it.
REASONS = {"stop": "stop", "length": "length", "context": "length", "abort": "abort", "error": "error"}


class Spelling:
    """Spells the tokens of an answer as text and bytes, and finds where each begins in its text.

    prompt  token ids before the answer; empty if the answer echoes them."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        self._tokenizer, self._prompt = tokenizer, prompt
        self._detokenizer = tokenizer.detokenizer(prompt)
        self._at, self._begun = 0, False
        self._held = b""  # Bytes of tokens whose text is held back.

    def of(self, token: int) -> tuple[str, bytes | None]:
        """(text, bytes) of a token that may come next. Part of a character is spelled in OpenAI's way, bytes:\\xc3.
        bytes is None if the token has a name, such as </s>, but no text."""
        piece = self._tokenizer.spelling(token)
        raw = piece.encode() if isinstance(piece, str) else piece
        if not raw:
            return str(self._tokenizer.inner.decode([token])), None
        if not self._begun and raw.startswith(b" "):  # Some tokenizers drop the first space of a text.
            first = self._tokenizer.detokenizer(self._prompt)
            if first.push(token) + first.flush() == raw[1:].decode(errors="replace"):
                raw = raw[1:]
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw

    def next(self, token: int) -> tuple[str, bytes | None, int]:
        """(text, bytes, place in characters) of the next token."""
        text, raw = self.of(token)
        new, at = self._detokenizer.push(token), self._at
        self._at += len(new)
        self._begun = self._begun or raw is not None
        place = at + len(self._held.decode(errors="ignore"))
        if new and raw is None:
            place = self._at
        elif raw is not None and new.endswith(text):  # Text held back comes before the token's own.
            place = self._at - len(text)
        self._held = b"" if new else self._held + (raw or b"")
        return text, raw, place


@dataclass
class Frame:
    """The fields that all objects of an answer share."""

    kind: str  # chat.completion or text_completion
    model: str
    tokenizer: Tokenizer
    created: int = field(default_factory=lambda: int(time()))

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.kind == 'chat.completion' else 'cmpl'}-{uuid4().hex}"

    def whole(self, choices: list[dict[str, Any]], completions: Sequence[Completion], **counts: int) -> dict[str, Any]:
        """The whole answer. counts: as in `usage`."""
        return {**self._head(self.kind), "choices": choices, **statistics(completions, **counts)}

    def chunk(self, choice: dict[str, Any] | None, **more: Any) -> str:
        """A piece of a stream as a server-sent event. choice: None if it has none, as with usage."""
        kind = "chat.completion.chunk" if self.kind == "chat.completion" else self.kind
        body = {**self._head(kind), "choices": [] if choice is None else [choice], **more}
        return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def entries(self, logprobs: Sequence[TokenLogprob], spelling: Spelling) -> list[dict[str, Any]]:
        """Log-probabilities in the form of chats."""
        made = []
        for one in logprobs:
            top = [_entry(*spelling.of(token), logprob) for token, logprob in one.top]
            made.append(_entry(*spelling.next(one.token)[:2], one.logprob) | {"top_logprobs": top})
        return made

    def columns(self, logprobs: Sequence[TokenLogprob | None], spelling: Spelling, first: int) -> dict[str, Any]:
        """Log-probabilities in the form of text completions.
        None stands for the prompt's first token, which nothing predicts."""
        rows = list[tuple[str, float | None, dict[str, float] | None, int]]()
        for one in logprobs:
            if one is None:
                rows.append((self.tokenizer.decode([first]), None, None, spelling.next(first)[2]))
                continue
            tops = dict[str, float]()
            for token, logprob in one.top:
                text = spelling.of(token)[0]
                tops[f"token_id:{token}" if text in tops else text] = max(logprob, LEAST)
            text, _, place = spelling.next(one.token)
            rows.append((text, max(one.logprob, LEAST), tops, place))
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [row[i] for row in rows] for i, name in enumerate(names)}


def _entry(text: str, raw: bytes | None, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": max(logprob, LEAST), "bytes": None if raw is None else list(raw)}


def statistics(completions: Sequence[Completion], **counts: int) -> dict[str, Any]:
    """The usage and, if there is a single answer, its speculation."""
    metrics = {"speculative_decoding": speculation(completions[0].stats) if len(completions) == 1 else None}
    return {"usage": usage(completions, **counts), "metrics": metrics}


def usage(completions: Sequence[Completion], predicted: int = 0, prompt: int | None = None) -> dict[str, Any]:
    """Numbers of tokens of prompts and answers.

    predicted: tokens of the request's prediction; prompt: tokens of all prompts; None: all answers share one prompt."""
    prompt = completions[0].prompt_tokens if prompt is None else prompt
    new = sum(done.new_tokens for done in completions)
    facts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    facts["prompt_tokens_details"] = {"cached_tokens": completions[0].reused}
    if predicted:
        accepted = sum(n for done in completions for source, n in done.runs if source == "prediction")
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": max(predicted - accepted, 0)}
        facts["completion_tokens_details"] = details
    return facts


def speculation(stats: RowStats) -> dict[str, Any]:
    """A request's speculation in vLLM's shape: steps are rounds with a draft, and only tokens of the answer count.

    Ours alone: `num_rounds`, rounds of any kind, and the counts by drafter."""
    depth, steps = max(len(stats.accepted), len(stats.drafted), 1) - 1, stats.draft_rounds
    histogram = [*stats.accepted, *[0] * (depth + 1 - len(stats.accepted))]
    histogram[0] -= stats.rounds - steps
    accepted = stats.accepted_tokens
    by_drafter = {name: {"drafted": drafted, "accepted": stood} for name, (drafted, stood) in stats.drafters.items()}
    return {
        "mean_acceptance_length": stats.mean_draft_round,
        "draft_acceptance_rate": stats.acceptance_rate,
        "acceptance_histogram": histogram,
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": stats.draft_tokens,
        "num_spec_tokens": depth,
        "num_rounds": stats.rounds,
        "by_drafter": by_drafter,
    }


def choice(index: int, body: dict[str, Any], logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
    """A choice, or a chunk's addition to it. reason: why the answer ended; None: it has not."""
    return {"index": index, **body, "logprobs": logprobs, "finish_reason": reason}


@dataclass
class Style:
    """How a request's answers are written, whole or as a stream.

    reader    makes a reader for each answer to a chat; None for text completions.
    pieces    whether chunks name the drafter of each piece.
    echo      the prompt's text, if it is to come back.
    _spelling  spelling of each choice, made when it is needed."""

    frame: Frame
    request: Common
    prompt: list[int]
    reader: Callable[[], Reader] | None = None
    logprobs: bool = False
    pieces: bool = False
    echo: str | None = None
    _spelling: dict[int, Spelling] = field(default_factory=dict)

    def whole(self, index: int, done: Completion, scored: Sequence[TokenLogprob | None] = ()) -> dict[str, Any]:
        """The choice with a whole answer. scored: log-probabilities of an echoed prompt."""
        reader = self.reader() if self.reader else None
        body: dict[str, Any] = {"text": (self.echo or "") + done.text}
        if reader is not None:
            body = {"message": reading.message(reader.push(done.text) + reader.end())}
        reason = reason_of(done, bool(reader and reader.called))
        made = choice(index, body, self._logs(index, [*scored, *done.logprobs]), reason)
        if not self.request.return_token_ids:
            return made
        return made | {"token_ids": done.tokens} | ({} if reader else {"prompt_token_ids": self.prompt})

    def piece(self, index: int, delta: Delta, pieces: list[Piece]) -> dict[str, Any]:
        """The choice with a round's addition to answer `index`."""
        body: dict[str, Any] = {"text": delta.text}
        if self.reader is not None:
            body = {"delta": reading.delta(pieces) or {"content": ""}}
        made = choice(index, body, self._logs(index, delta.logprobs))
        if self.request.return_token_ids:
            made["token_ids"] = delta.tokens
        return made | ({"pieces": delta.pieces} if self.pieces else {})

    def echoed(self, index: int, job: Job) -> dict[str, Any]:
        """The choice with the prompt and the log-probabilities of its tokens."""
        return choice(index, {"text": self.echo}, self._logs(index, job.row.prompt_logprobs if job.row else []))

    def end(self, index: int, reason: str) -> dict[str, Any]:
        """The choice with the reason why answer `index` ended."""
        return choice(index, {"delta": {}} if self.reader else {"text": ""}, reason=reason)

    def _logs(self, index: int, logprobs: Sequence[TokenLogprob | None]) -> dict[str, Any] | None:
        """Log-probabilities of the next tokens of answer `index`; None if the request does not want them."""
        if not self.logprobs:
            return None
        if index not in self._spelling:
            self._spelling[index] = Spelling(self.frame.tokenizer, () if self.echo is not None else self.prompt)
        spelling = self._spelling[index]
        if self.reader:
            own = [one for one in logprobs if one is not None]
            return {"content": self.frame.entries(own, spelling), "refusal": None}
        return self.frame.columns(logprobs, spelling, self.prompt[0])


def reason_of(done: Completion, called: bool) -> str:
    """Why an answer ended. called: whether it has a whole call."""
    reason = REASONS[done.finish_reason]
    return "tool_calls" if called and reason == "stop" else reason


def closed(job: Job) -> dict[str, Any]:
    """Fields of a choice if the limit of tokens decided how the answer's JSON ends (`on_length`); else {}."""
    limited = getattr(job.params.grammar, "was_limited", None)
    return {"finish_reason": "length", "closed": True} if limited and limited(job.completion.tokens) else {}


def styles_of(chats: Chats, request: Common, prompted: Sequence[Prompted], pieces: bool = False) -> list[Style]:
    """The style of the answers to each prompt. pieces: as in `Style`."""
    frame = Frame("chat.completion" if isinstance(request, ChatRequest) else "text_completion",
                  chats.settings.model, chats.tokenizer)  # fmt: skip
    logprobs = request.logprobs if isinstance(request, ChatRequest) else getattr(request, "logprobs", None) is not None
    return [
        Style(frame, request, one.prompt, one.reader, logprobs=logprobs, pieces=pieces, echo=one.text)
        for one in prompted
    ]


async def whole(
    chats: Chats, styles: Sequence[Style], submitted: Sequence[list[Job]], written: Callable[[dict[str, Any]], Made]
) -> Made:
    """Wait for the whole answers to every prompt, and write them in their styles. written: makes the result of the
    object; runs in a thread for long answers."""
    frame, request = styles[0].frame, styles[0].request
    jobs = [job for some in submitted for job in some]
    every: list[tuple[Style, Completion, list[TokenLogprob | None], dict[str, Any]]] = []
    try:
        for style, some in zip(styles, submitted, strict=True):
            completions = await chats.finished(some)
            if only_echo(request):  # An echo alone may have no job.
                completions = [Completion(0, "", [], len(style.prompt), "length", 0.0, RowStats(), [])]
            for done, job in zip_longest(completions, some):
                scored = job.row.prompt_logprobs if job and job.row else []
                every.append((style, done, scored, closed(job) if job else {}))
    except Unavailable:
        chats.note(jobs)
        raise
    finally:  # If an answer fails or the client leaves, nobody waits for the rest.
        chats.abort(jobs)

    def body() -> Made:
        choices = [style.whole(i, done, scored) | end for i, (style, done, scored, end) in enumerate(every)]
        prompts = sum(len(style.prompt) for style in styles)
        predicted = sum(len(job.params.prediction) for job in jobs[:1])
        made = frame.whole(choices, [done for _, done, *_ in every], prompt=prompts, predicted=predicted)
        return written(made | ({"prompt_token_ids": styles[0].prompt} if request.return_token_ids else {}))

    top = max((job.params.logprobs or 0 for job in jobs[:1]), default=0)
    entries = sum(len(done.logprobs) + len(scored) for _, done, scored, _ in every) * (1 + top)
    return body() if entries < MANY else await asyncio.to_thread(body)


class Chunks(Form):
    """Writes a stream of chats or texts. styles: a style for each job."""

    def __init__(self, styles: Sequence[Style], jobs: Sequence[Job]):
        self._styles, self._jobs, self._frame = styles, jobs, styles[0].frame
        self._request = styles[0].request
        options = self._request.stream_options
        self._counted = options is not None and options.include_usage
        self._so_far = options is not None and options.continuous_usage_stats
        self._none: dict[str, Any] = {"usage": None} if self._counted else {}
        self._unscored = {i for i, style in enumerate(styles) if style.echo is not None and style.logprobs}
        self._prompts = sum(len(style.prompt) for style in {id(style): style for style in styles}.values())

    def begin(self) -> str:
        return "".join(map(self._begin, range(len(self._styles)), self._styles))

    def _begin(self, i: int, style: Style) -> str:
        ids = {"prompt_token_ids": style.prompt} if self._request.return_token_ids else {}
        if style.reader:
            body: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}}
        else:
            body = {"text": "" if i in self._unscored else style.echo or ""}
        return self._frame.chunk(choice(i, body), **self._none, **ids)

    async def more(self, i: int, delta: Delta, pieces: list[Piece]) -> str:
        made, style = "", self._styles[i]
        if i in self._unscored:  # The prompt has been run once the first tokens come.
            self._unscored.remove(i)
            made = self._frame.chunk(await asyncio.to_thread(style.echoed, i, self._jobs[i]), **self._none)
        if not delta.text and not delta.tokens:
            return made
        more = self._none
        if self._so_far:
            more = {"usage": usage([job.completion for job in self._jobs], prompt=self._prompts)}
        return made + self._frame.chunk(style.piece(i, delta, pieces), **more)

    def end(self, i: int, done: Completion, pieces: list[Piece], called: bool) -> str:
        last = reading.delta(pieces)
        made = self._frame.chunk(choice(i, {"delta": last}), **self._none) if last else ""
        ended = self._styles[i].end(i, reason_of(done, called)) | closed(self._jobs[i])
        return made + self._frame.chunk(ended, **self._none)

    def over(self) -> str:
        if not self._counted:
            return DONE
        completions, predicted = [job.completion for job in self._jobs], len(self._jobs[0].params.prediction)
        return self._frame.chunk(None, **statistics(completions, predicted=predicted, prompt=self._prompts)) + DONE

    def broken(self, error: PacelineError, left: dict[int, Job]) -> str:
        made = f"data: {json.dumps(problem(error, 'server_error'), ensure_ascii=False)}\n\n"
        for i, job in left.items():  # Some clients look for nothing else.
            made += self._frame.chunk(self._styles[i].end(i, REASONS[job.completion.finish_reason]), **self._none)
        return made + DONE
