"""The kept views, brought up to date: what was touched is derived again.

Decided here: what a derivation is handed, and whose view is another one by it. Not decided here:
what a replica is (`derive`), and what is told of it (`publishing`).

Invariant: `views` is always what `derive_replica` says of `claims` once `rederive` has run; the
cost is that of the replicas that were touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from stagekeeper.core.cluster import Cluster, Moved
from stagekeeper.core.derive import ReplicaContext, derive_replica
from stagekeeper.core.ids import ReplicaKey
from stagekeeper.core.model import Failure, ReplicaView
from stagekeeper.core.stage_sets import Claim
from stagekeeper.core.states import ReplicaState


def rederive(cluster: Cluster) -> None:
    """Derive what was touched, and note whose view it changed."""
    while cluster.touched:
        touched, cluster.touched = cluster.touched, {}
        for key in touched:
            _rederive_one(cluster, key)


def _rederive_one(cluster: Cluster, key: ReplicaKey) -> None:
    cluster.derivation_count += 1
    claims = [
        Claim(worker_id, cluster.workers[worker_id].state, record)
        for worker_id, records in cluster.claims.get(key, {}).items()
        for record in records
    ]
    context = context_of(cluster, key)
    view = derive_replica(key, claims, context)
    if view is not None and view.state is ReplicaState.READY:
        cluster.notes.pop(key, None)
        if context.is_wanted:
            _note_success(cluster, key, view)
    _note_contest(cluster, key, view, claims)
    old = cluster.views.get(key)
    if view is not None and old is not None and old.since is not None:
        view = replace(view, since=old.since)
    if view == old:
        return
    _count(cluster, key, old, view)
    if view is None:
        del cluster.views[key]
        cluster.indexes[key.deployment].discard(key.index)
        if not cluster.indexes[key.deployment]:
            del cluster.indexes[key.deployment]
    else:
        cluster.views[key] = view
        cluster.indexes.setdefault(key.deployment, set()).add(key.index)
    cluster.touched_names[key.deployment] = None


def _note_success(cluster: Cluster, key: ReplicaKey, view: ReplicaView) -> None:
    newest = max(shard.record.generation for shard in view.shards)
    cluster.came_up[key] = max(newest, cluster.came_up.get(key, newest))


def _count(
    cluster: Cluster, key: ReplicaKey, old: ReplicaView | None, new: ReplicaView | None
) -> None:
    """Keep the counts of states, and note whose state has moved."""
    before = None if old is None else old.state
    after = None if new is None else new.state
    if before is after:
        return
    cluster.moved.setdefault(key, Moved(old, cluster.is_recovering))
    counts = cluster.counts.setdefault(key.deployment, Counter())
    if before is not None:
        counts[before] -= 1
    if after is not None:
        counts[after] += 1


def _note_contest(
    cluster: Cluster, key: ReplicaKey, view: ReplicaView | None, claims: Sequence[Claim]
) -> None:
    """Have everybody asked anew who claims a replica of which several sets are reported.

    A set makes way for a READY one; when that is READY no longer, nothing makes way any more.
    """
    is_contested = view is not None and len(claims) > len(view.shards)
    if is_contested or key in cluster.contested:
        cluster.due.update(dict.fromkeys(claim.worker_id for claim in claims))
    if is_contested:
        cluster.contested.add(key)
    else:
        cluster.contested.discard(key)


def context_of(cluster: Cluster, key: ReplicaKey) -> ReplicaContext:
    """Collect what is known of a replica beside the claims on it."""
    desired = cluster.desired.get(key.deployment)
    context = ReplicaContext(
        is_recovering=cluster.is_recovering, ceiling=cluster.tombstones.get(key.deployment)
    )
    if desired is not None:
        context.spec = desired.spec
        context.is_wanted = key.index < desired.spec.replicas
        context.is_deleting = desired.is_deleting
        context.note = cluster.notes.get(key)
        context.last_failure = _last_failure(cluster, key)
    operation = cluster.operations.by_replica.get(key)
    if operation is not None:
        context.starting_on = operation.start.where
        context.waits_for = operation.waits_for
        context.behind = operation.behind
        context.is_decided = operation.is_decided
        context.is_committed = operation.committed_at is not None
    return context


def _last_failure(cluster: Cluster, key: ReplicaKey) -> Failure | None:
    """Return what failed last of a replica, unless it was deleted or came up since then."""
    failure = cluster.failures.last_of(key, since=cluster.came_up.get(key))
    ceiling = cluster.tombstones.get(key.deployment)
    if failure is None or ceiling is None:
        return failure
    generation = failure.origin.generation
    return failure if generation is not None and generation > ceiling else None
