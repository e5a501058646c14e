"""Where an agent keeps what, below its state directory.

One folder per worker id, so that several agents of one host may share a state directory. Names from
outside become file names by quoting. A worker's folder alone is read back (`directories_in`): whose
it is must be known without the files in it.

Invariant: a socket's path fits into what the kernel takes for one.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from stagekeeper.core.ids import InstanceId, WorkerId
from stagekeeper.runtime.private_folder import make_private_folder, make_state_folder

SOCKET_PATH_BYTES: Final = 107
"""A unix socket's path, without its closing zero (`man 7 unix`)."""

SOCKET_NAME_LENGTH: Final = 12

_AGENTS: Final = "agents"


_LONGEST_FILE_NAME: Final = 240
"""In bytes. File systems take 255, and files have endings."""


def file_name(identity: str) -> str:
    """Make a file name of any identity; different ones make different names.

    Quoting makes up to twelve bytes of a character: where that is too long, only what may not stand
    in a file name is quoted; and where that is as well, the end becomes a digest of the whole.
    """
    quoted = quote(identity, safe="").replace(".", "%2E")
    if len(quoted) <= _LONGEST_FILE_NAME:
        return quoted
    sparing = "".join(quote(it, safe="") if it in "%/\0" else it for it in identity)
    sparing = sparing.replace(".", "%2E")
    if len(sparing.encode()) <= _LONGEST_FILE_NAME:
        return sparing
    return f"{quoted[:100]}.{hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()}"


class AgentDirectory:
    """The folder of one worker id."""

    def __init__(self, state_dir: Path, worker_id: WorkerId) -> None:
        self.worker_id = worker_id
        self.root = state_dir.absolute() / _AGENTS / file_name(worker_id)
        self.lock_file = self.root / "lock"
        self.identity_file = self.root / "identity.json"
        self.generations_file = self.root / "generations.json"
        self.stages = self.root / "stages"
        self.operations = self.root / "operations"
        self.procs = self.root / "procs"
        self.failures = self.root / "failures"
        self.sockets = self.root / "sock"
        # Shared by all agents of the state directory: what a stage caches depends on no worker.
        self.cache = state_dir.absolute() / "cache"

    @property
    def longest_socket_bytes(self) -> int:
        """The length that the path of each stage's socket has."""
        return len(str(self.sockets / ("0" * SOCKET_NAME_LENGTH)).encode())

    def create(self) -> None:
        """Make the folders that are missing; only their owner may look into them.

        Raises:
            FolderIsOpen: one of them is open to others, and not ours to close.
            OSError: one cannot be made.
        """
        make_state_folder(self.root.parent.parent)
        for folder in (
            self.root.parent,
            self.root,
            self.stages,
            self.operations,
            self.procs,
            self.failures,
            self.sockets,
            self.cache,
        ):
            make_private_folder(folder)

    def run_dir(self, instance_id: InstanceId) -> Path:
        """The folder of one stage process."""
        return self.stages / instance_id

    def socket(self, instance_id: InstanceId) -> Path:
        """Where one stage process listens for its agent."""
        return self.sockets / instance_id[:SOCKET_NAME_LENGTH]


def directories_in(state_dir: Path) -> list[AgentDirectory]:
    """Return the folder of every worker that a state directory has, ascending; makes nothing.

    What no agent of ours would have named so (`node-1.bak`) is none.
    """
    try:
        folders = sorted(it for it in (state_dir.absolute() / _AGENTS).iterdir() if it.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [
        AgentDirectory(state_dir, WorkerId(worker_id))
        for folder in folders
        if file_name(worker_id := unquote(folder.name)) == folder.name
    ]
