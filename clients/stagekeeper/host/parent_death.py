"""Ending with the process that started us, however that one ended.

Decided here: how a child notices that its parent is gone, `kill -9` included: the kernel sends it a
signal. The child arms it itself, since armed between fork and exec it would need code that runs in
the forked copy of a program with threads. Stages never use this; they outlive everybody.

Invariant: after `die_with` returned True, the end of the parent ends the child.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


def die_with(parent_pid: int, number: signal.Signals = signal.SIGTERM) -> bool:
    """Have a signal sent to this process when the *thread* that started it ends.

    So whoever starts such a child does it in a thread that lives as long as the child should. Call
    it in the main thread, once the handler of the signal is in place or not needed.

    Returns:
        False when the parent is gone already: the signal will not come, so end now.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl: {os.strerror(error)}")
    # It may have ended before the line above; whoever inherits orphans then is our parent.
    return os.getppid() == parent_pid
