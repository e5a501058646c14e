"""What a stage's process is started with, looked at as it would be started."""

from __future__ import annotations

import pytest

from stagekeeper.agent import spawning
from stagekeeper.agent.deaths import Deaths
from stagekeeper.agent.failures import FailureSpool
from stagekeeper.agent.identity import AgentIdentity
from stagekeeper.agent.ledger import Ledger
from stagekeeper.agent.records import RecordStore
from stagekeeper.agent.settings import AgentSettings
from stagekeeper.agent.spawning import Spawner
from stagekeeper.agent.stages import Stages
from stagekeeper.core.ids import DeviceId, WorkerId
from stagekeeper.core.model import Device
from stagekeeper.host.oom import OomWitness
from stagekeeper.host.tasks import TaskOwner
from stagekeeper.runtime.clock import SystemClock
from tests.fakes.overseer import plan, stage

CARD = Device(DeviceId("GPU-a"), "cuda", "", 0, total_bytes=2**30)
WORKER = WorkerId("w")


class NotRun(OSError):
    """Raised in place of a process."""


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
    settings = AgentSettings(
        worker_id=WORKER, endpoint="127.0.0.1:1", state_dir=tmp_path / "s", lock_dir=tmp_path
    )
    settings.directory.create()
    clock, records, ledger = SystemClock(), RecordStore(settings.directory), Ledger([CARD])
    deaths = Deaths(WORKER, FailureSpool(settings.directory), records, OomWitness(), clock)
    owner = TaskOwner("test", lambda *_: None)
    stages = Stages(records, ledger, deaths, owner, clock, lambda: None)
    identity = AgentIdentity.next_life(
        settings.directory.identity_file, WORKER, recorded_incarnation=0
    )
    spawner = Spawner(settings, records, stages, ledger, {CARD.device_id: CARD}, identity, clock)
    own = (("CUDA_VISIBLE_DEVICES", "0,1"), ("CUDA_DEVICE_ORDER", "FASTEST_FIRST"), ("MINE", "1"))
    p = plan(stage("a", device=device, env=own))

    with pytest.raises(NotRun):
        spawner.spawn(p, p.stages[0])

    assert seen["CUDA_VISIBLE_DEVICES"] == (device or "")
    assert seen["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert seen["MINE"] == "1"
