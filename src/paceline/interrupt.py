"""Ctrl-C, before a command's own loop watches for it and within that loop. Imports nothing slow."""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # `typing` takes longer to import than all the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, NoReturn

STATUS = 130  # a shell's status of a command that Ctrl-C ended


def at_once() -> None:
    """Let Ctrl-C end the process at once, while modules are imported."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # another handler stays
        signal.signal(signal.SIGINT, _leave)


def _leave(number: int = signal.SIGINT, frame: FrameType | None = None) -> NoReturn:
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"interrupted\n")
    os._exit(STATUS)


class ByException:
    """A context in which Ctrl-C raises KeyboardInterrupt and sets `pressed`, as libraries may replace the exception.

    While torch is imported, which an exception may break, Ctrl-C ends the process at once."""

    def __init__(self) -> None:
        self.pressed = False
        self._before: Any = None

    def __enter__(self) -> ByException:
        if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _leave):
            try:
                self._before = signal.signal(signal.SIGINT, self._press)
            except ValueError:  # not in the main thread, where signals do not arrive
                self._before = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _press(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        if _is_loading("torch"):
            _leave()
        raise KeyboardInterrupt


class Interrupt:
    """A context in which Ctrl-C sets `pressed`, for a loop to see between two steps. A second one does what it did
    before. signals: others that do the same; on_first: called at the first."""

    def __init__(self, *signals: int, on_first: Callable[[], None] = lambda: None):
        self.pressed, self._on_first = False, on_first
        self._signals = signals or (signal.SIGINT,)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        for number in self._signals:
            try:
                self._before[number] = signal.signal(number, self._press)
            except ValueError:  # not in the main thread: signals are left to the caller
                break
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _press(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        signal.signal(number, self._before[number])
        self._on_first()


def _is_loading(module: str) -> bool:
    """Whether a module is being imported now."""
    return bool(getattr(getattr(sys.modules.get(module), "__spec__", None), "_initializing", False))
