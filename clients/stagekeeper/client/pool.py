"""Channels by address: made when first needed, shared, dropped when doubted, closed when unused.

Decided here: how long a channel lives. Not decided here: when it is to be doubted (whoever calls
over it knows). Invariant: however many calls run at once, an address has one channel; a dropped one
is closed only when the last call over it has ended, so that nobody's call is cut for another's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Container, Iterator
from typing import Any, TypeVar, cast

import grpc

from stagekeeper.wire.transport import CLIENT_OPTIONS

Stub = TypeVar("Stub")


def open_channel(address: str) -> grpc.aio.Channel:
    """Make a channel with the project's options; nothing is dialled until the first call."""
    return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)


class Link:
    """A channel of a pool, with the stubs made from it: they are dropped together."""

    __slots__ = ("address", "channel", "in_flight", "is_dropped", "stubs")

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = open_channel(address)
        self.stubs: dict[object, object] = {}
        self.in_flight = 0
        self.is_dropped = False

    def stub(self, make: Callable[[grpc.aio.Channel], Stub]) -> Stub:
        """Return the stub that `make` makes of this channel; one a channel."""
        found = self.stubs.get(make)
        if found is None:
            found = self.stubs[make] = make(self.channel)
        return cast(Stub, found)


class ChannelPool:
    """One link an address. Belongs to the event loop that it is used in; close it when done."""

    def __init__(self) -> None:
        self._links: dict[str, Link] = {}
        self._dropped: set[Link] = set()
        self._closing: set[asyncio.Task[Any]] = set()

    @property
    def addresses(self) -> Collection[str]:
        """The addresses that have a channel now."""
        return self._links.keys()

    @contextlib.contextmanager
    def link(self, address: str) -> Iterator[Link]:
        """Hold the link to an address for one call."""
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = Link(address)
        link.in_flight += 1
        try:
            yield link
        finally:
            link.in_flight -= 1
            if link.is_dropped and link.in_flight == 0:
                self._close(link)

    def drop(self, link: Link) -> None:
        """Let the next call to the link's address dial anew; dropping twice changes nothing.

        It takes the link and not the address: a late failure of an old channel must not drop the
        one that has replaced it.
        """
        if self._links.get(link.address) is link:
            del self._links[link.address]
        if link.is_dropped:
            return
        link.is_dropped = True
        self._dropped.add(link)
        if link.in_flight == 0:
            self._close(link)

    def keep_only(self, addresses: Container[str]) -> None:
        """Drop the links to all other addresses."""
        for link in [link for link in self._links.values() if link.address not in addresses]:
            self.drop(link)

    async def close(self) -> None:
        """Close every channel; calls under way are cancelled. Closing twice changes nothing."""
        links = {*self._links.values(), *self._dropped}
        self._links.clear()
        self._dropped.clear()
        await asyncio.gather(*self._closing, *(link.channel.close() for link in links))

    def _close(self, link: Link) -> None:
        self._dropped.discard(link)
        task = asyncio.create_task(
            link.channel.close(), name=f"close the channel to {link.address}"
        )
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
