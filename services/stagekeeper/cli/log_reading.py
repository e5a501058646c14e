"""`logs`: the logs of some or all stages of a deployment.

Decided here: which logs are meant, and that each line says whose it is as soon as there are
several. Not decided here: where a log is (the client asks the agents).

Invariant: a log that is meant and cannot be read is named on stderr, and the verb fails for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from stagekeeper.cli.exits import CliError, ExitCode
from stagekeeper.cli.text.amounts import count
from stagekeeper.cli.text.lines import first_line
from stagekeeper.client import Client, NotFound, StagekeeperError
from stagekeeper.client.view import NoRoute, stage_id_of, stage_names
from stagekeeper.v1.deployment_service_pb2 import Deployment


@dataclass(frozen=True, slots=True)
class LogChoice:
    """Which logs, and how much of each. None means all stages, all replicas."""

    name: str
    stage: str | int | None = None
    replica: int | None = None
    previous: bool = False
    last_lines: int = 100
    follow: bool = False


@dataclass(frozen=True, slots=True)
class _Log:
    replica: int
    stage_id: int
    shard: int
    label: str


class _Found(Enum):
    """What came of one log."""

    SHOWN = auto()
    NOWHERE = auto()
    UNREADABLE = auto()


async def logs_shown(client: Client, choice: LogChoice) -> None:
    """Print the logs that are meant.

    Raises:
        NotFound: there is no such deployment, stage or replica, or nobody has such a log.
        CliError: one of several cannot be read; the others were printed.
        StagekeeperError: the only log that is meant cannot be read.
    """
    logs = _chosen(await client.get(choice.name), choice)
    width = max(len(log.label) for log in logs) if len(logs) > 1 else 0
    if choice.follow:
        # All at once: each goes on for as long as its process lives.
        found = await asyncio.gather(*(_show(client, choice, log, width) for log in logs))
    else:
        found = [await _show(client, choice, log, width) for log in logs]
    unreadable = found.count(_Found.UNREADABLE)
    if unreadable:
        raise CliError(ExitCode.FAILED, f"{unreadable} of {count(len(logs), 'log')} not read")
    if _Found.SHOWN not in found:
        which = "previous log" if choice.previous else "log"
        raise NotFound(
            f"nobody has a {which} of {choice.name!r}",
            next_move="leave --previous out"
            if choice.previous
            else f"`stagekeeper describe {choice.name}` says what became of it",
        )


def _chosen(deployment: Deployment, choice: LogChoice) -> Sequence[_Log]:
    names = stage_names(deployment)
    stage_ids: list[int] = list(range(len(names)))
    if choice.stage is not None:
        stage_id = stage_id_of(deployment, choice.stage)
        if isinstance(stage_id, NoRoute):
            raise NotFound(stage_id.message, reason="STAGE_UNKNOWN")
        stage_ids = [stage_id]
    replicas = {replica.replica_index for replica in deployment.replicas}
    if deployment.HasField("spec"):
        replicas |= set(range(deployment.spec.replicas or 1))
    if choice.replica is not None:
        if replicas and choice.replica not in replicas:
            there = ", ".join(map(str, sorted(replicas)))
            raise NotFound(
                f"{choice.name} has no replica {choice.replica} (there is: {there})",
                reason="STAGE_UNKNOWN",
            )
        replicas = {choice.replica}
    return [
        log
        for replica in sorted(replicas)
        for stage_id in stage_ids
        for log in _logs_of(deployment, replica, stage_id, names[stage_id] if names else "")
    ]


def _logs_of(deployment: Deployment, replica: int, stage_id: int, name: str) -> Iterator[_Log]:
    """Yield one log for each shard; only where there are several does the label say which."""
    shard_count = 1
    if deployment.HasField("spec"):
        shard_count = deployment.spec.stages[stage_id].shard_count or 1
    for view in deployment.replicas:
        for shard in view.shards:
            if shard.record.stage_id == stage_id:
                shard_count = max(shard_count, shard.record.shard_count)
    label = f"{replica}/{name or stage_id}"
    for shard_index in range(shard_count):
        which = f"[{shard_index}]" if shard_count > 1 else ""
        yield _Log(replica, stage_id, shard_index, label + which)


async def _show(client: Client, choice: LogChoice, log: _Log, width: int) -> _Found:
    """Print one log; of several, one that cannot be read is told on stderr."""
    prefix = f"{log.label.ljust(width)} | " if width else ""
    lines = client.stage_log(
        choice.name,
        stage=log.stage_id,
        replica=log.replica,
        shard=log.shard,
        previous=choice.previous,
        last_lines=choice.last_lines,
        follow=choice.follow,
    )
    try:
        async with contextlib.aclosing(lines):
            async for line in lines:
                print(f"{prefix}{line}", flush=choice.follow)
    except NotFound:
        if width and not choice.previous:
            _tell(log, "nobody has a log of it")
        return _Found.NOWHERE
    except StagekeeperError as error:
        if not width:
            error.message = f"{log.label}: {error.message}"
            raise
        _tell(log, first_line(error.message))
        return _Found.UNREADABLE
    return _Found.SHOWN


def _tell(log: _Log, why: str) -> None:
    sys.stdout.flush()
    print(f"{log.label}: {why}", file=sys.stderr, flush=True)
