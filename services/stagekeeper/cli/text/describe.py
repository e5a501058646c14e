"""What `stagekeeper describe` shows of one deployment: how it is, since when, why, and what next.

Decided here: what is worth a line, and that the worst stands first. Not decided here: where a line
is wrapped and what is coloured (`describe_view`). Nothing is asked for: all answers are there.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stagekeeper.cli.text import states
from stagekeeper.cli.text.amounts import count, seconds, size
from stagekeeper.cli.text.failures import LOG_LINES_SHOWN, exit_text
from stagekeeper.cli.text.status import (
    awaited_names,
    own_reason,
    progress_text,
    shard_name,
    shard_state_text,
)
from stagekeeper.cli.text.tables import Table, as_rows
from stagekeeper.cli.text.times import age_text, clock_text, since_text
from stagekeeper.core.planner import init_groups
from stagekeeper.v1 import deployment_service_pb2 as pb2
from stagekeeper.v1 import types_pb2 as types

BEFORE: Final = "since before this supervisor began"
INSTANCE_SHOWN: Final = 8
MOST_READY_SHOWN: Final = 20
"""Replicas; of those that are well, nobody reads more."""

UNBROKEN: Final = "\u00a0"
"""A space at which no line is broken; shown as any other."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What was asked: the deployment, all workers, its failures and its events, newest last."""

    deployment: pb2.Deployment
    workers: pb2.ListWorkersResponse
    failures: Sequence[types.Failure]
    events: Sequence[pb2.Event]


@dataclass(frozen=True, slots=True)
class Said:
    """A sentence below its label; it may be wrapped."""

    label: str
    text: str


@dataclass(frozen=True, slots=True)
class Block:
    """A headline, sentences, a table, and lines that are shown as they are."""

    headline: str
    said: tuple[Said, ...] = ()
    table: Table | None = None
    quoted: tuple[str, ...] = ()


def describe_blocks(answers: Answers, now: float) -> list[Block]:
    """Make the text of a deployment, without its events."""
    deployment = answers.deployment
    blocks, next_of_all = [_head(answers, now)], _next_of_all(deployment.replicas)
    # The worst first: at three in the morning nobody looks for it among those that are well.
    worst_first = sorted(deployment.replicas, key=lambda it: it.state == types.REPLICA_STATE_READY)
    unready = sum(it.state != types.REPLICA_STATE_READY for it in deployment.replicas)
    shown = worst_first[: unready + MOST_READY_SHOWN]
    blocks += [_replica(it, answers.failures, next_of_all, now) for it in shown]
    if len(worst_first) > len(shown):
        blocks.append(Block(f"and {len(worst_first) - len(shown)} more replicas that are READY"))
    workers = _workers(answers)
    if workers.table is not None:
        blocks.append(workers)
    if deployment.HasField("spec"):
        blocks.append(_spec(deployment, now))
    return blocks


# The deployment.


def _head(answers: Answers, now: float) -> Block:
    it = answers.deployment
    headline = f"{it.name}  {states.deployment_state(it.state)}  {_since(it, now)}"
    said = [Said("why", own_reason(it))] if it.reason else []
    if next_action := _next_of_all(it.replicas):
        said.append(Said("next", next_action))
    if not it.HasField("spec"):
        said.append(
            Said(
                "note",
                "it was found on workers, and nobody is known to want it: deploy its spec,"
                f" or `stagekeeper delete {it.name}`",
            )
        )
    elif not it.durable:
        said.append(Said("note", "what is wanted is not kept on disk (--no-store)"))
    if not answers.workers.complete:
        # Whether they held any of it nobody knows.
        names = awaited_names(answers.workers)
        who = f" ({names})" if names else ""
        said.append(
            Said(
                "note",
                "the supervisor began anew, and workers that were there before are still "
                f"awaited{who}: what is missing may run, and nothing is stopped or started",
            )
        )
    return Block(headline, tuple(said))


def _since(message: pb2.Deployment | pb2.Replica, now: float) -> str:
    return since_text(message.state_time, now) if message.HasField("state_time") else BEFORE


def _next_of_all(replicas: Sequence[pb2.Replica]) -> str:
    """Say what happens next where all replicas wait for the same."""
    actions = {it.next_action: it for it in replicas if it.next_action}
    if len(actions) > 1:
        return "see each replica"
    return "".join(_next(it) for it in actions.values())


