"""Processes of actor trees that live and do nothing: told apart from those that are gone."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from stagekeeper.actor import Died, FailureKind
from stagekeeper.actor.owning import known_ends
from tests.harness.actor_trees import SOON_S, all_gone, frozen
from tests.harness.waiting import wait_for
from tests.stages.actor_cases import Worker

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROC_COUNT = 1  # of the tree that these tests share

LEASE_S = 0.5


async def test_a_frozen_process_is_stalled_until_it_runs_again(tree, procs):
    worker = procs.spawn("worker", Worker)
    pid = (await worker.where.call_one())["pid"]
    with frozen(pid):
        call = asyncio.create_task(worker.add.call_one(1, 2))
        failure = await tree.faults.one()

        assert failure.kind == FailureKind.STALLED and failure.mesh is worker
        assert (failure.detected_by, failure.pid, failure.exit) == ("beat", pid, None)
        assert f"process {pid} gave no sign of life" in str(failure)
        assert dict(worker.failures) == {} and not call.done()

    assert await asyncio.wait_for(call, SOON_S) == 3
    with frozen(pid):
        again = await tree.faults.one()
        assert again.kind == FailureKind.STALLED and again.id != failure.id
    # Its end is another failure, of another id.
    os.kill(pid, signal.SIGKILL)
    end = await tree.faults.one()
    assert end.kind == FailureKind.SIGNALED and end.id != failure.id


async def test_a_process_whose_loop_is_blocked_is_stalled_and_told_once(tree, procs):
    worker = procs.spawn("worker", Worker)
    await worker.ready(60)

    blocked = asyncio.create_task(worker.stop_the_loop.call_one(3 * LEASE_S))

    assert (await tree.faults.one()).kind == FailureKind.STALLED
    await asyncio.wait_for(blocked, SOON_S)
    assert await worker.add.call_one(1, 2) == 3


async def test_a_respawn_ends_the_frozen_process_with_all_that_it_started(tree, procs):
    worker, beside = procs.spawn("worker", Worker), procs.spawn("beside", Worker)
    pids = [(await worker.where.call_one())["pid"], await worker.start_grandchild.call_one()]
    call = asyncio.create_task(worker.nap.call_one(60))
    await asyncio.sleep(0.05)
    with frozen(pids[0]):
        failures = {it.mesh_name: it for it in [await tree.faults.one() for _ in range(2)]}
        assert len({failure.id for failure in failures.values()}) == 1

        await failures["worker"].respawn()

        await all_gone(pids)
    with pytest.raises(Died) as caught:
        await asyncio.wait_for(call, SOON_S)
    assert caught.value.failure_id == failures["worker"].id
    assert (await worker.where.call_one())["incarnation"] == 2
    # The other mesh in the process had been told of the stall; of its end it is told as well.
    end = await tree.faults.one()
    assert end.mesh is beside and end.kind == FailureKind.SIGNALED
    await end.respawn()
    assert await beside.add.call_one(1, 2) == 3


async def test_a_respawn_replaces_a_frozen_process_also_when_its_connection_was_lost(
    tree, procs, monkeypatch
):
    monkeypatch.setattr(known_ends, "_NEWS_LIMIT_S", 0.1)
    worker = procs.spawn("worker", Worker)
    pid = (await worker.where.call_one())["pid"]
    (place,) = (await worker.places()).values()
    with frozen(pid):
        assert (await tree.faults.one()).kind == FailureKind.STALLED
        link = tree.program.links.existing(place.instance_id)
        await link.close()  # as the transport does that hears nothing for long
        failure = await tree.faults.one()
        assert failure.kind == FailureKind.GONE

        await asyncio.wait_for(failure.respawn(), SOON_S)

        await all_gone([pid])
    assert (await worker.where.call_one())["incarnation"] == 2


async def test_a_respawn_of_what_had_failed_does_not_wait_for_its_process_that_is_frozen(
    tree, procs
):
    worker = procs.spawn("worker", Worker)
    pid = (await worker.where.call_one())["pid"]
    (place,) = (await worker.places()).values()
    worker.fail.broadcast("on purpose")
    failure = await tree.faults.one()
    assert failure.kind == FailureKind.BROADCAST_RAISED
    with frozen(pid):
        link = tree.program.links.existing(place.instance_id)
        await wait_for(lambda: link.is_silent, "it is silent")

        await asyncio.wait_for(failure.respawn(), SOON_S)

        await all_gone([pid])
    assert (await worker.where.call_one())["incarnation"] == 2
