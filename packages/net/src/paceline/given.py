"""Check the values of a command's options, and split words joined by commas."""

from collections.abc import Callable
from typing import Any

from paceline.errors import PacelineError


def checked(check: Callable[[Any], object]) -> Callable[[Any], Any]:
    """The callback of an option that `check` refuses with a PacelineError: each of its values, if it is given."""

    def callback(value: Any) -> Any:
        for one in value if isinstance(value, list | tuple) else () if value is None else (value,):
            check(one)
        return value

    return callback


def listed(text: str | None) -> list[str]:
    """The words that a text joins by commas."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def listed_numbers(text: str, name: str) -> list[int]:
    """Whole numbers that an option joins by commas, ascending. Raises PacelineError for any other text."""
    words = listed(text)
    if not words or not all(word.isdecimal() and 1 <= int(word) <= 1024 for word in words):
        raise PacelineError(f"{name} is {text!r}; give whole numbers from 1 to 1024, joined by commas: 1,8,32")
    return sorted({*map(int, words)})
