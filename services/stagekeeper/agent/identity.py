"""Who the agent is over its lives: its incarnation, and the highest reign that it has obeyed.

Both are on disk before they are used: an incarnation before anybody hears of it, an epoch before a
command of that reign is obeyed. A life that was refused, since a living agent has its worker id,
does not count: else a second agent of that id would outdo the first by being started again.
Invariant: neither ever goes down.
"""

from __future__ import annotations

import socket
import uuid
from pathlib import Path
from typing import Final

import msgspec
import structlog

from stagekeeper.agent.durable_file import write_durably
from stagekeeper.core.ids import NO_EPOCH, Epoch, HostId, WorkerId

_log = structlog.get_logger(__name__)

_MACHINE_ID: Final = Path("/etc/machine-id")


class _File(msgspec.Struct, frozen=True):
    worker_id: str
    host_id: str
    incarnation: int
    highest_epoch: Epoch
    is_refused: bool = False


class IdentityUnreadable(Exception):
    """The agent's own file is damaged; the message says what to do."""


class AgentIdentity:
    """What tells this life of this agent from every other."""

    def __init__(
        self, path: Path, worker_id: WorkerId, host_id: HostId, incarnation: int, epoch: Epoch
    ) -> None:
        self.worker_id = worker_id
        self.host_id = host_id
        self.hostname = socket.gethostname()
        self._path = path
        self._incarnation = incarnation
        self._highest_epoch = epoch
        self._is_refused = False

    @property
    def incarnation(self) -> int:
        return self._incarnation

    @property
    def highest_epoch(self) -> Epoch:
        """The highest reign obeyed in any life."""
        return self._highest_epoch

    @classmethod
    def next_life(
        cls, path: Path, worker_id: WorkerId, *, recorded_incarnation: int
    ) -> AgentIdentity:
        """Begin the next life: one above the last, written down.

        Args:
            recorded_incarnation: the highest that the stage records name; it counts as well, in
                case the file was lost.

        Raises:
            IdentityUnreadable: the file is there and cannot be read.
        """
        found = _read(path)
        last = max(found.incarnation - found.is_refused if found else 0, recorded_incarnation)
        identity = cls(
            path,
            worker_id,
            HostId(found.host_id) if found else _host_id(),
            last + 1,
            found.highest_epoch if found else NO_EPOCH,
        )
        identity._write(identity.incarnation, identity.highest_epoch)
        return identity

    def rise_above(self, incarnation: int) -> None:
        """Take the incarnation after one that somebody else showed, unless ours is above it."""
        if incarnation >= self._incarnation:
            self._write(incarnation + 1, self._highest_epoch)

    def note_epoch(self, epoch: Epoch) -> None:
        """Remember a reign before it is obeyed; a lower one than the highest is not the highest."""
        if epoch > self._highest_epoch or self._is_refused:
            self._write(self._incarnation, max(epoch, self._highest_epoch))

    def note_refusal(self) -> None:
        """Remember that this life was refused before a living agent; the next has its number."""
        if not self._is_refused:
            self._write(self._incarnation, self._highest_epoch, is_refused=True)

    def _write(self, incarnation: int, highest_epoch: Epoch, *, is_refused: bool = False) -> None:
        """Put all on disk, and only then believe it."""
        file = _File(self.worker_id, self.host_id, incarnation, highest_epoch, is_refused)
        write_durably(self._path, msgspec.json.encode(file))
        self._incarnation, self._highest_epoch = incarnation, highest_epoch
        self._is_refused = is_refused


def _read(path: Path) -> _File | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(data, type=_File)
    except msgspec.DecodeError as error:
        raise IdentityUnreadable(
            f"{path} is damaged ({error}); move it away, and the incarnation is taken from the "
            "stage records and from the supervisor"
        ) from error


def _host_id() -> HostId:
    try:
        machine_id = _MACHINE_ID.read_text().strip()
    except OSError:
        machine_id = ""
    return HostId(machine_id or uuid.uuid4().hex)
