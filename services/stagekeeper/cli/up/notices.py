"""What `up` says of its children and of what it serves, a line each, on stdout.

Decided here: the words. Others read these lines too (`NAME: ready … pid N`), so they are the same
in a terminal and in a pipe.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from stagekeeper.cli.text import states
from stagekeeper.cli.text.amounts import count, seconds
from stagekeeper.cli.up.child import ChildEvent, Ended, Ready
from stagekeeper.v1 import deployment_service_pb2 as pb2
from stagekeeper.v1 import types_pb2 as types


def child_notice(event: ChildEvent) -> str:
    """Write what happened to a child."""
    if isinstance(event, Ended):
        again = f"starting again in {seconds(event.restart_in_s)}"
        return f"{event.name}: ended ({event.how}); {again}"
    return f"{event.name}: ready {_where(event)}(pid {event.pid}){_adopted(event)}"


def _where(event: Ready) -> str:
    address = event.facts.get("endpoint") or event.facts.get("address")
    return f"at {address} " if address else ""


def _adopted(event: Ready) -> str:
    adopted = int(event.facts.get("adopted", "0") or 0)
    return f", took over {count(adopted, 'running stage')}" if adopted else ""


class DeploymentNotices:
    """Turns watched changes into lines: one when a deployment or replica changes its state.

    A supervisor that has just started shows as missing what its workers have not reported yet, and
    stages serve meanwhile. So what it shows is kept back until it says that no worker is missing,
    and only what is different then is told.
    """

    def __init__(self) -> None:
        self._told: dict[str, str] = {}
        self._is_complete = False
        self._is_first = True
        self._kept_back: dict[str, pb2.WatchDeploymentsResponse] = {}

    def of(self, change: pb2.WatchDeploymentsResponse) -> list[str]:
        """Return the lines that a change is worth; what a snapshot shows first is worth none."""
        if not change.deployment.name:
            return self._said_of_workers(change)
        if change.kind == pb2.CHANGE_KIND_SNAPSHOT:
            self._is_complete = False  # the end of the snapshot says
        if not self._is_complete:
            self._kept_back[change.deployment.name] = change
            return []
        return self._lines(change)

    def _said_of_workers(self, change: pb2.WatchDeploymentsResponse) -> list[str]:
        is_back = change.kind == pb2.CHANGE_KIND_SYNCED and not self._is_first
        self._is_first = False
        self._is_complete = change.complete
        if not change.complete:
            return ["supervisor is back, waiting for workers"] if is_back else []
        kept_back, self._kept_back = self._kept_back, {}
        return [line for kept in kept_back.values() for line in self._lines(kept)]

    def _lines(self, change: pb2.WatchDeploymentsResponse) -> list[str]:
        deployment = change.deployment
        if change.kind == pb2.CHANGE_KIND_REMOVED:
            self._told = {key: word for key, word in self._told.items() if not _is_of(key, change)}
            return [f"{deployment.name}: gone"]
        lines = [
            self._line(
                deployment.name, states.deployment_state(deployment.state), deployment.reason
            )
        ]
        lines += [
            self._line(
                f"{deployment.name}/{replica.replica_index}",
                states.replica_state(replica.state),
                replica.reason,
            )
            for replica in deployment.replicas
        ]
        return [line for line in lines if line]

    def _line(self, key: str, state: str, reason: str) -> str:
        before = self._told.get(key)
        self._told[key] = state
        if before is None or before == state:
            return ""
        return f"{key}: {state}{f' ({reason})' if reason else ''}"


def _is_of(key: str, change: pb2.WatchDeploymentsResponse) -> bool:
    return key.partition("/")[0] == change.deployment.name


def where_state_is(state_dir: Path, logs: Path) -> str:
    """Write where to look, before anything starts."""
    return f"state in {state_dir}, logs of supervisor and agents in {logs}"


def left_running(deployments: Iterable[pb2.Deployment], *, told: Collection[str]) -> list[str]:
    """Write what goes on when `up` has ended, a line a deployment, but for those named in `told`.

    What ended by itself is left out: it is wanted, and nothing of it runs.
    """
    over = (types.SHARD_STATE_FAILED, types.SHARD_STATE_STOPPED)
    lines = []
    for deployment in deployments:
        stages = sum(
            shard.record.state not in over
            for replica in deployment.replicas
            for shard in replica.shards
        )
        if stages and deployment.name not in told:
            lines.append(
                f"left running: {deployment.name} ({count(stages, 'stage')}); the next "
                "`stagekeeper up` with this --state-dir takes them over"
            )
    return lines
