"""What is on disk about each stage process: enough for another agent to take it over.

A record is written as an intent before its process exists, and is removed only when all that
belonged to the process is proven gone. A removed record leaves its log behind for a while: the last
two instances of a slot keep theirs.

Invariant: a process that an agent let go is on record with its pid and ticks.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

import msgspec
import structlog

from stagekeeper.agent.damaged import DamagedRecord, damaged_record
from stagekeeper.agent.directory import AgentDirectory
from stagekeeper.agent.durable_file import rename_durably, sync_folder, write_durably
from stagekeeper.core.command_stage import PortLease
from stagekeeper.core.ids import Generation, InstanceId, SlotKey
from stagekeeper.core.model import Peer, ShardRecord
from stagekeeper.core.states import Phase
from stagekeeper.host.process import ProcessHandle, ProcessIdentity, environment_holds
from stagekeeper.runtime.launch import (
    INSTANCE_ENV,
    LAUNCH_FILE,
    LOG_FILE,
    Launch,
    noted_phase,
    write_launch,
)

_log = structlog.get_logger(__name__)

RECORD_FILE: Final = "record.json"
ENDED_FILE: Final = "ended.json"
DAMAGED_FILE: Final = "record.damaged"
KEPT_LOGS_PER_SLOT: Final = 2
KEPT_LOGS: Final = 64


class StageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One stage process as the disk knows it.

    Attributes:
        incarnation: the life of the agent that wrote it last.
        boot_id: of the host when the process was started; after another boot it is gone.
        pid, start_ticks: 0 as long as there is only the intent.
        shard: what is reported of it; the state is the last that had to survive (STARTING, READY,
            STOPPING, FAILED), phases and figures are not kept here.
        peers: the shards of its replica on other workers, as the last COMMIT named them.
        ports: leased for it, until it is gone.
        control_socket: where it was told to listen; `RecordStore.socket` says where that is now.
    """

    incarnation: int
    boot_id: str
    shard: ShardRecord
    control_socket: str
    stop_budget_s: float
    pid: int = 0
    start_ticks: int = 0
    peers: tuple[Peer, ...] = ()
    ports: tuple[PortLease, ...] = ()

    @property
    def instance_id(self) -> InstanceId:
        return self.shard.instance_id

    @property
    def process(self) -> ProcessIdentity | None:
        """The main process; None for an intent."""
        return ProcessIdentity(self.pid, self.start_ticks) if self.pid else None


class EndedInstance(msgspec.Struct, frozen=True):
    """An instance of which only the log is left."""

    slot: SlotKey
    instance_id: InstanceId
    order: tuple[int, str, int, int]


class RecordStore:
    """The stage records of one agent, and the logs of the instances that have ended.

    Attributes:
        damaged: what `load` could not read.
    """

    def __init__(self, directory: AgentDirectory) -> None:
        self._directory = directory
        self.damaged: list[DamagedRecord] = []
        self._live: dict[InstanceId, StageRecord] = {}
        self._ended: dict[InstanceId, EndedInstance] = {}

    def load(self) -> list[StageRecord]:
        """Read every record. One that cannot be read is set aside alone, and told."""
        for folder in sorted(self._directory.stages.iterdir()):
            if not folder.is_dir():
                _log.warning("what is no folder of a stage is left alone", path=str(folder))
                continue
            record = _read_or_set_aside(folder)
            if record is not None:
                self._live[record.instance_id] = record
            ended = _read_ended(folder)
            if ended is not None and record is None:
                self._ended[ended.instance_id] = ended
            damaged = damaged_in(folder)
            if damaged is not None:
                self.damaged.append(damaged)
            elif record is None and ended is None:
                # Its agent died before the intent was written, so nothing was ever started.
                shutil.rmtree(folder, ignore_errors=True)
        return list(self._live.values())

    def prepare(self, record: StageRecord, launch: Launch) -> Path:
        """Write an intent and the launch file; return the path of the launch file."""
        folder = self._directory.run_dir(record.instance_id)
        folder.mkdir(mode=0o700)
        sync_folder(folder.parent)
        launch_path = folder / LAUNCH_FILE
        write_launch(launch, launch_path)
        self.write(record)
        self._prune(record.shard.slot)
        return launch_path

    def write(self, record: StageRecord) -> None:
        """Replace a record; it is on disk when this returns."""
        path = self._directory.run_dir(record.instance_id) / RECORD_FILE
        write_durably(path, msgspec.json.format(msgspec.json.encode(record)))
        self._live[record.instance_id] = record

    def end(self, record: StageRecord) -> None:
        """Forget a process that is proven gone, and keep its log for a while."""
        folder = self._directory.run_dir(record.instance_id)
        ended = _ended_of(record)
        write_durably(folder / ENDED_FILE, msgspec.json.encode(ended))
        rename_durably(folder / RECORD_FILE, folder / "record.ended")
        self._live.pop(record.instance_id, None)
        self._ended[ended.instance_id] = ended
        self.socket(record.instance_id).unlink(missing_ok=True)
        self._prune(ended.slot)

    def end_damaged(self, damaged: DamagedRecord) -> None:
        """Forget a damaged record of which no process is left; its log is kept if it is a slot's.

        Of a folder in which nothing can be read nothing is known, and it is left as it is.
        """
        slot = damaged.slot
        if slot is None:
            return
        # Its generation is not known: the first to make room for another.
        ended = EndedInstance(slot, damaged.instance_id, (0, "", 0, 0))
        write_durably(damaged.path.with_name(ENDED_FILE), msgspec.json.encode(ended))
        self._ended[ended.instance_id] = ended
        self._prune(slot)

    def log_path(self, instance_id: InstanceId) -> Path:
        return self._directory.run_dir(instance_id) / LOG_FILE

    def socket(self, instance_id: InstanceId) -> Path:
        """Where a stage process listens: below the state directory as it is named now, since a
        folder that was moved takes its sockets along."""
        return self._directory.socket(instance_id)

    def noted_phase(self, instance_id: InstanceId) -> Phase | None:
        """Return the phase that a process entered last, by its own word; None without one."""
        return noted_phase(self._directory.run_dir(instance_id))

    def instances_of(self, slot: SlotKey) -> list[InstanceId]:
        """Return the instances of a slot that have a log, the newest first."""
        known = sorted(self._known_of(slot), key=lambda it: it.order, reverse=True)
        return [it.instance_id for it in known]

    def next_attempt(self, slot: SlotKey, generation: Generation) -> int:
        """Return the number of the next start of a slot in a generation, from 0."""
        epoch = generation.epoch
        made = [
            attempt
            for number, supervisor_id, n, attempt in (it.order for it in self._known_of(slot))
            if (number, supervisor_id, n) == (epoch.number, epoch.supervisor_id, generation.n)
        ]
        return max(made, default=-1) + 1

    def has_spoken(self, instance_id: InstanceId) -> bool:
        """Whether a process has written a word to its log: it was let go then, and came to run."""
        try:
            return self.log_path(instance_id).stat().st_size > 0
        except OSError:
            return False

    def _known_of(self, slot: SlotKey) -> list[EndedInstance]:
        """Return the instances of a slot, those that live as they will be once they have ended."""
        live = [_ended_of(record) for record in self._live.values() if record.shard.slot == slot]
        return live + [ended for ended in self._ended.values() if ended.slot == slot]

    def _prune(self, slot: SlotKey) -> None:
        for instance_id in self._superfluous(slot):
            del self._ended[instance_id]
            shutil.rmtree(self._directory.run_dir(instance_id), ignore_errors=True)

    def _superfluous(self, slot: SlotKey) -> set[InstanceId]:
        older = self.instances_of(slot)[KEPT_LOGS_PER_SLOT:]
        # Slots of deployments that are long deleted: the first in are the first out.
        first_in = list(self._ended)[: max(0, len(self._ended) - KEPT_LOGS)]
        return {it for it in older if it in self._ended} | set(first_in)


