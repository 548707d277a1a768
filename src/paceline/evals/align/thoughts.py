"""Where a thought begins, and parting a reply into thought and answer; a thought that never ended is not an answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile

from paceline.evals.align.backends.base import Reply, Request


@dataclass(frozen=True)
class Markers:
    """Where a thought begins and ends. opened: the user says that the server's chat template opens the thought."""

    open: str = "<think>"
    close: str = "</think>"
    opened: bool = False


@dataclass(frozen=True)
class Said:
    """thought and response; unanswered says why there is no response, None if there is one. open: whether the
    thought never ended."""

    thought: str
    response: str
    finish_reason: str
    unanswered: str | None = None
    open: bool = False


def opened(prompt: str, markers: Markers = Markers()) -> bool:
    """Whether a rendered conversation ends where a thought begins: some chat templates open it themselves."""
    return prompt.rstrip().endswith(markers.open)


def continued(request: Request, prompt: str, markers: Markers = Markers()) -> Request:
    """`request` with a prefix that follows `prompt`, its rendered messages: without the opening that `prompt` has."""
    if not opened(prompt, markers):
        return request
    prefix, opening = request.prefix, prompt[prompt.rindex(markers.open) :]
    written = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(opening, prefix, strict=False)))
    if written < len(markers.open):  # the turn does not begin with a thought
        return request
    return replace(request, prefix=prefix[written:], forced=prefix[max(written, len(prefix) - len(request.forced)) :])


def said(reply: Reply, markers: Markers, before: str | None = None, keep_open: bool = False) -> Said:
    """Part a reply at its last closing marker.

    before     the thought so far, where the reply goes on with a forced one; None where the model begins its turn.
    keep_open  a thought without an end is taken for the answer (the official code's choice)."""
    text = reply.text
    thinking = before is not None or markers.opened or reply.opened or text.lstrip().startswith(markers.open)
    if markers.close in text:
        thought, _, response = text.rpartition(markers.close)
    elif thinking and not reply.reasoning:
        if not keep_open:
            why = (
                "the budget ended within the thought" if reply.finish_reason == "length" else "the thought never ended"
            )
            return Said((before or "") + text, "", reply.finish_reason, why, True)
        thought, response = "", text
    else:
        thought, response = reply.reasoning, text
    thought = thought if before is not None else thought.strip().removeprefix(markers.open)
    response = response.strip()
    return Said((before or "") + thought, response, reply.finish_reason, None if response else "the answer is empty")
