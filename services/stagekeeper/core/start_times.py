"""How long stages took to start before, as the workers' reports have it.

Decided here: which earlier starts count for a stage: its own (the same deployment and stage name),
or else those of the same entrypoint in other deployments. Invariant: nothing is guessed; a stage of
which no start is reported has no time.
"""

from __future__ import annotations

from collections.abc import Iterable

from stagekeeper.core.cluster import Cluster
from stagekeeper.core.ids import DeploymentName, ReplicaKey, StageId
from stagekeeper.core.model import DeploymentSpec, ShardRecord, StageSpec


def start_times_s(cluster: Cluster, spec: DeploymentSpec) -> dict[StageId, float]:
    """Return the longest reported start of each stage, in seconds; unknown ones are left out.

    The longest, since a deployment waits for its slowest replica.
    """
    found: dict[StageId, float] = {}
    own = list(_records(cluster, spec.name))
    for number, stage in enumerate(spec.stages):
        times = list(_times(it for it in own if it.stage_name == stage.name))
        times = times or list(_times(_of_entrypoint(cluster, stage)))
        if times:
            found[StageId(number)] = max(times)
    return found


def _of_entrypoint(cluster: Cluster, stage: StageSpec) -> Iterable[ShardRecord]:
    """Yield the shards of stages that run the same code. Only wishes know which code that is."""
    for name, desired in cluster.desired.items():
        same = {
            StageId(number)
            for number, it in enumerate(desired.spec.stages)
            if it.runs == stage.runs
        }
        if same:
            yield from (it for it in _records(cluster, name) if it.stage_id in same)


def _records(cluster: Cluster, name: DeploymentName) -> Iterable[ShardRecord]:
    for index in cluster.indexes.get(name, ()):
        for records in cluster.claims.get(ReplicaKey(name, index), {}).values():
            yield from records


def _times(records: Iterable[ShardRecord]) -> Iterable[float]:
    for record in records:
        if record.create_time is None or record.ready_time is None:
            continue
        took_s = record.ready_time - record.create_time
        if took_s >= 0:  # wall clocks are set back now and then
            yield took_s
