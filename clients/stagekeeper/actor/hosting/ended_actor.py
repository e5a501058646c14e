"""What is kept of an actor that has ended: what answers for it need, and nothing that it held.

Invariant: the actor itself is kept no longer than code of it runs.
"""

from __future__ import annotations

from stagekeeper.actor.hosting.answers import stopped_error
from stagekeeper.actor.hosting.hosted_actor import HostedActor
from stagekeeper.actor.hosting.message import Message
from stagekeeper.actor.hosting.owner_news import refuse_as_failed


class EndedActor:
    """Answers in an actor's stead. For the loop's thread only."""

    __slots__ = ("_identity", "_owner", "_stuck", "failure", "start_failure")

    def __init__(self, actor: HostedActor) -> None:
        self._identity = actor.identity
        self._owner = actor.owner
        self.failure = actor.failure
        """What ended it; None when it was stopped."""
        self._stuck: HostedActor | None = actor
        self.start_failure = None if actor.has_served else actor.failure
        """What its start was answered with."""

    def take(self, message: Message) -> None:
        """Refuse a message that came too late."""
        if self.failure is not None:
            refuse_as_failed(self._owner, self._identity, self.failure, message)
        else:
            message.refuse(stopped_error(self._identity.name, message.endpoint))

    def look(self) -> bool:
        """Say whether code of it still runs, and let go of it if not."""
        if self._stuck is not None and not self._stuck.is_running:
            self._stuck = None
        return self._stuck is not None

    async def is_stuck(self) -> bool:
        """As `look`, after a moment in which that code may end."""
        if self._stuck is not None:
            await self._stuck.is_stuck()
        return self.look()
