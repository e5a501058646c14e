"""Which workers may take new replicas, and what of their cards is spoken for.

Decided here: who is a candidate, and the ledger (claims as reported, starts of this reign that are
not reported yet). Not decided here: who is chosen (`placement`).

Invariant: a byte that somebody holds, or was promised, counts; when in doubt it counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from stagekeeper.core.cluster import Cluster
from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.ids import DeploymentName, DeviceId, OperationId, ReplicaKey, StageId
from stagekeeper.core.model import DeploymentSpec, Device
from stagekeeper.core.placement import Account, Card, Offer
from stagekeeper.core.planner import Holding
from stagekeeper.core.states import ShardState, WorkerState
from stagekeeper.core.workers import Worker

RETRY_AFTER_S = 1.0
UNFIT_SHOWN = 4

HOLDING_NOTHING = frozenset({ShardState.STOPPED, ShardState.FAILED})
"""States in which no process exists, so no memory is held."""


def fit_workers(cluster: Cluster, spec: DeploymentSpec) -> list[Worker]:
    """Return the workers that may take a replica now.

    Raises:
        Refused: there is none; the message says why each is not.
    """
    fit: list[Worker] = []
    unfit: list[str] = []
    is_registering = False
    for worker in cluster.workers.values():
        if worker.epoch is not cluster.epoch:
            is_registering = True
            unfit.append(f"{worker.worker_id} has yet to register with this reign")
        elif why := _unfitness(worker, spec):
            unfit.append(f"{worker.worker_id} {why}")
        else:
            fit.append(worker)
    if fit:
        return fit
    if is_registering:
        raise Refused(
            Reason.SUPERVISOR_RECOVERING,
            f"no worker can take {spec.name} yet: {_listed(unfit)}",
            retry_after_s=RETRY_AFTER_S,
        )
    if not unfit:
        why = "no worker is registered: start an agent (stagekeeper agent), then deploy again"
    else:
        why = f"no worker can take it: {_listed(unfit)}"
    raise Refused(Reason.ADMISSION_REFUSED, f"{spec.name} cannot start: {why}")


def _unfitness(worker: Worker, spec: DeploymentSpec) -> str:
    if spec.placement.workers and worker.worker_id not in spec.placement.workers:
        return "is not among placement.workers"
    if worker.state is not WorkerState.ALIVE:
        return f"is {worker.state}"
    if worker.is_reachable is False:
        return f"is AGENT_UNREACHABLE at {worker.report.agent_address}"
    if worker.report.inventory_unknown:
        return "could not read its devices"
    return ""


def _listed(unfit: list[str]) -> str:
    more = len(unfit) - UNFIT_SHOWN
    listed = "; ".join(unfit[:UNFIT_SHOWN])
    return f"{listed}; and {more} more" if more > 0 else listed


def build_offers(
    cluster: Cluster,
    spec: DeploymentSpec,
    candidates: Iterable[Worker],
    restarting: Collection[ReplicaKey],
) -> list[Offer]:
    """Open the accounts of all cards and offer those of `candidates` that the spec may use.

    A card of 0 bytes is one whose driver could not tell: nothing new goes there.
    `restarting` are replicas that are stopped before they start: what they hold is free by then,
    where it can be stopped.
    """
    accounts = _accounts(cluster, restarting)
    pool = spec.placement.device_pool
    offers = []
    for worker in candidates:
        cards = [
            Card(device, accounts.setdefault(_card_key(worker, device), Account()))
            for device in worker.checked.devices
            if device.total_bytes > 0 and (not pool or device.device_id in pool)
        ]
        count = _replica_count(cluster, worker, spec.name, restarting)
        offers.append(Offer(worker.worker_id, cards, count))
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
        for holding in (*_claimed(worker, restarting), *_promised(cluster, worker, devices)):
            device = devices.get(DeviceId(str(holding.device_id)))
            if device is not None:
                account = accounts.setdefault(_card_key(worker, device), Account())
                account.hold(holding)
    return accounts


def _claimed(worker: Worker, restarting: Collection[ReplicaKey]) -> Iterable[Holding]:
    """Yield what a worker's shards hold, by its own word."""
    for record in worker.shards:
        if record.state in HOLDING_NOTHING:
            continue
        if record.replica in restarting and worker.takes_commands:
            continue
        holder = f"{record.replica} stage {record.stage_id}"
        for claim in record.devices:
            yield Holding(claim.device_id, holder, claim.reserved_bytes)


def _promised(
    cluster: Cluster, worker: Worker, devices: dict[DeviceId, Device]
) -> Iterable[Holding]:
    """Yield what starts of this reign will hold that the worker does not report yet."""
    operations = cluster.operations.of_worker(worker.worker_id)
    if not operations:
        return
    reported: set[tuple[OperationId, StageId]] = {
        (record.operation_id, record.stage_id) for record in worker.shards if record.devices
    }
    for operation in operations:
        plan = operation.plan
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
    replicas.update(it.plan.replica for it in operations if it.plan.deployment == name)
    return len(replicas.difference(restarting))
