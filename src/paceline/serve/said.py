"""Errors and names for strangers: one line of valid UTF-8, without folders of the server's disk.
Also the server's log."""

import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

serving = logging.getLogger("paceline.serving")  # Lines of the server's log.
notices = logging.getLogger("paceline.serving.notices")  # Lines that `serve --quiet` shows too.


@lru_cache(1024)
def once(line: str) -> None:
    """Log, the first time only, what is ignored in requests."""
    notices.info("%s", readable(line))


def problem(error: Exception, kind: str) -> dict[str, Any]:
    """An error object in OpenAI's shape."""
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    return {"error": {"message": public(str(error)), "type": kind, "param": param and readable(param), "code": code}}


_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 500: "api_error", 503: "overloaded_error",
}  # fmt: skip


def problem_of_messages(message: str, status: int) -> dict[str, Any]:
    """An error object in Anthropic's shape; also an event of a stream."""
    return {"type": "error", "error": {"type": _KINDS.get(status, "invalid_request_error"), "message": public(message)}}


def problem_of_ollama(message: str) -> dict[str, Any]:
    """An error in Ollama's shape; also a line of a stream."""
    return {"error": public(message)}


_PATH = re.compile(r"(?<![\w./~])~?/(?:[^\s/'\"]+/)+(?=[^\s/'\"])")
"""The folders of an absolute path with at least two parts; not those of a URL."""


def public(message: str) -> str:
    """An error's message for strangers: without folders of the server's disk."""
    return _PATH.sub("", readable(message))


def shown_drafts(specs: Sequence[str]) -> dict[str, str]:
    """Specs by the names shown to strangers, which leave out folders of checkpoints and files."""
    names: dict[str, str] = {}
    for spec in specs:
        name = re.sub(r"[^\s:|+,;=\"]*/(?=[^/])", "", spec)
        names[name if name not in names else f"{name}#{len(names)}"] = spec
    return names


def readable(message: str) -> str:
    """The message as one line of valid UTF-8, without lone surrogates, line breaks and other control characters."""
    whole = message.encode("utf-8", "replace").decode()
    return "".join(char if char.isprintable() else " " for char in whole)
