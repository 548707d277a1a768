"""The words that generated examples are made of (words.toml), and what several kinds of them share."""

import tomllib
from importlib.resources import files

Pair = tuple[str, str]
"""(prompt, answer), or the same sentence in two languages."""

_LISTS: dict[str, str] = tomllib.loads(files(__package__).joinpath("words.toml").read_text("utf-8"))


def words(name: str) -> list[str]:
    """A list of words."""
    return _LISTS[name].split()


def lines(name: str) -> list[str]:
    """A list of entries that contain spaces."""
    return _LISTS[name].strip().splitlines()


def capitalized(text: str) -> str:
    """`text` with a capital first letter; the rest stays."""
    return text[0].upper() + text[1:]


NAMES, ITEMS = words("names"), words("items")
