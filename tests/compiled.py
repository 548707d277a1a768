"""Compiles what the tests need compiled: python -m tests.compiled

Numba keeps it beside the sources. In a fresh clone every process of pytest would begin by compiling the same functions;
`make test` runs this beside mypy, which leaves a core idle.
"""

from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from paceline.draft.recording import Recording
from paceline.draft.registry import create
from paceline.draft.text import frozen as freezing
from paceline.draft.text import ngrams, suffix_array
from paceline.workbench.walk import tokens_only
from tests.draft.rows import target
from tests.draft.stores import corpus

KERNELS = ("attention", "program", "steps", "tiles")
"""Modules whose import compiles them."""


def compile_all() -> None:
    """The target's kernels; and bind every drafter that needs no checkpoint, which compiles what it has, and those that
    read a corpus."""
    for name in KERNELS:
        import_module(f"paceline.target.kernels.{name}")
    tokens_only(Recording(None, (2,), 320))
    reader = target(".")
    reader.tokenizer = None
    with TemporaryDirectory() as folder:
        store = corpus(Path(folder) / "store", ["abcde", "abxyz"], parts=(freezing, ngrams, suffix_array))
        for spec in (f"rest:{store}", f"suffix,corpus={store}", f"hierarchy,corpus={store}"):
            create(spec).bind(reader)


if __name__ == "__main__":
    compile_all()
