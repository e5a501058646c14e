"""What an agent hands to a stage process that it starts, as one file in the process's directory.

The agent writes it before it spawns; the stage process reads it and nothing else. A later agent
reads it again when it adopts the process: it holds all that belongs to one instance, and never
changes.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from stagekeeper.core.command_stage import CommandSpec
from stagekeeper.core.states import Phase
from stagekeeper.runtime.phase_lock import DEFAULT_LIMIT_S

INSTANCE_ENV = "STAGEKEEPER_INSTANCE_ID"
"""Set in a stage process and inherited by all that it starts: how its processes are told apart."""

START_LINE = b"go\n"
"""What the agent writes into the start pipe once the process is on record; its end means exit."""

LAUNCH_FILE = "launch.json"
LOG_FILE = "stage.log"

PHASE_FILE = "phase"
"""Beside the launch file: the phase that the process entered last. For the failure of a process
that ended before any agent had heard of it over the socket, which is otherwise the place to ask."""


class LaunchDevice(msgspec.Struct, frozen=True):
    """A card of the stage: the real device behind one number of the replica's, and its budget."""

    device_id: str
    kind: str
    budget_bytes: int
    total_bytes: int
    reserve_bytes: int = 0
    """Set aside beside the budget, for what lies outside of the model's own accounting."""
    model: str = ""
    lock_domain_id: str = ""
    """The card as all agents of the host name it: its phase lock is taken under that name."""


class LaunchCommand(msgspec.Struct, frozen=True, kw_only=True):
    """The program of a command stage: as its spec describes it, and as it is executed here.

    `has_fixed_bytes`: its memory is stated in bytes, so that it measures nothing.
    """

    spec: CommandSpec
    argv: list[str]
    env: dict[str, str]
    ports: dict[str, int]
    has_fixed_bytes: bool = False


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """One start of one stage process."""

    instance_id: str
    deployment: str
    replica_index: int
    stage_id: int
    stage_name: str
    stage_count: int
    shard_index: int = 0
    shard_count: int = 1
    entrypoint: str = ""
    args_json: str = "{}"
    command: LaunchCommand | None = None
    pythonpath: list[str] = []
    devices: list[LaunchDevice] = []
    max_in_flight: int = 64
    stop_budget_s: float = 10.0
    busy_after_s: float = 5.0
    host: str = "127.0.0.1"
    control_socket: str
    run_dir: str
    cache_dir: str
    lock_dir: str = ""
    """The host's folder for locks; empty where nobody else can be on the cards, as in a test."""
    lock_limit_s: float = DEFAULT_LIMIT_S
    """How long the phase lock is waited for while whoever holds it makes no progress."""
    env_digest: str = ""
    """Of what the spec's `env` says: two starts that differ there may load different things."""
    skips_measure: bool = False
    """A profile that an earlier start measured may stand in for MEASURE."""

    @property
    def lock_domains(self) -> tuple[str, ...]:
        """The cards whose phase lock the stage takes."""
        if not self.lock_dir:
            return ()
        return tuple(device.lock_domain_id or device.device_id for device in self.devices)

    @property
    def reserve_bytes(self) -> int:
        """What is set aside for the stage beside its budget, on the card where it is least."""
        return min((device.reserve_bytes for device in self.devices), default=0)

    @property
    def budget_bytes(self) -> int:
        """What the stage may use on each of its cards, the least of them; 0 without cards."""
        return min((device.budget_bytes for device in self.devices), default=0)


def write_launch(launch: Launch, path: Path) -> None:
    """Write `launch` to `path`; the caller makes it durable."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(launch)))


def note_phase(run_dir: Path, phase: Phase) -> None:
    """Leave word of the phase that begins. Without it the start goes on all the same."""
    try:
        (run_dir / PHASE_FILE).write_text(phase.value)
    except OSError:
        pass


def noted_phase(run_dir: Path) -> Phase | None:
    """Read which phase a process entered last; None when it left no word."""
    try:
        return Phase((run_dir / PHASE_FILE).read_text())
    except (OSError, ValueError):
        return None


def read_launch(path: Path) -> Launch:
    """Read a launch file.

    Raises:
        OSError: it cannot be read.
        msgspec.DecodeError: it is not a launch file.
    """
    return msgspec.json.decode(path.read_bytes(), type=Launch)
