"""Errors that are a client's to mend, with the status and the field that OpenAI's error object names."""

from __future__ import annotations

import re

from paceline.errors import PacelineError

_PATH = re.compile(r"(?<![\w.:/~])~?/(?:[^\s/'\"]+/)+(?=[^\s/'\"])")
"""The folders of an absolute path with at least two parts; not those of a URL."""


class Refused(PacelineError):
    """A request that cannot be answered. param: the field that is wrong; code: OpenAI's word for it, if it has one."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


def public(message: str) -> str:
    """An error's message as strangers may read it: without folders of the server's disk."""
    return _PATH.sub("", readable(message))


def readable(message: str) -> str:
    """Text that UTF-8 can carry, though a client sent half of a surrogate pair."""
    return message.encode("utf-8", "replace").decode()
