"""COMMIT: a replica's shards on this worker told of all the others, and put into service.

Decided here: what a commit needs and what a repeat changes: where the shards on other workers are.
Not decided here: whether the replica is whole (the supervisor), how a stage is told (`siblings`).

Invariant: no shard is in service before every stage here knows where its siblings are; what a
commit says of other workers is on disk before anybody is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from stagekeeper.agent.operation import Operation
from stagekeeper.agent.stage_process import StageProcess
from stagekeeper.agent.stages import Stages
from stagekeeper.core.ids import OperationId
from stagekeeper.core.model import OperationRecord, Peer
from stagekeeper.core.states import OperationState, ShardState
from stagekeeper.runtime import crash_points

_log = structlog.get_logger(__name__)

_PUSHES: Final = 3
_PUSH_AGAIN_S: Final = 1.0


class Commitment:
    """The commits of one agent.

    Args:
        undo: rolls an operation back, for a reason.
    """

    def __init__(self, stages: Stages, undo: Callable[[Operation, str], Awaitable[None]]) -> None:
        self._stages = stages
        self._undo = undo

    async def commit(self, operation: Operation, peers: tuple[Peer, ...]) -> None:
        """Commit what is STARTED; tell the stages of what is committed where their siblings are."""
        async with operation.committing:
            if operation.state not in (OperationState.STARTED, OperationState.COMMITTED):
                return
            operation.peers_are(peers)
            crash_points.reached("peers-written")
            self._peers_are(operation.operation_id, peers)
            if operation.state is OperationState.COMMITTED:
                await self._stages.siblings.push(operation.operation_id)
                return
            await self._tell_siblings(operation)
            # Asked again: a stage may have died meanwhile, and then all is being rolled back.
            if operation.state is OperationState.STARTED:
                operation.move(OperationState.COMMITTED)
                crash_points.reached("commit-written")
                self.mark(operation)

    async def repeat(self, operation_id: OperationId, peers: tuple[Peer, ...]) -> None:
        """Take in a COMMIT of an operation of which only the stages are left."""
        self._peers_are(operation_id, peers)
        await self._stages.siblings.push(operation_id)

    def mark(self, operation: Operation) -> None:
        """Let the shards of a committed operation say so; its file has said so already."""
        if operation.lease is not None:
            operation.lease.cancel()
            operation.lease = None
        for stage in self._stages.of_operation(operation.operation_id):
            stage.peers_are(operation.peers)
            stage.update(committed=True)
            stage.persist()
            crash_points.reached("commit-half-written")
        crash_points.reached("committed")
        _log.info("committed", operation=str(operation))

    def record_of(self, operation_id: OperationId) -> OperationRecord | None:
        """Describe a committed operation of which only the stages are left; None for others."""
        committed = [it.shard for it in self._stages.of_operation(operation_id)]
        committed = [shard for shard in committed if shard.committed]
        if not committed:
            return None
        first = committed[0]
        return OperationRecord(
            operation_id,
            first.deployment,
            first.replica_index,
            first.generation,
            OperationState.COMMITTED,
            up_stage_ids=tuple(
                [shard.stage_id for shard in committed if shard.state is ShardState.READY]
            ),
        )

    def _peers_are(self, operation_id: OperationId, peers: tuple[Peer, ...]) -> None:
        """Let each stage's record name the peers; of committed ones at once on disk."""
        for stage in self._stages.of_operation(operation_id):
            if stage.record.peers != peers:
                stage.peers_are(peers)
                if stage.shard.committed:
                    stage.persist()

    async def _tell_siblings(self, operation: Operation) -> None:
        """Tell every stage of the others, or undo the operation: a deaf one is no replica's.

        One that an earlier life of the agent started, and that has not answered this one yet, is
        waited for: whoever commits has decided that all are up.
        """
        untold: list[StageProcess] = []
        for attempt in range(_PUSHES):
            if attempt:
                await asyncio.sleep(_PUSH_AGAIN_S)
            for stage in self._stages.of_operation(operation.operation_id):
                while stage.state is ShardState.ADOPTING:
                    await stage.changed()
            if operation.state is not OperationState.STARTED:
                return
            untold = await self._stages.siblings.push(operation.operation_id)
            if not untold:
                crash_points.reached("peers-pushed")
                return
        await self._undo(operation, f"{untold[0]} could not be told where its siblings are")
