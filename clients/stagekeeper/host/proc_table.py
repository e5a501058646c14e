"""What the kernel's table of processes says of one of them, read with as little as can be.

Only built-in modules are imported here, so that a program that has to be small can use it as well.
Whoever wants more than numbers and bytes takes `process`.

Invariant: nothing here is kept; every answer was true at some moment during the call.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

_DEAD_STATES = frozenset((b"Z", b"X", b"x"))
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD, linux/sched.h


def read_file(path: str) -> bytes | None:
    """Return the whole of a file of /proc; None when it is gone, or not for us to read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        blocks = []
        while block := os.read(fd, 65536):
            blocks.append(block)
        return b"".join(blocks)
    except OSError:
        return None  # it ended while it was read
    finally:
        os.close(fd)


def stat_fields(pid: int) -> list[bytes] | None:
    """Return `/proc/PID/stat` from the state on, at index 0; None when there is no such process."""
    text = read_file(f"/proc/{pid}/stat")
    if text is None:
        return None
    # The name, in parentheses, may hold spaces and parentheses itself.
    fields = text[text.rfind(b")") + 2 :].split()
    return fields if len(fields) >= 22 else None


def is_dead(fields: list[bytes]) -> bool:
    """Return whether it only waits to be reaped."""
    return fields[0] in _DEAD_STATES


def session_of(fields: list[bytes]) -> int:
    return int(fields[3])


def is_kernel_thread(fields: list[bytes]) -> bool:
    return bool(int(fields[6]) & _KERNEL_THREAD)


def start_ticks_of(fields: list[bytes]) -> int:
    """Return when it started, in clock ticks since the host booted."""
    return int(fields[19])


def resident_pages_of(fields: list[bytes]) -> int:
    return int(fields[21])


def living_start_ticks(pid: int) -> int | None:
    """Return when the process that has this pid now started; None when nobody living has it."""
    fields = stat_fields(pid)
    return None if fields is None or is_dead(fields) else start_ticks_of(fields)


def environment(pid: int) -> list[bytes] | None:
    """Return what a process was started with, as `NAME=VALUE`.

    Returns:
        None when that is not readable; empty for one without any, and for one that is just being
        made into another program, which says nothing of what it was started with.
    """
    block = read_file(f"/proc/{pid}/environ")
    if block is None:
        return None
    return block.split(b"\0") if block else []


def other_pids() -> Iterator[int]:
    """Look at the pid of every process of the host but this one."""
    own = os.getpid()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != own:
            yield int(name)
