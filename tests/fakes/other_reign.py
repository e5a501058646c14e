"""Another supervisor, as far as discovery shows it: a cluster and an epoch, and nothing behind."""

from __future__ import annotations

import grpc

from stagekeeper.core.ids import Epoch
from stagekeeper.runtime.convert import epoch_to_proto
from stagekeeper.v1 import discovery_service_pb2 as pb
from stagekeeper.v1.discovery_service_pb2_grpc import (
    DiscoveryServiceServicer,
    add_DiscoveryServiceServicer_to_server,
)
from stagekeeper.wire.transport import SERVER_OPTIONS


class OtherReign(DiscoveryServiceServicer):
    """`async with OtherReign(epoch) as other`; `asked` counts the questions."""

    def __init__(self, epoch: Epoch, *, cluster: str = "default", address: str = "") -> None:
        self.epoch = epoch
        self.cluster = cluster
        self.endpoint = address or "127.0.0.1:0"
        self.asked = 0
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> OtherReign:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        add_DiscoveryServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(self.endpoint)
        await self._server.start()
        self.endpoint = f"127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def GetSupervisor(self, request, context):
        self.asked += 1
        return pb.GetSupervisorResponse(
            cluster=self.cluster,
            epoch=epoch_to_proto(self.epoch),
            worker_address="127.0.0.1:1",
        )
