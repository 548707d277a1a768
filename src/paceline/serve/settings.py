"""The server's settings, and limits of a request.

Counts are checked before a body is used. Needs no package of the extra `serve`."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from paceline.core.rules import SAMPLING, check
from paceline.draft.spec import option
from paceline.errors import PacelineError, meant, shortened

PIECE = 1 << 16  # Bytes to look at in one go; other threads run in between.
ACCESS, LOAD, ANSWERS, WATCHING = "Access", "Load", "Requests and answers", "Watching it"  # Groups in the help.


class Refused(PacelineError):
    """A request that cannot be answered. param: the wrong field; code, kind: OpenAI's words for the error."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None,
        kind: str = "invalid_request_error",
    ):  # fmt: skip
        super().__init__(message)
        self.param, self.status, self.code, self.kind = param, status, code, kind


def _most(default: int, what: str) -> Any:
    return field(default=default, metadata={"what": what})


@dataclass(frozen=True)
class Limits:
    """The most that a request may ask for, by kind."""

    messages: int = _most(2048, "messages in a chat")
    parts: int = _most(2048, "content parts and tool calls in all messages of a chat")
    prompts: int = _most(256, "prompts in one text completion")
    answers: int = _most(128, "answers to a prompt (n)")
    stops: int = _most(32, "stop strings in a request")
    stop_length: int = _most(1000, "characters of a stop string")
    stop_ids: int = _most(128, "stop_token_ids in a request")
    logit_bias: int = _most(1024, "entries in logit_bias")
    logprobs: int = _most(20, "alternatives of logprobs and top_logprobs")
    tools: int = _most(128, "tools in a request")
    schema: int = _most(128 << 10, "bytes of a JSON schema, of all tools, and of chat_template_kwargs")
    text: int = _most(1 << 18, "characters that /tokenize takes")
    ids: int = _most(1 << 15, "token ids that /detokenize takes")
    values: int = _most(250_000, "JSON values in a request body")

    def check(self, body: dict[str, Any]) -> None:
        """Raise Refused if a body asks for more. Wrong types are left to the check of fields."""
        for name, param, size in _sizes(body):
            self.check_size(name, param, size)

    def check_numbers(self, request: object) -> None:
        """Raise Refused if numbers in a checked request ask for more."""
        for name, limit in (("n", "answers"), ("logprobs", "logprobs"), ("top_logprobs", "logprobs")):
            self.check_size(limit, name, getattr(request, name, None) or 0)

    def check_size(self, name: str, param: str, size: int) -> None:
        """Raise Refused if the field `param` has a size above the limit `name`."""
        if size > (most := getattr(self, name)):
            (unit,) = (one.metadata["what"] for one in fields(self) if one.name == name)
            flag = f"--limit {name.replace('_', '-')}=N"
            raise Refused(f"{param} has {size:,}, and this server takes at most {most:,} {unit} ({flag})", param)

    def check_raw(self, raw: bytes) -> None:
        """Raise Refused if a body has too many JSON values, before it is parsed: parsing cannot be interrupted."""
        most = self.values
        if sum(map(raw.count, (b"[", b"{", b","))) <= most // 5:
            return
        values = holders = 0
        for piece in _outside_strings(raw):
            holders += piece.count(b"[") + piece.count(b"{")
            values += piece.count(b",")
            if values + holders > most or holders > most // 5:
                raise Refused(f"the body has more than {most:,} JSON values, or {most // 5:,} lists and objects")


def _outside_strings(raw: bytes) -> Iterator[bytes]:
    """Yield the text outside the strings of a JSON text, piece by piece."""
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # Escaped quotes end no string.
    inside = 0
    for at in range(0, len(plain), PIECE):
        parts = plain[at : at + PIECE].split(b'"')
        yield b"".join(parts[inside::2])
        inside ^= len(parts) - 1 & 1


def _sizes(body: dict[str, Any]) -> Iterator[tuple[str, str, int]]:
    """Yield (limit, field, size) of everything counted in a body."""
    counted = {"messages": "messages", "input": "messages", "tools": "tools", "stop_token_ids": "stop_ids"}
    for name, limit in counted.items():
        yield limit, name, _length(body.get(name), list)
    yield "logit_bias", "logit_bias", _length(body.get("logit_bias"), dict)
    prompt, stop = body.get("prompt"), body.get("stop")
    messages = [*_list(body.get("messages")), *_list(body.get("input"))]
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        yield "prompts", "prompt", len(prompt)
    yield "stops", "stop", _length(stop, list)
    yield "stop_length", "stop", max((_length(one, str) for one in [stop, *_list(stop)]), default=0)
    lists = [value for message in messages if isinstance(message, dict) for value in message.values()]
    yield "parts", "messages", sum(_length(value, list) for value in lists)
    for name in ("response_format", "tools", "chat_template_kwargs", "tool_choice", "metadata", "text"):
        if body.get(name) is not None:
            yield "schema", name, len(json.dumps(body[name]))


def _length(value: Any, kind: type[Sized]) -> int:
    return len(value) if isinstance(value, kind) else 0


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


