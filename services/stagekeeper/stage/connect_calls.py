"""Calls to a stage that come over a connection: each to the dispatcher, as those of `Call` do.

Decided here: nothing but how one becomes the other. Not decided here: who may enter (dispatch).
Invariant: a call ends with an answer or an error, and is cancelled when its connection is gone.
"""

from __future__ import annotations

import asyncio
import logging

from stagekeeper.actor.hosting.message import Message
from stagekeeper.actor.hosting.sessions import Session
from stagekeeper.core.errors import Refused
from stagekeeper.stage.dispatch import Dispatcher, EndpointRaised
from stagekeeper.v1 import stage_service_pb2 as pb
from stagekeeper.wire.error_details import is_own_cancellation

_log = logging.getLogger(__name__)


class StageCalls:
    """What is behind the connections to a stage. For the loop's thread only.

    Args:
        instance_id: of the stage's process.
        boot_id: of its host.
    """

    token = ""  # whoever reaches a stage may call it, as with Call

    def __init__(self, dispatcher: Dispatcher, instance_id: str, boot_id: str) -> None:
        self.instance_id = instance_id
        self.boot_id = boot_id
        self._dispatcher = dispatcher
        self._tasks: dict[Message, asyncio.Task[None]] = {}

    @property
    def is_closing(self) -> bool:
        """The dispatcher says by itself, call by call, that the stage is stopping."""
        return False

    @property
    def session_count(self) -> int:
        """None is kept beyond its connection."""
        return 0

    def session(self, hello: pb.Hello, own_boot_id: str) -> Session:
        """Make a session that owns nothing."""
        return Session(
            hello.session_id, lease_s=hello.lease_s, is_same_host=True, on_over=lambda _: None
        )

    def others_count(self, session_id: str) -> int:
        """A stage hosts no actors."""
        return 0

    def rank_failed(self, news: pb.RankFailed) -> None:
        """A stage owns no mesh."""

    def take(self, target_id: str, message: Message) -> None:
        """Run a call."""
        task = asyncio.create_task(self._run(target_id, message), name=f"call {message.endpoint}")
        self._tasks[message] = task
        task.add_done_callback(lambda _: self._tasks.pop(message, None))

    def cancel(self, target_id: str, message: Message) -> None:
        """Nobody waits for it any more."""
        task = self._tasks.get(message)
        if task is not None:
            task.cancel()

    def over(self, target_id: str, message: Message) -> None:
        """It was answered; its task ends by itself."""

    def no_room(self, call: pb.CallFrame, why: str) -> None:
        """Nobody owns a stage who could hear of it: its log does."""
        _log.warning("a message to %s was not run: %s", call.endpoint, why)

    async def _run(self, target_id: str, message: Message) -> None:
        try:
            if message.is_stream:
                await self._stream(target_id, message)
            else:
                answer = await self._dispatcher.call(
                    target_id, message.endpoint, message.payload, message.remaining_s
                )
                message.answer(answer)
        except Refused as refused:
            if message.is_cast:
                _log.warning("a message to %s was not run: %s", message.endpoint, refused.message)
            message.refuse(_error_of(refused))
        except asyncio.CancelledError:
            message.is_over = True
            if is_own_cancellation():
                raise

    async def _stream(self, target_id: str, message: Message) -> None:
        await self._dispatcher.stream(
            target_id, message.endpoint, message.payload, message.remaining_s, message.send
        )
        message.answer(None)


def _error_of(refused: Refused) -> pb.CallError:
    error = pb.CallError(
        reason=refused.reason.value, message=refused.message, metadata=refused.metadata
    )
    if isinstance(refused, EndpointRaised):
        error.exception.CopyFrom(refused.exception)
    return error
