"""The command lines that a plan would execute, as far as they are settled before a start.

Decided here: for which shards, and what is known of each place beforehand: ports, ids and folders
are not, and stand there as `<port:http>`. Invariant: what is filled in is what the start fills in,
by the same table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from stagekeeper.core.command_stage import CommandPlace, share_of
from stagekeeper.core.ids import DeviceId, ReplicaIndex, StageId, WorkerId
from stagekeeper.core.model import DeploymentSpec, MemoryNeed, StageSpec
from stagekeeper.core.placement import Place, Placing


@dataclass(frozen=True, slots=True)
class PlannedCommand:
    """The command line of one shard."""

    replica_index: ReplicaIndex
    stage_id: StageId
    shard_index: int
    worker_id: WorkerId
    argv: tuple[str, ...]


def planned_commands(
    spec: DeploymentSpec, placing: Placing, hosts: Mapping[WorkerId, str]
) -> Iterator[PlannedCommand]:
    """Yield the command line of every shard of a command stage that has a place.

    Args:
        spec: of the deployment.
        placing: where its replicas go.
        hosts: where each worker's stages are reached, without brackets.
    """
    totals = {(it.worker_id, it.device.device_id): it.device.total_bytes for it in placing.sums}
    for index, places in sorted(placing.places.items()):
        for stage_id, stage in enumerate(spec.stages):
            if stage.command is None:
                continue
            for shard_index, place in enumerate(places[: stage.shard_count]):
                sizes = {
                    device_id: totals.get((place.worker_id, device_id), 0)
                    for device_id in place.devices.values()
                }
                filled = _place(stage, shard_index, place, hosts, sizes, places[0].worker_id)
                argv = [filled.fill(it) for it in stage.command.argv[1:]]
                yield PlannedCommand(
                    index,
                    StageId(stage_id),
                    shard_index,
                    place.worker_id,
                    (stage.command.program, *argv),
                )


def _place(
    stage: StageSpec,
    shard_index: int,
    place: Place,
    hosts: Mapping[WorkerId, str],
    total_bytes: Mapping[DeviceId, int],
    leader: WorkerId,
) -> CommandPlace:
    device_ids = [place.devices[number] for number in stage.devices]
    budgets = [
        (budget_on(stage.memory, total_bytes[device_id]), total_bytes[device_id])
        for device_id in device_ids
        if stage.memory is not None
    ]
    least = min(budgets, default=None)
    utilization = stage.memory.utilization if stage.memory is not None else None
    if utilization is None and least is not None:
        utilization = share_of(*least)
    return CommandPlace(
        host=hosts.get(place.worker_id, "<host>"),
        shard_index=shard_index,
        shard_count=stage.shard_count,
        device_uuids=device_ids,
        utilization=utilization,
        memory_bytes=None if least is None else least[0],
        leader_host=hosts.get(leader),
    )


def budget_on(need: MemoryNeed, total_bytes: int) -> int:
    """Return what a stage may use of a card itself: what is reserved less what lies outside."""
    return need.on_card(total_bytes) - need.reserve_bytes
