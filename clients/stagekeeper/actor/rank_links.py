"""The ways to ranks, as calls see them: of a mesh here, of one elsewhere, of a deployed stage.

Invariant: nothing of it raises when something is sent; what goes wrong comes with the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from stagekeeper.v1.types_pb2 import Payload
from stagekeeper.wire.payload import Tensors


class PayloadStream(Protocol):
    """The values of one call. Closed by whoever stops reading before its end."""

    def __aiter__(self) -> AsyncIterator[Payload]: ...

    async def __anext__(self) -> Payload: ...

    async def aclose(self) -> None: ...


class RankLink(Protocol):
    """The way to one rank. None of its methods raises: what goes wrong comes with the answer."""

    @property
    def rank(self) -> int:
        """Its number in the whole mesh."""
        ...

    @property
    def is_failed(self) -> bool:
        """The rank has failed and is not back: what is asked of it fails at once."""
        ...

    @property
    def outstanding(self) -> int:
        """Calls of this process that the rank has not answered."""
        ...

    def call(self, endpoint: str, payload: Payload) -> asyncio.Future[Payload]:
        """Send a call now; its future never ends as cancelled but by cancelling it, which ends the
        call over there too."""
        ...

    def stream(self, endpoint: str, payload: Payload) -> PayloadStream:
        """Send a call now, whose every value is wanted; closing it ends the call over there too."""
        ...

    def cast(self, endpoint: str, payload: Payload) -> None:
        """Send a message to which nothing is answered."""
        ...


class RankView(Protocol):
    """The ranks that calls go to: a whole mesh or a selection."""

    @property
    def name(self) -> str:
        """The mesh's, for people."""
        ...

    @property
    def links(self) -> Sequence[RankLink]:
        """One per rank, ascending; at least one.

        Raises:
            MeshStopped: the mesh takes no more messages.
        """
        ...

    @property
    def tensors(self) -> Tensors:
        """What tensors in answers become."""
        ...