def _next(replica: pb2.Replica) -> str:
    if not replica.HasField("next_action_in_s"):
        return replica.next_action
    left_s = replica.next_action_in_s
    when = f"in {seconds(left_s)}".replace(" ", UNBROKEN) if left_s > 0 else "now"
    return f"{replica.next_action} ({when})"


# What is wanted.


def _spec(deployment: pb2.Deployment, now: float) -> Block:
    spec = deployment.spec
    facts = [f"revision {deployment.spec_revision}", count(spec.replicas or 1, "replica")]
    if spec.entry:
        facts.append(f"entry {spec.entry}")
    if deployment.HasField("create_time"):
        facts.append(f"wanted since {clock_text(deployment.create_time, now)}")
    said = []
    if spec.model.name:
        words = [spec.model.name, spec.model.version, f"({', '.join(spec.model.abilities)})"]
        said.append(Said("model", " ".join(word for word in words if word not in ("", "()"))))
    if spec.placement.workers or spec.placement.device_pool:
        places = [*spec.placement.workers, *spec.placement.device_pool]
        said.append(Said("only on", ", ".join(places)))
    group_of = _groups(spec)
    rows = [
        (
            str(group_of[stage_id]),
            stage.name,
            ", ".join(map(str, stage.devices)) or "none",
            _need(stage),
            shlex.join(stage.command.argv) or stage.entrypoint,
        )
        for stage_id, stage in enumerate(spec.stages)
    ]
    table = Table(("GROUP", "STAGE", "CARDS", "MEMORY OF EACH", "RUNS"), as_rows(rows))
    return Block(f"spec  {', '.join(facts)}", tuple(said), table)


def _groups(spec: types.DeploymentSpec) -> dict[int, int]:
    """Number the groups of stages that share a card: they start one after another."""
    devices = {stage_id: list(stage.devices) for stage_id, stage in enumerate(spec.stages)}
    groups = init_groups(devices)
    return {stage_id: number for number, group in enumerate(groups, 1) for stage_id in group}


def _need(stage: types.StageSpec) -> str:
    if not stage.HasField("memory"):
        return "-"
    need = stage.memory
    share = f"{need.utilization * 100:g} %"
    text = share if need.WhichOneof("amount") == "utilization" else size(need.bytes)
    return f"{text} + {size(need.reserve_bytes)}" if need.reserve_bytes else text


# Replicas and their stages.


def _replica(
    replica: pb2.Replica, failures: Sequence[types.Failure], next_of_all: str, now: float
) -> Block:
    state = states.replica_state(replica.state)
    shards = f"{replica.ready_shard_count}/{replica.shard_count} shards READY"
    said = []
    if replica.reason:
        said.append(Said("why", replica.reason))
    if replica.next_action and _next(replica) != next_of_all:
        said.append(Said("next", _next(replica)))
    rows = [_stage(shard, replica.reason, now) for shard in replica.shards]
    header = ("STAGE", "STATE", "WORKER", "PID", "UP", "MEMORY", "WHAT ELSE")
    quoted: list[str] = []
    if replica.state != types.REPLICA_STATE_READY:
        quoted = _failure(_last_failure(replica, failures), replica.reason, now)
    return Block(
        f"replica {replica.replica_index}  {state}  {shards}  {_since(replica, now)}",
        tuple(said),
        Table(header, as_rows(rows)) if rows else None,
        tuple(quoted),
    )


def _stage(shard: pb2.RoutedShard, said: str, now: float) -> tuple[str, ...]:
    record = shard.record
    is_up = record.pid and record.HasField("create_time")
    is_heard = shard.worker_state == types.WORKER_STATE_ALIVE
    return (
        shard_name(record),
        shard_state_text(record),
        shard.worker_id + ("" if is_heard else f" {states.worker_state(shard.worker_state)}"),
        str(record.pid or "-"),
        age_text(record.create_time, now) if is_up else "-",
        size(record.memory_bytes) if record.HasField("memory_bytes") else "-",
        "\n".join(line for line in (_trouble(shard, said), _facts(record)) if line),
    )