def _ended_of(record: StageRecord) -> EndedInstance:
    generation, shard = record.shard.generation, record.shard
    return EndedInstance(
        slot=shard.slot,
        instance_id=record.instance_id,
        order=(
            generation.epoch.number,
            generation.epoch.supervisor_id,
            generation.n,
            shard.attempt,
        ),
    )


class RecordDamaged(Exception):
    """A record cannot be read; the message says what is wrong with it."""


def read_record(path: Path) -> StageRecord | None:
    """Read one record; None when there is none, or none any more.

    Raises:
        RecordDamaged: it is there and makes no sense.
    """
    try:
        record = msgspec.json.decode(path.read_bytes(), type=StageRecord)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise RecordDamaged(str(error)) from error
    if record.instance_id != path.parent.name:
        raise RecordDamaged(f"it names instance {record.instance_id}")
    return record


def damaged_in(folder: Path) -> DamagedRecord | None:
    """Return what is known of an instance whose record was damaged and is not settled yet."""
    if (folder / ENDED_FILE).exists():
        return None
    path, aside = folder / RECORD_FILE, folder / DAMAGED_FILE
    try:
        if read_record(path) is not None or not aside.exists():
            return None
    except RecordDamaged as error:
        return damaged_record(path, str(error))
    try:
        read_record(aside)
    except RecordDamaged as error:
        return damaged_record(aside, str(error))
    return damaged_record(aside, "an agent could not read it, though it can be read now")


def open_process(record: StageRecord, this_boot: str) -> ProcessHandle | None:
    """Take hold of a recorded main process if it lives and is surely the one.

    It is ours only if pid, start ticks, boot and instance id all say so.
    """
    if record.process is None or record.boot_id != this_boot:
        return None
    handle = ProcessHandle.open(record.process)
    if handle is None:
        return None
    if environment_holds(handle.pid, INSTANCE_ENV, record.instance_id) is False:
        _log.error("a pid of a record is another's now", pid=handle.pid, stage=str(record.shard))
        handle.close()
        return None
    return handle


def _read_or_set_aside(folder: Path) -> StageRecord | None:
    path = folder / RECORD_FILE
    try:
        return read_record(path)
    except RecordDamaged as error:
        rename_durably(path, folder / DAMAGED_FILE)
        _log.error(
            "a stage record is damaged and was set aside; a process of it is left alone",
            record=str(folder / DAMAGED_FILE),
            error=str(error),
        )
        return None


def _read_ended(folder: Path) -> EndedInstance | None:
    try:
        return msgspec.json.decode((folder / ENDED_FILE).read_bytes(), type=EndedInstance)
    except (OSError, msgspec.DecodeError):
        return None
