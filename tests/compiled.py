"""Compiles what the tests need compiled: python -m tests.compiled

Numba keeps it beside the sources, and pytest the bytecode of the tests, whose asserts it rewrites. In a fresh clone
every process of pytest would begin by making the same; `make test` runs this beside mypy, which leaves a core idle.
"""

from contextlib import redirect_stdout
from os import devnull

import pytest

from paceline.cli.ahead import parts


def import_all():
    """Collect every test and run none. What is wrong with one pytest itself will say."""
    with open(devnull, "w") as nowhere, redirect_stdout(nowhere):
        pytest.main(["--collect-only", "-q", "-n0", "-p", "no:cacheprovider"])


if __name__ == "__main__":
    for _, compile in parts():
        compile()
    import_all()
