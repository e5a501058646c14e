"""ActorService of another process, asked over the channel of the connection to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from stagekeeper.v1 import actor_service_pb2_grpc
from stagekeeper.wire.error_details import is_own_cancellation


class OtherEnd:
    """ActorService of the other process, over the connection and as long as that."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        stub = actor_service_pb2_grpc.ActorServiceStub(channel)
        self.SpawnActor = _call_over(stub.SpawnActor)
        self.StopActor = _call_over(stub.StopActor)
        self.GetMesh = _call_over(stub.GetMesh)
        self.RespawnProcs = _call_over(stub.RespawnProcs)


def _call_over(call: Any) -> Callable[..., Awaitable[Any]]:
    """Have a call raise ConnectionError when the connection ends under it.

    gRPC cancels what is under way on a channel that is closed, which would look as if the caller
    itself were to end.
    """

    async def ask(request: Any, *, timeout: float | None = None) -> Any:
        try:
            return await call(request, timeout=timeout)
        except asyncio.CancelledError:
            if is_own_cancellation():
                raise
            raise ConnectionError("the connection broke") from None
        except grpc.aio.UsageError as error:  # it was closed before
            raise ConnectionError(str(error)) from None

    return ask
