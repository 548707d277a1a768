"""What strangers may read of errors and names: one line that UTF-8 can carry, without folders of this server's disk."""

import re
from collections.abc import Sequence
from typing import Any


def problem(error: Exception, kind: str) -> dict[str, Any]:
    """An error object in OpenAI's shape."""
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    return {"error": {"message": public(str(error)), "type": kind, "param": param and readable(param), "code": code}}


_PATH = re.compile(r"(?<![\w./~])~?/(?:[^\s/'\"]+/)+(?=[^\s/'\"])")
"""The folders of an absolute path with at least two parts; not those of a URL."""


def public(message: str) -> str:
    """An error's message as strangers may read it: without folders of the server's disk."""
    return _PATH.sub("", readable(message))


def shown_drafts(specs: Sequence[str]) -> dict[str, str]:
    """Specs by the names under which strangers see them: without the folders of checkpoints and files."""
    names: dict[str, str] = {}
    for spec in specs:
        name = re.sub(r"[^\s:|+,;=\"]*/(?=[^/])", "", spec)
        names[name if name not in names else f"{name}#{len(names)}"] = spec
    return names


def readable(message: str) -> str:
    """Text that UTF-8 can carry, though a client sent half of a surrogate pair."""
    return message.encode("utf-8", "replace").decode()
