"""What an agent can be told, and whether that makes sense together.

Durations are seconds. Times that nest are checked against each other here, once, at the start.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from stagekeeper.agent.cards.device_choice import parse_choice
from stagekeeper.agent.directory import SOCKET_PATH_BYTES, AgentDirectory
from stagekeeper.agent.host_lock import default_lock_dir
from stagekeeper.agent.ports import PortRange
from stagekeeper.core.ids import ClusterName, WorkerId
from stagekeeper.host.proc_launch import PROC_MODULE
from stagekeeper.host.server import check_loopback, split_address
from stagekeeper.runtime.phase_lock import DEFAULT_LIMIT_S
from stagekeeper.runtime.retry import Backoff
from stagekeeper.wire.stable_endpoint import DEFAULT_ENDPOINT

LONGEST_NAME = 63


def default_worker_id() -> WorkerId:
    return WorkerId(socket.gethostname()[:LONGEST_NAME])


def default_state_dir() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "stagekeeper"


class SettingsError(ValueError):
    """Settings that cannot work; `problems` names every one."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """One agent.

    Attributes:
        endpoint: where the supervisor is asked for.
        listen: where this agent serves; port 0 takes one from the system.
        advertise: host, or host:port, at which others reach it; empty is `listen`.
        devices: as `--devices` says them; none at all are the NVIDIA cards, where there are some.
        device_deadline_s: a call of the cards' driver that takes longer makes them unknown.
        device_interval_s: between two readings of the cards.
        pythonpath: folders from which stages import, before the agent's own Python environment.
        allow: patterns of the entrypoints that may be started, and of the classes that may be
            actors: `my_models.*`.
        operation_lease_s: an uncommitted operation that no reign joins for so long is rolled back.
        stop_budget_s: from the request to stop until SIGKILL, for stages that name none.
        rollback_budget_s: the same for stages that never were in service.
        memory_wait_s: how long the driver may take to give back the memory of an ended stage; what
            the stage claimed is free after that, whatever the driver says.
        max_loads: stages of this agent that may be in LOAD at once; None is no limit.
        lock_limit_s: a stage that waits for the phase lock of its cards fails when whoever holds it
            has made no progress for so long.
        max_wait_s: the agent ends if it has found no supervisor by then; None is for ever.
        heartbeat_timeout_s: a heartbeat without an answer for so long has failed.
        register_timeout_s: the same for a registration, beside the time that its bytes need. Half
            a default lease: an answer that is lost costs no lease.
        adopt_wait_s: how long a live stage may take to answer before it is reported as ADOPTING.
        busy_after_s: a call or phase without progress for so long makes a stage BUSY.
        stall_after_s: a stage with work that shows no sign of life for so long is STALLED.
        ports: `FIRST-LAST`, from which command stages get theirs; empty takes a slice that no other
            agent of the host has.
        stage_command: what runs a stage process; the launch file is added.
        proc_module: what a process for actors runs.
    """

    cluster: ClusterName = ClusterName("default")
    worker_id: WorkerId = field(default_factory=default_worker_id)
    endpoint: str = DEFAULT_ENDPOINT
    listen: str = "127.0.0.1:0"
    advertise: str = ""
    state_dir: Path = field(default_factory=default_state_dir)
    lock_dir: Path = field(default_factory=default_lock_dir)
    devices: tuple[str, ...] = ()
    device_deadline_s: float = 3.0
    device_interval_s: float = 5.0
    pythonpath: tuple[Path, ...] = ()
    allow: tuple[str, ...] = ("*",)
    operation_lease_s: float = 60.0
    stop_budget_s: float = 10.0
    rollback_budget_s: float = 3.0
    memory_wait_s: float = 10.0
    max_loads: int | None = None
    lock_limit_s: float = DEFAULT_LIMIT_S
    max_wait_s: float | None = None
    heartbeat_timeout_s: float = 2.0
    register_timeout_s: float = 5.0
    discovery_timeout_s: float = 2.0
    reconnect: Backoff = field(default_factory=Backoff)
    adopt_wait_s: float = 3.0
    busy_after_s: float = 5.0
    stall_after_s: float = 30.0
    insecure: bool = False
    ports: str = ""
    stage_command: tuple[str, ...] = (sys.executable, "-m", "stagekeeper.stage")
    proc_module: str = PROC_MODULE

    @property
    def directory(self) -> AgentDirectory:
        return AgentDirectory(self.state_dir, self.worker_id)

    @property
    def stage_host(self) -> str:
        """Where stages and actors of this agent serve: at the host at which it is reached."""
        address = _with_port(self.advertise) if self.advertise else self.listen
        return address.rpartition(":")[0]  # with its brackets, where it has some

    def advertised(self, bound: str) -> str:
        """Return `host:port` for others, of an agent that listens at `bound`."""
        if not self.advertise:
            return bound
        _, port = split_address(_with_port(self.advertise))
        return f"{self.stage_host}:{port or split_address(bound)[1]}"

    def check(self) -> None:
        """Refuse what cannot work.

        Raises:
            SettingsError: naming every problem at once.
        """
        problems = list(self._problems())
        if problems:
            raise SettingsError(problems)

    def _problems(self) -> Iterator[str]:
        for name, value in (("cluster", self.cluster), ("worker id", self.worker_id)):
            if not 1 <= len(value) <= LONGEST_NAME or not value.isprintable() or "/" in value:
                yield f"{name} {value!r} is not 1 to {LONGEST_NAME} printable characters without /"
        yield from self._address_problems()
        try:
            parse_choice(self.devices)
        except ValueError as error:
            yield str(error)
        if self.ports:
            try:
                PortRange.parse(self.ports)
            except ValueError as error:
                yield f"ports: {error}"
        length = self.directory.longest_socket_bytes
        if length > SOCKET_PATH_BYTES:
            yield (
                f"state dir {self.state_dir} is too long: the sockets in it have {length} bytes, "
                f"and {SOCKET_PATH_BYTES} are allowed; choose a shorter --state-dir"
            )
        for name, seconds in (
            ("operation_lease_s", self.operation_lease_s),
            ("heartbeat_timeout_s", self.heartbeat_timeout_s),
            ("register_timeout_s", self.register_timeout_s),
            ("discovery_timeout_s", self.discovery_timeout_s),
            ("busy_after_s", self.busy_after_s),
            ("device_deadline_s", self.device_deadline_s),
            ("device_interval_s", self.device_interval_s),
            ("lock_limit_s", self.lock_limit_s),
        ):
            if not seconds > 0:
                yield f"{name} {seconds} is not above 0"
        for name, seconds in (
            ("stop_budget_s", self.stop_budget_s),
            ("rollback_budget_s", self.rollback_budget_s),
            ("memory_wait_s", self.memory_wait_s),
            ("adopt_wait_s", self.adopt_wait_s),
            ("max_wait_s", self.max_wait_s or 0.0),
        ):
            if not seconds >= 0:
                yield f"{name} {seconds} is below 0"
        if self.max_loads is not None and self.max_loads < 1:
            yield f"max_loads {self.max_loads} is not 1 or more: nothing could ever start"
        if not self.busy_after_s <= self.stall_after_s:
            yield f"stall_after_s {self.stall_after_s} is below busy_after_s {self.busy_after_s}"

    def _address_problems(self) -> Iterator[str]:
        try:
            split_address(self.endpoint)
        except ValueError as error:
            yield f"endpoint: {error}"
        try:
            check_loopback(self.listen, insecure=self.insecure)
        except ValueError as error:
            yield f"listen: {error}"
            return
        if not self.advertise:
            if split_address(self.listen)[0] in ("0.0.0.0", "::"):
                yield f"listen {self.listen} is every address: say which one others use (advertise)"
            return
        try:
            check_loopback(_with_port(self.advertise), insecure=self.insecure)
        except ValueError as error:
            yield f"advertise: {error}"


def _with_port(advertise: str) -> str:
    """Return `host:port` of a host that may stand alone; port 0 where it does."""
    head, separator, tail = advertise.rpartition(":")
    if separator and tail.isdigit() and not (":" in head and not head.startswith("[")):
        return advertise
    host = f"[{advertise}]" if ":" in advertise and not advertise.startswith("[") else advertise
    return f"{host}:0"
