"""What a session holds of one connection, and how a session can end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from stagekeeper.agent.transport import SupervisorLink
from stagekeeper.core.ids import NO_EPOCH, Epoch, FailureId, OperationId
from stagekeeper.core.model import Failure


class SessionLost(Exception):
    """The connection is no good any more; `retry_after_s` is what is waited at least."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class AuthorityEnded(Exception):
    """Another incarnation of this worker took over."""


class SupervisorNotFound(Exception):
    """No supervisor was found in the time given."""


class Settlements(Protocol):
    """What becomes of what a supervisor has settled; also the failures that none has."""

    def settle(
        self, failure_ids: Iterable[FailureId], operation_ids: Iterable[OperationId]
    ) -> None:
        """Forget these; unknown ones are no error."""
        ...

    def unsettled_failures(self) -> tuple[Failure, ...]:
        """Return the failures that no supervisor has settled, the oldest first."""
        ...


@dataclass(slots=True, eq=False)
class Connection:
    """Channel, stubs and registration, which live and die together.

    Attributes:
        generation: ascending within a session; tells a late failure from a new one.
        registered_revision: of the slice as it was last put; 0 when it is not registered.
        lost: why it was dropped; empty while it is used. The words alone: the exception would hold
            on to the frames of the failed call, they to this, and the channel would go on
            reconnecting until the garbage collector comes by.
        reported: failures that were sent over it.
    """

    generation: int
    address: str
    link: SupervisorLink
    epoch: Epoch = NO_EPOCH
    registered_revision: int = 0
    digest: bytes = b""
    next_heartbeat_s: float = 0.0
    beats_until_look: int = 0
    lost: str = ""
    reported: set[FailureId] = field(default_factory=set)

    @property
    def is_registered(self) -> bool:
        return self.registered_revision > 0
