"""A small StageService in this process: answers by functions, and refuses as a stage would."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc

from stagekeeper.v1 import stage_service_pb2 as pb
from stagekeeper.v1.stage_service_pb2_grpc import (
    StageServiceServicer,
    add_StageServiceServicer_to_server,
)
from stagekeeper.wire.error_details import pack
from stagekeeper.wire.payload import content_type_of, decode_arguments, encode
from stagekeeper.wire.transport import SERVER_OPTIONS

Endpoint = Callable[..., Any]


class StageServer(StageServiceServicer):
    """Serves `endpoints` under one instance id; attributes may be changed while it serves."""

    def __init__(self, instance_id: str, endpoints: Mapping[str, Endpoint] | None = None) -> None:
        self.instance_id = instance_id
        self.endpoints = dict(endpoints or {})
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.ran: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self.peers: set[str] = set()
        self.url = ""
        self._server: grpc.aio.Server | None = None

    async def start(self, address: str = "127.0.0.1:0") -> StageServer:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        add_StageServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(address)
        await self._server.start()
        self.url = f"127.0.0.1:{port}"
        return self

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def _admit(self, request, context) -> Endpoint:
        self.asked[request.endpoint] += 1
        self.peers.add(context.peer())
        refusal = self.refusal
        if request.instance_id and request.instance_id != self.instance_id:
            refusal = (grpc.StatusCode.ABORTED, "STALE_ROUTE")
        elif request.endpoint not in self.endpoints:
            refusal = (grpc.StatusCode.NOT_FOUND, "ENDPOINT_UNKNOWN")
        if refusal is not None:
            code, reason = refusal
            message = f"{self.instance_id} says {reason}"
            await context.abort(code, message, trailing_metadata=pack(code, message, reason))
        self.ran[request.endpoint] += 1
        return self.endpoints[request.endpoint]

    async def Call(self, request, context):
        endpoint = await self._admit(request, context)
        args, kwargs = decode_arguments(request.payload)
        try:
            answer = await endpoint(*args, **kwargs)
        except ZeroDivisionError as error:
            message = f"{request.endpoint} raised {error!r}"
            facts = {"type": "ZeroDivisionError", "traceback": "Traceback …\nboom", "rank": "0"}
            await context.abort(
                grpc.StatusCode.UNKNOWN,
                message,
                trailing_metadata=pack(2, message, "ENDPOINT_RAISED", facts),
            )
            raise AssertionError("abort returned") from error
        return pb.CallResponse(payload=encode(answer, content_type_of(request.payload)))

    async def CallStream(self, request, context) -> AsyncIterator[pb.CallStreamResponse]:
        endpoint = await self._admit(request, context)
        args, kwargs = decode_arguments(request.payload)
        async for value in endpoint(*args, **kwargs):
            content_type = content_type_of(request.payload)
            yield pb.CallStreamResponse(payload=encode(value, content_type))

    async def Connect(self, request_iterator, context):
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not yet")
        yield
