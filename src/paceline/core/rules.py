"""What the parameters of a request may be. Imports nothing slow: the command line asks before torch is loaded."""

import math
from collections.abc import Callable
from operator import index
from typing import Any

from paceline.errors import PacelineError, shortened

COLDEST = 1e-6  # lowest temperature above greedy; logits divided by a lower one could overflow
MOST = 2**31 - 1  # largest count that the compiled functions take

RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda t: t == 0 or COLDEST <= t + 0.0 < math.inf, f"0 (greedy), or {COLDEST:g} or more"),
    "top_k": (lambda k: 0 <= index(k) <= MOST, f"a whole number, 0 (all tokens) to {MOST:,}"),
    "top_p": (lambda p: 0 < p <= 1, "above 0 and at most 1"),
    "min_p": (lambda p: 0 <= p <= 1, "between 0 and 1"),
    "repetition_penalty": (lambda r: 0 < r + 0.0 < math.inf, "above 0 (1 is off)"),
    "presence_penalty": (lambda p: -2 <= p <= 2, "between -2 and 2 (0 is off)"),
    "frequency_penalty": (lambda p: -2 <= p <= 2, "between -2 and 2 (0 is off)"),
    "min_tokens": (lambda n: 0 <= index(n) <= MOST, f"a whole number, 0 to {MOST:,}"),
    "logit_bias": (
        lambda bias: all(index(i) >= 0 and b + 0.0 < math.inf for i, b in bias.items()),
        "a mapping from token ids to numbers (-inf bans a token)",
    ),
    "bad_words": (
        lambda words: all(len(w) > 0 and all(index(i) >= 0 for i in w) for w in words),
        "sequences of at least one token id",
    ),
    "max_tokens": (lambda n: 1 <= index(n) <= MOST, f"a whole number, 1 or more (at most {MOST:,})"),
    "seed": (lambda seed: seed is None or index(seed) >= 0, "a whole number, 0 or more, or None"),
    "stop": (
        lambda stop: not isinstance(stop, str) and all(isinstance(s, str) and s for s in stop),
        "a list of non-empty strings",
    ),
    "logprobs": (lambda n: n is None or index(n) >= 0, "a whole number, 0 or more, or None"),
    "prompt_logprobs": (lambda n: n is None or index(n) >= 0, "a whole number, 0 or more, or None"),
    "stop_token_ids": (lambda ids: all(index(i) >= 0 for i in ids), "a list of token ids"),
    "ignore_eos": (lambda ignore: isinstance(ignore, bool), "true or false"),
    "prediction": (lambda ids: all(index(i) >= 0 for i in ids), "a list of token ids"),
}
"""For each field of SamplingParams: a test of its value, and the rule in words."""

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of SamplingParams that a checkpoint may set."""


def check(name: str, value: Any) -> None:
    """PacelineError unless `value` keeps the rule of the field `name`."""
    fits, rule = RULES[name]
    try:
        good = fits(value) and (name == "ignore_eos" or not isinstance(value, bool))
    except (TypeError, AttributeError, OverflowError):  # of another type, or too large
        good = False
    if not good:
        raise PacelineError(f"{name} is {shortened(repr(value))}; it must be {rule}.")


def ruled(name: str) -> Callable[[Any], Any]:
    """The callback of an option that holds the field `name`: its value, if that keeps the rule or is not given."""

    def checked(value: Any) -> Any:
        if value is not None:
            check(name, value)
        return value

    return checked
