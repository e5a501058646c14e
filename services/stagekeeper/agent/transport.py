"""How the session reaches a supervisor: as an interface, and over gRPC.

The session takes it as an argument, so that a simulator can put its own network in its place.
Nothing of gRPC leaves this module: every failed call is a `CallFailed`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Protocol, TypeVar

import grpc

from stagekeeper.v1 import discovery_service_pb2 as discovery_pb2
from stagekeeper.v1 import discovery_service_pb2_grpc as discovery_grpc
from stagekeeper.v1 import supervisor_service_pb2 as supervisor_pb2
from stagekeeper.v1 import supervisor_service_pb2_grpc as supervisor_grpc
from stagekeeper.wire.error_details import describe, is_own_cancellation, released
from stagekeeper.wire.transport import BEATING_CLIENT_OPTIONS, CLIENT_OPTIONS

Request = TypeVar("Request")
Answer = TypeVar("Answer")


class CallFailed(Exception):
    """A call to a supervisor failed.

    Attributes:
        code: gRPC's name of the status code.
        reason: from the protocol's table; empty when the other end gave none.
        metadata: facts a program can act on.
        retry_after_s: what the server asked for; 0 is nothing.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "UNAVAILABLE",
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.retry_after_s = retry_after_s


class SupervisorLink(Protocol):
    """One connection to a worker-facing service, with its stubs. Every call raises `CallFailed`."""

    async def register(
        self, request: supervisor_pb2.RegisterWorkerRequest, timeout_s: float
    ) -> supervisor_pb2.RegisterWorkerResponse: ...

    async def heartbeat(
        self, request: supervisor_pb2.HeartbeatRequest, timeout_s: float
    ) -> supervisor_pb2.HeartbeatResponse: ...

    async def report_failure(
        self, request: supervisor_pb2.ReportFailureRequest, timeout_s: float
    ) -> supervisor_pb2.ReportFailureResponse: ...

    async def close(self) -> None:
        """Drop the connection; calls under way fail."""
        ...


class Transport(Protocol):
    """The network as the session sees it."""

    async def find_supervisor(self, timeout_s: float) -> discovery_pb2.GetSupervisorResponse:
        """Ask the stable endpoint, over a connection of its own that is dropped afterwards.

        Raises:
            CallFailed: nobody answered.
        """
        ...

    def connect(self, address: str) -> SupervisorLink:
        """Make a new connection; nothing of an earlier one to the same address is used again."""
        ...


class GrpcTransport:
    """The network as it is."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    async def find_supervisor(self, timeout_s: float) -> discovery_pb2.GetSupervisorResponse:
        async with grpc.aio.insecure_channel(self._endpoint, options=CLIENT_OPTIONS) as channel:
            stub = discovery_grpc.DiscoveryServiceStub(channel)
            request = discovery_pb2.GetSupervisorRequest()
            try:
                return await _answered(stub.GetSupervisor(request, timeout=timeout_s))
            except CallFailed as failed:
                if failed.code != "UNIMPLEMENTED" or failed.reason:
                    raise
                raise CallFailed(
                    "who answers there is no supervisor, or one of another release: check "
                    f"--endpoint ({failed})",
                    code=failed.code,
                ) from None

    def connect(self, address: str) -> GrpcLink:
        return GrpcLink(address)


class GrpcLink:
    """A channel with its own subchannels, and the stubs made from it."""

    def __init__(self, address: str) -> None:
        # The options have the own subchannel pool: with the shared one this channel would inherit
        # the back-off of the one before it to the same address.
        self._channel = grpc.aio.insecure_channel(address, options=BEATING_CLIENT_OPTIONS)
        self._stub = supervisor_grpc.SupervisorServiceStub(self._channel)

    async def register(
        self, request: supervisor_pb2.RegisterWorkerRequest, timeout_s: float
    ) -> supervisor_pb2.RegisterWorkerResponse:
        return await self._call(self._stub.RegisterWorker, request, timeout_s)

    async def heartbeat(
        self, request: supervisor_pb2.HeartbeatRequest, timeout_s: float
    ) -> supervisor_pb2.HeartbeatResponse:
        return await self._call(self._stub.Heartbeat, request, timeout_s)

    async def report_failure(
        self, request: supervisor_pb2.ReportFailureRequest, timeout_s: float
    ) -> supervisor_pb2.ReportFailureResponse:
        return await self._call(self._stub.ReportFailure, request, timeout_s)

    async def close(self) -> None:
        await self._channel.close()

    async def _call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Request, Answer],
        request: Request,
        timeout_s: float,
    ) -> Answer:
        try:
            return await _answered(method(request, timeout=timeout_s))
        except grpc.aio.UsageError as error:
            raise CallFailed(f"the connection was dropped ({error})", code="CANCELLED") from error


async def _answered(call: Awaitable[Answer]) -> Answer:
    """Wait for a call; what gRPC raises becomes `CallFailed`; only our own cancellation passes."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        found = describe(error)
        raise CallFailed(
            found.message,
            code=error.code().name,
            reason=found.reason,
            metadata=found.metadata,
            retry_after_s=found.retry_after_s or 0.0,
        ) from released(error)
    except asyncio.CancelledError as cancelled:
        if is_own_cancellation():
            raise
        raise CallFailed("the connection was dropped", code="CANCELLED") from (
            cancelled.with_traceback(None)
        )
    finally:
        del call  # whoever keeps the error keeps this frame, and with a call its connection
