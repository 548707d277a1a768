"""Errors that a user can cause. Each message is one line: what was wrong, what exists, what to do.

All else is a bug and keeps its traceback. The command line prints a PacelineError as one line and exits with 2."""

from collections.abc import Iterable


class PacelineError(Exception):
    """Base of all errors that the caller can mend."""


class ModelError(PacelineError):
    """A model cannot be found, read, or used as a target."""


class MethodError(PacelineError):
    """An unknown drafter, or an option it does not have."""


class PromptError(PacelineError):
    """A prompt that cannot be answered: empty, too long, or not readable."""


class TooLong(PromptError):
    """A prompt that the model's context does not hold. Clients know it by `code`, and many by "prompt is too long"."""

    code = "context_length_exceeded"


class StoreError(PacelineError):
    """A store of tokens cannot be found or read, or is of another tokenizer."""


class NumericError(PacelineError):
    """Logits or probabilities are not finite numbers."""


class RowError(Exception):
    """One row of a batch failed, for the reason in `__cause__`; the others did not. row_id: its `Row.id`."""

    def __init__(self, row_id: int):
        super().__init__(f"row {row_id} failed")
        self.row_id = row_id


class Interrupted(BaseException):
    """A forward was given up for something more urgent. Like Ctrl-C, it is nobody's failure."""


def out_of_memory(error: BaseException) -> str | None:
    """The line for an error of an allocator, of an accelerator or a CPU; None for any other error."""
    first = str(error).strip().split(". ")[0].split("\n")[0]
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in first:
        said = f" ({first})" if first else ""
        return f"there is no memory left{said}; a smaller model, --dtype, --batch or --cache-memory takes less"
    return None


# What a model writes: control characters are shown, and half a surrogate pair cannot be written at all.
CONTROLS = {i: 0x2400 + i for i in range(32) if chr(i) not in "\t\n"} | {0x7F: 0x2421}
CONTROLS |= dict.fromkeys([*range(0x80, 0xA0), *range(0xD800, 0xE000)], 0xFFFD)


def printable(said: object) -> str:
    """Text of a server, a file or an error, as one line without control characters, which a terminal would obey."""
    return "".join(one if one.isprintable() else "?" for one in " ".join(str(said).split()))


def install(place: str) -> str:
    """How to install one of our distributions, for the message of an error. place: in a checkout, with an extra or
    without: ".[serve]", "packages/lab"."""
    folder, _, extra = place.partition("[")
    name = "paceline" if folder == "." else f"paceline-{folder.removeprefix('packages/')}"
    absent = _absent(name, extra.removesuffix("]"))
    by_name = f", elsewhere: pip install {' '.join(absent)}" if absent else ""
    return f"in a checkout of Paceline: pip install {repr(place) if extra else place}{by_name}"


def _absent(name: str, extra: str) -> list[str]:
    """The packages of others that a distribution's extra brings, those that are not installed if there are any; none
    for one that is not installed itself."""
    from importlib import metadata  # Both imports are slow, and only errors need them.

    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(line) for line in metadata.requires(name) or () if extra]
    except metadata.PackageNotFoundError:
        return []
    wanted = [one for one in wanted if one.marker is not None and one.marker.evaluate({"extra": extra})]
    packages: dict[str, bool] = {}
    for one in wanted:
        ours = one.name.partition("-")[0] == "paceline"
        more = [part for inner in one.extras for part in _absent(one.name, inner)] if ours else [one.name]
        packages |= {part: any(metadata.distributions(name=part)) for part in more}
    return [part for part, installed in packages.items() if not installed] or list(packages)


_KINDS = {
    dict: "an object", list: "a list", tuple: "a list", str: "a text", bool: "true or false", int: "a number",
    float: "a number", type(None): "null",
}  # fmt: skip


def kind_of(value: object) -> str:
    """What JSON calls a value, with its article."""
    return _KINDS.get(type(value), f"a {type(value).__name__}")


PATHS = 0.7  # `near` for names of files, which are often unrelated.


def meant(word: str, known: Iterable[str], near: float = 0.5) -> str:
    """`" Did you mean 'sam'?"` if one of `known` is close to `word`, else an empty string. near: how close, 0 to 1."""
    import difflib  # Imported late, because it is slow.

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=near)
    return f" Did you mean {close[0]!r}?" if close else ""


def shortened(text: str, most: int = 120) -> str:
    """`text` for a message: a text longer than `most` characters loses its middle."""
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 4 :]}"
