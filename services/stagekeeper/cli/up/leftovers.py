"""Killing what an orderly end would have stopped: the stages of our own agents, when asked twice.

Decided here: which processes those are: the ones that carry an instance id which an agent of this
state directory has on record. Nothing else is ever signalled.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from stagekeeper.agent.directory import AgentDirectory
from stagekeeper.agent.records import RECORD_FILE
from stagekeeper.core.ids import WorkerId
from stagekeeper.host.process import ProcessHandle, find_members
from stagekeeper.runtime.launch import INSTANCE_ENV

_MOST_ROUNDS: Final = 10
"""What is killed may have started something in the meantime; each round finds less."""


def kill_stages(state_dir: Path, worker_ids: Iterable[str]) -> int:
    """SIGKILL every process of every stage on record; return how many were hit.

    Call it when no agent is left that could start more.
    """
    instance_ids = [
        record.parent.name
        for worker_id in worker_ids
        for record in AgentDirectory(state_dir, WorkerId(worker_id)).stages.glob(f"*/{RECORD_FILE}")
    ]
    hit = 0
    for _ in range(_MOST_ROUNDS):
        found = sum(_kill_instance(instance_id) for instance_id in instance_ids)
        hit += found
        if not found:
            break
    return hit


def _kill_instance(instance_id: str) -> int:
    hit = 0
    for member in find_members(INSTANCE_ENV, instance_id):
        handle = ProcessHandle.open(member)
        if handle is not None:
            hit += handle.send(signal.SIGKILL)
            handle.close()
    return hit
