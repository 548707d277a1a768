"""What an answer says of itself: its tokens, why it ended, and its log-probabilities. Each is a request or two.

    counted(completion, {"max_tokens": 7})     # "" if all of it agrees, else what does not"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.certify.asking import places
from paceline.workbench.client import Completion

Body = Mapping[str, Any]
Form = Callable[[Completion, Body, Sequence[Completion]], str]
"""Why an answer is wrong by itself, "" if it is right: of the answer, its request, and the answers to those before it
in its step. It hangs on nothing else, so that a request that is made smaller is judged by what it still asks for."""
REASONS = ("stop", "length", "tool_calls", "content_filter", "function_call")
SPECIAL = re.compile(r"<\|\w+\|>|</s>|<eos>|<end_of_turn>")
SURE = 4  # tokens of an answer that are not all certain


def counted(one: Completion, body: Body, before: Sequence[Completion] = ()) -> str:
    """Tokens, limits, finish_reason and log-probabilities of an answer."""
    most, least = body["max_tokens"], body.get("min_tokens", 0)
    of_tokens = places(one)
    usage, listed = one.usage.get("completion_tokens"), len(one.tokens) or len(of_tokens)
    count = listed if usage is None else usage
    if one.finish_reason not in REASONS:
        return f"finish_reason is {one.finish_reason!r}"
    spare = one.finish_reason == "stop"  # the end token may be listed, or not
    if usage is not None and listed and abs(usage - listed) > spare:
        return f"usage counts {usage} tokens, and {listed} are listed"
    if count > most:
        return f"it has {count} tokens; {most} were asked for"
    if one.finish_reason == "length" and count and count < most:
        return f"finish_reason is length after {count} of {most} tokens"
    if one.finish_reason == "stop" and count and count < least:
        return f"it ends after {count} tokens; at least {least} were asked for"
    if SPECIAL.search(one.text):
        return f"a special token is in the text: {one.text[-40:]!r}"
    if len(of_tokens) >= SURE and all(place.logprob == 0.0 for place in of_tokens):
        return "every token is reported with log-probability 0"
    return ""


def alike(one: Completion, body: Body, before: Sequence[Completion] = ()) -> str:
    """That sampled answers without a seed are not all alike; for several requests in a row, and the answers of one."""
    every, seen = [one.text, *(other.text for other in one.others)], [*(other.text for other in before), one.text]
    if body.get("seed") is not None or not body.get("temperature") or len(one.text.split()) < SURE:
        return ""
    if len(every) > 2 and len(set(every)) == 1:
        return f"its {len(every)} sampled answers are all the same"
    if len(seen) > 2 and len(set(seen)) == 1:
        return f"{len(seen)} requests without a seed have the same sampled answer"
    return ""
