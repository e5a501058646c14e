"""The agent's line to one stage process: `StageControlService` on a unix socket.

The process serves the socket a moment after it was let go; until then calls wait for it. Nothing
here outlives the agent, and nothing in the process depends on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stagekeeper.core.ids import InstanceId
from stagekeeper.v1 import stage_control_service_pb2 as control_pb2
from stagekeeper.v1 import stage_control_service_pb2_grpc as control_grpc
from stagekeeper.v1 import types_pb2
from stagekeeper.wire.error_details import is_own_cancellation
from stagekeeper.wire.transport import MAX_MESSAGE_BYTES

_OPTIONS: Final = (
    ("grpc.use_local_subchannel_pool", 1),
    # A process that just started serves its socket within a second; one attempt is cheap.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 300),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # No keepalive: a pidfd tells of the process's end, and a stage that is frozen is not dead.
)


class LinkError(Exception):
    """A call to a stage process failed; the message says how."""


class ControlLink:
    """Made for one instance; a process that is another one refuses what is said over it."""

    def __init__(self, socket: Path, instance_id: InstanceId) -> None:
        self._socket = socket
        self._instance_id = instance_id
        self._channel = grpc.aio.insecure_channel(f"unix:{socket}", options=_OPTIONS)
        self._stub = control_grpc.StageControlServiceStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    @property
    def is_served(self) -> bool:
        """Whether the process serves its socket, as far as a name on the disk tells."""
        return self._socket.exists()

    async def states(self) -> AsyncIterator[control_pb2.WatchStageResponse]:
        """Yield the stage's state, at once and at each change. The open stream is the adoption.

        Raises:
            LinkError: the stream ended, whoever ended it.
        """
        request = control_pb2.WatchStageRequest(instance_id=self._instance_id)
        with _link_errors():
            async for message in self._stub.WatchStage(request, wait_for_ready=True):
                yield message
        raise LinkError("the stage ended the stream")

    async def set_peers(self, peers: Sequence[types_pb2.Peer], timeout_s: float) -> None:
        """Replace the addresses of the stage's siblings.

        Raises:
            LinkError: the stage did not take them.
        """
        request = control_pb2.SetPeersRequest(instance_id=self._instance_id, peers=peers)
        with _link_errors():
            await self._stub.SetPeers(request, timeout=timeout_s)

    async def answers(self, timeout_s: float) -> None:
        """Return when the process has answered anything at all.

        Raises:
            LinkError: it did not in time, or the line is broken.
        """
        with _link_errors():
            await self._health.Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=True
            )

    async def end(self, budget_s: float, reason: str, timeout_s: float) -> None:
        """Ask the process to end.

        Raises:
            LinkError: it did not answer.
        """
        request = control_pb2.EndStageRequest(
            instance_id=self._instance_id, budget_s=budget_s, reason=reason
        )
        with _link_errors():
            await self._stub.EndStage(request, timeout=timeout_s)

    async def close(self) -> None:
        await self._channel.close()


@contextmanager
def _link_errors() -> Iterator[None]:
    """Turn what gRPC raises into `LinkError`, and let only our own cancellation through."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise LinkError(f"{error.code().name}: {error.details()}") from error
    except asyncio.CancelledError as cancelled:
        if is_own_cancellation():
            raise
        raise LinkError("the call was ended from the other side") from cancelled
