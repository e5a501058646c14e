"""Looking at one's own endpoint before a reign is begun.

Decided here: that a supervisor which lives there keeps its place, and so does anybody else. It is
looked at before anything is written, so that a start which cannot succeed leaves no trace; the
listening itself decides in the end. Invariant: nothing is written and nothing stays bound.
"""

from __future__ import annotations

import socket

import grpc

from stagekeeper.runtime.convert import epoch_from_proto
from stagekeeper.runtime.server import AddressTaken, split_address
from stagekeeper.v1 import discovery_service_pb2 as discovery_pb2
from stagekeeper.v1 import discovery_service_pb2_grpc as discovery_grpc
from stagekeeper.wire.transport import CLIENT_OPTIONS

ASK_TIMEOUT_S = 1.0


async def check_endpoint_is_free(endpoint: str) -> None:
    """Return when a supervisor could serve `endpoint`.

    Raises:
        AddressTaken: naming the cluster and the reign that live there, if it is a supervisor.
    """
    host, port = split_address(endpoint)
    if port == 0 or _can_listen(host, port):
        return
    async with grpc.aio.insecure_channel(endpoint, options=CLIENT_OPTIONS) as channel:
        try:
            answer = await discovery_grpc.DiscoveryServiceStub(channel).GetSupervisor(
                discovery_pb2.GetSupervisorRequest(), timeout=ASK_TIMEOUT_S
            )
        except grpc.RpcError as error:
            raise AddressTaken(
                f"cannot listen at {endpoint}: something else does, or it is no address of this "
                "machine"
            ) from error
    raise AddressTaken(
        f"a supervisor of cluster {answer.cluster!r} (epoch {epoch_from_proto(answer.epoch)}) "
        f"lives at {endpoint}: end that one first, or use another --endpoint"
    )


def _can_listen(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True
