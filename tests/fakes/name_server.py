"""A name server that knows one name and answers what it is told: names that move.

gRPC asks it itself, through an endpoint of the form `dns://HOST:PORT/NAME:PORT`.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import cast

_A = 1
_HEADER = struct.Struct(">HHHHHH")
_ANSWERS_WITH_AUTHORITY = 0x8580
_POINTS_TO_THE_QUESTION = b"\xc0\x0c"


class NameServer(asyncio.DatagramProtocol):
    """Answers every question for an IPv4 address with `ip`.

    Attributes:
        ip: the address that the name has now.
        questions: how many questions for it have come.
    """

    def __init__(self, ip: str) -> None:
        self.ip = ip
        self.questions = 0
        self._transport: asyncio.DatagramTransport | None = None

    async def start(self) -> NameServer:
        loop = asyncio.get_running_loop()
        await loop.create_datagram_endpoint(lambda: self, local_addr=("127.0.0.1", 0))
        return self

    def stop(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def address_of(self, name: str, port: int) -> str:
        """Return what a gRPC client is told to dial."""
        assert self._transport is not None
        host, own_port = self._transport.get_extra_info("sockname")
        return f"dns://{host}:{own_port}/{name}:{port}"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        assert self._transport is not None
        number = _HEADER.unpack_from(data)[0]
        end = data.index(b"\0", _HEADER.size) + 5
        question = data[_HEADER.size : end]
        (kind,) = struct.unpack_from(">H", data, end - 4)
        answers = b""
        if kind == _A:
            self.questions += 1
            address = socket.inet_aton(self.ip)
            answers = _POINTS_TO_THE_QUESTION + struct.pack(">HHIH", _A, 1, 0, 4) + address
        head = _HEADER.pack(number, _ANSWERS_WITH_AUTHORITY, 1, int(bool(answers)), 0, 0)
        self._transport.sendto(head + question + answers, addr)
