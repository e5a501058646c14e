"""The ledger that all agents of a host share: each writes its claims, all read those of others.

To check and to book is one thing: it is done in a *turn*, which one agent of the host has at a
time, by a record lock on a file beside the claims. A turn lasts as long as it takes to read some
small files and to write one; nothing is awaited in it. Who does not get it at once has changed
nothing, and tries again (`until_turn`). Decided here: whose turn it is, and that a claim is in the
file before its turn is over. Not decided here: what is believed of others (`host_claims`), and what
is admitted (`ledger`).

Invariants: nobody books outside a turn; the file of an agent that died stays until its next life
has taken over what it left.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

import structlog

from stagekeeper.agent.cards.host_claims import (
    ClaimsFile,
    ClaimsFolder,
    OtherClaims,
    StageClaim,
    claims_path,
    pid_namespace,
    write_claims,
)
from stagekeeper.agent.host_lock import LockHeld, TurnLock
from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.ids import ClusterName, WorkerId
from stagekeeper.host.process import boot_id, identity_of

_log = structlog.get_logger(__name__)

LOCK_FILE: Final = "ledger.lock"

TURN_WAIT_S: Final = 2.0
"""A turn takes less than a millisecond: whoever waits longer waits for somebody who is stuck."""

_AGAIN_S: Final = 0.004

Result = TypeVar("Result")


class LedgerBusy(Refused):
    """Another agent of this host has its turn, or somebody holds the lock; nothing was changed."""

    def __init__(self, why: str) -> None:
        super().__init__(
            Reason.ADMISSION_REFUSED,
            f"the ledger of this host's cards cannot be had, so nothing is reserved: {why}",
            retry_after_s=1.0,
        )


async def until_turn(act: Callable[[], Result], within_s: float = TURN_WAIT_S) -> Result:
    """Do what needs a turn as soon as it can be had; what was refused for another reason is not.

    Raises:
        LedgerBusy: it could not be had in time.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while True:
        try:
            return act()
        except LedgerBusy:
            if loop.time() >= deadline:
                raise
        # Two that wait do not march in step.
        await asyncio.sleep(_AGAIN_S * (0.5 + random.random()))


class HostLedger:
    """One agent's part in the ledger of its host."""

    def __init__(self, lock_dir: Path, cluster: ClusterName, worker_id: WorkerId) -> None:
        self._cluster = cluster
        self._worker_id = worker_id
        self._path = claims_path(lock_dir, worker_id)
        self._lock = TurnLock(lock_dir / LOCK_FILE, "the host's ledger")
        self._claims = ClaimsFolder(lock_dir, worker_id)
        self._boot_id = boot_id()
        self._pid_namespace = pid_namespace()
        self._unwritten = ""

    @property
    def cluster(self) -> ClusterName:
        return self._cluster

    @property
    def worker_id(self) -> WorkerId:
        return self._worker_id

    @property
    def notes(self) -> tuple[str, ...]:
        """What the operator should know: files that are left out, and an own one that is stale."""
        own = () if not self._unwritten else (self._unwritten,)
        return (*own, *self._claims.problems)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Have the turn, at once or not at all.

        Raises:
            LedgerBusy: naming who has it.
        """
        try:
            self._lock.take()
        except LockHeld as held:
            raise LedgerBusy(str(held)) from held
        except OSError as error:
            raise LedgerBusy(f"{self._lock.path}: {error.strerror or error}") from error
        try:
            yield
        finally:
            self._lock.free()

    def others(self) -> list[OtherClaims]:
        """Return what the other agents of this host claim now.

        Raises:
            LedgerBusy: it cannot be read.
        """
        try:
            return self._claims.look()
        except OSError as error:
            raise LedgerBusy(f"{self._path.parent}: {error.strerror or error}") from error

    def left_behind(self) -> tuple[StageClaim, ...]:
        """Return what this agent's earlier life claimed, as far as it still means anything."""
        return self._claims.of_earlier_life()

    def still_runs(self, claim: StageClaim) -> bool:
        """Return whether anything lives of what an earlier life claimed."""
        return self._claims.still_runs(claim)

    def write(self, claims: Sequence[StageClaim]) -> None:
        """Put all that this agent claims in place of what it claimed.

        Raises:
            LedgerBusy: it cannot be written; the others go on reading what was there.
        """
        agent = identity_of(os.getpid())
        file = ClaimsFile(
            cluster=self._cluster,
            worker_id=self._worker_id,
            boot_id=self._boot_id,
            pid_namespace=self._pid_namespace,
            agent_pid=os.getpid(),
            agent_start_ticks=agent.start_ticks if agent is not None else 0,
            claims=tuple(claims),
        )
        try:
            write_claims(self._path, file)
        except OSError as error:
            why = f"{self._path} cannot be written ({error.strerror or error})"
            if error.errno in (errno.EPERM, errno.EACCES):
                why += ": if another user has put it there, have root remove it"
            if not self._unwritten:
                _log.error("the claims of this agent are not told to others", why=why)
            self._unwritten = f"other agents of this host do not see what is free here: {why}"
            raise LedgerBusy(why) from error
        self._unwritten = ""

    def close(self) -> None:
        """Let go of the lock's file; the claims stay, as long as their processes do."""
        self._lock.close()
