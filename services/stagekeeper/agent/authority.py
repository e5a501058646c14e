"""Whose commands this agent obeys: those of the one reign that it is registered with.

A registration gives authority, the next one moves it; a lost connection takes nothing away, since
the reign may still be there. SUPERSEDED ends it for good. Invariant: the epoch of a reign is on
disk before it is obeyed.
"""

from __future__ import annotations

from stagekeeper.agent.identity import AgentIdentity
from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.ids import ClusterName, Epoch
from stagekeeper.core.names import shown


class Authority:
    """What every command is checked against."""

    def __init__(self, cluster: ClusterName, identity: AgentIdentity) -> None:
        self._cluster = cluster
        self._identity = identity
        self._reign: Epoch | None = None
        self._ended_by = ""
        self.is_draining = False
        """The agent ends: it starts nothing new."""

    @property
    def reign(self) -> Epoch | None:
        """The reign that is obeyed; None before the first registration of this life."""
        return self._reign

    def obey(self, epoch: Epoch) -> None:
        """Obey a reign from now on; it is remembered on disk first."""
        self._identity.note_epoch(epoch)
        self._reign = epoch

    def end(self, why: str) -> None:
        """Obey nobody any more. No stage is stopped for that."""
        self._ended_by = why
        self._reign = None

    def check_cluster(self, cluster: str) -> None:
        """Refuse what is meant for another cluster.

        Raises:
            Refused: WRONG_CLUSTER.
        """
        if cluster != self._cluster:
            raise Refused(
                Reason.WRONG_CLUSTER,
                f"this agent belongs to cluster {self._cluster!r}, not {shown(cluster)}",
            )

    def check(self, cluster: str, epoch: Epoch, incarnation: int) -> None:
        """Refuse a command that is not for this agent now.

        Raises:
            Refused: WRONG_CLUSTER, STALE_INCARNATION or STALE_EPOCH.
        """
        self.check_cluster(cluster)
        mine = self._identity.incarnation
        if self._ended_by or incarnation != mine:
            raise Refused(
                Reason.STALE_INCARNATION,
                self._ended_by
                or f"this is incarnation {mine} of worker {self._identity.worker_id}, and the "
                f"command is for {incarnation}",
                metadata={"incarnation": str(mine)},
            )
        if epoch != self._reign:
            obeyed = f"obeys reign {self._reign}" if self._reign else "is not registered yet"
            raise Refused(Reason.STALE_EPOCH, f"this agent {obeyed}, and the command is of {epoch}")
