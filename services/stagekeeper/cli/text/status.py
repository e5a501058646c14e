"""What `stagekeeper status` shows: the supervisor, workers, cards, deployments, replicas, stages.

Decided here: what is worth a column. Not decided here: how a table is drawn. Nothing is asked for:
both lists are answers that the caller has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stagekeeper.cli.text import states
from stagekeeper.cli.text.amounts import seconds, size
from stagekeeper.cli.text.cards import cards_summary, cards_table
from stagekeeper.cli.text.tables import Table, as_rows
from stagekeeper.v1 import deployment_service_pb2 as pb2
from stagekeeper.v1 import types_pb2 as types

AWAITED_SHOWN: Final = 4
"""Names of workers; of more only the number is said."""


@dataclass(frozen=True, slots=True)
class StatusText:
    """`headline` first, then the tables, then `notes`: what a person should know besides."""

    headline: str
    tables: tuple[Table, ...]
    notes: tuple[str, ...]


def status_text(
    endpoint: str, workers: pb2.ListWorkersResponse, deployments: pb2.ListDeploymentsResponse
) -> StatusText:
    """Make the text of a status out of the two lists."""
    mode = states.mode(workers.mode, workers.hold_reason)
    tables = [
        _workers(workers),
        cards_table(workers.workers, deployments.deployments),
        _deployments(deployments),
        _replicas(deployments),
        _stages(deployments),
    ]
    return StatusText(
        headline=f"supervisor {endpoint}  {mode}  epoch {states.epoch(workers.epoch)}",
        tables=tuple(table for table in tables if table.rows),
        notes=_notes(workers, deployments),
    )


def _notes(
    workers: pb2.ListWorkersResponse, deployments: pb2.ListDeploymentsResponse
) -> tuple[str, ...]:
    notes = []
    if not workers.complete or not deployments.complete:
        notes.append(
            "workers that were here before the supervisor's start have not all come back yet: "
            "what is missing may still run"
        )
    if not workers.workers:
        notes.append("no worker has registered: start one with `stagekeeper agent`")
    if not deployments.deployments:
        notes.append("no deployments: `stagekeeper deploy FILE` makes one")
    notes.extend(
        f"stages of {worker.worker_id} end with its agent: "
        f"{worker.outlive_reason or 'it did not say why'}"
        for worker in workers.workers
        if not worker.stages_outlive_agent
    )
    return tuple(notes)


def _workers(response: pb2.ListWorkersResponse) -> Table:
    rows = [
        (
            worker.worker_id,
            states.worker_state(worker.state),
            str(worker.shard_count),
            worker.agent_address or "-",
            "\n".join((cards_summary(worker), *_worker_notes(worker))),
        )
        for worker in response.workers
    ]
    return Table(("WORKER", "STATE", "STAGES", "AGENT", "DEVICES"), as_rows(rows))


def _worker_notes(worker: pb2.Worker) -> list[str]:
    notes = []
    if worker.state != types.WORKER_STATE_ALIVE:
        notes.append(worker.reason or f"silent for {seconds(worker.silent_for_s)}")
    if worker.HasField("agent_reachable") and not worker.agent_reachable:
        notes.append(f"AGENT_UNREACHABLE at {worker.agent_address}: it gets nothing new")
    if not worker.stages_outlive_agent:
        notes.append("stages end with their agent")
    return notes + list(worker.notes)


def _deployments(response: pb2.ListDeploymentsResponse) -> Table:
    rows = []
    for deployment in response.deployments:
        ready = sum(r.state == types.REPLICA_STATE_READY for r in deployment.replicas)
        wanted = (deployment.spec.replicas or 1) if deployment.HasField("spec") else "?"
        rows.append(
            (
                deployment.name,
                states.deployment_state(deployment.state),
                f"{ready}/{wanted}",
                _deployment_note(deployment),
            )
        )
    return Table(("DEPLOYMENT", "STATE", "READY", "WHY"), as_rows(rows))


def _deployment_note(deployment: pb2.Deployment) -> str:
    notes = [own_reason(deployment)]
    if not deployment.HasField("spec"):
        notes.append("found on workers; nobody is known to want it")
    elif not deployment.durable:
        notes.append("not kept on disk")
    return "; ".join(note for note in notes if note)


def own_reason(deployment: pb2.Deployment) -> str:
    """Return a deployment's reason without what its replicas' own rows say in full."""
    reasons = {replica.reason for replica in deployment.replicas if replica.reason}
    if deployment.reason in reasons:
        return "its replicas say why"
    text = deployment.reason
    for reason in sorted(reasons, key=len, reverse=True):
        text = text.replace(f": {reason}", "")
    return text


def awaited_names(workers: pb2.ListWorkersResponse) -> str:
    """Write `a, b, c, d and 2 more`: who was there before the supervisor and is not back."""
    names = [worker.worker_id for worker in workers.workers if not worker.incarnation]
    more = f" and {len(names) - AWAITED_SHOWN} more" if len(names) > AWAITED_SHOWN else ""
    return ", ".join(names[:AWAITED_SHOWN]) + more


def _replicas(response: pb2.ListDeploymentsResponse) -> Table:
    rows = [
        (
            f"{deployment.name}/{replica.replica_index}",
            states.replica_state(replica.state),
            f"{replica.ready_shard_count}/{replica.shard_count}",
            _why_and_next(replica),
        )
        for deployment in response.deployments
        for replica in deployment.replicas
    ]
    return Table(("REPLICA", "STATE", "SHARDS", "WHY, AND WHAT NEXT"), as_rows(rows))


def _why_and_next(replica: pb2.Replica) -> str:
    if replica.next_action in replica.reason:  # nothing, or said already
        return replica.reason
    if replica.reason in replica.next_action:
        return f"next: {replica.next_action}"
    return f"{replica.reason}\nnext: {replica.next_action}".lstrip("\n")


def _stages(response: pb2.ListDeploymentsResponse) -> Table:
    rows = [
        _stage_row(deployment.name, replica.replica_index, shard)
        for deployment in response.deployments
        for replica in deployment.replicas
        for shard in replica.shards
    ]
    header = ("STAGE", "STATE", "WORKER", "PID", "MEMORY", "DEVICES", "ADDRESS", "NOTE")
    return Table(header, as_rows(rows))


def shard_name(record: types.ShardRecord) -> str:
    """Write `thinker`, or `thinker[1]` where a stage has several shards."""
    which = f"[{record.shard_index}]" if record.shard_count > 1 else ""
    return record.stage_name + which


def _stage_row(deployment: str, replica_index: int, shard: pb2.RoutedShard) -> tuple[str, ...]:
    record = shard.record
    return (
        f"{deployment}/{replica_index}/{shard_name(record)}",
        shard_state_text(record),
        shard.worker_id,
        str(record.pid or "-"),
        size(record.memory_bytes) if record.HasField("memory_bytes") else "-",
        ", ".join(claim.device_id for claim in record.devices) or "-",
        ", ".join(address.url for address in record.addresses) or "-",
        _stage_note(shard),
    )


def shard_state_text(record: types.ShardRecord) -> str:
    """Write `READY`, or `STARTING(LOAD)`: in the protocol's words."""
    name = states.shard_state(record.state)
    return f"{name}({states.phase(record.phase)})" if record.phase else name


def _stage_note(shard: pb2.RoutedShard) -> str:
    record = shard.record
    notes = [record.state_reason] if record.state_reason else []
    if record.HasField("busy_for_s"):
        notes.append(f"BUSY: no progress for {seconds(record.busy_for_s)}")
    if shard.worker_state != types.WORKER_STATE_ALIVE:
        notes.append(f"its worker is {states.worker_state(shard.worker_state)}")
    if not record.committed and record.state == types.SHARD_STATE_READY:
        notes.append("not committed yet")
    if progress := progress_text(record):
        notes.append(progress)
    return "; ".join(notes)


def progress_text(record: types.ShardRecord) -> str:
    """Write `42 of 100: reading weights`; empty unless something long is under way."""
    progress = record.progress
    if record.state not in (types.SHARD_STATE_STARTING, types.SHARD_STATE_STALLED):
        return ""
    done = f"{progress.done} of {progress.total}" if progress.total else ""
    return ": ".join(part for part in (done, progress.note) if part)
