"""Ctrl-C where nobody can catch it: while modules are loaded, and while the interpreter ends.

Decided here: that it ends the process then, as the system would end it, and nothing is printed.
Invariant: a SIGINT that the caller had ignored, or had taken over itself, stays as it was.
"""

from __future__ import annotations

import signal


def end_quietly() -> None:
    """Let SIGINT end this process without a word, from now on."""
    _replace(signal.default_int_handler, signal.SIG_DFL)


def raise_again() -> None:
    """Let SIGINT raise KeyboardInterrupt again, as Python does by itself."""
    _replace(signal.SIG_DFL, signal.default_int_handler)


def _replace(old: object, new: signal._HANDLER) -> None:
    if signal.getsignal(signal.SIGINT) != old:
        return
    try:
        signal.signal(signal.SIGINT, new)
    except ValueError:  # not in the main thread, which alone is told of signals
        pass
