"""What values the parameters of requests and engines may have. Imports nothing slow, because the command line checks
them before torch is loaded."""

import math
import re
from collections.abc import Callable
from operator import index
from typing import Any

from paceline.errors import ModelError, PacelineError, meant, shortened

COLDEST = 1e-6  # Logits divided by a lower temperature could overflow.
MOST = 2**31 - 1  # largest count that the compiled functions take
SEEDS = 2**64  # number of seeds

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
    "seed": (lambda seed: seed is None or 0 <= index(seed) < SEEDS, "a whole number, 0 to 2**64 - 1, or None"),
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

DTYPES = ("float32", "bfloat16", "float16")
PRECISIONS = ("int8", "int4")
DEVICES = (
    "cpu", "cuda", "ipu", "xpu", "mkldnn", "opengl", "opencl", "ideep", "hip", "ve", "fpga", "maia", "xla", "lazy",
    "vulkan", "mps", "meta", "hpu", "mtia", "privateuseone",
)  # fmt: skip
"""Names of torch's kinds of devices."""
SCHEDULES = ("ragged", "equal", "grouped")
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def check(name: str, value: Any) -> None:
    """Raise PacelineError if `value` breaks the rule of the field `name`."""
    fits, rule = RULES[name]
    try:
        good = fits(value) and (name == "ignore_eos" or not isinstance(value, bool))
    except (TypeError, AttributeError, OverflowError):  # The value has another type, or is too large.
        good = False
    if not good:
        raise PacelineError(f"{name} is {shortened(repr(value))}; it must be {rule}.")


def split_dtype(dtype: Any) -> tuple[str | None, Any]:
    """Split `dtype` into (precision of matrices, dtype of all else).

    "int8-float32" gives ("int8", "float32"), "int8" gives ("int8", "auto"), "auto" gives ("auto", "auto"), and
    "bfloat16" or a torch.dtype gives (None, dtype). The precisions "int8" and "int4" quantise a checkpoint, "auto"
    keeps the blocks of a file, None expands them."""
    word, _, rest = dtype.partition("-") if isinstance(dtype, str) else ("", "", "")
    return (word, rest or "auto") if word in ("auto", *PRECISIONS) else (None, dtype)


def check_dtype(dtype: str) -> None:
    """Raise ModelError if `dtype` names no dtype."""
    if (word := split_dtype(dtype)[1]) not in ("auto", *DTYPES):
        known = (*DTYPES, *PRECISIONS)
        raise ModelError(f"unknown dtype {str(word)!r}; there are auto, {', '.join(known)}.{meant(str(word), known)}")


def check_precision(word: str) -> None:
    """Raise ModelError if `word` names no kind of blocks."""
    if word not in PRECISIONS:
        raise ModelError(f"unknown precision {word!r}; there are {', '.join(PRECISIONS)}.{meant(word, PRECISIONS)}")


def check_device(device: str) -> None:
    """Raise ModelError if `device` names no device. Only torch knows whether this machine has it."""
    kind, colon, number = device.partition(":")
    if device != "auto" and (kind not in DEVICES or (colon and not number.isdecimal())):
        raise ModelError(f"there is no device {device!r}; give auto, cpu, cuda, cuda:1, ...{meant(kind, DEVICES, 0.7)}")


def check_schedule(spec: str, max_batch: int = 0) -> tuple[str, int | None]:
    """Parse `spec` into name and window. PacelineError if it is wrong, or does not fit batches of `max_batch` rows."""
    name, colon, window = spec.partition(":")
    if name not in SCHEDULES:
        known = ", ".join(SCHEDULES)
        raise PacelineError(f"there is no schedule {name!r}; there are {known}.{meant(name, SCHEDULES)}")
    if not colon:
        return name, None
    if name != "grouped" or not window.isdecimal() or int(window) < 1:
        raise PacelineError(f"schedule {spec!r}: only grouped takes a number, its window, as in grouped:48")
    if int(window) <= max_batch:
        raise PacelineError(f"schedule {spec!r}: a window is larger than the batch, which is {max_batch}")
    return name, int(window)


def parse_bytes(text: int | str, option: str = "cache_memory") -> int:
    """Parse a number of bytes: 2000000000, "2GB", "1.5 GiB" or "500M". PacelineError for anything else, and for 0."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?I?)B?", str(text).strip().upper())
    size = int(float(match[1]) * UNITS[match[2]]) if match and match[2] in UNITS else 0
    if size < 1 or isinstance(text, bool):
        raise PacelineError(f"{option} is {text!r}; it must be a number of bytes above 0, such as 2GB or 500MB.")
    return size


def ruled(name: str) -> Callable[[Any], Any]:
    """Make the callback that checks a command-line option by the rule of the field `name`. It returns the value."""

    def checked(value: Any) -> Any:
        if value is not None:
            check(name, value)
        return value

    return checked
