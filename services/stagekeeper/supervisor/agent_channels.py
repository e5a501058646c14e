"""Connections to agents: one per address while somebody uses it.

An address is a hint, so nothing is kept for later: a connection is closed with its last user, and
the next command dials anew. Invariant: no channel outlives its users.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from stagekeeper.v1 import agent_service_pb2_grpc as agent_grpc
from stagekeeper.wire.transport import CLIENT_OPTIONS


@dataclass(slots=True)
class _Shared:
    channel: grpc.aio.Channel
    users: int = 0


class AgentChannels:
    """Lends connections to agents by address."""

    def __init__(self) -> None:
        self._shared: dict[str, _Shared] = {}

    @asynccontextmanager
    async def agent(self, address: str) -> AsyncIterator[agent_grpc.AgentServiceAsyncStub]:
        """Lend a stub for the agent at `address`; it is valid inside the block only."""
        shared = self._shared.get(address)
        if shared is None:
            channel = grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
            shared = self._shared[address] = _Shared(channel)
        shared.users += 1
        try:
            yield agent_grpc.AgentServiceStub(shared.channel)
        finally:
            shared.users -= 1
            if shared.users == 0:
                del self._shared[address]
                await shared.channel.close()
