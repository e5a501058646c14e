"""Asking one's own endpoint who serves it, before serving it.

Decided here: that a supervisor which lives there keeps its place. Invariant: nothing is written and
nothing is bound before the answer.
"""

from __future__ import annotations

import grpc

from stagekeeper.core.ids import Epoch
from stagekeeper.runtime.convert import epoch_from_proto
from stagekeeper.runtime.server import AddressTaken, split_address
from stagekeeper.v1 import discovery_service_pb2 as discovery_pb2
from stagekeeper.v1 import discovery_service_pb2_grpc as discovery_grpc
from stagekeeper.wire.transport import CLIENT_OPTIONS

ASK_TIMEOUT_S = 1.0


async def check_nobody_serves(endpoint: str) -> None:
    """Return when no supervisor answers at `endpoint`; one that is being killed does not count.

    Raises:
        AddressTaken: naming the cluster and the reign that live there.
    """
    if split_address(endpoint)[1] == 0:
        return
    async with grpc.aio.insecure_channel(endpoint, options=CLIENT_OPTIONS) as channel:
        try:
            answer = await discovery_grpc.DiscoveryServiceStub(channel).GetSupervisor(
                discovery_pb2.GetSupervisorRequest(), timeout=ASK_TIMEOUT_S
            )
        except grpc.RpcError:
            return
    epoch: Epoch = epoch_from_proto(answer.epoch)
    raise AddressTaken(
        f"a supervisor of cluster {answer.cluster!r} (epoch {epoch}) lives at {endpoint}: end that "
        "one first, or use another --endpoint"
    )
