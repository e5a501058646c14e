"""Folders that only their owner may look into: what a supervisor and an agent keep.

Sockets without a password, logs and specs lie in them. Decided here: what becomes of a folder that
is there already and open to others. It is closed when it is ours and holds nothing else; a shared
one (`/tmp`, somebody's project) is refused, since closing it would lock out whoever uses it.

Invariant: a folder that was accepted has no mode bits for its group and for others.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600

_OPEN_TO_OTHERS: Final = 0o077
_STATE_NAMES: Final = frozenset({"agents", "cache", "logs", "up.lock"})
_STATE_PREFIX: Final = "supervisor."


class FolderIsOpen(PermissionError):
    """A folder that others can look into and that is not ours to close; says what to do."""


def make_state_folder(path: Path) -> None:
    """Make the folder that a user chose for our state, or close the one that is there.

    Raises:
        FolderIsOpen: it belongs to another user, or holds more than our state.
        OSError: it cannot be made or read.
    """
    try:
        path.mkdir(mode=FOLDER_MODE, parents=True)
    except FileExistsError:
        _close(path, holds_only_ours=False)


def make_private_folder(path: Path) -> None:
    """Make a folder of our own inside one of ours, or close the one that is there.

    Raises:
        FolderIsOpen: it belongs to another user.
        OSError: it cannot be made.
    """
    try:
        path.mkdir(mode=FOLDER_MODE)
    except FileExistsError:
        _close(path, holds_only_ours=True)


def _close(path: Path, *, holds_only_ours: bool) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = os.fstat(folder)
        mode = stat.S_IMODE(found.st_mode)
        if not mode & _OPEN_TO_OTHERS:
            return
        if found.st_uid != os.geteuid():
            raise _refusal(path, mode, "and belongs to another user", "choose a folder of your own")
        if not holds_only_ours and not all(map(_is_of_our_state, os.listdir(folder))):
            raise _refusal(
                path,
                mode,
                "and holds other things too",
                f"choose an empty one, or `chmod 700 {path}` if nobody else needs it",
            )
        os.fchmod(folder, FOLDER_MODE)
    finally:
        os.close(folder)


def _is_of_our_state(name: str) -> bool:
    return name in _STATE_NAMES or name.startswith(_STATE_PREFIX)


def _refusal(path: Path, mode: int, why: str, what_to_do: str) -> FolderIsOpen:
    return FolderIsOpen(
        f"the folder {path} is open to other users of this host (mode {mode:04o}) {why}: "
        f"{what_to_do}"
    )
