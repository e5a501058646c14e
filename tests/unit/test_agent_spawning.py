"""What a stage's process is started with, looked at as it would be started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stagekeeper.agent import spawning
from stagekeeper.agent.cards.ledger import Ledger
from stagekeeper.agent.deaths import Deaths
from stagekeeper.agent.failures import FailureSpool
from stagekeeper.agent.identity import AgentIdentity
from stagekeeper.agent.ports import PortRange, Ports
from stagekeeper.agent.records import RecordStore, StageRecord
from stagekeeper.agent.settings import AgentSettings
from stagekeeper.agent.spawning import Spawner
from stagekeeper.agent.stages import Stages, booking_of
from stagekeeper.core.command_stage import CommandSpec, PortLease
from stagekeeper.core.errors import Refused
from stagekeeper.core.ids import DeviceId, InstanceId, WorkerId
from stagekeeper.core.model import Device, MemoryNeed, OperationPlan, ShardRecord, StageSpec
from stagekeeper.core.states import ShardState
from stagekeeper.host.oom import OomWitness
from stagekeeper.host.tasks import TaskOwner
from stagekeeper.runtime.clock import SystemClock
from stagekeeper.runtime.launch import INSTANCE_ENV, read_launch
from tests.fakes.overseer import plan, stage
from tests.harness.ports import HOST, ports_in_a_row

CARD = Device(DeviceId("GPU-a"), "cuda", "", 0, total_bytes=2**30)
WORKER = WorkerId("w")


class NotRun(OSError):
    """Raised in place of a process."""


def spawner_in(tmp_path, ports: Ports | None = None) -> tuple[Spawner, RecordStore, Stages]:
    settings = AgentSettings(
        worker_id=WORKER, endpoint="127.0.0.1:1", state_dir=tmp_path / "s", lock_dir=tmp_path
    )
    settings.directory.create()
    clock, records, ledger = SystemClock(), RecordStore(settings.directory), Ledger([CARD])
    deaths = Deaths(WORKER, FailureSpool(settings.directory), records, OomWitness(), clock)
    owner = TaskOwner("test", lambda *_: None)
    stages = Stages(records, ledger, deaths, owner, clock, lambda: None, ports=ports)
    identity = AgentIdentity.next_life(
        settings.directory.identity_file, WORKER, recorded_incarnation=0
    )
    spawner = Spawner(
        settings, records, stages, ledger, {CARD.device_id: CARD}, identity, clock, ports
    )
    return spawner, records, stages


@pytest.mark.parametrize("device", ["GPU-a", None])
async def test_cards_of_a_stage_are_the_agents_word_whatever_its_spec_says(
    tmp_path, monkeypatch, device
):
    """A plan may be on disk since a release that took these variables from a spec."""
    seen = {}

    def look(command, *, env, **_):
        seen.update(env)
        raise NotRun

    monkeypatch.setattr(spawning, "spawn", look)
    spawner, _, _ = spawner_in(tmp_path)
    own = (("CUDA_VISIBLE_DEVICES", "0,1"), ("CUDA_DEVICE_ORDER", "FASTEST_FIRST"), ("MINE", "1"))
    p = plan(stage("a", device=device, env=own))

    with pytest.raises(NotRun):
        spawner.spawn(p, p.stages[0])

    assert seen["CUDA_VISIBLE_DEVICES"] == (device or "")
    assert seen["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert seen["MINE"] == "1"


def test_what_a_start_remembers_is_of_its_environment_too(tmp_path, monkeypatch):
    digests = []

    def look(command, **_):
        digests.append(read_launch(Path(command[-1])).env_digest)
        raise NotRun

    monkeypatch.setattr(spawning, "spawn", look)
    spawner, _, _ = spawner_in(tmp_path)
    for env in ((), (("MODEL", "a"),), (("MODEL", "b"),), (("MODEL", "a"),)):
        p = plan(stage("a", device="GPU-a", env=env))
        with pytest.raises(NotRun):
            spawner.spawn(p, p.stages[0])
    assert digests[1] == digests[3] and len(set(digests)) == 3


def program(*argv: str, **fields: Any) -> StageSpec:
    return StageSpec("llm", command=CommandSpec(argv, **fields))


async def test_a_program_gets_its_own_environment_and_its_arguments_filled_in(
    tmp_path, monkeypatch
):
    seen: dict[str, Any] = {}

    def look(command, *, env, **_):
        seen.update(env, launch=read_launch(Path(command[-1])))
        raise NotRun

    monkeypatch.setattr(spawning, "spawn", look)
    monkeypatch.setenv("PYTHONPATH", "/the/agents")
    (port,) = ports_in_a_row(1)
    ports = Ports(HOST, tmp_path, PortRange(port, port))
    spawner, _, stages = spawner_in(tmp_path, ports)
    argv = ("sh", "{port:http}", "{device_uuids}", "{memory_bytes}", "{utilization}", "{run_dir}")
    spec = replace(
        program(*argv, ports=("http",)),
        devices=(0,),
        memory=MemoryNeed(bytes=2**29, reserve_bytes=2**20),
        env=(("WHERE", "{host}"), ("PATH", "/mine")),
    )
    p = plan((spec, "GPU-a"))
    (leased,) = ports.lease(p)

    with pytest.raises(NotRun):
        spawner.spawn(p, p.stages[0])

    assert [it.port for it in leased.ports] == [port]
    command = seen["launch"].command
    assert command.argv[0].endswith("/sh") and command.argv[0].startswith("/")
    assert command.argv[1:5] == [str(port), "GPU-a", str(2**29), "0.5"]
    assert command.env["WHERE"] == "127.0.0.1"
    assert command.env["PATH"] == "/mine"
    assert command.env["CUDA_VISIBLE_DEVICES"] == "GPU-a"
    assert command.env[INSTANCE_ENV] == seen["launch"].instance_id
    assert "PYTHONPATH" not in command.env
    assert "WHERE" not in seen and seen["PATH"] != "/mine"  # the stage process itself is ours
    (held,) = stages
    assert held.record.ports == leased.ports
    ports.close()


def test_what_an_earlier_life_leased_is_held_with_the_record(tmp_path):
    ports = Ports("127.0.0.1", tmp_path)
    _, _, stages = spawner_in(tmp_path, ports)
    lease = (PortLease("http", 20_001),)
    stage = stages.add(record_of(shard_of(plan(program("sh"))), lease))

    found = ports.of(booking_of(stage))
    assert found is not None and found.ports == lease


def test_a_shard_that_was_told_of_no_leader_is_not_started(tmp_path):
    spawner, _, stages = spawner_in(tmp_path)
    p = plan(program("sh", "{leader_host}"), shard=(1, 2))
    with pytest.raises(Refused, match="leaders"):
        spawner.spawn(p, p.stages[0])
    assert [*stages] == []


def shard_of(p: OperationPlan) -> ShardRecord:
    return ShardRecord(
        deployment=p.deployment,
        replica_index=p.replica_index,
        stage_id=p.stages[0].stage_id,
        stage_name="llm",
        stage_count=1,
        shard_index=0,
        shard_count=1,
        generation=p.generation,
        operation_id=p.operation_id,
        instance_id=InstanceId("i"),
        state=ShardState.READY,
    )


def record_of(shard: ShardRecord, ports: tuple[PortLease, ...]) -> StageRecord:
    return StageRecord(
        incarnation=1,
        boot_id="b",
        shard=shard,
        control_socket="/none",
        stop_budget_s=1.0,
        ports=ports,
    )
