"""One look at an address: a supervisor answers, nobody is there, or it cannot be told.

Decided here: what counts as whose silence. Only a refused connection, one that is closed before a
byte came, or a proxy's word that it has nobody behind it (502 to 504) says that nobody is there: a
stopped or busy process keeps its connections open, since its kernel accepts them. So the look
knocks by hand first: gRPC reports a peer that is frozen and one that is gone with the same code.
Not decided here: what follows.

Invariant: a look ends within twice its time limit, and leaves no connection.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from dataclasses import dataclass
from typing import Any, Final

import grpc

from stagekeeper.core.ids import Epoch
from stagekeeper.host.server import split_address
from stagekeeper.runtime.convert import epoch_from_proto
from stagekeeper.v1 import discovery_service_pb2 as discovery_pb2
from stagekeeper.v1 import discovery_service_pb2_grpc as discovery_grpc
from stagekeeper.wire.error_details import is_own_cancellation
from stagekeeper.wire.transport import CLIENT_OPTIONS

# RFC 9113, 3.4 and 4.1: the client's preface and an empty SETTINGS frame; a server's first frame is
# SETTINGS as well, whose type, 4, stands behind three bytes of length.
_KNOCK: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_HEADER_BYTES: Final = 9
_SETTINGS: Final = 4
_HTTP1: Final = b"HTTP/1."
_HTTP1_BYTES: Final = len("HTTP/1.1 503")
_NOBODY_BEHIND: Final = ("502", "503", "504")
_HTTP2_STATUS: Final = re.compile(r"http2 header with status: (\d+)")
"""What gRPC says of an answer that is HTTP and not gRPC."""


@dataclass(frozen=True, slots=True)
class Served:
    """A supervisor answered, just now."""

    cluster: str
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Vacant:
    """Nobody is there: refused, or closed without a word by somebody who stands in between."""

    is_refused: bool


@dataclass(frozen=True, slots=True)
class Silent:
    """Somebody may be there: slow, frozen, or behind a network that swallows."""

    why: str


@dataclass(frozen=True, slots=True)
class Stranger:
    """Somebody answers, and is no supervisor."""

    why: str


Found = Served | Vacant | Silent | Stranger


async def look(address: str, timeout_s: float) -> Found:
    """Find out who is at `address` (`host:port`)."""
    try:
        async with asyncio.timeout(timeout_s):
            found = await _knock(address)
    except TimeoutError:
        return Silent(f"no answer within {timeout_s:g} s")
    if found is not None:
        return found
    found = await ask(address, timeout_s)
    status = _HTTP2_STATUS.search(found.why) if isinstance(found, Silent) else None
    return Vacant(is_refused=False) if status and status[1] in _NOBODY_BEHIND else found


async def ask(address: str, timeout_s: float) -> Found:
    """Ask only; somebody who is gone is Silent then, like one who is slow."""
    async with grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS) as channel:
        try:
            answer = await discovery_grpc.DiscoveryServiceStub(channel).GetSupervisor(
                discovery_pb2.GetSupervisorRequest(), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            said = f"{error.code().name}: {error.details()}"
            is_stranger = error.code() is grpc.StatusCode.UNIMPLEMENTED
            return Stranger(said) if is_stranger else Silent(said)
        except asyncio.CancelledError:
            if is_own_cancellation():
                raise
            return Silent("the connection was dropped")
    return Served(answer.cluster, epoch_from_proto(answer.epoch))


async def _knock(address: str) -> Found | None:
    """Say what a bare connection tells; None when a gRPC server is there, to be asked."""
    host, port = split_address(address)
    loop = asyncio.get_running_loop()
    try:
        places = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return Silent(f"{host} cannot be resolved: {error.strerror}")
    found: Found = Vacant(is_refused=True)
    for family, kind, protocol, _, place in places:
        with socket.socket(family, kind, protocol) as connection:
            connection.setblocking(False)
            try:
                await loop.sock_connect(connection, place)
            except ConnectionRefusedError:
                continue
            except ConnectionResetError:
                return Vacant(is_refused=False)  # closed before we came to say anything
            except OSError as error:
                found = Silent(os.strerror(error.errno) if error.errno else str(error))
                continue
            return await _exchange(connection)
    return found


async def _exchange(connection: socket.socket) -> Found | None:
    loop = asyncio.get_running_loop()
    head = b""
    try:
        await loop.sock_sendall(connection, _KNOCK)
        while len(head) < (_HTTP1_BYTES if head.startswith(_HTTP1) else _HEADER_BYTES):
            more = await loop.sock_recv(connection, _HTTP1_BYTES - len(head))
            if not more:
                break
            head += more
    except OSError:  # reset
        pass
    if not head:
        return Vacant(is_refused=False)
    if head.startswith(_HTTP1):
        if head[-3:].decode(errors="replace") in _NOBODY_BEHIND:
            return Vacant(is_refused=False)
    elif len(head) >= _HEADER_BYTES and head[3] == _SETTINGS:
        return None
    return Stranger(f"it does not speak HTTP/2 (it said {head!r})")


def listen_problem(address: str) -> OSError | None:
    """Return why `address` cannot be listened at now; None when it can. Nothing stays bound."""
    host, port = split_address(address)
    if port == 0:
        return None
    try:
        places: list[Any] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, place = places[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            probe.listen(1)
    except OSError as error:
        return error
    return None
