"""Tells the stages of a replica where their siblings are.

Pushed before a replica becomes routable, and again whenever a stage is reached anew or one of them
changed. Those on other workers are as the last COMMIT named them, and stand in each stage's record.
Decided here: who is told what, and that a push that failed is made again as long as the stage
lives. Invariant: a stage is told of its own replica's shards alone, those of its own set.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

import structlog

from stagekeeper.agent.control_link import LinkError
from stagekeeper.agent.stage_process import StageProcess
from stagekeeper.core.ids import InstanceId, OperationId
from stagekeeper.core.states import ShardState
from stagekeeper.host.tasks import TaskOwner
from stagekeeper.v1 import types_pb2

_log = structlog.get_logger(__name__)

_PUSH_TIMEOUT_S: Final = 5.0
_RETRY_S: Final = 1.0

_Told = tuple[tuple[int, str, int, str, str], ...]


class Siblings:
    """The pushes of one agent.

    Args:
        shards_of: the stages that an operation started and that are still held.
    """

    def __init__(
        self,
        shards_of: Callable[[OperationId], Iterable[StageProcess]],
        owner: TaskOwner,
    ) -> None:
        self._shards_of = shards_of
        self._owner = owner
        self._told: dict[InstanceId, _Told] = {}
        self._retrying: set[InstanceId] = set()

    async def push(self, operation_id: OperationId) -> list[StageProcess]:
        """Tell every stage of an operation of all; return those that could not be told.

        Equal news are not told twice.
        """
        stages = list(self._shards_of(operation_id))
        known: dict[tuple[int, int], tuple[int, str, int, str, str]] = {
            (peer.stage_id, peer.shard_index): (
                peer.stage_id,
                peer.stage_name,
                peer.shard_index,
                peer.instance_id,
                peer.url,
            )
            for stage in stages
            for peer in stage.record.peers
        }
        for stage in stages:
            if stage.shard.addresses:
                known[stage.shard.stage_id, stage.shard.shard_index] = _address_of(stage)
        news: _Told = tuple(known[place] for place in sorted(known))
        await asyncio.gather(*(self._tell(stage, news) for stage in stages))
        return [stage for stage in stages if self._told.get(stage.instance_id) != news]

    def reached_anew(self, stage: StageProcess) -> None:
        """Tell a stage again: its process was reached for the first time by this agent."""
        self._told.pop(stage.instance_id, None)
        if stage.shard.committed and not self._owner.is_stopping:
            _ = self._owner.start("push", self.push(stage.shard.operation_id))

    def forget(self, stage: StageProcess) -> None:
        self._told.pop(stage.instance_id, None)

    async def _tell(self, stage: StageProcess, news: _Told) -> None:
        if (
            stage.link is None
            or stage.state is not ShardState.READY
            or self._told.get(stage.instance_id) == news
        ):
            return
        peers = [
            types_pb2.Peer(
                stage_id=stage_id,
                stage_name=name,
                shard_index=shard_index,
                instance_id=instance_id,
                url=url,
            )
            for stage_id, name, shard_index, instance_id, url in news
        ]
        try:
            await stage.link.set_peers(peers, _PUSH_TIMEOUT_S)
        except LinkError as error:
            _log.warning("a stage was not told its siblings", stage=str(stage), error=str(error))
            self._try_again(stage)
        else:
            self._told[stage.instance_id] = news

    def _try_again(self, stage: StageProcess) -> None:
        if stage.instance_id in self._retrying or self._owner.is_stopping:
            return
        self._retrying.add(stage.instance_id)

        async def later() -> None:
            try:
                await asyncio.sleep(_RETRY_S)
            finally:
                self._retrying.discard(stage.instance_id)
            if stage.holds_processes and not stage.is_asked:
                await self.push(stage.shard.operation_id)

        _ = self._owner.start("push again", later())


def _address_of(stage: StageProcess) -> tuple[int, str, int, str, str]:
    shard = stage.shard
    url = next((it.url for it in shard.addresses if it.name == "stage"), "")
    return shard.stage_id, shard.stage_name, shard.shard_index, shard.instance_id, url
