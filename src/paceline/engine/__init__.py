"""The loop and its nouns: requests, trees, rounds, acceptance, sampling, the scheduler, memory; and `Engine`.

`from paceline.engine import Engine` imports the engine only when it is asked for: drafters and targets use the nouns.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from paceline.engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
