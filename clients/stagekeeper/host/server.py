"""gRPC servers of Stagekeeper: their options, their standard services, their orderly end.

Every port serves health and reflection beside its own services. A port that is already taken is an
error (two servers never share one silently), and an address beyond loopback needs `insecure`.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Sequence
from typing import Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from stagekeeper.wire.stable_endpoint import GRPC_SCHEMES
from stagekeeper.wire.transport import SERVER_OPTIONS

AddServicer = Callable[[grpc.aio.Server], None]


class NotLoopback(ValueError):
    """An address beyond loopback without `--insecure`: there is no TLS yet."""


class AddressTaken(OSError):
    """Somebody else listens at the address."""


class EndsStreams(Protocol):
    """A servicer whose streams must be told to end before its server can stop."""

    def end_streams(self) -> None: ...


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port`; IPv6 hosts stand in brackets. Of a name for gRPC the host is all before.

    Raises:
        ValueError: it is not of that form.
    """
    host, separator, port = address.rpartition(":")
    is_number = port.isascii() and port.isdigit() and len(port) <= 5
    is_url = "/" in host and not host.startswith(GRPC_SCHEMES)
    if not separator or not host or is_url or not is_number or int(port) > 65535:
        raise ValueError(f"address {address!r} is not host:port")
    return host.strip("[]"), int(port)


def check_loopback(address: str, *, insecure: bool) -> None:
    """Refuse an address that others than this machine could reach.

    Raises:
        NotLoopback: it is beyond loopback and `insecure` was not given.
        ValueError: it is not host:port.
    """
    host, _ = split_address(address)
    if insecure or host == "localhost":
        return
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise NotLoopback(
            f"{address} is not a loopback address, and traffic is not encrypted yet: "
            "use 127.0.0.1, or say --insecure if the network is yours alone"
        )


class Server:
    """One listening gRPC server with health and reflection.

    Args:
        address: `host:port`; port 0 takes one from the system.
        services: full names of the services added, for reflection and health.
        add: adds the servicers.
        ends_streams: servicers that hold open streams, told to end them first in `stop`.
        with_reflection: False leaves reflection out (for sockets that only our own code reaches).
    """

    def __init__(
        self,
        address: str,
        services: Sequence[str],
        add: Sequence[AddServicer],
        *,
        ends_streams: Sequence[EndsStreams] = (),
        with_reflection: bool = True,
    ) -> None:
        self._address = address
        self._ends_streams = ends_streams
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        for add_servicer in add:
            add_servicer(self._server)
        self._health = health.aio.HealthServicer()
        self._services = (*services, "")
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if with_reflection:
            names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)

    async def start(self) -> str:
        """Listen and serve; return the address with its real port.

        Raises:
            AddressTaken: the address is in use or cannot be bound.
        """
        try:
            port = self._server.add_insecure_port(self._address)
        except RuntimeError as error:
            raise AddressTaken(f"cannot listen at {self._address}: it is taken") from error
        if port == 0 and not self._address.startswith("unix:"):
            raise AddressTaken(f"cannot listen at {self._address}: it is taken")
        await self._server.start()
        for service in self._services:
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        if self._address.startswith("unix:"):
            return self._address
        host, _, _ = self._address.rpartition(":")
        return f"{host}:{port}"

    async def say_not_serving(self) -> None:
        """Answer NOT_SERVING to health checks from now on; calls are still served."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float = 1.0) -> None:
        """Say NOT_SERVING, end the open streams, let calls end within `grace_s`, close."""
        await self._health.enter_graceful_shutdown()
        for servicer in self._ends_streams:
            servicer.end_streams()
        await asyncio.wait_for(self._server.stop(grace_s), grace_s + 5.0)
