"""`logs`: the logs of some or all stages of a deployment.

Decided here: which logs are meant, and that each line says whose it is as soon as there are
several. Not decided here: where a log is (the client asks the agents).
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

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
    label: str


async def logs_shown(client: Client, choice: LogChoice) -> None:
    """Print the logs that are meant.

    Raises:
        NotFound: there is no such deployment or stage, or nobody has such a log.
        StagekeeperError: the only log that is meant cannot be read.
    """
    logs = _chosen(await client.get(choice.name), choice)
    width = max(len(log.label) for log in logs) if len(logs) > 1 else 0
    if choice.follow:
        # All at once: each goes on for as long as its process lives.
        found = await asyncio.gather(*(_show(client, choice, log, width) for log in logs))
    else:
        found = [await _show(client, choice, log, width) for log in logs]
    if not any(found):
        which = "previous log" if choice.previous else "log"
        raise NotFound(
            f"nobody has a {which} of {choice.name!r}",
            next_move="leave --previous out" if choice.previous else "deploy it first",
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
        replicas = {choice.replica}
    return [
        _Log(replica, stage_id, f"{replica}/{names[stage_id] if names else stage_id}")
        for replica in sorted(replicas)
        for stage_id in stage_ids
    ]


async def _show(client: Client, choice: LogChoice, log: _Log, width: int) -> bool:
    """Print one log; return whether there was one. Of several, one that fails is only told."""
    prefix = f"{log.label.ljust(width)} | " if width else ""
    lines = client.stage_log(
        choice.name,
        stage=log.stage_id,
        replica=log.replica,
        previous=choice.previous,
        last_lines=choice.last_lines,
        follow=choice.follow,
    )
    try:
        async with contextlib.aclosing(lines):
            async for line in lines:
                print(f"{prefix}{line}", flush=choice.follow)
    except NotFound:
        return False
    except StagekeeperError as error:
        if not width:
            raise
        print(f"stagekeeper: {log.label}: {error.message}", file=sys.stderr)
        return False
    return True
