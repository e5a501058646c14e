"""What becomes of a failure of a rank: its callers hear of it, then its owner, once.

Decided here: what ends a rank, and what is news to the owner. Not decided here: how a failure is
found, and what the owner does about it (scope). Invariant: of one incarnation the owner is told of
at most one end and one message that was not delivered, of each stall once, and of no end that was
asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from stagekeeper.actor.connection.link import PendingCall
from stagekeeper.actor.failing import failure_of
from stagekeeper.actor.failure import FailureKind, MeshFailure
from stagekeeper.actor.identity import ActorIdentity
from stagekeeper.actor.owning.known_ends import KnownEnds
from stagekeeper.actor.owning.ranks import ActorRank

_log = logging.getLogger("stagekeeper.actor")

_NEVER_ASKED: Final = (
    FailureKind.BROADCAST_RAISED,
    FailureKind.UNHANDLED,
    FailureKind.SUPERVISE_RAISED,
)
"""What who ends a rank does not ask for: errors that nobody else is told of."""


@dataclass(slots=True)
class _Told:
    """What the owner knows of one incarnation of a rank.

    Attributes:
        end: that it has ended, or will.
        stalls: by the ids of failures, each time that it made no progress.
        undelivered: that a message found it failed.
    """

    incarnation: int
    end: bool = False
    stalls: set[str] = field(default_factory=set)
    undelivered: bool = False


class RankFailures:
    """Those of one mesh. For the loop's thread only.

    Args:
        identity_of: says who one start (an actor id) of a rank is.
        tell: gives a failure to the owner, whatever it knows.
    """

    def __init__(
        self,
        identity_of: Callable[[ActorRank, str], ActorIdentity],
        tell: Callable[[MeshFailure], None],
    ) -> None:
        self.known_ends = KnownEnds()
        """How its actors ended."""
        self.tell = tell
        self._identity_of = identity_of
        self._told: dict[int, _Told] = {}
        self._is_end_expected = False

    def expect_end(self) -> None:
        """From now on the end of a rank is asked for, and no failure."""
        self._is_end_expected = True

    def expects_end(self) -> bool:
        """Return whether the mesh was asked to end."""
        return self._is_end_expected

    def owner_knows(self, rank: ActorRank) -> None:
        """Take the end of this incarnation for known to the owner, or wanted by it."""
        self._told_of(rank).end = True

    def settle(
        self,
        rank: ActorRank,
        failure: MeshFailure,
        calls: Sequence[PendingCall] = (),
    ) -> None:
        """Settle a rank's failure: callers first, then the owner, once.

        Args:
            calls: end with it, besides those that wait for the rank.
        """
        told = self._told_of(rank)
        if failure.kind is FailureKind.UNDELIVERABLE:
            if not (told.undelivered or self._is_end_expected):
                told.undelivered = True
                self.tell(failure)
        elif failure.kind is FailureKind.CLEANUP_RAISED:
            self.tell(failure)
        elif failure.kind is FailureKind.STALLED:  # no end: the rank may go on, or end later
            if not (failure.id in told.stalls or told.end or self._is_end_expected):
                told.stalls.add(failure.id)
                self.tell(failure)
        elif rank.failure is not None:
            rank.end_calls(calls)
        else:
            self.end(rank, failure, calls)

    def end(self, rank: ActorRank, failure: MeshFailure, calls: Sequence[PendingCall] = ()) -> None:
        """End a rank with its first failure, of whatever kind."""
        rank.fail(failure, calls)
        self.known_ends.add(rank.actor_id, failure)
        told = self._told_of(rank)
        is_known = told.end or self._is_end_expected
        told.end = True
        if not is_known or failure.kind in _NEVER_ASKED:
            self.tell(failure)
        for endpoint, sender in rank.take_late_casts():
            self.undelivered(rank, endpoint, sender)

    def undelivered(self, rank: ActorRank, endpoint: str, sender: str) -> None:
        """A message without an answer was for a rank that has failed."""
        told = self._told_of(rank)
        if told.undelivered or self._is_end_expected:
            level = logging.DEBUG if told.undelivered else logging.WARNING  # not for each of many
            told.undelivered = True
            _log.log(level, "%s from %s was for %s, which has failed", endpoint, sender, rank.name)
            return
        failure = failure_of(
            self._identity_of(rank, rank.actor_id or f"{rank.name}-{rank.incarnation}"),
            FailureKind.UNDELIVERABLE,
            f"{endpoint} from {sender} was for {rank.name}, which has failed",
            endpoint=endpoint,
            sender=sender,
        )
        if rank.failure is not None:
            failure = replace(failure, causes=(*rank.failure.causes, rank.failure))
        self.settle(rank, failure)

    def _told_of(self, rank: ActorRank) -> _Told:
        told = self._told.get(rank.rank)
        if told is None or told.incarnation != rank.incarnation:
            told = self._told[rank.rank] = _Told(rank.incarnation)
        return told