def _trouble(shard: pb2.RoutedShard, said: str) -> str:
    """Say what is the matter with a stage, and was not said of its replica."""
    record = shard.record
    notes = [record.state_reason] if record.state_reason not in said else []
    if record.HasField("busy_for_s"):
        notes.append(f"BUSY: no progress for {seconds(record.busy_for_s)}")
    if record.state == types.SHARD_STATE_READY and not record.committed:
        notes.append("not committed yet")
    if progress := progress_text(record):
        notes.append(progress)
    return "; ".join(notes)


def _facts(record: types.ShardRecord) -> str:
    facts = [_claim(claim) for claim in record.devices]
    facts += [address.url for address in record.addresses]
    if record.HasField("measured_memory"):
        facts.append(f"measured {_profile(record.measured_memory)}")
    if record.HasField("predicted_memory"):
        facts.append(f"foreseen {_profile(record.predicted_memory)}")
    if record.instance_id:
        facts.append(f"instance {record.instance_id[:INSTANCE_SHOWN]}")
    if record.attempt:
        facts.append(f"attempt {record.attempt}")
    if record.restart_ages_s:
        facts.append(count(len(record.restart_ages_s), "restart"))
    return ", ".join(facts)


def _profile(profile: types.MemoryProfile) -> str:
    """Write `10 GiB weights/14 GiB peak/1 GiB graphs`."""
    parts = [f"{size(profile.weights_bytes)} weights", f"{size(profile.peak_bytes)} peak"]
    if profile.HasField("graph_bytes"):
        parts.append(f"{size(profile.graph_bytes)} graphs")
    return "/".join(parts)


def _claim(claim: types.DeviceClaim) -> str:
    used = f", {size(claim.used_bytes)} used" if claim.HasField("used_bytes") else ""
    return f"{size(claim.reserved_bytes)} of {claim.device_id}{used}"


def _last_failure(replica: pb2.Replica, failures: Sequence[types.Failure]) -> types.Failure | None:
    """Return the failure that a replica's shards name, or its newest; `failures` are newest first.

    What failed before the present shards came up is no news.
    """
    named = {shard.record.failure_id for shard in replica.shards if shard.record.failure_id}
    of_it = [it for it in failures if it.origin.replica_index == replica.replica_index]
    told = [it for it in of_it if it.failure_id in named]
    if not told and replica.state == types.REPLICA_STATE_FAILED:
        told = of_it
    if not told and not replica.shards:
        # Nobody reports it, and the supervisor has judged which failure still says anything.
        told = [it for it in of_it if it.message and it.message in replica.reason]
    return told[0] if told else None


def _failure(failure: types.Failure | None, said: str, now: float) -> list[str]:
    if failure is None:
        return []
    origin = failure.origin
    when = f" at {clock_text(failure.detect_time, now)}" if failure.HasField("detect_time") else ""
    phase = f" in {states.phase(origin.phase)}" if origin.phase else ""
    how = exit_text(failure)
    lines = [
        f"last failure: {origin.stage_name}{phase} on worker {origin.worker_id}{when}"
        + (f" ({how})" if how else ""),
        *([] if failure.message in said else [f"  {failure.message}"]),
    ]
    log = [line for line in failure.last_log_lines if line.strip()][-LOG_LINES_SHOWN:]
    return [*lines, *(f"  | {line}" for line in log)]


# Workers.


def _workers(answers: Answers) -> Block:
    """Show the workers that hold shards of it, and those of which it is known that they did."""
    shown = {shard.worker_id for replica in answers.deployment.replicas for shard in replica.shards}
    if answers.deployment.state != types.DEPLOYMENT_STATE_READY:
        shown |= {failure.origin.worker_id for failure in answers.failures}
        shown |= {event.worker_id for event in answers.events}
    rows = [
        (
            worker.worker_id,
            states.worker_state(worker.state),
            f"{seconds(worker.silent_for_s)} ago" if worker.incarnation else "not yet",
            worker.reason or f"agent at {worker.agent_address}",
        )
        for worker in answers.workers.workers
        if worker.worker_id in shown
    ]
    table = Table(("WORKER", "STATE", "HEARD", "WHY, OR WHERE"), as_rows(rows))
    return Block("workers", table=table if rows else None)
