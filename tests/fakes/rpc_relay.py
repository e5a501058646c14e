"""A relay of unary rpcs, as a balancer that ends connections itself: what is behind it may be
replaced while its clients' connections stay as they are."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

from stagekeeper.wire.transport import CLIENT_OPTIONS, SERVER_OPTIONS

Call = grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]


class RpcRelay(grpc.GenericRpcHandler):
    """Passes every unary call on to `target` with its bytes untouched, and its status back.

    Attributes:
        url: where it listens.
        calls: (connection, method) of each call that came, in order.
    """

    def __init__(self) -> None:
        self.url = ""
        self.calls: list[tuple[str, str]] = []
        self._channel: grpc.aio.Channel | None = None
        self._server: grpc.aio.Server | None = None

    async def start(self) -> RpcRelay:
        self._server = grpc.aio.server(handlers=[self], options=SERVER_OPTIONS)
        self.url = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
        await self.lead_to("")

    async def lead_to(self, target: str) -> None:
        """Pass calls on to another target; without one every call is UNAVAILABLE.

        Calls that are with the old target get their answers from it.
        """
        old, self._channel = self._channel, None
        if target:
            self._channel = grpc.aio.insecure_channel(target, options=CLIENT_OPTIONS)
        if old is not None:
            await old.close(grace=5.0)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method

        async def relay(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
            self.calls.append((context.peer(), method))
            if self._channel is None:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "nobody is behind the relay")
            assert self._channel is not None
            try:
                call: Call = self._channel.unary_unary(method)
                return await call(request, timeout=context.time_remaining())
            except grpc.aio.AioRpcError as error:
                await context.abort(
                    error.code(), error.details() or "", tuple(error.trailing_metadata() or ())
                )
                raise AssertionError("abort raises") from error

        return grpc.unary_unary_rpc_method_handler(relay)
