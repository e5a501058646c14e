"""The log of a stage is bounded: what is too long loses its beginning, which the disk gets back.

A program that prints without end would fill the disk on which its agent keeps its records. Decided
here: how much is kept. Nothing is moved, since whoever writes has the file open and whoever reads
knows its place in it: the file keeps its length, and a hole takes the place of its beginning.

Invariant: what was written last is never touched.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import stat
from typing import Final

from stagekeeper.core.limits import LARGEST_LOG_BYTES

_STDOUT: Final = 1
_LOOK_S: Final = 2.0
_SLACK_SHARE: Final = 8
"""An eighth more may be there before anything is done."""

_KEEP_SIZE: Final = 0x01
_PUNCH_HOLE: Final = 0x02
"""fallocate(2): FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE."""

_log = logging.getLogger("stagekeeper.stage")


async def keep_bounded() -> None:
    """Keep the log of this process bounded, until this is cancelled, or nothing can be done."""
    was_said = False
    try:
        while True:
            if trim(_STDOUT, LARGEST_LOG_BYTES) and not was_said:
                was_said = True
                _log.warning("this log is too long: its beginning is given up, now and later")
            await asyncio.sleep(_LOOK_S)
    except OSError as error:
        _log.warning("this log is not kept bounded, whatever is printed: %s", error)


def trim(descriptor: int, most_bytes: int) -> bool:
    """Give back what a file holds beyond its last `most_bytes`; return whether there was enough.

    Raises:
        OSError: its file system cannot do that.
    """
    status = os.fstat(descriptor)
    held_bytes = status.st_blocks * 512
    if not stat.S_ISREG(status.st_mode) or held_bytes <= most_bytes + most_bytes // _SLACK_SHARE:
        return False
    end = status.st_size - most_bytes
    if end <= 0:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    where = ctypes.c_longlong(0), ctypes.c_longlong(end)
    if libc.fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, *where):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return True
