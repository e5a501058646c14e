"""Watching the supervisor's change log, for ever: the routes come from here.

Decided here: when the stream is opened again, from where, and who is told of a change. Not decided
here: what a change does to the routes (routing.py). Invariant: while the supervisor is away the
table stays as it is; nothing in this module removes a route.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Callable

from stagekeeper.client.errors import StagekeeperError
from stagekeeper.client.retry import RECONNECT_BASE_S, for_ever
from stagekeeper.client.routing import RoutingTable
from stagekeeper.client.supervisor_link import SupervisorLink
from stagekeeper.v1.deployment_service_pb2 import (
    CHANGE_KIND_SYNCED,
    WatchDeploymentsRequest,
    WatchDeploymentsResponse,
)
from stagekeeper.v1.types_pb2 import ChangeRevision

_log = logging.getLogger("stagekeeper.client")

SILENCE_S = 20.0
"""A watch that said nothing for so long is opened anew: the supervisor sends a bookmark each 5 s
when nothing changes."""

ROUTES = WatchDeploymentsRequest()

Changes = AsyncGenerator[WatchDeploymentsResponse, None]


async def deployment_changes(
    link: SupervisorLink,
    request: WatchDeploymentsRequest = ROUTES,
    *,
    after: ChangeRevision | None = None,
    on_lost: Callable[[], None] = lambda: None,
) -> AsyncGenerator[WatchDeploymentsResponse | None, None]:
    """Yield the change log for ever, over any number of streams and supervisors.

    A stream that breaks is resumed after the last revision where the same supervisor still reigns;
    otherwise a None says that a snapshot follows, and what it does not show may be gone.

    Args:
        link: the supervisor.
        request: what to watch; its `after` is filled in.
        after: where to begin; None means a snapshot.
        on_lost: called when a stream broke or could not be opened.
    """
    while True:
        stream, message, after = await _opened(link, request, after, on_lost)
        if after is None:
            yield None
        async with contextlib.aclosing(stream):
            is_synced = after is not None
            try:
                while message is not None:
                    yield message
                    is_synced = is_synced or message.kind == CHANGE_KIND_SYNCED
                    if is_synced and message.HasField("revision"):
                        after = message.revision
                    message = await anext(stream, None)
            except StagekeeperError as error:
                _log.info("the watch on %s ended: %s", link.endpoint, error)
                if error.reason == "REVISION_GONE":  # this reader fell behind, or took nothing
                    after = None
                else:
                    on_lost()
        # All clients lose one supervisor at the same moment, and must not come back at the same.
        await asyncio.sleep(random.uniform(0, RECONNECT_BASE_S))


async def _opened(
    link: SupervisorLink,
    request: WatchDeploymentsRequest,
    after: ChangeRevision | None,
    on_lost: Callable[[], None],
) -> tuple[Changes, WatchDeploymentsResponse | None, ChangeRevision | None]:
    """Open a stream and read its first message, trying for ever; say from where it goes on."""

    async def attempt() -> tuple[Changes, WatchDeploymentsResponse | None]:
        nonlocal after
        while True:
            asked = WatchDeploymentsRequest(after=after)
            asked.MergeFrom(request)
            stream = link.stream(lambda stub: stub.WatchDeployments, asked, silence_s=SILENCE_S)
            try:
                return stream, await anext(stream, None)
            except StagekeeperError as error:
                if error.reason != "REVISION_GONE" or after is None:
                    on_lost()
                    raise
                after = None  # another supervisor reigns: its snapshot is next

    retrying = for_ever(f"watching {link.endpoint}")
    opened: tuple[Changes, WatchDeploymentsResponse | None] = await retrying(attempt)
    return *opened, after


class RouteWatch:
    """Keeps a routing table up to date, as one task. Whoever made it stops it.

    Args:
        link: the supervisor.
        table: what is kept.
        on_change: called after each change, in the event loop.
    """

    def __init__(
        self, link: SupervisorLink, table: RoutingTable, on_change: Callable[[], None]
    ) -> None:
        self._link = link
        self._table = table
        self._on_change = on_change
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch; starting twice changes nothing."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="watch deployments")
            self._task.add_done_callback(_say_if_it_died)

    async def stop(self) -> None:
        """End the watch; the table stays."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def until(self, is_met: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until `is_met` of the table, looking after each change; False when time is over."""
        try:
            async with asyncio.timeout(timeout):
                while not is_met():
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def tell(self) -> None:
        """Wake all that wait for a change."""
        self._wake()
        self._on_change()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _run(self) -> None:
        # Woken by losses also: who waits for the first routes looks whether anybody is there.
        changes_of_routes = deployment_changes(self._link, on_lost=self._wake)
        async with contextlib.aclosing(changes_of_routes) as changes:
            async for message in changes:
                if message is None:
                    self._table.begin()
                else:
                    self._table.apply(message)
                    self.tell()


def _say_if_it_died(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.critical("the watch met a bug; routes stay as they are", exc_info=task.exception())
