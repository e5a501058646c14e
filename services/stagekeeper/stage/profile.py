"""What a stage's phases measured of its memory, kept for its next start.

One file for each kind of start, beside the other things that the stages of a worker keep. Two
starts are of one kind when they run the same class with the same arguments and `env`, as the same
part of it, on cards of the same model. Decided here: what is kept, and for whom it stands. Not
decided here: whether it may stand in for a measurement (memory_account, phases).

Invariant: what cannot be read or written is as if nothing was kept, and no start fails for it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from pathlib import Path
from typing import Annotated

import msgspec

from stagekeeper.core.limits import LARGEST_BYTES
from stagekeeper.core.model import MemoryProfile
from stagekeeper.runtime.launch import Launch

_FOLDER = "profiles"
_MOST_BYTES = 4096
"""Three numbers have less; what was cut off cannot be read."""

_log = logging.getLogger(__name__)

_Bytes = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_BYTES)]


class _File(msgspec.Struct, frozen=True, kw_only=True):
    weights_bytes: _Bytes
    peak_bytes: _Bytes
    graph_bytes: _Bytes | None = None


def read_profile(launch: Launch) -> MemoryProfile | None:
    """Return what was kept of an earlier start of this kind; None when there is nothing."""
    try:
        file = msgspec.json.decode(_content(_path(launch)), type=_File)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        _log.warning("the memory profile %s cannot be read: %s", _path(launch), error)
        return None
    return MemoryProfile(file.weights_bytes, file.peak_bytes, file.graph_bytes)


def keep_profile(launch: Launch, profile: MemoryProfile) -> None:
    """Keep what was measured in place of what was kept before."""
    path = _path(launch)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(msgspec.json.encode(profile))
        new.replace(path)
    except OSError as error:
        _log.warning("the memory profile %s cannot be kept: %s", path, error)


def _content(path: Path) -> bytes:
    # Whatever lies there is not waited for, and not read without end.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no regular file")
        return file.read(_MOST_BYTES)


def _path(launch: Launch) -> Path:
    kind = msgspec.json.encode(
        [
            launch.entrypoint,
            msgspec.json.decode(launch.args_json),
            launch.env_digest,
            launch.shard_index,
            launch.shard_count,
            [(device.kind, device.model, device.total_bytes) for device in launch.devices],
        ],
        order="sorted",
    )
    name = hashlib.blake2b(kind, digest_size=16).hexdigest()
    return Path(launch.cache_dir) / _FOLDER / f"{name}.json"
