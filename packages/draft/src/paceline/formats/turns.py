"""Makes other forms of a conversation, for templates that refuse it as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SYSTEM = ("system", "developer")
Messages = list[dict[str, Any]]


def forms(messages: Sequence[Mapping[str, Any]]) -> Iterator[Messages]:
    """Yield the conversation as it is, then other forms, for templates that refuse the forms before:

    1. System and developer messages at the front are joined.
    2. Also neighbours of the same role are joined, if they are the user's, or the assistant's without calls.
    3. Later system messages become the user's, at their places.
    4. Both 2 and 3.
    5. The system message stands at the front of the user's first message.

    An empty line separates joined texts."""
    as_given = [dict(message) for message in messages]
    yield as_given
    front = _front_as_one(as_given)
    turned = _later_as_users(front)
    both = _neighbours_as_one(turned)
    seen = [as_given]
    for form in (front, _neighbours_as_one(front), turned, both, _neighbours_as_one(_all_as_users(both))):
        if form not in seen:
            seen.append(form)
            yield form


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    texts = [text for one in (first, second) if (text := one.get("content"))]
    return {**second, **first, "content": "\n\n".join(texts)}


def _front_as_one(messages: Messages) -> Messages:
    count = next((i for i, one in enumerate(messages) if one.get("role") not in SYSTEM), len(messages))
    if count < 2 or not all(map(_is_text, messages[:count])):
        return messages
    whole = messages[0]
    for one in messages[1:count]:
        whole = _joined(whole, one)
    return [{**whole, "role": "system"}, *messages[count:]]


def _neighbours_as_one(messages: Messages) -> Messages:
    made: Messages = []
    for one in messages:
        role = one.get("role")
        alike = bool(made) and role == made[-1].get("role") and role in ("user", "assistant")
        if alike and _is_text(one) and _is_text(made[-1]):
            made[-1] = _joined(made[-1], one)
        else:
            made.append(one)
    return made


def _later_as_users(messages: Messages) -> Messages:
    return [*messages[:1], *_all_as_users(messages[1:])]


def _all_as_users(messages: Messages) -> Messages:
    return [{**one, "role": "user"} if one.get("role") in SYSTEM else one for one in messages]


def _is_text(message: Mapping[str, Any]) -> bool:
    return isinstance(message.get("content") or "", str) and not message.get("tool_calls")
