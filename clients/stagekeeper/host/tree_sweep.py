"""Ends all processes at or below a place in an actor tree, whatever they made of themselves.

Decided here: what belongs to a place, and when nothing is left of it. A process belongs to a place
when it was started with a `STAGEKEEPER_TREE` that equals the place or lies below it, in parts
between "/"; a session of its own, a parent that is gone, a second fork change nothing. Not decided
here: who deserves it. One that was started with another environment is found only through the
session that it is in, and only by an owner who has not reaped that session's leader.

Only built-in modules are imported here, and `proc_table`: the warden has to be small.

Invariant: a kill goes through a pidfd whose process had the expected start ticks *after* the pidfd
was opened; this process itself is never among the killed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

from stagekeeper.host import proc_table

TREE_ENV = "STAGEKEEPER_TREE"
"""Names the place in an actor tree of a process and of all that it starts."""

Member = tuple[int, int]
"""A process: its pid, and its start in clock ticks since the host booted."""

_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.1
_EMPTY_LOOKS = 2  # one may miss what a member forked under a lower pid before it ended itself


class Sweep:
    """One sweep of one place; each `look` kills what it finds.

    Args:
        path: the place; everything at it and below it is meant.
        session: also everything in this session. Pass it only while its leader lives or waits to
            be reaped by this process, so that the number is surely its own.
        since_ticks: nothing below the place started before; makes a look cheaper.

    Attributes:
        found: whom the last look found.
        killed: everybody who was sent SIGKILL so far.
    """

    def __init__(self, path: str, *, session: int = 0, since_ticks: int = 0) -> None:
        if not path.strip("/"):
            raise ValueError("a sweep of no tree would end everything")
        self.path = path
        self._exactly = f"{TREE_ENV}={path}".encode()
        self._below = self._exactly + b"/"
        self._session = session
        self._since_ticks = since_ticks
        self._unknown: set[Member] = set()
        self._empty_looks = 0
        self.found: set[Member] = set()
        self.killed: set[Member] = set()

    @property
    def is_over(self) -> bool:
        """Whether enough looks in a row have found nothing."""
        return self._empty_looks >= _EMPTY_LOOKS

    def look(self) -> None:
        """Look at every process of the host once, and kill what belongs to the place."""
        unknown: set[Member] = set()
        self.found = set()
        for pid, start_ticks in self._members(unknown):
            self.found.add((pid, start_ticks))
            # At once: what only forks and ends itself is somebody else by the end of the look.
            if kill(pid, start_ticks):
                self.killed.add((pid, start_ticks))
        # One that shows no environment is about to become another program, or has none for ever:
        # only those that a later look sees the same way are surely none of ours.
        is_empty = not self.found and unknown <= self._unknown
        self._empty_looks = self._empty_looks + 1 if is_empty else 0
        self._unknown = unknown

    def _members(self, unknown: set[Member]) -> Iterator[Member]:
        # The last first: what is started meanwhile is seen by the next look alone, so the time in
        # which a young one can fork itself away should be short.
        for pid in sorted(proc_table.other_pids(), reverse=True):
            fields = proc_table.stat_fields(pid)
            if fields is None or proc_table.is_dead(fields):
                continue
            member = (pid, proc_table.start_ticks_of(fields))
            if member[1] < self._since_ticks or proc_table.is_kernel_thread(fields):
                continue
            if self._session and proc_table.session_of(fields) == self._session:
                yield member
                continue
            environment = proc_table.environment(pid)
            if environment == []:
                unknown.add(member)
            elif environment is not None and self._holds(environment):
                yield member

    def _holds(self, environment: list[bytes]) -> bool:
        return any(it == self._exactly or it.startswith(self._below) for it in environment)


def sweep(path: str, *, deadline_s: float) -> set[Member]:
    """Kill everything at or below a place until nothing is left of it; blocks meanwhile.

    Args:
        deadline_s: how long it may take; a process may be held by a driver in the kernel.

    Returns:
        Everybody who was killed.

    Raises:
        TimeoutError: something still lives, with its pids.
    """
    work = Sweep(path)
    work.look()
    for pause_s in pauses_s(work, deadline_s):
        time.sleep(pause_s)
        work.look()
    return work.killed


def pauses_s(work: Sweep, deadline_s: float) -> Iterator[float]:
    """Yield how long to wait before each look after the first, until nothing is left.

    Raises:
        TimeoutError: as `sweep`.
    """
    ends_at = time.monotonic() + deadline_s
    pause_s = _FIRST_PAUSE_S
    while not work.is_over:
        if time.monotonic() >= ends_at:
            left = sorted(pid for pid, _ in work.found)
            raise TimeoutError(f"after {deadline_s:g} s not all of {work.path} is gone: {left}")
        yield pause_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def find(path: str) -> set[Member]:
    """Return the living processes at or below a place, with one look."""
    return set(Sweep(path)._members(set()))


def is_alive(pid: int, start_ticks: int) -> bool:
    """Return whether this very process lives; one that was not reaped yet does not."""
    return proc_table.living_start_ticks(pid) == start_ticks


def kill(pid: int, start_ticks: int) -> bool:
    """SIGKILL this very process; False when it is gone, or not ours to kill."""
    pidfd = open_pidfd(pid, start_ticks)
    if pidfd is None:
        return False
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(pidfd)
    return True


def open_pidfd(pid: int, start_ticks: int) -> int | None:
    """Take hold of this very process; None when it is gone."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    # Only now: whatever the pid means from here on, the pidfd means what the ticks say.
    if not is_alive(pid, start_ticks):
        os.close(pidfd)
        return None
    return pidfd
