"""Signals that end a command, and are raised again where a library took them for something else.

A signal becomes an exception in the middle of whatever Python runs. Some code drops every exception: finalisers, callbacks
of weak references, extension modules. So a signal is also noted, and work that would go on asks whether one came.
"""

from __future__ import annotations

import signal
from typing import NoReturn

_received: list[int] = []


def taken() -> int | None:
    """The first signal that came, if one did; they are forgotten then."""
    number = _received[0] if _received else None
    _received.clear()
    return number


def end(number: int, _: object) -> NoReturn:
    """The handler of a signal.

    Raises:
        KeyboardInterrupt: it is Ctrl-C.
        SystemExit: it is another one; the code is a shell's, 128 and its number.
    """
    _received.append(number)
    _raise(number)


def end_if_asked() -> None:
    """Raise what `end` raised, where a signal came and its exception was lost. Call it before a result takes its place.

    It is not for what tidies up after a signal, which would end at once.
    """
    if _received:
        _raise(_received[0])


def _raise(number: int) -> NoReturn:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)
