"""The registry: events in, commands out, and the reads that answer from memory.

Decided here: nothing but the order of things inside one event (a handler changes the books, then
what it touched is derived again, then commands go out: reply, writes, work, changes). The rules are
in the modules that it calls.

Invariant: an event that is refused leaves no trace.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from stagekeeper.core.commands import AgentTarget, Command, Desired, PublishChange
from stagekeeper.core.events import Event
from stagekeeper.core.ids import (
    ChangeRevision,
    ClusterName,
    DeploymentName,
    Epoch,
    Generation,
    WorkerId,
)
from stagekeeper.core.model import DeploymentView, Failure
from stagekeeper.core.operations import CreationView
from stagekeeper.core.settings import RegistrySettings
from stagekeeper.core.states import HoldReason, Mode
from stagekeeper.core.workers import WorkerView

__all__ = ["Registry", "RegistrySettings"]


class Registry:
    """All that one reign knows, behind one door.

    Args:
        cluster: compared by the servers; carried here for messages.
        epoch: this reign; above everything that store and endpoint showed.
        settings: see `RegistrySettings`.
        desired: what the store holds; deployments being deleted included.
        tombstones: names that were deleted, each with the highest generation that was to stop.
        roster: workers that were there before; they are waited for, never counted as alive.
        failures: recorded ones, oldest first.
        durable: whether what is wanted survives this process.
        now: monotonic seconds.
        is_new: nothing was ever kept here, so there is nobody to wait for. None: judged by
            whether anything was handed in. Say False where the memory is gone (no store): the
            registry then holds still for the whole recovery window.
    """

    def __init__(
        self,
        *,
        cluster: ClusterName,
        epoch: Epoch,
        settings: RegistrySettings,
        desired: Iterable[Desired] = (),
        tombstones: Mapping[DeploymentName, Generation] | None = None,
        roster: Collection[WorkerId] = (),
        failures: Iterable[Failure] = (),
        durable: bool,
        now: float,
        is_new: bool | None = None,
    ) -> None:
        raise NotImplementedError

    def apply(self, event: Event, *, now: float) -> list[Command]:
        """Take in one event and say what follows from it.

        Returns:
            Commands in the order in which to carry them out: the reply (at most one, first),
            writes, work for agents, changes to publish.

        Raises:
            Refused: nothing has changed, and nothing is to be done. In HOLD(RECOVERING) a
                DeploymentRequested that is right in itself is refused with SUPERVISOR_RECOVERING:
                hand it in again once `is_complete`, within the caller's deadline.
        """
        raise NotImplementedError

    # Reads: from memory, without side effects.

    @property
    def epoch(self) -> Epoch:
        raise NotImplementedError

    @property
    def mode(self) -> Mode:
        raise NotImplementedError

    @property
    def hold_reason(self) -> HoldReason | None:
        """Why the registry holds still; None in NORMAL."""
        raise NotImplementedError

    @property
    def is_complete(self) -> bool:
        """False while workers may still be missing from every list."""
        raise NotImplementedError

    @property
    def revision(self) -> ChangeRevision:
        raise NotImplementedError

    @property
    def registration_count(self) -> int:
        """Registrations that this reign accepted."""
        raise NotImplementedError

    def deployment(self, name: DeploymentName) -> DeploymentView | None:
        """Return one deployment; None when nothing of that name is wanted or reported."""
        raise NotImplementedError

    def deployments(self) -> list[DeploymentView]:
        """Return all deployments in the order of their names."""
        raise NotImplementedError

    def workers(self, now: float) -> list[WorkerView]:
        """Return all workers in the order of their ids, silent ones included."""
        raise NotImplementedError

    def failures(self, deployment: DeploymentName | None = None, limit: int = 100) -> list[Failure]:
        """Return recorded failures, newest first."""
        raise NotImplementedError

    def changes_since(self, revision: ChangeRevision) -> list[PublishChange]:
        """Return what changed after `revision`, in order, the last change of each name only.

        Raises:
            Refused: REVISION_GONE: another reign's, or too old: list, then watch again.
        """
        raise NotImplementedError

    def creation_of(self, name: DeploymentName) -> CreationView:
        """Return how far a creation is; of an unknown name nothing starts and nothing failed."""
        raise NotImplementedError

    def target_of(self, worker_id: WorkerId) -> AgentTarget | None:
        """Return which life of a worker commands go to now; None when it has not registered."""
        raise NotImplementedError
