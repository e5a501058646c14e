"""The routing table: which instance a call goes to. Pure: no clock, no task, no socket.

Decided here: what a watched change does to the routes, and which route is picked. Not decided here:
what a failed call means and whether it is tried again (calls.py). Invariants: a replica that is not
READY is never routed to; and while the supervisor says that workers are still missing, a route goes
only when the supervisor knows better, never because it knows nothing yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stagekeeper.client.view import (
    Missing,
    NoRoute,
    entry_stage_id_of,
    stage_id_of,
    why_none_is_ready,
)
from stagekeeper.v1 import types_pb2 as types
from stagekeeper.v1.deployment_service_pb2 import (
    CHANGE_KIND_ADDED,
    CHANGE_KIND_BOOKMARK,
    CHANGE_KIND_MODIFIED,
    CHANGE_KIND_REMOVED,
    CHANGE_KIND_SNAPSHOT,
    CHANGE_KIND_SYNCED,
    Deployment,
    Replica,
    WatchDeploymentsResponse,
)

# States that say no more than "not there yet". After a restart of the supervisor a replica whose
# worker has not registered again looks like this, and goes on serving.
_SAYS_NOTHING = frozenset(
    (
        types.REPLICA_STATE_UNSPECIFIED,
        types.REPLICA_STATE_PENDING,
        types.REPLICA_STATE_STARTING,
        types.REPLICA_STATE_PARTIAL,
    )
)


@dataclass(frozen=True, slots=True)
class Route:
    """One instance of one stage that calls may go to.

    `idempotent` names the endpoints whose repeat does no harm. A last resort lies on a worker that
    is LOST: it is picked when nothing else is left.
    """

    deployment: str
    replica_index: int
    stage_id: int
    stage_name: str
    worker_id: str
    url: str
    instance_id: str
    idempotent: frozenset[str] = frozenset()
    is_last_resort: bool = False


@dataclass(slots=True)
class _Entry:
    """What is known of one deployment; `routes` are in the order of stages, then replicas."""

    view: Deployment
    revision: tuple[int, str, int]
    entry_stage_id: int = 0
    held: dict[int, tuple[Route, ...]] = field(default_factory=dict)
    routes: dict[int, tuple[Route, ...]] = field(default_factory=dict)


class RoutingTable:
    """Routes by deployment and stage, and how many calls each instance has under way.

    `is_synced`: a whole snapshot has been seen once, so an unknown name means something.
    `is_complete`: the supervisor says that no worker is missing.
    """

    def __init__(self) -> None:
        self.is_synced = False
        self.is_complete = False
        self._entries: dict[str, _Entry] = {}
        self._seen: set[str] = set()
        self._revision = (0, "", 0)
        self._addresses: Counter[str] = Counter()
        self._outstanding: Counter[str] = Counter()
        self._avoided: dict[str, float] = {}
        self._turns: dict[tuple[str, int], int] = {}

    # --- what is known

    def begin(self) -> None:
        """A stream starts from a snapshot: what it does not show is not known to it."""
        self._seen.clear()
        self._revision = (0, "", 0)
        self.is_complete = False

    def apply(self, message: WatchDeploymentsResponse) -> None:
        """Take over one watched change; the same one twice changes nothing."""
        revision = _revision_of(message)
        name = message.deployment.name
        kind = message.kind
        if kind in (CHANGE_KIND_SNAPSHOT, CHANGE_KIND_ADDED, CHANGE_KIND_MODIFIED):
            self._seen.add(name)
            self._put(message.deployment, revision)
        elif kind == CHANGE_KIND_REMOVED:
            self._seen.discard(name)
            self._remove(name)
        elif kind in (CHANGE_KIND_SYNCED, CHANGE_KIND_BOOKMARK):
            if kind == CHANGE_KIND_SYNCED:
                self.is_synced = True
            if message.complete and not self.is_complete:
                self._complete()
            self.is_complete = message.complete
        self._revision = max(self._revision, revision)

    def learn(self, view: Deployment, revision: types.ChangeRevision, *, is_complete: bool) -> None:
        """Take over a view that was read beside the watch, unless the watch is past it.

        Args:
            view: the deployment.
            revision: where its supervisor's change log stood.
            is_complete: that supervisor says that no worker is missing.
        """
        read = _triple(revision)
        is_other_reign = read[:2] != self._revision[:2]
        if not is_other_reign and read[2] < self._revision[2]:
            return
        if is_other_reign or not is_complete:
            # What the watch said before of completeness was said by another reign, and this one may
            # know nothing yet. Routes are held until the watch says more.
            self.is_complete = False
        self._seen.add(view.name)
        self._put(view, read)

    def view(self, name: str) -> Deployment | None:
        """Return the deployment as it was last seen; None when it is not known."""
        entry = self._entries.get(name)
        return entry.view if entry else None

    @property
    def names(self) -> Collection[str]:
        """The deployments that are known."""
        return self._entries.keys()

    @property
    def addresses(self) -> Mapping[str, int]:
        """The addresses that routes lead to, with how many do."""
        return self._addresses

    def routes(self, name: str, stage_id: int) -> Sequence[Route]:
        """Return the routes to one stage, in the order of replicas."""
        entry = self._entries.get(name)
        return entry.routes.get(stage_id, ()) if entry else ()

    # --- which one

    def pick(
        self,
        name: str,
        stage: str | int | None,
        *,
        exclude: Collection[str] = (),
        now: float = 0.0,
    ) -> Route | NoRoute:
        """Choose the instance with the fewest calls under way, in turn where several have.

        Args:
            name: the deployment.
            stage: its name or its id; None means the entry stage.
            exclude: instance ids that must not be chosen.
            now: the time that `avoid` speaks of.
        """
        entry = self._entries.get(name)
        if entry is None:
            known = ", ".join(sorted(self._entries)) or "none"
            return NoRoute(
                Missing.DEPLOYMENT, f"there is no deployment {name!r} (there are: {known})"
            )
        stage_id = _stage_id(entry, stage)
        if isinstance(stage_id, NoRoute):
            return stage_id
        routes = entry.routes.get(stage_id, ())
        if not routes:
            return NoRoute(Missing.READY_REPLICA, why_none_is_ready(entry.view))
        turn = self._turns.get((name, stage_id), 0)
        best: tuple[int, int, int] | None = None
        chosen = 0
        for position, route in enumerate(routes):
            if route.instance_id in exclude:
                continue
            rank = (
                self._reluctance(route, now),
                self._outstanding[route.instance_id],
                (position - turn) % len(routes),
            )
            if best is None or rank < best:
                best, chosen = rank, position
        if best is None:
            return NoRoute(
                Missing.OTHER_REPLICA,
                f"no other replica of deployment {name!r} is READY than those just tried",
            )
        self._turns[name, stage_id] = (chosen + 1) % len(routes)
        return routes[chosen]

    def has_route(
        self, name: str, stage: str | int | None, *, exclude: Collection[str] = ()
    ) -> bool:
        """Say whether `pick` would find one; nobody's turn is used up."""
        entry = self._entries.get(name)
        stage_id = _stage_id(entry, stage) if entry else None
        if entry is None or not isinstance(stage_id, int):
            return False
        return any(route.instance_id not in exclude for route in entry.routes.get(stage_id, ()))

    def acquire(self, route: Route) -> None:
        """Count a call that starts."""
        self._outstanding[route.instance_id] += 1

    def release(self, route: Route) -> None:
        """Count a call that ended."""
        self._outstanding[route.instance_id] -= 1
        if self._outstanding[route.instance_id] <= 0:
            del self._outstanding[route.instance_id]

    def outstanding(self, instance_id: str) -> int:
        """Return how many calls an instance has under way from here."""
        return self._outstanding[instance_id]

    def avoid(self, instance_id: str, until: float) -> None:
        """Prefer others for a while. It ends by itself, and another instance starts clean."""
        self._avoided[instance_id] = until

    def _reluctance(self, route: Route, now: float) -> int:
        if route.is_last_resort:
            return 2
        until = self._avoided.get(route.instance_id)
        if until is None:
            return 0
        if now < until:
            return 1
        del self._avoided[route.instance_id]
        return 0

    # --- how changes become routes

    def _put(self, view: Deployment, revision: tuple[int, str, int]) -> None:
        entry = self._entries.get(view.name)
        if entry is None:
            entry = self._entries[view.name] = _Entry(view, revision)
        elif revision[:2] == entry.revision[:2] and revision[2] < entry.revision[2]:
            return
        else:
            if not self.is_complete:
                routes = (route for stage in entry.routes.values() for route in stage)
                entry.held = _grouped(routes, lambda route: route.replica_index)
            entry.view, entry.revision = view, revision
        if self.is_complete:
            entry.held = {}
        self._derive(entry)

    def _derive(self, entry: _Entry) -> None:
        entry.entry_stage_id = entry_stage_id_of(entry.view)
        before = [route for routes in entry.routes.values() for route in routes]
        found: dict[int, tuple[Route, ...]] = {}
        for replica in entry.view.replicas:
            index = replica.replica_index
            if replica.state == types.REPLICA_STATE_READY:
                found[index] = tuple(_routes_of(entry.view.name, replica))
            elif replica.state in _SAYS_NOTHING and index in entry.held:
                found[index] = entry.held[index]
        shown = {replica.replica_index for replica in entry.view.replicas}
        found.update({index: held for index, held in entry.held.items() if index not in shown})
        after = [route for index in sorted(found) for route in found[index]]
        entry.routes = _grouped(after, lambda route: route.stage_id)
        self._account(before, after)

    def _remove(self, name: str) -> None:
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        for stage_id in entry.routes:
            self._turns.pop((name, stage_id), None)
        self._account([route for routes in entry.routes.values() for route in routes], ())

    def _complete(self) -> None:
        for name in [name for name in self._entries if name not in self._seen]:
            self._remove(name)
        for entry in self._entries.values():
            if entry.held:
                entry.held = {}
                self._derive(entry)

    def _account(self, before: Iterable[Route], after: Iterable[Route]) -> None:
        kept = {route.instance_id for route in after}
        self._addresses.update(route.url for route in after)
        for route in before:
            self._addresses[route.url] -= 1
            if self._addresses[route.url] <= 0:
                del self._addresses[route.url]
            if route.instance_id not in kept:
                self._avoided.pop(route.instance_id, None)


