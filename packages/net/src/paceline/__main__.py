"""Where the command `paceline` begins, and `python -m paceline`: ready for Ctrl-C before anything slow is imported."""

import gc
import os
import sys

from paceline import interrupt

GARBAGE = 50_000, 20, 100
"""When Python looks for objects that only point at each other. At its default, 700 new objects, a quarter of the time
until a model has been loaded went into looking through modules, which stay."""


NARROWEST = 40
"""Fewest columns that tables are made for: in fewer, names would be cut, and in none nothing would be shown."""


def main() -> int:
    """`paceline.cli.main` for the process's own arguments."""
    interrupt.at_once()
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed by whoever started this
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    if os.environ.get("COLUMNS", "").isdecimal():
        os.environ["COLUMNS"] = str(max(int(os.environ["COLUMNS"]), NARROWEST))
    gc.set_threshold(*GARBAGE)
    from paceline import cli

    status = cli.main()
    if status == interrupt.STATUS:
        interrupt.silence()
    return status


if __name__ == "__main__":
    sys.exit(main())
