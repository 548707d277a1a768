"""What an answer says of itself: its tokens, why it ended, and its log-probabilities. Each is a request or two.

    counted({"max_tokens": 7})(completion)     # "" if all of it agrees, else what does not"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from paceline.certify.asking import places
from paceline.workbench.client import Completion

Form = Callable[[Completion], str]  # why an answer is wrong by itself; "" if it is right
REASONS = ("stop", "length", "tool_calls", "content_filter", "function_call")
SPECIAL = re.compile(r"<\|\w+\|>|</s>|<eos>|<end_of_turn>")
SURE = 4  # tokens of an answer that are not all certain


def counted(body: Mapping[str, Any]) -> Form:
    """Tokens, limits, finish_reason and log-probabilities of an answer to `body`."""
    most, least = body["max_tokens"], body.get("min_tokens", 0)

    def wrong(one: Completion) -> str:
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

    return wrong


def other_than_before() -> Form:
    """That sampled answers without a seed are not all alike; for several requests in a row, and the answers of one."""
    seen: list[str] = []

    def wrong(one: Completion) -> str:
        every = [one.text, *(other.text for other in one.others)]
        if len(every) > 2 and len(set(every)) == 1 and len(every[0].split()) >= SURE:
            return f"its {len(every)} sampled answers are all the same"
        seen.append(one.text)
        if len(seen) > 2 and len(set(seen)) == 1 and len(one.text.split()) >= SURE:
            return f"{len(seen)} requests without a seed have the same sampled answer"
        return ""

    return wrong
