"""What `stagekeeper stages --local` shows, for people and for programs.

Decided here: what is worth a column, and the keys of the JSON (each listed in docs/cli.md; keys are
added, never renamed or removed). Not decided here: what is read (`agent.local_stages`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagekeeper.agent.damaged import pids_text, what_to_do
from stagekeeper.agent.local_stages import LocalDamaged, LocalStage, LocalState, LocalWorker
from stagekeeper.cli.text.amounts import count, seconds, size
from stagekeeper.cli.text.tables import Table, as_rows
from stagekeeper.core.model import ShardRecord

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LocalText:
    """`headlines` first, then the tables, then `notes`: what a person should know besides."""

    headlines: tuple[str, ...]
    tables: tuple[Table, ...]
    notes: tuple[str, ...]


def local_text(state_dir: Path, workers: Sequence[LocalWorker]) -> LocalText:
    """Make the text of a list."""
    if not workers:
        return LocalText((f"no agent has kept anything in {state_dir}",), (), ())
    stage_count = sum(len(worker.stages) for worker in workers)
    return LocalText(
        headlines=(
            f"state directory {state_dir}  {count(stage_count, 'stage')}",
            *(f"worker {worker.worker_id}: {_agent(worker)}" for worker in workers),
        ),
        tables=tuple(table for table in (_stages(workers), _damaged(workers)) if table.rows),
        notes=tuple(_notes(workers)),
    )


def shard_name(shard: ShardRecord) -> str:
    """Write `m/0/thinker`, or `m/0/thinker[1]` where a stage has several shards."""
    name = f"{shard.deployment}/{shard.replica_index}/{shard.stage_name}"
    return f"{name}[{shard.shard_index}]" if shard.shard_count > 1 else name


def agent_text(worker: LocalWorker) -> str:
    """Write `its agent runs (pid 12)`."""
    return f"its agent runs (pid {worker.agent_pid})" if worker.agent_pid else "its agent runs"


def _agent(worker: LocalWorker) -> str:
    return "no agent runs" if worker.agent_pid is None else agent_text(worker)


def _stages(workers: Sequence[LocalWorker]) -> Table:
    rows = [
        (
            shard_name(stage.shard),
            stage.state,
            worker.worker_id,
            str(stage.process.pid) if stage.process is not None else "-",
            stage.shard.instance_id[:8],
            seconds(stage.age_s) if stage.age_s is not None else "-",
            size(stage.memory_bytes) if stage.memory_bytes is not None else "-",
            ", ".join(address.url for address in stage.shard.addresses) or "-",
            str(stage.log_path),
        )
        for worker in workers
        for stage in worker.stages
    ]
    header = ("STAGE", "STATE", "WORKER", "PID", "INSTANCE", "AGE", "MEMORY", "ADDRESS", "LOG")
    return Table(header, as_rows(rows))


def _damaged(workers: Sequence[LocalWorker]) -> Table:
    rows = [
        (
            it.record.name or "?",
            worker.worker_id,
            it.record.instance_id[:8],
            ", ".join(str(process.pid) for process in it.processes) or "-",
            f"{it.record.path}: {it.record.problem}\n{what_to_do(it.record, it.processes)}",
        )
        for worker in workers
        for it in worker.damaged
    ]
    header = ("DAMAGED RECORD", "WORKER", "INSTANCE", "PIDS", "WHAT, AND WHAT TO DO")
    return Table(header, as_rows(rows))


def _notes(workers: Sequence[LocalWorker]) -> Iterator[str]:
    for worker in workers:
        for stage in worker.stages:
            if stage.process is None and stage.others:
                yield (
                    f"{shard_name(stage.shard)} ({stage.shard.instance_id[:8]}): its main process "
                    f"is gone, {pids_text(stage.others)} of it is left"
                )
    if any(worker.agent_pid is not None and worker.stages for worker in workers):
        yield (
            "where an agent runs, `stagekeeper status` shows more and `stagekeeper delete NAME` "
            "stops; --stop and --stop-all are for workers without one"
        )
    if any(worker.agent_pid is None and worker.stages for worker in workers):
        yield (
            "the next agent of the same worker id and state directory takes over what runs; --stop "
            "NAME[/REPLICA[/STAGE]] or --stop-all stops it without one"
        )


def local_json(state_dir: Path, workers: Sequence[LocalWorker]) -> Json:
    """Make the document of a list."""
    return {
        "state_dir": str(state_dir),
        "workers": [
            {
                "worker_id": worker.worker_id,
                "agent_running": worker.agent_pid is not None,
                "agent_pid": worker.agent_pid or None,
                "stages": [_stage_json(stage) for stage in worker.stages],
                "damaged": [_damaged_json(it) for it in worker.damaged],
            }
            for worker in workers
        ],
    }


def shard_json(shard: ShardRecord) -> Json:
    """Name a shard."""
    return {
        "deployment": shard.deployment,
        "replica_index": shard.replica_index,
        "stage_id": shard.stage_id,
        "stage": shard.stage_name,
        "shard_index": shard.shard_index,
        "instance_id": shard.instance_id,
    }


def _stage_json(stage: LocalStage) -> Json:
    shard = stage.shard
    return {
        **shard_json(shard),
        "state": stage.state.value,
        "alive": stage.state is not LocalState.GONE,
        "pid": stage.process.pid if stage.process is not None else None,
        "other_pids": [process.pid for process in stage.others],
        "age_s": stage.age_s,
        "memory_bytes": stage.memory_bytes,
        "addresses": [{"name": address.name, "url": address.url} for address in shard.addresses],
        "devices": [
            {"device_id": claim.device_id, "reserved_bytes": claim.reserved_bytes}
            for claim in shard.devices
        ],
        "log_path": str(stage.log_path),
    }


def _damaged_json(it: LocalDamaged) -> Json:
    launch = it.record.launch
    return {
        "instance_id": it.record.instance_id,
        "deployment": launch.deployment if launch else None,
        "replica_index": launch.replica_index if launch else None,
        "stage": launch.stage_name if launch else None,
        "pids": [process.pid for process in it.processes],
        "record": str(it.record.path),
        "problem": it.record.problem,
        "what_to_do": what_to_do(it.record, it.processes),
        "log_path": str(it.record.log_path),
    }
