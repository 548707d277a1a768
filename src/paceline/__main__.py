"""Where the command `paceline` begins, and `python -m paceline`: ready for Ctrl-C before anything slow is imported."""

import gc
import sys

from paceline import interrupt

GARBAGE = 50_000, 20, 100
"""When Python looks for objects that only point at each other. At its default, 700 new objects, a quarter of the time
until a model has been loaded went into looking through modules, which stay."""


def main() -> int:
    """`paceline.cli.main` for the process's own arguments."""
    interrupt.at_once()
    gc.set_threshold(*GARBAGE)
    from paceline import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
