"""Handle Ctrl-C before and within a command's own loop. Imports nothing slow."""

from __future__ import annotations

import _thread
import os
import signal
import sys
from time import sleep

TYPE_CHECKING = False  # `typing` takes longer to import than all the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, NoReturn

STATUS = 130  # A shell's status for a command that Ctrl-C ended.


def at_once() -> None:
    """Let Ctrl-C end the process at once, while modules are imported."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # Another handler stays.
        signal.signal(signal.SIGINT, _leave)


def _leave(number: int = signal.SIGINT, frame: FrameType | None = None) -> NoReturn:
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"interrupted\n")
    os._exit(STATUS)


def silence() -> None:
    """Say nothing of what objects complain about when the interpreter ends: they were interrupted half-way."""
    sys.unraisablehook = lambda unraisable: None


AGAIN = 0.2
"""Seconds until Ctrl-C is raised again, where its exception was dropped: longer than dropping it takes."""


class ByException:
    """A context in which Ctrl-C raises KeyboardInterrupt and sets `pressed`, as libraries may replace the exception.

    While torch is imported, which an exception may break, Ctrl-C ends the process at once. Python drops an exception
    of a `__del__` or of a call from C; a KeyboardInterrupt that was dropped is raised again."""

    def __init__(self) -> None:
        self.pressed = False
        self._before: Any = None
        self._hook: Any = None

    def __enter__(self) -> ByException:
        if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _leave):
            try:
                self._before = signal.signal(signal.SIGINT, self._press)
            except ValueError:  # Signals arrive only in the main thread.
                self._before = None
            else:
                self._hook, sys.unraisablehook = sys.unraisablehook, self._dropped
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            sys.unraisablehook = self._hook

    def _dropped(self, unraisable: Any) -> None:
        if not self.pressed:
            self._hook(unraisable)
        elif issubclass(unraisable.exc_type, KeyboardInterrupt):
            _thread.start_new_thread(_press_again, (_thread.get_ident(),))

    def _press(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        if _is_loading("torch"):
            _leave()
        raise KeyboardInterrupt


def _press_again(thread: int) -> None:
    sleep(AGAIN)
    signal.pthread_kill(thread, signal.SIGINT)


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
            except ValueError:  # Outside the main thread, signals are left to the caller.
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
