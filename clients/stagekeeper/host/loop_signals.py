"""Signals that this process's event loop listens to, and that no child of it inherits.

asyncio hears of signals over a pair of sockets, which a child that is forked has as well: what is
sent to the child would be read by the parent's loop, and a pool of workers that is told to end
would end the program that it belongs to. Invariant: a child that is forked is on its own: it is
ended by what is sent to it, and its parent hears nothing of that.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from typing import Final

_heard: Final = set[signal.Signals]()
_forking: Final = threading.local()
"""The signals that a thread that forks had blocked."""


def listen(
    loop: asyncio.AbstractEventLoop, number: signal.Signals, callback: Callable[[], object]
) -> None:
    """Have the loop call `callback` at each signal of this number; from the main thread only."""
    loop.add_signal_handler(number, callback)
    _heard.add(number)


def leave(loop: asyncio.AbstractEventLoop, number: signal.Signals) -> None:
    """Undo `listen`: the signal does by itself what it does to any process."""
    _heard.discard(number)
    loop.remove_signal_handler(number)


def _before_fork() -> None:
    # What is sent to the child before it is on its own waits until it is: of any number, since the
    # program's own handlers share those sockets.
    blocked = signal.valid_signals() if _heard else ()
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)


def _in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_child() -> None:
    if _heard:
        signal.set_wakeup_fd(-1)
    for number in _heard:
        signal.signal(number, signal.SIG_DFL)
    _heard.clear()
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
