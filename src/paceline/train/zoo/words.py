"""Word lists and helpers that several kinds of generated examples share."""

Pair = tuple[str, str]
"""(prompt, answer), or the same sentence in two languages."""


def words(text: str, between: str = " ") -> list[str]:
    """The words of a list that is written as one text."""
    return text.split(between)


def capitalized(text: str) -> str:
    """`text` with a capital first letter; the rest stays."""
    return text[0].upper() + text[1:]


NAMES = words(
    "Anna Ben Clara David Emma Felix Greta Hannah Jonas Julia Karl Lena Lukas Maria Max Nina Oskar Paul Sarah Tom"
)
ITEMS = words(
    "apples books coins cards eggs flowers letters marbles oranges pencils photos plates shells stamps tickets"
)
