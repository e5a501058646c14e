"""Ending with the process that started us, however that one ended.

Decided here: how a child of `up` notices that `up` is gone, `kill -9` included. The child arms the
signal itself, in its main thread: armed by the parent it would follow the death of the parent's
*thread*. Stage processes never use this; they outlive everybody.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


def die_with(parent_pid: int) -> bool:
    """Have SIGTERM sent to this process when its parent ends.

    Call it in the main thread, once the handler of SIGTERM is in place or not needed.

    Returns:
        False when the parent is gone already: the signal will not come, so end now.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl: {os.strerror(error)}")
    # It may have ended before the line above; whoever inherits orphans then is our parent.
    return os.getppid() == parent_pid