@dataclass(frozen=True)
class Settings:
    """Settings of the routes.

    model        the model's name in answers; also: other names for it in requests; "*" for any.
    api_keys     keys, each of which opens the server; without keys it is open to all.
    hosts        without keys, browsers may use only these names of the server, localhost and addresses; "*" for all.
                 So no foreign page can pose as this server's by its own DNS.
    origins      pages that may ask this server, such as https://chat.example; "*" for all.
    corpora      folders whose text `suffix` and `sam` copy from: from the first, unless a request names another.
    drafts       drafters that requests may choose; the first is the default.
    protect_all  whether every route but /health needs the key; load balancers ask /health."""

    GROUP: ClassVar = ANSWERS

    model: str = ""
    also: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    drafts: tuple[str, ...] = ()
    corpora: tuple[str, ...] = ()
    protect_all: bool = False
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    tool_parser: Literal[
        "auto", "hermes", "json", "llama3", "mistral", "qwen3_coder", "glm45", "llama4", "deepseek", "none"
    ] = option(
        "auto",
        "Format of tool calls; auto is every format.",
    )
    reasoning_parser: Literal["auto", "think", "mistral", "seed", "harmony", "none"] = option(
        "auto", "How reasoning is told from the answer; auto is by the chat template."
    )
    lenient: bool = option(
        False, "Ignore fields of requests that are unknown or ask for what is not there, and name each once."
    )
    sampling: str = option(
        "checkpoint",
        "Sampling of requests that do not say: checkpoint (as it says, else temperature 1), none (temperature 1), or "
        "what differs, such as temperature=0.7,top_p=0.9.",
    )
    parse_marks: bool = option(
        False, "Let marks in messages, such as <|im_end|>, become the control tokens that they spell, as elsewhere."
    )
    share_prefixes: bool = option(
        False, "Let prompts of different keys share computed beginnings; one key can then find out what others asked.",
        group=ACCESS,
    )
    json_whitespace: Literal["limited", "any", "none"] = option(
        "limited", "White space allowed in JSON answers: limited (a space, or a line break and indentation), any, none."
    )
    max_connections: int = 1000
    head_seconds: float = option(
        10.0, "Seconds in which the headers of a request must arrive.", least=0.1, group=LOAD
    )
    body_seconds: float = option(
        60.0, "Seconds in which the body of a request must arrive.", least=0.1, group=LOAD
    )
    max_body: int = 4 << 20
    limits: Limits = field(default_factory=Limits)
    read_ahead: bool = option(
        True, "While nothing is asked, compute what the next request of a conversation will begin with.",
        group=LOAD,
    )
    metrics_prefix: str = option(
        "paceline", "Prefix of the names in /metrics; vllm gives vLLM's names.", group=WATCHING
    )
    audit: float = option(
        0.0, "Share of answers that are scored again while nothing is asked, to notice corruption; 0: none.",
        least=0, most=1, group=WATCHING,
    )
    audit_tokens: int = option(
        1 << 18, "Most tokens of answers that wait to be scored again, with prompts.", least=1, group=WATCHING
    )
    audit_texts: bool = option(
        False, "Repeat token ids, and so what users said, in the audit's alarms.", group=WATCHING
    )

    def __post_init__(self) -> None:
        if any(not key.isascii() or not key.isprintable() or not key or " " in key for key in self.api_keys):
            raise PacelineError("an API key is empty, or has spaces or characters that are not ASCII; give another one")
        self.defaults({})
        if self.protect_all and not self.api_keys:
            raise PacelineError("--protect-all needs an --api-key")

    def defaults(self, checkpoint: Mapping[str, float]) -> dict[str, float]:
        """Defaults of sampling parameters, by --sampling. Raises PacelineError if that cannot be read.

        checkpoint  defaults in the model's checkpoint."""
        made = {} if self.sampling.startswith("none") else dict(checkpoint)
        for part in filter(None, self.sampling.removeprefix("none").removeprefix("checkpoint").split(",")):
            name, is_given, text = (word.strip() for word in part.partition("="))
            if name not in SAMPLING or not is_given:
                choice = f"checkpoint, none, or NAME=NUMBER,... of {', '.join(SAMPLING)}"
                raise PacelineError(f"--sampling has {shortened(repr(part))}; it can be {choice}")
            try:
                made[name] = int(text) if name == "top_k" else float(text)
            except ValueError:
                raise PacelineError(f"--sampling: {name} is {shortened(repr(text))}; it must be a number") from None
            check(name, made[name])
        return made


LIMITS: dict[str, tuple[Any, int, str]] = {
    "waiting": (256, 1, "requests that wait; further ones get status 429"),
    "rows-per-key": (None, 1, "requests of one key answered at once"),
    "connections": (
        Settings.max_connections, 2, "open connections; one more closes the one that has waited longest to send"
    ),
    "body": (Settings.max_body, 1, "bytes of a request"),
    **{one.name.replace("_", "-"): (one.default, 1, one.metadata["what"]) for one in fields(Limits)},
}
"""What --limit NAME=N sets, by name: its default (None: no limit), its least value, and what is counted."""


def most_of(given: Iterable[str]) -> dict[str, Any]:
    """Every limit by name, from --limit NAME=N and the defaults."""
    return {name: default for name, (default, *_) in LIMITS.items()} | dict(map(limit, given))


def limit(text: str) -> tuple[str, int]:
    """Name and number of --limit NAME=N. Raises PacelineError if it is wrong."""
    name, _, number = text.partition("=")
    if name not in LIMITS:
        raise PacelineError(f"there is no limit {name!r}.{meant(name, LIMITS)} Limits: {', '.join(LIMITS)}")
    least = LIMITS[name][1]
    if not number.isdecimal() or int(number) < least:
        raise PacelineError(f"--limit is {text!r}; it must be {name}=N, a whole number of {least} or more")
    return name, int(number)
