"""Stage processes whose record cannot be read: known by what else lies in their folder.

Without a record nobody can tell what such a process was promised (its generation, whether it is
committed), so an agent leaves it alone, and says so to its operator for as long as it lives.
Decided here: what is still known of one, and what is said. Not decided here: how a damaged file is
told apart (`records`), and how one is stopped (`local_stop`).

Invariant: a damaged record is settled only when no process carries its instance id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stagekeeper.core.ids import DeploymentName, InstanceId, ReplicaIndex, SlotKey, StageId
from stagekeeper.host.process import ProcessIdentity, is_alive, members_by
from stagekeeper.runtime.launch import INSTANCE_ENV, LAUNCH_FILE, LOG_FILE, Launch, read_launch


@dataclass(frozen=True, slots=True)
class DamagedRecord:
    """One that could not be read.

    Attributes:
        path: the file as it was found.
        problem: what is wrong with it.
        launch: what the process was started with; None when that file is damaged as well.
    """

    path: Path
    problem: str
    launch: Launch | None

    @property
    def instance_id(self) -> InstanceId:
        return InstanceId(self.path.parent.name)

    @property
    def log_path(self) -> Path:
        return self.path.with_name(LOG_FILE)

    @property
    def slot(self) -> SlotKey | None:
        it = self.launch
        if it is None:
            return None
        return SlotKey(
            DeploymentName(it.deployment), ReplicaIndex(it.replica_index), StageId(it.stage_id)
        )

    @property
    def name(self) -> str:
        """As `--stop` takes it: `m/0/thinker`; empty when it is not known."""
        it = self.launch
        return f"{it.deployment}/{it.replica_index}/{it.stage_name}" if it else ""

    def __str__(self) -> str:
        return f"{self.name or 'a stage'} ({self.instance_id[:8]})"


def damaged_record(path: Path, problem: str) -> DamagedRecord:
    """Look what is still known of the instance whose record `path` is."""
    try:
        launch = read_launch(path.with_name(LAUNCH_FILE))
    except (OSError, msgspec.DecodeError):
        launch = None
    return DamagedRecord(path, problem, launch)


class DamagedRecords:
    """What an agent does about the damaged records that it found when it started.

    Args:
        settle: forgets one of which no process is left.
        on_change: called when `notes` are others now.
    """

    def __init__(
        self,
        found: Iterable[DamagedRecord],
        settle: Callable[[DamagedRecord], None],
        on_change: Callable[[], None],
    ) -> None:
        self._found = list(found)
        self._settle = settle
        self._on_change = on_change
        self._running: dict[InstanceId, list[ProcessIdentity]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def look(self) -> None:
        """See which processes are left of them; costs next to nothing until one has ended."""
        news = [damaged for damaged in self._found if self._may_have_changed(damaged)]
        if not news:
            return
        # All processes of the host are looked at: what ended may have started others.
        members = members_by(INSTANCE_ENV)
        for damaged in news:
            left = self._running[damaged.instance_id] = members.get(damaged.instance_id, [])
            if not left:
                self._settle(damaged)
        self._on_change()

    def notes(self) -> tuple[str, ...]:
        """Say what the operator should know, a sentence for each of them."""
        return tuple(
            _note(damaged, self._running.get(damaged.instance_id, ())) for damaged in self._found
        )

    def _may_have_changed(self, damaged: DamagedRecord) -> bool:
        known = self._running.get(damaged.instance_id)
        return known is None or not all(map(is_alive, known))


def _note(damaged: DamagedRecord, running: Sequence[ProcessIdentity]) -> str:
    head = f"the record of {damaged} is damaged ({damaged.path.parent})"
    if not running:
        return f"{head}; no process of it is left"
    return (
        f"{head}, so its {pids_text(running)} is left alone, unwatched and in no route: "
        f"{what_to_do(damaged, running)}"
    )


def pids_text(processes: Sequence[ProcessIdentity]) -> str:
    """Write `pid 12`, or `pids 12, 13`."""
    listed = ", ".join(str(process.pid) for process in processes)
    return f"pid {listed}" if len(processes) == 1 else f"pids {listed}"


def what_to_do(damaged: DamagedRecord, running: Sequence[ProcessIdentity]) -> str:
    """Say how its processes are ended."""
    if not running:
        return f"nothing runs of it; {damaged.log_path} has what it wrote"
    kill = f"`kill {' '.join(str(process.pid) for process in running)}`"
    if not damaged.name:
        return f"{kill} ends it"
    return f"{kill} ends it, or `stagekeeper stages --local --stop {damaged.name}` with no agent"
