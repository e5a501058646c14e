"""`StageService` as gRPC serves it: convert, dispatch, convert.

Decided here: nothing. Invariant: no interceptor and no task of our own stands between the wire and
the dispatcher.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from stagekeeper.actor.hosting.connect import Connections
from stagekeeper.runtime.errors import answers_refusals_up_to
from stagekeeper.stage.dispatch import Dispatcher
from stagekeeper.v1 import stage_service_pb2 as pb
from stagekeeper.v1.stage_service_pb2_grpc import StageServiceServicer
from stagekeeper.v1.types_pb2 import Payload

SERVICE = pb.DESCRIPTOR.services_by_name["StageService"].full_name

Context = grpc.aio.ServicerContext[Any, Any]

# What a payload may hold is the codec's to judge: to measure a large message is to copy it.
_answers_refusals = answers_refusals_up_to(None)


class StageService(StageServiceServicer):
    """Serves one stage that has come up."""

    def __init__(self, dispatcher: Dispatcher, connections: Connections) -> None:
        self._dispatcher = dispatcher
        self._connections = connections

    @_answers_refusals
    async def Call(self, request: pb.CallRequest, context: Context) -> pb.CallResponse:
        answer = await self._dispatcher.call(
            request.instance_id, request.endpoint, request.payload, context.time_remaining()
        )
        return pb.CallResponse(payload=answer)

    # A coroutine that writes, and not an async generator: when the caller goes, gRPC cancels the
    # coroutine at once, whereas a generator would be left to the garbage collector.
    @_answers_refusals
    async def CallStream(  # type: ignore[override]
        self, request: pb.CallStreamRequest, context: Context
    ) -> None:
        async def send(payload: Payload) -> None:
            await context.write(pb.CallStreamResponse(payload=payload))

        await self._dispatcher.stream(
            request.instance_id, request.endpoint, request.payload, context.time_remaining(), send
        )

    async def Connect(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.ConnectRequest], context: Context
    ) -> None:
        await self._connections.serve(context)
