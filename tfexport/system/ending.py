"""Signals that end a command. They are raised again if a library loses their exception.

A signal raises an exception at any point of the running code. Some code drops all exceptions: finalisers, callbacks of weak
references, extension modules. So a signal is also recorded, and long work checks for recorded signals.
"""

from __future__ import annotations

import signal
from typing import NoReturn

_received: list[int] = []


def taken() -> int | None:
    """The first signal that arrived, if any. The record is then cleared."""
    number = _received[0] if _received else None
    _received.clear()
    return number


def end(number: int, _: object) -> NoReturn:
    """The handler of a signal.

    Raises:
        KeyboardInterrupt: the signal is Ctrl-C.
        SystemExit: for other signals, with the code of a shell, 128 plus the signal's number.
    """
    _received.append(number)
    _raise(number)


def end_if_asked() -> None:
    """Raise the exception of `end` again, if a signal arrived and its exception was lost. Call it before a result is moved
    into place.

    Do not call it in code that cleans up after a signal: that code would end at once.
    """
    if _received:
        _raise(_received[0])


def _raise(number: int) -> NoReturn:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)
