"""The named cases of supervision, on real processes: what users of such systems have suffered.

What a case wants within milliseconds has seconds here; benchmarks show the milliseconds.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from stagekeeper.actor import (
    Died,
    FailureKind,
    MeshError,
    MeshStopped,
    RemoteError,
    this_host,
    this_proc,
)
from tests.harness.actor_trees import SOON_S, a_script, all_gone, frozen, until
from tests.stages.actor_cases import Broken, Manager, PlainWorker, Worker

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROC_COUNT = 4  # of the tree that these tests share

LONG_S = 60.0


async def pids_of(workers) -> list[int]:
    return [where["pid"] for where in (await workers.where.call()).values()]


async def test_supervision_U1_a_kill_ends_the_call_of_all_ranks_with_the_owners_failure(
    tree, procs, tmp_path
):
    workers = procs.spawn("workers", Worker, "w", str(tmp_path / "journal"))
    pids = await pids_of(workers)
    call = asyncio.create_task(workers.nap.call(LONG_S))
    await until(
        lambda: (tmp_path / "journal").read_text().count("naps") == 4, "all four ranks sleep"
    )

    os.kill(pids[2], signal.SIGKILL)

    with pytest.raises(MeshError) as caught:
        await asyncio.wait_for(call, SOON_S)
    died = caught.value.failed[2]
    assert list(caught.value.failed) == [2] and isinstance(died, Died)
    assert died.signal == signal.SIGKILL and died.rank == 2
    failure = await tree.faults.one()
    assert failure.id == died.failure_id
    assert failure.ranks == (2,) and failure.mesh is workers
    # The survivors are told, and may stop to wait for the dead one.
    living = workers[[0, 1, 3]]

    async def all_woken() -> bool:
        return list((await living.naps_given_up.call()).values()) == [1, 1, 1]

    await until(all_woken, "the survivors' calls are cancelled")
    # Without the dead rank the mesh goes on working.
    assert dict(await living.add.call(1, 2)) == {0: 3, 1: 3, 3: 3}
    assert await workers.add.choose(2, 2) == 4


async def test_supervision_U2_new_processes_on_a_host_where_one_died_are_as_good_as_any(tree):
    procs = this_host().spawn_procs(2, name="first")
    workers = procs.spawn("workers", Worker)
    pids = await pids_of(workers)
    os.kill(pids[1], signal.SIGKILL)
    failure = await tree.faults.one()
    report = await procs.stop(2)
    assert list(report.dead) == [1] and report.clean == [0]

    again = this_host().spawn_procs(2, name="first").spawn("workers", Worker)

    assert dict(await asyncio.wait_for(again.add.call(1, 2), 60)) == {0: 3, 1: 3}
    where = await again.where.call()
    assert [it["incarnation"] for it in where.values()] == [1, 1]
    assert not set(await pids_of(again)) & set(pids)
    # The failure of the old ones concerns nobody any more.
    await failure.respawn()
    assert dict(again.failures) == {}


async def test_supervision_U4_a_service_that_fails_takes_no_other_with_it(tree, procs):
    first = procs[0:1].spawn("first", Worker)
    second = procs[1:2].spawn("second", Worker)
    caller, late_caller = procs[2:3].spawn("caller", Worker), procs[3:4].spawn("late", Worker)
    assert await caller.ask.call_one(first, 1, 2) == [3]

    first.fail.broadcast("nobody takes this")
    failure = await tree.faults.one()

    assert failure.mesh is first
    for asking in (caller, late_caller):  # the second one looks both up only now
        with pytest.raises(RemoteError, match="no answer of 1 of 1"):
            await asking.ask.call_one(first, 1, 2)
        assert await asking.ask.call_one(second, 2, 2) == [4]
    assert await caller.nap_elsewhere.call_one(first, 1) == f"Died {failure.id}"
    assert await late_caller.nap_elsewhere.call_one(second, 0) == "slept"


async def test_supervision_U5_messages_to_a_process_that_is_gone_are_one_failure_at_the_hook(
    tree, procs
):
    worker = procs[0:1].spawn("worker", Worker)
    (pid,) = await pids_of(worker)
    os.kill(pid, signal.SIGKILL)
    assert (await tree.faults.one()).kind == FailureKind.SIGNALED

    for number in range(3):
        worker.take.broadcast(number)

    failure = await tree.faults.one()
    assert failure.kind == FailureKind.UNDELIVERABLE
    assert (failure.endpoint, failure.sender, failure.where) == ("take", "root", "worker[0]")
    assert "take from root was for worker[0]" in str(failure)
    assert failure.root.kind == FailureKind.SIGNALED  # and why it could not be delivered
    # `tree` asserts that no other one came.


async def test_supervision_U5_so_are_those_of_another_actor_to_what_it_does_not_own(tree, procs):
    worker, sender = procs[0:1].spawn("worker", Worker), procs[1:2].spawn("sender", Worker)
    await sender.tell.call_one(worker, 1)
    await until(lambda: worker.taken.call_one(), "the first message arrives")
    (pid,) = await pids_of(worker)
    os.kill(pid, signal.SIGKILL)
    assert (await tree.faults.one()).kind == FailureKind.SIGNALED
    assert (await sender.nap_elsewhere.call_one(worker, 1)).startswith("Died ")

    for number in range(3):
        await sender.tell.call_one(worker, number)

    failure = await tree.faults.one()
    assert failure.kind == FailureKind.UNDELIVERABLE
    assert (failure.endpoint, failure.sender, failure.where) == ("take", "sender[0]", "worker[0]")
    assert failure.mesh is worker


async def test_supervision_U7_an_error_that_nobody_awaits_reaches_the_owner(tree, procs):
    worker = procs[0:1].spawn("worker", Worker)
    await worker.ready(60)

    worker.fail.broadcast("into the void")

    failure = await tree.faults.one(within_s=SOON_S)
    assert failure.kind == FailureKind.BROADCAST_RAISED
    assert (failure.endpoint, failure.sender) == ("fail", "root")
    assert failure.mesh is worker and failure.path == ()
    assert "ValueError: into the void" in str(failure)
    assert "raise ValueError(message)" in failure.remote_traceback


async def test_supervision_U7_so_does_that_of_an_init(tree, procs):
    broken = procs[0:1].spawn("broken", Broken, "/nowhere")

    failure = await tree.faults.one()

    assert failure.kind == FailureKind.INIT_RAISED and failure.mesh is broken
    assert "LookupError: there is no weight file" in str(failure)
    assert "raise LookupError" in failure.remote_traceback


async def test_supervision_U8_stopping_a_healthy_tree_is_no_failure(tmp_path):
    with a_script("healthy", tmp_path / "journal") as script:
        exit_code = await script.ended()

    assert (exit_code, script.output, script.errors) == (0, "", "")
    assert not [line for line in script.noted if line.startswith("hook")]
    assert "1 clean" in script.noted
    cleanups = [line for line in script.noted if line.startswith("cleanup")]
    assert len(cleanups) == 5 and all(line.endswith(": None") for line in cleanups)


async def test_supervision_U9_a_mesh_with_a_dead_rank_stops_within_its_budget(tree, procs):
    workers = procs.spawn("workers", Worker)
    pids = await pids_of(workers)
    os.kill(pids[1], signal.SIGKILL)
    failure = await tree.faults.one()

    begin = time.monotonic()
    report = await workers.stop(2)

    assert time.monotonic() - begin < 2.5 + SOON_S
    assert report.clean == [0, 2, 3] and report.dead == {1: failure}
    assert str(report) == "3 clean; 1 dead"
    assert report.is_clean


async def test_supervision_U9_also_when_nobody_knows_yet_that_it_is_dead(tree, procs):
    workers = procs.spawn("workers", Worker)
    pids = await pids_of(workers)

    os.kill(pids[1], signal.SIGKILL)
    workers.take.broadcast(1)
    report = await asyncio.wait_for(workers.stop(2), 2.5 + SOON_S)

    assert report.clean == [0, 2, 3] and list(report.dead) == [1]
    assert report.dead[1].exit is not None and report.dead[1].exit.signal == signal.SIGKILL
    with pytest.raises(MeshStopped):
        workers.take.broadcast(2)


async def test_supervision_U11_a_hook_that_raises_is_called_once_and_ends_the_program(tmp_path):
    with a_script("raising_hook", tmp_path / "journal") as script:
        exit_code = await script.ended()

    assert exit_code == 1
    assert script.noted.count("hook BROADCAST_RAISED") == 1
    assert [line for line in script.noted if line.startswith("hook")] == ["hook BROADCAST_RAISED"]
    assert script.noted[-1] == "atexit"
    assert script.errors.count("BROADCAST_RAISED: ") == 1
    assert "LookupError: the pager is off" in script.errors


async def test_supervision_U19_a_process_that_does_not_answer_is_named_and_ended(tree):
    procs = this_host().spawn_procs(2)
    workers = procs.spawn("workers", Worker)
    pids = await pids_of(workers)
    with frozen(pids[1]):
        begin = time.monotonic()

        report = await workers.stop(0.3)
        ended = await procs.stop(1.5)

        assert time.monotonic() - begin < 1.5 + 3 + SOON_S
    assert report.unreachable == [1] and report.clean == [0]
    assert not report.is_clean and "unreachable: 1" in str(report)
    assert ended.unreachable == [1] and ended.clean == [0]
    await all_gone(pids)


async def test_supervision_U22_nothing_on_the_way_of_a_failure_waits_for_the_survivors(tree, procs):
    workers = procs.spawn("workers", PlainWorker)
    watcher = procs[0:1].spawn("watcher", Worker)
    (pid,) = await pids_of(watcher)
    call = asyncio.create_task(workers.block_in_c.call(LONG_S))
    await workers.ready(60)
    await asyncio.sleep(0.1)

    os.kill(pid, signal.SIGKILL)

    with pytest.raises(MeshError) as caught:
        await asyncio.wait_for(call, SOON_S)
    assert list(caught.value.failed) == [0]
    failures = [await tree.faults.one(within_s=SOON_S), await tree.faults.one(within_s=SOON_S)]
    assert {failure.mesh_name for failure in failures} == {"workers", "watcher"}
    assert len({failure.id for failure in failures}) == 1  # one end, told to both meshes
    begin = time.monotonic()
    report = await workers.stop(0.3)
    assert time.monotonic() - begin < 2 * 0.3 + 0.5 + SOON_S
    assert list(report.dead) == [0]
    assert {(it.rank, it.endpoint, it.had_begun) for it in report.unrun} == {
        (rank, "block_in_c", True) for rank in (1, 2, 3)
    }
    for pid in await pids_of(procs[1:4].spawn("watcher", Worker)):
        os.kill(pid, signal.SIGKILL)  # they are stuck for a minute
    for _ in range(3):
        await tree.faults.one()


async def test_supervision_U24_all_below_a_root_that_is_killed_is_gone(tmp_path):
    with a_script("waiting", tmp_path / "journal") as script:
        await script.until("up")
        pids = script.pids()
        assert len(set(pids)) == 3  # a worker of a manager, the manager, and what is no actor

        script.process.kill()

        await all_gone(pids)


async def test_supervision_U28_a_signal_handler_that_exits_0_is_a_failure(tree, procs):
    worker = procs[0:1].spawn("worker", Worker)
    pid = await worker.leave_on.call_one(signal.SIGUSR1)
    call = asyncio.create_task(worker.nap.call_one(LONG_S))

    os.kill(pid, signal.SIGUSR1)

    failure = await tree.faults.one()
    assert failure.kind == FailureKind.EXITED
    assert failure.exit is not None and failure.exit.code == 0 and not failure.exit.asked
    with pytest.raises(Died) as caught:
        await asyncio.wait_for(call, SOON_S)
    assert caught.value.exit_code == 0 and caught.value.failure_id == failure.id


async def test_supervision_U28_so_is_an_order_to_end_that_the_owner_did_not_give(tree, procs):
    worker = procs[0:1].spawn("worker", Worker)
    (pid,) = await pids_of(worker)

    os.kill(pid, signal.SIGTERM)

    failure = await tree.faults.one()
    assert failure.kind == FailureKind.EXITED
    assert failure.exit is not None and failure.exit.code == 0


async def test_supervision_U31_a_rank_that_is_stuck_in_c_is_stalled_and_not_dead(tree, procs):
    options = procs[0:1].options(stall_after_s=0.3)
    stuck, beside = options.spawn("stuck", PlainWorker), procs[0:1].spawn("beside", Worker)
    call = asyncio.create_task(stuck.block_in_c.call_one(0.8))

    failure = await tree.faults.one()

    assert failure.kind == FailureKind.STALLED and failure.mesh is stuck
    assert (failure.detected_by, failure.endpoint) == ("progress counter", "block_in_c")
    assert failure.exit is None
    assert await beside.add.call_one(1, 2) == 3  # its process lives, and so does it
    assert dict(stuck.failures) == {}
    assert await asyncio.wait_for(call, 60) == "back"
    # Its owner lived with that; it must not be left with one that then hangs for good.
    call = asyncio.create_task(stuck.block_in_c.call_one(0.8))
    again = await tree.faults.one()
    assert again.kind == FailureKind.STALLED and again.id != failure.id
    assert await asyncio.wait_for(call, 60) == "back"


async def test_supervision_U31_a_stalled_rank_is_replaced_with_its_process(tree, procs):
    options = procs[0:1].options(stall_after_s=0.3)
    stuck = options.spawn("stuck", PlainWorker)
    call = asyncio.create_task(stuck.block_in_c.call_one(LONG_S))
    failure = await tree.faults.one()

    await failure.respawn()

    with pytest.raises(Died) as caught:
        await asyncio.wait_for(call, SOON_S)
    assert caught.value.failure_id == failure.id
    assert await asyncio.wait_for(stuck.work.call_one("again"), 60) == "again"


async def test_supervision_U1_the_same_to_who_only_has_a_reference(tree, procs):
    """Caller, worker and owner are three processes."""
    manager = this_proc().spawn("manager", Manager, "handle", "", 1, 1)
    workers = await manager.mesh.call_one()
    caller = procs[0:1].spawn("caller", Worker)
    (pid,) = await pids_of(workers)
    call = asyncio.create_task(caller.nap_elsewhere.call_one(workers, LONG_S))
    await asyncio.sleep(0.3)

    os.kill(pid, signal.SIGKILL)

    said = await asyncio.wait_for(call, SOON_S)
    (told,) = await until(lambda: manager.failures_told.call_one(), "the owner is told")
    assert said == f"Died {told['id']}"
    assert told["is_own_mesh"] and told["kind"] == "SIGNALED"
