"""A deployment out of its replicas: one state and one sentence for people.

Decided here: the state of a deployment. Not decided here: the states of replicas (`derive`).

Invariant: composing is a read. It happens when somebody looks, never when a worker reports, so a
report costs nothing for the replicas that it does not name. The state alone follows from how many
replicas are in which state, and those are counted as they change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from stagekeeper.core.commands import Desired
from stagekeeper.core.counted import counted, noun
from stagekeeper.core.ids import DeploymentName
from stagekeeper.core.model import DeploymentView, ReplicaView
from stagekeeper.core.next_action import WAITING
from stagekeeper.core.states import DeploymentState, ReplicaState, WorkerState

REPLICAS_EXPLAINED = 3
WORKERS_SHOWN = 3


def compose_deployment(
    name: DeploymentName,
    desired: Desired | None,
    replicas: Sequence[ReplicaView],
    *,
    is_condemned: bool,
    is_recovering: bool,
    durable: bool,
    since: float | None = None,
) -> DeploymentView:
    """Compose one deployment.

    Args:
        name: its name.
        desired: what is wanted; None when only workers know of it.
        replicas: ascending by index; wanted ones that nobody reports included.
        is_condemned: it was deleted, and workers still report shards of it.
        is_recovering: workers that were there before are still waited for.
        durable: what is wanted survives this process.
        since: when it came into its state; None when it was in it before this reign.
    """
    wanted = _wanted(desired, replicas)
    state = deployment_state(
        desired,
        Counter(it.state for it in wanted),
        is_any_ready=any(it.state is ReplicaState.READY for it in replicas),
        is_condemned=is_condemned,
        is_recovering=is_recovering,
    )
    reason = ""
    if state is DeploymentState.DELETING:
        reason = _still_there(replicas, is_recovering)
    elif state is not DeploymentState.READY:
        ready = sum(it.state is ReplicaState.READY for it in wanted)
        reason = f"{ready} of {counted(len(wanted), 'replica')} READY: {_explanation(wanted)}"
    return DeploymentView(
        name=name,
        state=state,
        reason=reason,
        spec=desired.spec if desired is not None else None,
        spec_revision=_spec_revision(desired, replicas),
        replicas=tuple(replicas),
        durable=durable and (desired is not None or is_condemned),
        create_time=desired.create_time if desired is not None else None,
        since=since,
    )


def _spec_revision(desired: Desired | None, replicas: Sequence[ReplicaView]) -> int:
    if desired is not None:
        return desired.spec_revision
    reported = (shard.record.spec_revision for replica in replicas for shard in replica.shards)
    return max(reported, default=0)


def deployment_state(
    desired: Desired | None,
    wanted: Mapping[ReplicaState, int],
    *,
    is_any_ready: bool,
    is_condemned: bool,
    is_recovering: bool,
) -> DeploymentState:
    """Judge a deployment by its replicas.

    Args:
        desired: what is wanted; None when only workers know of it.
        wanted: how many of the replicas that count are in which state.
        is_any_ready: some replica is READY, be it one that does not count.
        is_condemned: it was deleted, and workers still report shards of it.
        is_recovering: workers that were there before are still waited for.
    """
    if is_condemned or (desired is not None and desired.is_deleting):
        return DeploymentState.DELETING
    count, ready = sum(wanted.values()), wanted.get(ReplicaState.READY, 0)
    if ready == count:
        return DeploymentState.READY
    is_creating = desired is not None and desired.is_creating
    if wanted.get(ReplicaState.STARTING) and (not ready or is_creating):
        return DeploymentState.CREATING
    # While workers are waited for, what is missing is late, and nothing has failed yet.
    is_late = is_recovering and wanted.get(ReplicaState.FAILED, 0) < count
    return DeploymentState.DEGRADED if is_late or is_any_ready else DeploymentState.FAILED


def _still_there(replicas: Sequence[ReplicaView], is_recovering: bool) -> str:
    """Say what a deletion waits for."""
    shards = [shard for replica in replicas for shard in replica.shards]
    silent = sorted(
        {
            f"{shard.worker_id} ({shard.worker_state})"
            for shard in shards
            if shard.worker_state is not WorkerState.ALIVE
        }
    )
    count = len(shards)
    reason = f"{counted(count, 'shard')} of it {noun(count, 'is', 'are')} still to be stopped"
    if silent:
        more = f" and {len(silent) - WORKERS_SHOWN} more" if len(silent) > WORKERS_SHOWN else ""
        reason += f"; workers that are not heard: {', '.join(silent[:WORKERS_SHOWN])}{more}"
    return f"{reason}; {WAITING}" if is_recovering else reason


def _wanted(desired: Desired | None, replicas: Sequence[ReplicaView]) -> list[ReplicaView]:
    """Return the replicas that count: those wanted, or all where nobody is known to want any."""
    if desired is None:
        return list(replicas)
    return [replica for replica in replicas if replica.key.index < desired.spec.replicas]


def _explanation(wanted: Sequence[ReplicaView]) -> str:
    unready = [it for it in wanted if it.state is not ReplicaState.READY]
    unready.sort(key=lambda it: it.state is not ReplicaState.FAILED)
    told = [f"replica {it.key.index} {it.state}: {it.reason}" for it in unready]
    more = len(told) - REPLICAS_EXPLAINED
    shown = " | ".join(told[:REPLICAS_EXPLAINED])
    return f"{shown} | and {more} more" if more > 0 else shown
