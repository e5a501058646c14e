"""Which workers may take new replicas, and what of their cards is spoken for.

Decided here: who is a candidate, and the ledger (claims as reported, starts of this reign that are
not reported yet, and what others were measured to hold). Not decided here: who is chosen
(`placement`); what is free by the driver at that moment (the agent, at RESERVE).

Invariant: a byte that somebody holds, or was promised, counts; when in doubt it counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from stagekeeper.core.cluster import Cluster
from stagekeeper.core.errors import Reason
from stagekeeper.core.ids import (
    DeploymentName,
    DeviceId,
    OperationId,
    ReplicaKey,
    StageId,
    WorkerId,
)
from stagekeeper.core.model import DeploymentSpec, Device
from stagekeeper.core.names import cut
from stagekeeper.core.placement import Account, Card, Offer
from stagekeeper.core.planner import Holding
from stagekeeper.core.states import ShardState, WorkerState
from stagekeeper.core.workers import Worker

HOLDING_NOTHING = frozenset({ShardState.STOPPED, ShardState.FAILED})
"""States in which no process exists, so no memory is held."""


@dataclass(frozen=True, slots=True)
class UnfitWorker:
    """A worker that may take nothing now; `why` ends a sentence that begins with its id."""

    worker_id: WorkerId
    reason: Reason
    why: str


def judge_workers(cluster: Cluster, spec: DeploymentSpec) -> tuple[list[Worker], list[UnfitWorker]]:
    """Tell the workers that may take a replica now from those that may not."""
    fit: list[Worker] = []
    unfit: list[UnfitWorker] = []
    for worker in cluster.workers.values():
        found = _unfitness(cluster, worker, spec)
        if found is None:
            fit.append(worker)
        else:
            unfit.append(UnfitWorker(worker.worker_id, *found))
    return fit, unfit


def _unfitness(cluster: Cluster, worker: Worker, spec: DeploymentSpec) -> tuple[Reason, str] | None:
    refused = Reason.ADMISSION_REFUSED
    if worker.epoch is not cluster.epoch:
        return Reason.SUPERVISOR_RECOVERING, "has yet to register with this reign"
    if spec.placement.workers and worker.worker_id not in spec.placement.workers:
        return refused, "is not among placement.workers"
    if worker.state is not WorkerState.ALIVE:
        return refused, f"is {worker.state}"
    if worker.is_reachable is False:
        where = worker.report.agent_address
        return Reason.AGENT_UNREACHABLE, f"is AGENT_UNREACHABLE at {where}"
    if worker.report.inventory_unknown:
        why = cut(worker.report.inventory_reason)
        return refused, f"could not read its devices{why and f': {why}'}"
    return None


def build_offers(
    cluster: Cluster,
    spec: DeploymentSpec,
    candidates: Iterable[Worker],
    restarting: Collection[ReplicaKey],
) -> list[Offer]:
    """Open the accounts of all cards and offer those of `candidates` that the spec may use.

    A card of 0 bytes is one whose driver could not tell: nothing new goes there, nor on a sick one.
    `restarting` are replicas that are gone before anything starts: what they hold is free by then,
    where it can be stopped.
    """
    accounts = _accounts(cluster, restarting)
    pool = spec.placement.device_pool
    offers = []
    for worker in candidates:
        allowed = [it for it in worker.checked.devices if not pool or it.device_id in pool]
        cards = [
            Card(device, accounts.setdefault(_card_key(worker, device), Account()))
            for device in allowed
            if device.total_bytes > 0 and not device.sick_reason
        ]
        count = _replica_count(cluster, worker, spec.name, restarting)
        sick = [it for it in allowed if it.sick_reason]
        offers.append(Offer(worker.worker_id, cards, count, sick))
    return offers


_CardKey = tuple[str, str]


def _card_key(worker: Worker, device: Device) -> _CardKey:
    """Identify a card: two agents with one lock domain see the same one."""
    if device.lock_domain_id:
        return "", device.lock_domain_id
    return worker.worker_id, device.device_id


def _accounts(cluster: Cluster, restarting: Collection[ReplicaKey]) -> dict[_CardKey, Account]:
    accounts: dict[_CardKey, Account] = {}
    for worker in cluster.workers.values():
        devices = {device.device_id: device for device in worker.checked.devices}
        promised = _promised(cluster, worker, devices, restarting)
        for holding in (*_claimed(worker, restarting), *promised):
            device = devices.get(DeviceId(str(holding.device_id)))
            if device is not None:
                account = accounts.setdefault(_card_key(worker, device), Account())
                account.hold(holding)
    for key, holdings in _foreign(cluster).items():
        account = accounts.setdefault(key, Account())
        for holding in holdings:
            account.hold(holding)
    return accounts


def _foreign(cluster: Cluster) -> dict[_CardKey, list[Holding]]:
    """Return what is held of each card that no claim of a known worker covers.

    Strangers on a card are those of the living worker that sees most of them: two that share it see
    the same ones. What a stage uses beyond its claim only its own worker sees. A stage of a worker
    that has reported counts by its own claim.
    """
    beyond: dict[_CardKey, list[Holding]] = {}
    strangers: dict[_CardKey, list[Holding]] = {}
    for worker in cluster.workers.values():
        for device in worker.checked.devices:
            if not device.foreign:
                continue
            key, seen = _card_key(worker, device), list[Holding]()
            for it in device.foreign:
                holding = Holding(device.device_id, str(it), it.memory_bytes)
                if it.worker_id == worker.worker_id:
                    beyond.setdefault(key, []).append(holding)
                elif it.worker_id not in cluster.workers:
                    seen.append(holding)
            if worker.state is WorkerState.ALIVE and _sum(seen) > _sum(strangers.get(key, ())):
                strangers[key] = seen
    return {
        key: [*beyond.get(key, ()), *strangers.get(key, ())]
        for key in dict.fromkeys((*beyond, *strangers))
    }


def _sum(holdings: Iterable[Holding]) -> int:
    return sum(it.memory_bytes for it in holdings)


def _claimed(worker: Worker, restarting: Collection[ReplicaKey]) -> Iterable[Holding]:
    """Yield what a worker's shards hold, by its own word."""
    names = {key.deployment for key in restarting} if worker.takes_commands else ()
    for record in worker.shards:
        if not record.devices or record.state in HOLDING_NOTHING:
            continue
        if record.deployment in names and record.replica in restarting:
            continue
        holder = f"{record.replica} stage {record.stage_id}"
        for claim in record.devices:
            yield Holding(claim.device_id, holder, claim.reserved_bytes)


