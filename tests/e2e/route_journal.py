"""What a client could route to, noted at each change that it hears of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from stagekeeper.client import Client
from stagekeeper.v1.deployment_service_pb2 import WatchDeploymentsResponse


@dataclass(frozen=True)
class Entry:
    """The instances that could be called after one message, and the reign that sent it."""

    epoch: int
    instances: frozenset[str]
    is_complete: bool


@contextmanager
def journal(client: Client, name: str, stage_id: int = 0) -> Iterator[list[Entry]]:
    """Note every state of the routes to one stage during the block; the first is that of now."""
    routes = client.routes
    entries: list[Entry] = []
    apply, begin = routes.apply, routes.begin

    def note(epoch: int) -> None:
        instances = frozenset(route.instance_id for route in routes.routes(name, stage_id))
        entries.append(Entry(epoch, instances, routes.is_complete))

    def apply_and_note(message: WatchDeploymentsResponse) -> None:
        apply(message)
        note(message.revision.epoch.number)

    def begin_and_note() -> None:
        begin()
        note(0)

    note(0)
    routes.apply, routes.begin = apply_and_note, begin_and_note  # type: ignore[method-assign]
    try:
        yield entries
    finally:
        routes.apply, routes.begin = apply, begin  # type: ignore[method-assign]
