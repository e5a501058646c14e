"""DiscoveryService: says where the worker-facing service of this reign is.

Invariant: the address answered is one that this process listens at now.
"""

from __future__ import annotations

from collections.abc import Callable

from stagekeeper.core.ids import ClusterName
from stagekeeper.core.registry import Registry
from stagekeeper.runtime.convert import epoch_to_proto, hold_reason_to_proto, mode_to_proto
from stagekeeper.runtime.errors import Context, answers_refusals
from stagekeeper.v1 import discovery_service_pb2 as discovery_pb2
from stagekeeper.v1 import discovery_service_pb2_grpc as discovery_grpc


class DiscoveryServicer(discovery_grpc.DiscoveryServiceServicer):
    """Answers from memory.

    Args:
        cluster: what callers compare with their own.
        registry: read only.
        worker_address: says where SupervisorService is, as agents are told it.
    """

    def __init__(
        self, cluster: ClusterName, registry: Registry, worker_address: Callable[[], str]
    ) -> None:
        self._cluster = cluster
        self._registry = registry
        self._worker_address = worker_address

    @answers_refusals
    async def GetSupervisor(
        self, request: discovery_pb2.GetSupervisorRequest, context: Context
    ) -> discovery_pb2.GetSupervisorResponse:
        return discovery_pb2.GetSupervisorResponse(
            cluster=self._cluster,
            epoch=epoch_to_proto(self._registry.epoch),
            worker_address=self._worker_address(),
            mode=mode_to_proto(self._registry.mode),
            hold_reason=hold_reason_to_proto(self._registry.hold_reason),
        )
