"""A stage process, from the intent to the word that lets it go.

The order is the promise: the intent is on disk before a process exists; the process waits on its
pipe until its pid, start ticks and instance id are on disk; only then it hears its word. Whoever
dies in between, nothing runs that is not on record. Decided here as well: which variables of a
stage process are the agent's word alone.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Mapping

import msgspec

from stagekeeper.agent.cards.ledger import Booking, Ledger
from stagekeeper.agent.child_environment import RUN_DIR_ENV, listed, passed_on
from stagekeeper.agent.command_launch import command_launch, command_place
from stagekeeper.agent.identity import AgentIdentity
from stagekeeper.agent.ports import Ports
from stagekeeper.agent.records import RecordStore, StageRecord
from stagekeeper.agent.settings import AgentSettings
from stagekeeper.agent.stage_process import StageProcess
from stagekeeper.agent.stages import Stages
from stagekeeper.core.command_stage import StagePorts
from stagekeeper.core.errors import FieldProblem, bad_fields
from stagekeeper.core.ids import DeviceId, InstanceId, SlotKey
from stagekeeper.core.model import Device, OperationPlan, ShardRecord, StageStart
from stagekeeper.core.states import ShardState
from stagekeeper.host.process import WaitingProcess, boot_id, spawn
from stagekeeper.runtime import crash_points
from stagekeeper.runtime.clock import Clock
from stagekeeper.runtime.launch import INSTANCE_ENV, START_LINE, Launch, LaunchDevice


class Spawner:
    """Starts the stage processes of one agent.

    Args:
        identity: of this life of the agent, for the records.
        devices: the agent's cards, as they are at any time.
        ports: leased for command stages; None where there are none.
    """

    def __init__(
        self,
        settings: AgentSettings,
        records: RecordStore,
        stages: Stages,
        ledger: Ledger,
        devices: Mapping[DeviceId, Device],
        identity: AgentIdentity,
        clock: Clock,
        ports: Ports | None = None,
    ) -> None:
        self._settings = settings
        self._records = records
        self._stages = stages
        self._ledger = ledger
        self._devices = devices
        self._identity = identity
        self._clock = clock
        self._ports = ports
        self._boot_id = boot_id()

    def spawn(
        self, plan: OperationPlan, start: StageStart, leader: StagePorts | None = None
    ) -> StageProcess:
        """Start a stage's process and hold it; it runs its phases from now on.

        Nothing is awaited, so that nothing comes between the steps.

        Args:
            plan: has the stage.
            start: the stage.
            leader: where shard 0 of a command stage has its ports, when it is on another worker.

        Raises:
            Refused: UNKNOWN_DEVICE, ADMISSION_REFUSED: a card is gone since it was reserved, or its
                bytes are. BAD_FIELD: nobody said where its shard 0 is. Nothing was begun.
            OSError: the program cannot be run, or the disk is full. The instance then is in the
                table without a process, and is the caller's to forget.
        """
        self._ledger.check_still_there(start)
        instance_id = InstanceId(uuid.uuid4().hex)
        ports = self._ports_of(plan, start)
        if start.spec.command is not None and start.shard_index and leader is None:
            problem = f"name no shard 0 of stage {start.spec.name}"
            raise bad_fields([FieldProblem("leaders", problem)])
        launch = self._launch(plan, start, instance_id, ports, leader or ports)
        record = StageRecord(
            incarnation=self._identity.incarnation,
            boot_id=self._boot_id,
            control_socket=launch.control_socket,
            stop_budget_s=launch.stop_budget_s,
            shard=self._shard(plan, start, instance_id),
            ports=ports.ports,
        )
        launch_path = self._records.prepare(record, launch)
        stage = self._stages.add(record)
        crash_points.reached("intent-written")
        try:
            waiting = spawn(
                [*self._settings.stage_command, str(launch_path)],
                env=self._environment(start, instance_id),
                cwd=self._settings.directory.run_dir(instance_id),
                log_path=self._records.log_path(instance_id),
            )
        except OSError:
            stage.is_asked = True
            stage.all_gone()
            raise
        self._put_on_record(stage, waiting)
        return stage

    def _put_on_record(self, stage: StageProcess, waiting: WaitingProcess) -> None:
        crash_points.reached("spawned")
        identity = waiting.handle.identity
        try:
            stage.process_started(identity.pid, identity.start_ticks)
            crash_points.reached("pid-written")
            waiting.release(START_LINE)
        finally:
            waiting.abandon()  # not on record, so it must not start
            self._stages.hold(stage, waiting.handle)
        crash_points.reached("released")

    def _ports_of(self, plan: OperationPlan, start: StageStart) -> StagePorts:
        booking = Booking(plan.operation_id, start.stage_id)
        leased = None if self._ports is None else self._ports.of(booking)
        return leased or StagePorts(start.stage_id, self._settings.stage_host.strip("[]"))

    def _launch(
        self,
        plan: OperationPlan,
        start: StageStart,
        instance_id: InstanceId,
        ports: StagePorts,
        leader: StagePorts,
    ) -> Launch:
        spec, directory = start.spec, self._settings.directory
        own_budget_s = spec.stop_budget_s
        devices = [self._launch_device(start, device_id) for device_id in start.device_ids]
        command = None
        if spec.command is not None:
            place = command_place(
                start,
                devices,
                host=ports.host,
                ports=ports,
                leader=leader,
                generation=plan.generation,
                instance_id=instance_id,
                run_dir=str(directory.run_dir(instance_id)),
                cache_dir=str(directory.cache),
            )
            passed, fixed = listed(), self._fixed_environment(start, instance_id)
            command = command_launch(start, place, ports, passed, fixed)
        return Launch(
            instance_id=instance_id,
            deployment=plan.deployment,
            replica_index=plan.replica_index,
            stage_id=start.stage_id,
            stage_name=spec.name,
            stage_count=plan.stage_count,
            shard_index=start.shard_index,
            shard_count=start.shard_count,
            entrypoint=spec.entrypoint,
            args_json=spec.args_json,
            command=command,
            pythonpath=[str(folder.absolute()) for folder in self._settings.pythonpath],
            devices=devices,
            max_in_flight=spec.max_in_flight,
            stop_budget_s=self._settings.stop_budget_s if own_budget_s is None else own_budget_s,
            busy_after_s=self._settings.busy_after_s,
            host=self._settings.stage_host,
            control_socket=str(directory.socket(instance_id)),
            run_dir=str(directory.run_dir(instance_id)),
            cache_dir=str(directory.cache),
            lock_dir=str(self._settings.lock_dir.absolute()),
            lock_limit_s=self._settings.lock_limit_s,
            env_digest=_digest_of(spec.env),
            skips_measure=spec.memory is not None and spec.memory.reuse_profile,
        )

    def _launch_device(self, start: StageStart, device_id: DeviceId) -> LaunchDevice:
        total_bytes, need = self._ledger.total_bytes(device_id), start.spec.memory
        device = self._devices[device_id]
        reserve_bytes = 0 if need is None else need.reserve_bytes
        return LaunchDevice(
            device_id=device_id,
            kind=device.kind,
            budget_bytes=0 if need is None else need.on_card(total_bytes) - reserve_bytes,
            total_bytes=total_bytes,
            reserve_bytes=reserve_bytes,
            model=device.model,
            lock_domain_id=device.lock_domain_id,
        )

    def _shard(
        self, plan: OperationPlan, start: StageStart, instance_id: InstanceId
    ) -> ShardRecord:
        slot = SlotKey(plan.deployment, plan.replica_index, start.stage_id)
        return ShardRecord(
            deployment=plan.deployment,
            replica_index=plan.replica_index,
            stage_id=start.stage_id,
            stage_name=start.spec.name,
            stage_count=plan.stage_count,
            shard_index=start.shard_index,
            shard_count=start.shard_count,
            generation=plan.generation,
            operation_id=plan.operation_id,
            instance_id=instance_id,
            state=ShardState.STARTING,
            attempt=self._records.next_attempt(slot, plan.generation),
            spec_revision=plan.spec_revision,
            model=plan.model,
            devices=self._ledger.claims_of(start),
            create_time=self._clock.wall(),
            restart_ages_s=start.restart_ages_s,
            entry=start.stage_id == plan.entry_stage_id,
        )

    def _environment(self, start: StageStart, instance_id: InstanceId) -> dict[str, str]:
        """Return what the stage process gets; a command stage's program gets its own."""
        env = passed_on(self._settings.pythonpath)
        if start.spec.command is None:
            env |= dict(start.spec.env)
        # After the spec's own: which cards a stage has is settled by admission, and by nobody else.
        return env | self._fixed_environment(start, instance_id)

    def _fixed_environment(self, start: StageStart, instance_id: InstanceId) -> dict[str, str]:
        cuda = [
            device_id for device_id in start.device_ids if self._devices[device_id].kind == "cuda"
        ]
        return {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            # UUIDs, since a number means another card in a process that sees fewer. A stage without
            # cards gets the empty list, which hides all: unset it would show those of others.
            "CUDA_VISIBLE_DEVICES": ",".join(cuda),
            INSTANCE_ENV: instance_id,
            RUN_DIR_ENV: str(self._settings.directory.run_dir(instance_id)),
        }


def _digest_of(env: Iterable[tuple[str, str]]) -> str:
    """Return what tells environments apart; empty for an empty one."""
    ordered = sorted(env)
    if not ordered:
        return ""
    return hashlib.blake2b(msgspec.json.encode(ordered), digest_size=16).hexdigest()
