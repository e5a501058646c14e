"""Files that are there whole or not at all, whatever dies when.

Written to a neighbour, flushed, renamed, and the folder flushed: a reader sees the old content or
the new one, and what was written before an action is there after a power cut behind it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_SUFFIX = ".new"


def write_durably(path: Path, data: bytes) -> None:
    """Replace the content of `path`. When this returns it survives the host.

    Raises:
        OSError: it names the file; the old content is there, and nothing of the new one.
    """
    temporary = path.with_name(path.name + _SUFFIX)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)  # a full disk has no room for it
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)
    os.rename(temporary, path)
    sync_folder(path.parent)


def rename_durably(path: Path, target: Path) -> None:
    """Give a file another name in its folder; harmless when it is gone already."""
    try:
        os.rename(path, target)
    except FileNotFoundError:
        return
    sync_folder(target.parent)


def remove_durably(path: Path) -> None:
    """Remove a file; harmless when it is gone already."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive the host."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
