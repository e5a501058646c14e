"""What is told of an event: states that are others now, and deployments that changed.

Decided here: which differences count as news, and since when a state holds. Not decided here: what
the states are (`derive`, `compose`), and the news that handlers put down themselves.

Invariant: states are compared as they were before an event and as they are after it; what went
through on the way is not told. Telling costs what the event touched: a deployment's state follows
from counts, and nothing is composed for it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from stagekeeper.core.cluster import Cluster, Moved
from stagekeeper.core.commands import ChangeKind, PublishChange
from stagekeeper.core.compose import deployment_state
from stagekeeper.core.counted import counted
from stagekeeper.core.event_log import EventKind, PublishEvent, Subject, of_replica
from stagekeeper.core.ids import DeploymentName, ReplicaKey
from stagekeeper.core.model import ReplicaView
from stagekeeper.core.states import DeploymentState, ReplicaState

_WORRYING = frozenset({ReplicaState.FAILED, ReplicaState.PARTIAL})
_WORRYING_DEPLOYMENTS = frozenset({DeploymentState.FAILED, DeploymentState.DEGRADED})


def begin(cluster: Cluster) -> None:
    """Take what is derived before anybody reports as the start, not as news.

    What nobody reports is so from here on; a deletion was under way before.
    """
    cluster.moved.clear()
    cluster.touched_names.clear()
    for key, view in cluster.views.items():
        cluster.views[key] = replace(view, since=cluster.now)
    for name in cluster.visible:
        state = _state(cluster, name)
        since = None if state is DeploymentState.DELETING else cluster.now
        cluster.deployment_states[name] = state, since
    message = f"reign {cluster.epoch} began"
    if cluster.hold_until is not None:
        who = counted(len(cluster.awaited), "worker") if cluster.awaited else "whoever was there"
        message += f"; it waits for {who}, {cluster.hold_until - cluster.now:g} s at most"
    cluster.log(EventKind.REIGN_BEGAN, message)
    cluster.news.clear()  # nobody can be watching yet


def publish(cluster: Cluster) -> list[PublishEvent | PublishChange]:
    """Say what happened, and which deployments are others than when this was last asked."""
    learned = {
        key.deployment for key, moved in cluster.moved.items() if _tell_replica(cluster, key, moved)
    }
    cluster.moved.clear()
    changed: list[tuple[ChangeKind, DeploymentName]] = []
    for name in cluster.touched_names:
        cluster.composed.pop(name, None)
        is_known, was_known = cluster.is_known(name), name in cluster.visible
        if is_known:
            changed.append((ChangeKind.MODIFIED if was_known else ChangeKind.ADDED, name))
            cluster.visible.add(name)
            _tell_deployment(cluster, name, is_learned=name in learned)
        elif was_known:
            changed.append((ChangeKind.REMOVED, name))
            cluster.visible.discard(name)
            _tell_removal(cluster, name)
    cluster.touched_names.clear()
    news, cluster.news = cluster.news, []
    return [*news, *(cluster.changes.add(kind, name) for kind, name in changed)]


def _tell_replica(cluster: Cluster, key: ReplicaKey, moved: Moved) -> bool:
    """Tell that a replica's state is another one; return whether it was so before this reign."""
    view, before = cluster.views.get(key), moved.before
    if view is not None and before is not None and view.state is before.state:
        if view.since != before.since:
            cluster.views[key] = replace(view, since=before.since)
        return False
    if view is None:
        if before is not None:
            message = f"{key} is gone (it was {before.state})"
            cluster.log(EventKind.REPLICA_CHANGED, message, of_replica(key))
        return False
    is_learned = moved.was_recovering and not _was_known(before)
    cluster.views[key] = replace(view, since=None if is_learned else cluster.now)
    told = f"{key} is {view.state}"
    if before is not None:
        told += f" (it was {before.state})"
    if view.reason:
        told += f": {view.reason}"
    is_warning = view.state in _WORRYING and not moved.was_recovering
    is_warning = is_warning or view.state is ReplicaState.FAILED
    cluster.log(EventKind.REPLICA_CHANGED, told, of_replica(key), is_warning=is_warning)
    return is_learned


def _was_known(view: ReplicaView | None) -> bool:
    """Whether all of a replica was reported, so that what it became is no mere late knowledge."""
    return view is not None and 0 < view.shard_count <= len(view.shards)


def _tell_deployment(cluster: Cluster, name: DeploymentName, *, is_learned: bool) -> None:
    state = _state(cluster, name)
    before = cluster.deployment_states.get(name)
    if before is not None and before[0] is state:
        return
    cluster.deployment_states[name] = state, None if is_learned else cluster.now
    told = f"{name} is {state}"
    if before is not None:
        told += f" (it was {before[0]})"
    counts = cluster.states_of(name)
    if state is not DeploymentState.READY and counts:
        of_all = counted(sum(counts.values()), "replica")
        told += f": {counts[ReplicaState.READY]} of {of_all} READY"
    is_warning = state in _WORRYING_DEPLOYMENTS and not cluster.is_recovering
    cluster.log(EventKind.DEPLOYMENT_CHANGED, told, Subject(deployment=name), is_warning=is_warning)


def _tell_removal(cluster: Cluster, name: DeploymentName) -> None:
    cluster.deployment_states.pop(name, None)
    cluster.counts.pop(name, None)
    told = f"{name} is gone: nobody wants it and no worker reports it"
    cluster.log(EventKind.DEPLOYMENT_CHANGED, told, Subject(deployment=name))


def _state(cluster: Cluster, name: DeploymentName) -> DeploymentState:
    """Judge a deployment without looking at each of its replicas."""
    desired, counts = cluster.desired.get(name), cluster.states_of(name)
    wanted = counts
    if desired is not None and len(cluster.indexes.get(name, ())) > desired.spec.replicas:
        count = desired.spec.replicas
        wanted = Counter(it.state for it in cluster.replicas(name) if it.key.index < count)
    return deployment_state(
        desired,
        wanted,
        is_any_ready=counts[ReplicaState.READY] > 0,
        is_condemned=cluster.is_condemned(name),
        is_recovering=cluster.is_recovering,
    )