def _stage_id(entry: _Entry, stage: str | int | None) -> int | NoRoute:
    return entry.entry_stage_id if stage is None else stage_id_of(entry.view, stage)


def _triple(revision: types.ChangeRevision) -> tuple[int, str, int]:
    return (revision.epoch.number, revision.epoch.supervisor_id, revision.n)


def _revision_of(message: WatchDeploymentsResponse) -> tuple[int, str, int]:
    return _triple(message.revision)


def _grouped(routes: Iterable[Route], key: Callable[[Route], int]) -> dict[int, tuple[Route, ...]]:
    lists: dict[int, list[Route]] = {}
    for route in routes:
        lists.setdefault(key(route), []).append(route)
    return {group: tuple(members) for group, members in lists.items()}


def _routes_of(deployment: str, replica: Replica) -> Iterable[Route]:
    for shard in replica.shards:
        record = shard.record
        url = next(
            (
                address.url
                for address in record.addresses
                if address.protocol == types.ADDRESS_PROTOCOL_GRPC
            ),
            "",
        )
        if record.shard_index == 0 and url:
            yield Route(
                deployment=deployment,
                replica_index=replica.replica_index,
                stage_id=record.stage_id,
                stage_name=record.stage_name,
                worker_id=shard.worker_id,
                url=url,
                instance_id=record.instance_id,
                idempotent=frozenset(e.name for e in record.endpoints if e.idempotent),
                is_last_resort=shard.worker_state == types.WORKER_STATE_LOST,
            )