def _promised(
    cluster: Cluster,
    worker: Worker,
    devices: dict[DeviceId, Device],
    restarting: Collection[ReplicaKey],
) -> Iterable[Holding]:
    """Yield what starts of this reign will hold that the worker does not report yet."""
    operations = cluster.operations.of_worker(worker.worker_id)
    if not operations:
        return
    reported: set[tuple[OperationId, StageId]] = {
        (record.operation_id, record.stage_id) for record in worker.shards if record.devices
    }
    for operation in operations:
        plan = operation.start.part_of(worker.worker_id)
        if plan.replica in restarting and worker.takes_commands:
            continue
        for stage in plan.stages:
            need = stage.spec.memory
            if need is None or (plan.operation_id, stage.stage_id) in reported:
                continue
            holder = f"{plan.replica} stage {stage.stage_id} (starting)"
            for device_id in stage.device_ids:
                if device_id in devices:
                    total_bytes = devices[device_id].total_bytes
                    yield Holding(device_id, holder, need.on_card(total_bytes))


def _replica_count(
    cluster: Cluster, worker: Worker, name: DeploymentName, restarting: Collection[ReplicaKey]
) -> int:
    """Count the replicas of a deployment that lie or start on a worker."""
    replicas = {record.replica for record in worker.shards if record.deployment == name}
    operations = cluster.operations.of_worker(worker.worker_id)
    replicas.update(it.start.replica for it in operations if it.start.replica.deployment == name)
    return len(replicas.difference(restarting))
