"""Who holds a phase lock, as the holders themselves say it in the lock's own file.

A holder takes one of a few slots: a record lock on one byte far behind the file's end says that
the slot is somebody's, and its text in the file says whose. So a slot falls free with its holder's
process, whatever that had written. Anybody of the host can write into the file: what stands there
is shown to people, and its counter only lengthens a wait; whether somebody holds the lock, and
which process, the kernel says.

Invariant: a slot whose text makes no sense is a holder without a name, never no holder.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from stagekeeper.runtime.lock_file import holder_pid

SLOTS: Final = 64
"""Holders that can be named at once; one more is a holder without a name."""

_SLOT_BYTES: Final = 512
_LONGEST_TEXT: Final = 120
_SLOT_LOCKS: Final = 2**40
"""Where the slots' own locks are; nothing is ever written there."""

_Text = Annotated[str, msgspec.Meta(max_length=_LONGEST_TEXT)]


class HolderText(msgspec.Struct, frozen=True, array_like=True):
    """What a holder says of itself.

    `since` is for people, on the wall clock; `progress` changes whenever the holder gets on.
    """

    pid: int = 0
    stage: _Text = ""
    phase: _Text = ""
    since: Annotated[str, msgspec.Meta(max_length=40)] = ""
    progress: int = 0


@dataclass(frozen=True, slots=True)
class Holder:
    """One that holds a lock now; `pid` is 0 where nobody can tell."""

    pid: int
    text: HolderText | None = None

    def __str__(self) -> str:
        process = f"process {self.pid}" if self.pid else "a process that cannot be seen from here"
        if self.text is None:
            return process
        return f"{process} ({self.text.stage}, {self.text.phase}, since {self.text.since})"


class HolderSlot:
    """This process's own slot of one file; without one where all were taken."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._number: int | None = None

    def take(self) -> None:
        for number in range(SLOTS):
            try:
                fcntl.lockf(
                    self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _SLOT_LOCKS + number
                )
            except OSError:
                continue
            self._number = number
            return

    def say(self, text: HolderText) -> None:
        """Put down what is so now. Where it cannot be written, the holder has no name."""
        if self._number is None:
            return
        try:
            os.pwrite(self._descriptor, _encoded(text), self._number * _SLOT_BYTES)
        except OSError:
            pass

    def free(self) -> None:
        if self._number is None:
            return
        try:
            os.pwrite(self._descriptor, bytes(_SLOT_BYTES), self._number * _SLOT_BYTES)
        except OSError:
            pass
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, _SLOT_LOCKS + self._number)
        self._number = None


def read_holders(descriptor: int) -> tuple[Holder, ...]:
    """Return who holds the lock of a file, this process left out."""
    pid = holder_pid(descriptor, 0, 1)
    if pid is None:
        return ()
    found: list[Holder] = []
    data = os.pread(descriptor, SLOTS * _SLOT_BYTES, 0)
    for number in range(SLOTS):
        text = data[number * _SLOT_BYTES : (number + 1) * _SLOT_BYTES].rstrip(b"\0")
        if text:
            slot_pid = holder_pid(descriptor, _SLOT_LOCKS + number, 1)
            if slot_pid is not None:
                found.append(_holder(slot_pid, text))
    if not found or (pid and pid not in {it.pid for it in found}):
        found.append(Holder(pid))
    return tuple(found)


def _holder(pid: int, data: bytes) -> Holder:
    try:
        text = msgspec.json.decode(data, type=HolderText)
    except (msgspec.DecodeError, RecursionError):
        return Holder(pid)
    if not (text.stage + text.phase + text.since).isprintable():
        return Holder(pid)
    return Holder(pid, text)


def _encoded(text: HolderText) -> bytes:
    data = msgspec.json.encode(text)
    while len(data) > _SLOT_BYTES:  # each character of a name may have several bytes
        cut = HolderText(text.pid, text.stage[: len(text.stage) // 2], "", "", text.progress)
        data, text = msgspec.json.encode(cut), cut
    return data.ljust(_SLOT_BYTES, b"\0")


def shortened(text: str) -> str:
    """Return a name as it fits into a slot, and as a line of text can show it."""
    cut = text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"
    return "".join(it if it.isprintable() else "?" for it in cut)
