"""Where the command `paceline` begins, and `python -m paceline`: ready for Ctrl-C before anything slow is imported."""

import sys

from paceline import interrupt


def main() -> int:
    """`paceline.cli.main` for the process's own arguments."""
    interrupt.at_once()
    from paceline import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
