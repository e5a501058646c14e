"""The rules of actor trees: messages, errors, owners, failures, stops and respawns.

Most actors here live in the test's own process, since the rules are the same there and cost no
process; where a process has to end, it is one of those that all tests share.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stagekeeper.actor import (
    Died,
    FailureKind,
    MeshError,
    MeshStopped,
    NotOwner,
    NotSendable,
    RemoteError,
    root,
    this_host,
    this_proc,
)
from stagekeeper.actor.owning import local_procs
from stagekeeper.actor.owning.references import ReferenceKeeper
from stagekeeper.actor.place import Place
from stagekeeper.client.errors import NoRoom
from stagekeeper.v1.types_pb2 import Payload
from stagekeeper.wire.actor_limits import STREAM_WINDOW
from tests.harness.actor_trees import SOON_S, a_script, all_gone, is_alive, until
from tests.stages.actor_cases import (
    BriefManager,
    Broken,
    Careless,
    HastyManager,
    Manager,
    PlainManager,
    PlainWorker,
    Spring,
    Untidy,
    Worker,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROC_COUNT = 3  # of the tree that these tests share

LONG_S = 60.0


class Journal:
    """A file that actors write to."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    @property
    def lines(self) -> list[str]:
        path = Path(self.path)
        return path.read_text().splitlines() if path.exists() else []

    async def has(self, line: str, times: int = 1) -> None:
        await until(lambda: self.lines.count(line) >= times, f"{line!r} is in the journal")


@pytest.fixture
def journal(tmp_path) -> Journal:
    return Journal(tmp_path / "journal")


@pytest.fixture
def gate(tmp_path) -> Path:
    """What opens when it is touched."""
    return tmp_path / "gate"


async def told_once(manager) -> dict:
    (told,) = await until(lambda: manager.failures_told.call_one(), "the owner is told")
    return told


# --- messages


@pytest.mark.parametrize("is_up", [True, False], ids=["up", "not up yet"])
async def test_messages_start_in_the_order_in_which_they_were_sent(tree, procs, is_up):
    workers = procs[0:2].spawn("workers", Worker)
    if is_up:
        await workers.ready(LONG_S)
    for number in range(200):
        workers.take.broadcast(number)

    assert dict(await workers.taken.call()) == {rank: list(range(200)) for rank in (0, 1)}


async def test_plain_endpoints_run_one_at_a_time_in_order_and_in_one_thread(tree, journal, gate):
    worker = this_proc().spawn("worker", PlainWorker, journal.path)
    calls = [asyncio.create_task(worker.work.call_one("0", str(gate)))]
    await journal.has("0 begins")
    calls += [asyncio.create_task(worker.work.call_one(str(number))) for number in range(1, 6)]
    gate.touch()

    assert await asyncio.gather(*calls) == [str(number) for number in range(6)]

    expected = [f"{number} {what}" for number in range(6) for what in ("begins", "ends")]
    assert journal.lines == expected
    assert len({await worker.thread.call_one() for _ in range(3)}) == 1


async def test_async_endpoints_interleave_at_awaits_and_nowhere_else(tree, journal):
    worker = this_proc().spawn("worker", Worker, "w", journal.path)

    await asyncio.gather(*(worker.steps.call_one(name, 5) for name in "abc"))

    pairs = list(zip(journal.lines[::2], journal.lines[1::2], strict=True))
    assert all(first.split()[0] == second.split()[0] for first, second in pairs)
    names = [first.split()[0] for first, _ in pairs]
    assert sorted(names) == sorted("abc" * 5)
    assert names != sorted(names)  # they took turns


async def test_plain_code_can_wait_for_other_actors(tree):
    worker, plain = this_proc().spawn("worker", Worker), this_proc().spawn("plain", PlainWorker)

    assert await plain.ask.call_one(worker, 1, 2) == 3


async def test_who_awaits_a_mesh_on_a_loop_of_another_thread_is_told_so(tree):
    worker = this_proc().spawn("worker", Worker)

    def elsewhere(ask: Any) -> None:
        async def run() -> None:
            async with asyncio.timeout(SOON_S):
                await ask()

        with pytest.raises(RuntimeError, match=r"say context\(\).wait"):
            asyncio.run(run())

    values = worker.count.stream(3)
    for ask in (
        partial(worker.add.call_one, 1, 2),
        partial(worker.add.call, 1, 2),
        values.__anext__,
        worker.ready,
        worker.stop,
        this_proc().ready,
    ):
        await asyncio.to_thread(elsewhere, ask)
    assert await worker.add.call_one(1, 2) == 3


async def test_context_says_rank_mesh_incarnation_and_owner(tree, procs):
    manager = procs[0:1].spawn("manager", Manager)
    workers = await manager.mesh.call_one()

    where = (await workers.where.call())[0]
    of_pair = await procs[1:3].spawn("pair", Worker).where.call()

    assert where["owner"] == "manager[0]" and where["owner_path"] == ["root", "manager[0]"]
    assert (where["rank"], where["size"], where["mesh"], where["incarnation"]) == (
        0,
        1,
        "workers",
        1,
    )
    assert [(it["rank"], it["size"], it["owner"]) for it in of_pair.values()] == [
        (0, 2, "root"),
        (1, 2, "root"),
    ]


async def test_streams_yield_the_values_of_every_rank(tree, procs):
    workers = procs[0:2].spawn("workers", Worker)

    values = [tuple(it) async for it in workers.count.stream(3)]

    assert sorted(values) == [(rank, number) for rank in (0, 1) for number in range(3)]


async def test_an_endpoint_with_one_value_can_be_streamed(tree, procs):
    workers = procs[0:2].spawn("workers", Worker)

    values = [tuple(it) async for it in workers.add.stream(1, 2)]

    assert sorted(values) == [(0, 3), (1, 3)]


@pytest.mark.parametrize("pour", ["pour", "pour_plainly"])
async def test_an_endpoint_that_yields_waits_for_its_reader_and_for_nobody_else(
    tree, journal, pour
):
    spring = this_proc().spawn("spring", Spring, journal.path)
    beside = this_proc().spawn("beside", Worker)
    values = getattr(spring, pour).stream()
    async with aclosing(values):
        read = [(await anext(values)).value]
        made = 0

        async def waits() -> bool:
            nonlocal made
            before, made = made, await spring.made.call_one()
            return made == before

        await until(waits, "it waits for its reader")
        assert made <= len(read) + STREAM_WINDOW + 1
        assert await beside.add.call_one(1, 2) == 3

        read += [(await anext(values)).value for _ in range(10 * STREAM_WINDOW)]
        assert read == list(range(1, len(read) + 1))
    await journal.has(f"{pour} ends")
    assert await spring.plain.call_one() == "plain"
    assert dict(spring.failures) == {}


async def test_who_waits_for_its_reader_is_not_stalled(tree):
    spring = this_proc().options(stall_after_s=60).spawn("spring", Spring)
    async with aclosing(spring.pour.stream()) as values:
        await anext(values)
        await until(lambda: spring.made.call_one(), "it has begun")
        await asyncio.sleep(0)
        tree.program.house.look(time.monotonic() + 3600, 0.0)
    worker = this_proc().options(stall_after_s=60).spawn("worker", Worker)
    nap = asyncio.create_task(worker.nap.call_one(LONG_S))
    await asyncio.sleep(0)  # so that it is sent first
    await worker.add.call_one(1, 2)
    tree.program.house.look(time.monotonic() + 3600, 0.0)

    assert (await tree.faults.one()).mesh is worker
    nap.cancel()


async def test_a_stop_wakes_an_endpoint_that_waits_for_its_reader(tree, journal):
    spring = this_proc().spawn("spring", Spring, journal.path)
    values = spring.pour_plainly.stream()
    await anext(values)

    await asyncio.wait_for(spring.stop(0.0), SOON_S)

    await journal.has("pour_plainly ends")
    with pytest.raises(MeshError):
        async for _ in values:
            pass


async def test_a_broadcast_that_yields_without_end_lets_others_run(tree, journal):
    spring = this_proc().spawn("spring", Spring, journal.path)
    spring.pour.broadcast()

    await asyncio.wait_for(spring.made.call_one(), SOON_S)
    await asyncio.wait_for(spring.stop(0.0), SOON_S)

    await journal.has("pour ends")


# --- errors


async def test_an_error_of_an_awaited_call_is_the_callers_and_the_actor_lives(tree, procs):
    workers = procs[0:2].spawn("workers", Worker)

    with pytest.raises(KeyError) as caught:
        await workers[1].look_up.call_one("nothing")

    error = caught.value
    assert isinstance(error, RemoteError)
    assert (error.rank, error.mesh_name) == (1, "workers")
    assert 'return {"a": "b"}[key]' in error.remote_traceback
    with pytest.raises(OSError, match="the disk") as with_cause:
        await workers[1].fail_with_a_cause.call_one()
    assert isinstance(with_cause.value.__cause__, KeyError)
    assert await workers[1].add.call_one(1, 2) == 3
    assert dict(workers.failures) == {}


async def test_errors_of_some_ranks_wait_for_the_answers_of_the_others(tree, procs):
    workers = procs.spawn("workers", Worker)

    with pytest.raises(MeshError) as caught:
        await workers.fail_at.call(1, 0.2)

    assert caught.value.ok == {0: 0, 2: 2}
    assert list(caught.value.failed) == [1]
    assert isinstance(caught.value.failed[1], ValueError)
    with pytest.raises(ExceptionGroup):  # it is one: `except*` works
        raise caught.value
    assert dict(await workers.add.call(1, 2)) == {0: 3, 1: 3, 2: 3}


async def test_arguments_that_cannot_travel_fail_at_the_sender(tree):
    worker = this_proc().spawn("worker", Worker)
    await worker.take.call_one(1)

    with pytest.raises(NotSendable, match="number"):
        await worker.take.call_one(lambda: 2)  # type: ignore[arg-type]
    with pytest.raises(NotSendable, match="number"):
        worker.take.broadcast(object())  # type: ignore[arg-type]
    with pytest.raises(NotSendable):
        this_proc().spawn("other", Worker, asyncio.Lock())  # type: ignore[arg-type]

    assert await worker.taken.call_one() == [1]


async def test_whoever_stops_waiting_for_a_call_ends_it(tree, journal):
    worker = this_proc().spawn("worker", Worker, "worker", journal.path)
    call = asyncio.create_task(worker.nap.call_one(LONG_S))
    await journal.has("worker naps")

    call.cancel()

    await journal.has("worker woken")
    assert await worker.add.call_one(1, 2) == 3


# --- failures and their owners


async def test_a_broadcast_that_raises_ends_the_actor_and_tells_its_owner_alone(tree):
    worker = this_proc().spawn("worker", Worker)
    pending = asyncio.create_task(worker.nap.call_one(LONG_S))

    worker.fail.broadcast("no")

    failure = await tree.faults.one()
    assert failure.kind == FailureKind.BROADCAST_RAISED
    with pytest.raises(Died) as caught:
        await asyncio.wait_for(pending, SOON_S)
    assert caught.value.failure_id == failure.id
    with pytest.raises(Died) as late:
        await worker.add.call_one(1, 2)
    assert late.value.failure_id == failure.id
    assert dict(worker.failures) == {0: failure}


async def test_callers_are_told_before_the_owner_is_asked_and_with_the_same_id(tree, journal):
    """By a broadcast's error, and by the end of a process."""
    for procs in (0, 1):
        manager = this_proc().spawn(f"manager{procs}", Manager, "handle", journal.path, 1, procs)
        workers = await manager.mesh.call_one()
        pid = (await workers.where.call_one())["pid"]
        naps = journal.lines.count("workers naps")
        call = asyncio.create_task(manager.wait_for_one.call_one())
        await journal.has("workers naps", naps + 1)
        if procs:
            os.kill(pid, signal.SIGKILL)
        else:
            await manager.break_one.call_one()

        with pytest.raises(RemoteError):
            await asyncio.wait_for(call, SOON_S)
        told = await told_once(manager)

        lines = [line for line in journal.lines if line.endswith(told["id"])]
        assert lines == [f"caller {told['id']}", f"handler {told['id']}"]


async def test_what_is_handled_stops_there_and_names_the_owners_own_mesh(tree):
    manager = this_proc().spawn("manager", Manager, "handle", "", 2)
    await manager.break_one.call_one(1)

    told = await told_once(manager)

    assert told["is_own_mesh"] and told["name"] == "workers1"
    assert (told["kind"], told["ranks"], told["incarnations"]) == ("BROADCAST_RAISED", [0], [1])
    assert (told["endpoint"], told["sender"]) == ("fail", "manager[0]")
    assert await manager.ping.call_one() == "pong"
    workers = await manager.mesh.call_one(0)
    assert await workers.add.call_one(1, 2) == 3  # of its other mesh


@pytest.mark.parametrize("decision", ["refuse", "nothing"])
async def test_what_every_owner_refuses_reaches_the_hook_once_with_its_path(tree, decision):
    top = this_proc().spawn("top", Careless, decision)
    pending = asyncio.create_task(top.nap.call_one(LONG_S))
    await top.break_below.call_one()

    failure = await tree.faults.one()

    assert failure.kind == FailureKind.UNHANDLED and failure.mesh is top
    assert [tuple(hop) for hop in failure.path] == [
        ("managers[0]", "refused"),
        ("top[0]", "has no __supervise__"),
    ]
    assert failure.root.kind == FailureKind.BROADCAST_RAISED
    assert failure.root.where == "workers[0]"
    assert [cause.where for cause in failure.causes] == ["workers[0]", "managers[0]"]
    assert all(cause.mesh is None for cause in failure.causes)
    shown = str(failure)
    assert shown.index("top[0]") < shown.index("managers[0]") < shown.index("break 0")
    with pytest.raises(Died) as caught:
        await asyncio.wait_for(pending, SOON_S)
    assert caught.value.failure_id == failure.id


async def test_raising_in_supervise_is_a_new_failure_that_the_old_one_caused(tree):
    manager = this_proc().spawn("manager", Manager, "raise")
    await manager.break_one.call_one()

    failure = await tree.faults.one()

    assert failure.kind == FailureKind.SUPERVISE_RAISED and failure.mesh is manager
    assert [cause.kind for cause in failure.causes] == [FailureKind.BROADCAST_RAISED]
    assert "RuntimeError: no idea what to do" in failure.path[0].decision
    assert 'raise RuntimeError("no idea what to do")' in failure.remote_traceback


async def test_a_handler_has_a_time_limit(tree):
    manager = this_proc().spawn("manager", HastyManager, "hold")
    await manager.break_one.call_one()

    failure = await tree.faults.one()

    assert failure.kind == FailureKind.SUPERVISE_RAISED
    assert "TimeoutError" in failure.path[0].decision
    assert failure.root.where == "workers[0]"


async def test_a_plain_handler_of_an_actor_without_plain_endpoints_runs_on_the_loop(tree):
    manager = this_proc().spawn("manager", BriefManager, "handle")
    await manager.break_one.call_one()

    told = await told_once(manager)

    assert told["thread"] == threading.main_thread().name
    assert await manager.ping.call_one() == "pong"


async def test_failures_are_handled_one_at_a_time_and_messages_are_served_meanwhile(tree, journal):
    manager = this_proc().spawn("manager", Manager, "hold", journal.path, 3)
    for number in range(3):
        await manager.break_one.call_one(number)
    await until(lambda: manager.failures_told.call_one(), "the handler has begun")

    assert await manager.ping.call_one() == "pong"
    assert len(await manager.failures_told.call_one()) == 1
    await manager.release.call_one()

    async def all_told() -> bool:
        return len(await manager.failures_told.call_one()) == 3

    await until(all_told, "the other two are handled")
    assert await manager.concurrency.call_one() == 1


async def test_a_plain_handler_runs_after_the_message_in_progress_and_before_those_that_wait(
    tree, journal, gate
):
    manager = this_proc().spawn("manager", PlainManager, journal.path)
    worker = await manager.mesh.call_one()
    calls = [asyncio.create_task(manager.work.call_one("first", str(gate)))]
    await journal.has("first begins")
    calls += [asyncio.create_task(manager.work.call_one(name)) for name in ("second", "third")]
    worker.fail.broadcast("now")
    with pytest.raises(Died):
        while True:
            await worker.add.call_one(1, 2)
    gate.touch()
    await asyncio.gather(*calls)

    assert journal.lines == [
        "first begins",
        "first ends",
        "handler BROADCAST_RAISED",
        "second begins",
        "second ends",
        "third begins",
        "third ends",
    ]


async def test_a_handler_is_cancelled_by_a_stop_and_its_failure_goes_on(tree, journal):
    manager = this_proc().spawn("manager", Manager, "hold", journal.path, 2)
    await manager.break_one.call_one(0)
    await until(lambda: manager.failures_told.call_one(), "the handler has begun")
    await manager.break_one.call_one(1)

    await asyncio.wait_for(manager.stop(0.5), SOON_S)

    assert "handler cancelled" in journal.lines
    failure = await tree.faults.one()
    assert failure.kind == FailureKind.UNHANDLED and failure.mesh is manager
    assert [cause.where for cause in failure.causes] == ["workers[0]", "workers1[0]"]
    assert [tuple(hop) for hop in failure.path] == [("manager[0]", "was stopping")]


async def test_an_init_that_raises_fails_the_rank_and_all_that_wait_for_it(tree, gate):
    broken = this_proc().spawn("broken", Broken, str(gate))
    with pytest.raises(Died) as caught:
        await broken.add.call_one(1, 2)

    failure = await tree.faults.one()
    assert failure.kind == FailureKind.INIT_RAISED
    assert caught.value.failure_id == failure.id
    with pytest.raises(MeshError):
        await broken.ready(LONG_S)
    with pytest.raises(MeshError):  # as broken as before; whoever awaits is told, and nobody else
        await failure.respawn()
    (again,) = broken.failures.values()
    assert again.incarnations == (2,)
    gate.touch()
    await failure.respawn()  # tried again with what the owner has: the failure that it was told of
    assert await broken.add.call_one(1, 2) == 3


@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize("kind", [Worker, PlainWorker])
async def test_sys_exit_in_an_endpoint_is_a_failure_whatever_its_code(tree, procs, kind, code):
    worker = procs[0:1].spawn("worker", kind)
    with pytest.raises(Died) as caught:
        await asyncio.wait_for(worker.leave.call_one(code), LONG_S)

    failure = await tree.faults.one()
    assert failure.kind == FailureKind.EXITED
    assert failure.exit is not None and failure.exit.code == code
    assert (caught.value.failure_id, caught.value.exit_code) == (failure.id, code)


# --- respawn


async def test_a_respawn_where_the_process_lives_keeps_it_and_the_others(tree, procs):
    workers = procs.spawn("workers", Worker)
    before = await workers.where.call()
    workers.take.broadcast(1)
    workers[1].fail.broadcast("one of three")
    failure = await tree.faults.one()

    await failure.respawn()

    after = await workers.where.call()
    assert [it["pid"] for it in after.values()] == [it["pid"] for it in before.values()]
    assert [it["incarnation"] for it in after.values()] == [1, 2, 1]
    assert dict(await workers.taken.call()) == {0: [1], 1: [], 2: [1]}
    assert dict(workers.failures) == {}
    await failure.respawn()  # those that are back are left as they are
    assert [it["incarnation"] for it in (await workers.where.call()).values()] == [1, 2, 1]


async def test_a_respawn_where_the_process_is_gone_makes_another_in_its_place(tree, procs):
    workers = procs.spawn("workers", Worker, "tag")
    reference = procs[0:1].spawn("caller", Worker)
    assert await reference.ask.call_one(workers, 1, 2) == [3, 3, 3]
    before = await workers.where.call()
    os.kill(before[2]["pid"], signal.SIGKILL)
    failure = await tree.faults.one()

    await failure.respawn()

    after = await workers.where.call()
    assert after[2]["pid"] != before[2]["pid"] and after[2]["incarnation"] == 2
    assert [after[rank]["pid"] for rank in (0, 1)] == [before[rank]["pid"] for rank in (0, 1)]
    # Who has an old reference reaches the new rank by it.
    assert await reference.ask.call_one(workers, 2, 2) == [4, 4, 4]
    again = {failure.id}
    os.kill(after[2]["pid"], signal.SIGKILL)
    again.add((await tree.faults.one()).id)
    assert len(again) == 2  # another end, another id


async def test_a_group_is_respawned_whole(tree, procs):
    workers = procs.options(is_group=True).spawn("workers", Worker)
    before = await workers.where.call()
    pending = asyncio.create_task(workers[0].nap.call_one(LONG_S))
    workers[1].fail.broadcast("one of three")
    failure = await tree.faults.one()
    assert failure.ranks == (1,)

    await failure.respawn()

    after = await workers.where.call()
    assert [it["incarnation"] for it in after.values()] == [2, 2, 2]
    assert [it["pid"] for it in after.values()] == [it["pid"] for it in before.values()]
    with pytest.raises((MeshStopped, Died)):  # of a life that is over
        await asyncio.wait_for(pending, SOON_S)


async def test_a_respawn_ends_the_process_of_a_survivor_that_is_stuck(tree, procs):
    """Nothing else ends native code, and what it holds."""
    workers = procs[0:2].options(is_group=True).spawn("workers", PlainWorker)
    before = await workers.pid.call()
    pending = asyncio.create_task(workers[0].block_in_c.call_one(LONG_S))
    await workers[0].pid.call_one()
    workers[1].fail_beside.broadcast()
    failure = await tree.faults.one()

    await asyncio.wait_for(failure.respawn(), LONG_S)

    after = await workers.pid.call()
    assert after[0] != before[0] and after[1] == before[1]
    assert not is_alive(before[0])
    with pytest.raises((MeshStopped, Died)):
        await asyncio.wait_for(pending, SOON_S)


async def test_a_respawn_ends_the_process_in_which_what_failed_is_stuck(tree, procs):
    worker = procs[0:1].spawn("worker", PlainWorker)
    before = await worker.pid.call_one()
    pending = asyncio.create_task(worker.block_in_c.call_one(LONG_S))
    await worker.pid.call_one()
    worker.fail_beside.broadcast()

    await asyncio.wait_for((await tree.faults.one()).respawn(), LONG_S)

    assert await worker.pid.call_one() != before and not is_alive(before)
    with pytest.raises(Died):
        await pending


async def test_a_survivor_that_is_stuck_in_a_process_of_another_owner_is_ended_there(tree, procs):
    manager = procs[0:1].spawn("manager", Manager, "respawn")
    guests = await manager.spawn_group_in.call_one(procs[1:3])
    before = await guests.pid.call()
    pending = asyncio.create_task(guests[0].block_in_c.call_one(LONG_S))
    await guests[0].pid.call_one()
    guests[1].fail_beside.broadcast()
    await all_gone([before[0]])
    with pytest.raises((MeshStopped, Died)):
        await asyncio.wait_for(pending, SOON_S)

    async def is_back() -> bool:
        try:
            after = await guests.pid.call()
        except MeshError:
            return False
        return after[0] != before[0] and after[1] == before[1]

    await until(is_back, "the group is back")


async def test_in_ones_own_process_a_respawn_leaves_what_is_stuck(tree, journal, gate):
    worker = this_proc().spawn("worker", PlainWorker, journal.path)
    pending = asyncio.create_task(worker.work.call_one("old", str(gate)))
    await journal.has("old begins")
    worker.fail_beside.broadcast()

    await asyncio.wait_for((await tree.faults.one()).respawn(), LONG_S)

    assert await worker.work.call_one("new") == "new"
    with pytest.raises(Died):
        await pending
    gate.touch()
    await journal.has("old ends")


async def test_a_manager_that_respawns_keeps_its_callers_going(tree):
    manager = this_proc().spawn("manager", Manager, "respawn")
    workers = await manager.mesh.call_one()
    await manager.break_one.call_one()
    await told_once(manager)

    async def is_back() -> bool:
        return (await workers.where.call_one())["incarnation"] == 2

    await until(is_back, "the worker is back")
    await manager.break_one.call_one()

    async def is_back_again() -> bool:
        return (await workers.where.call_one())["incarnation"] == 3

    await until(is_back_again, "and again")
    assert len(await manager.failures_told.call_one()) == 2


async def test_two_ranks_that_fail_are_told_at_most_once_each(tree, procs):
    workers = procs.spawn("workers", Worker)
    pids = [it["pid"] for it in (await workers.where.call()).values()]
    for rank in (0, 2):
        os.kill(pids[rank], signal.SIGKILL)

    failures = [await tree.faults.one(), await tree.faults.one()]

    assert sorted(failure.ranks for failure in failures) == [(0,), (2,)]
    assert dict(await workers[1:2].add.call(1, 2)) == {1: 3}
    for failure in failures:
        await failure.respawn()
    assert dict(await workers.add.call(1, 2)) == {0: 3, 1: 3, 2: 3}


# --- stops


async def test_what_is_owned_ends_before_its_owner_and_siblings_in_reverse_order(tree, journal):
    manager = this_proc().spawn("manager", Manager, "handle", journal.path, 2)
    await manager.spawn_more.call_one("extra")
    await manager.ping.call_one()

    report = await manager.stop()

    assert report.is_clean and report.clean == [0]
    assert journal.lines == [
        "cleanup extra: None",
        "cleanup workers1: None",
        "cleanup workers: None",
        "cleanup manager: None",
    ]


async def test_cleanup_is_given_what_ended_the_actor(tree, journal):
    worker = this_proc().spawn("worker", Worker, "worker", journal.path)
    manager = this_proc().spawn("manager", Manager, "refuse", journal.path, 2)
    worker.fail.broadcast("no")
    await tree.faults.one()
    await journal.has("cleanup worker: ValueError")

    await manager.break_one.call_one()

    await tree.faults.one()
    await journal.has("cleanup manager: FailureAsError")
    # The sibling of what failed had done nothing wrong; it is told why it ends.
    assert "cleanup workers1: FailureAsError" in journal.lines
    assert journal.lines.index("cleanup workers1: FailureAsError") < journal.lines.index(
        "cleanup manager: FailureAsError"
    )


@pytest.mark.parametrize("hangs", [False, True], ids=["raises", "hangs"])
async def test_a_cleanup_that_goes_wrong_is_in_the_report(tree, hangs):
    untidy = this_proc().spawn("untidy", Untidy, hangs)
    await untidy.add.call_one(1, 2)

    report = await untidy.stop(0.2)

    (problem,) = report.cleanup
    assert problem.kind == FailureKind.CLEANUP_RAISED
    assert ("did not end within" if hangs else "the device is busy") in str(problem)
    assert not report.is_clean


async def test_messages_that_a_stop_does_not_run_are_named_and_their_senders_told(
    tree, journal, gate
):
    worker = this_proc().spawn("worker", PlainWorker, journal.path)
    calls = [asyncio.create_task(worker.work.call_one(name, str(gate))) for name in ("one", "two")]
    await journal.has("one begins")
    worker.work.broadcast("three", str(gate))

    stop = asyncio.create_task(worker.stop(0.3))
    await asyncio.sleep(0)
    with pytest.raises(MeshStopped):  # it takes nothing new
        await worker.work.call_one("four")
    report = await asyncio.wait_for(stop, SOON_S + 1)

    assert [(it.endpoint, it.sender, it.had_begun) for it in report.unrun] == [
        ("work", "root", True),
        ("work", "root", False),
        ("work", "root", False),
    ]
    assert "3 messages not run" in str(report) and not report.is_clean
    begun, queued = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(begun, MeshStopped) and begun.had_begun and not begun.never_ran
    assert isinstance(queued, MeshStopped) and queued.never_ran
    assert (report.stuck, report.clean) == ([0], []) and "stuck: 0" in str(report)
    gate.touch()
    await journal.has("one ends")
    assert "two begins" not in journal.lines and "three begins" not in journal.lines


async def test_messages_that_are_there_run_within_the_budget(tree, journal, gate):
    worker = this_proc().spawn("worker", PlainWorker, journal.path)
    calls = [asyncio.create_task(worker.work.call_one(name, str(gate))) for name in ("one", "two")]
    await journal.has("one begins")
    worker.work.broadcast("three")
    stop = asyncio.create_task(worker.stop(LONG_S))
    await asyncio.sleep(0.05)
    gate.touch()

    report = await asyncio.wait_for(stop, LONG_S)

    assert report.is_clean and report.unrun == []
    assert await asyncio.gather(*calls) == ["one", "two"]
    assert journal.lines[-1] == "three ends"


async def test_messages_that_were_sent_before_the_stop_run_also_when_they_are_on_their_way(
    tree, procs, journal
):
    worker = procs[0:1].spawn("worker", Worker, "w", journal.path)
    await worker.ready(LONG_S)
    for _ in range(1_000):
        worker.nap.broadcast(0.0)

    report = await worker.stop(SOON_S)

    assert report.is_clean and not report.unrun
    assert journal.lines.count("w naps") == 1_000


async def test_what_waits_for_a_mesh_that_its_owner_has_stopped_is_told_of(
    tree, caplog, monkeypatch
):
    keeper = ReferenceKeeper(tree.program, "m", "worker", 1, Place("a", "i", 0, ""))
    monkeypatch.setattr(keeper, "sought", lambda rank: None)
    (rank,) = keeper.ranks
    for _ in range(2):
        rank.cast("add", Payload())

    keeper._stopped(rank)

    assert caplog.messages == [
        "2 messages were for worker[0], which was stopped: add from root first"
    ]


async def test_an_error_of_a_message_that_runs_during_a_stop_is_not_lost(tree, journal, gate):
    worker = this_proc().spawn("worker", PlainWorker, journal.path)
    first = asyncio.create_task(worker.work.call_one("one", str(gate)))
    await journal.has("one begins")
    worker.fail.broadcast("at the last moment")
    stop = asyncio.create_task(worker.stop(LONG_S))
    await asyncio.sleep(0.05)
    gate.touch()

    await asyncio.wait_for(stop, LONG_S)

    failure = await tree.faults.one()
    assert failure.kind == FailureKind.BROADCAST_RAISED and failure.mesh is worker
    assert await first == "one"


async def test_a_shorter_second_stop_hurries_the_first(tree, journal, gate):
    """Of actors, and of the processes that they are in, whose report tells of them."""
    own = this_host().spawn_procs(1, name="own")
    for home, of_what in ((this_proc(), "actors"), (own, "processes")):
        worker: Any = home.spawn("worker", PlainWorker, journal.path)
        stopped = own if of_what == "processes" else worker
        call = asyncio.create_task(worker.work.call_one(of_what, str(gate)))
        await journal.has(f"{of_what} begins")
        first = asyncio.create_task(stopped.stop(LONG_S))
        keeper = worker._keeper
        await until(partial(getattr, keeper, "is_stopping"), "it is being stopped")

        report = await asyncio.wait_for(stopped.stop(0.2), SOON_S)

        assert (await asyncio.wait_for(first, SOON_S)) is report
        assert [(it.endpoint, it.had_begun) for it in report.unrun] == [("work", True)]
        of_worker = report if stopped is worker else report.actors[0]
        assert (of_worker.name, of_worker.stuck, of_worker.clean) == ("worker", [0], [])
        assert not report.is_clean and "stuck: 0" in str(report)
        with pytest.raises(MeshStopped):
            await call
    gate.touch()


async def test_nothing_is_spawned_in_processes_that_were_stopped_and_that_is_no_failure(
    tree, procs
):
    shared, procs = procs, this_host().spawn_procs(1, name="stopped")
    worker = procs.spawn("worker", Worker)
    stop = asyncio.create_task(procs.stop())
    await asyncio.sleep(0)

    for home in (procs, procs[0:1]):
        with pytest.raises(MeshStopped, match="stopped was stopped"):
            home.spawn("late", Worker)
    assert (await stop).is_clean
    with pytest.raises(MeshStopped):
        await procs.ready(LONG_S)
    for home in (this_proc(), shared[0:1]):
        manager = home.spawn("manager", Manager)
        await manager.spawn_in.call_one(procs)
        guest = await manager.mesh.call_one(1)
        with pytest.raises(MeshStopped):
            await guest.add.call_one(1, 2)
        assert await manager.failures_told.call_one() == []
    with pytest.raises(MeshStopped):
        await worker.add.call_one(1, 2)


async def test_only_the_owner_stops_a_mesh_and_only_whole(tree, procs):
    manager = procs[0:1].spawn("manager", Manager)
    reference = await manager.mesh.call_one()
    workers = procs[0:2].spawn("workers", Worker)

    with pytest.raises(NotOwner):
        await reference.stop()
    with pytest.raises(NotOwner):
        await workers[0:1].stop()
    with pytest.raises(NotOwner):
        await procs[0:1].stop()
    assert await reference.add.call_one(1, 2) == 3


async def test_in_the_owners_process_too_nobody_else_stops_a_mesh(tree, procs):
    manager = this_proc().spawn("manager", Manager)
    of_manager = await manager.mesh.call_one()
    worker = this_proc().spawn("worker", Worker)

    with pytest.raises(NotOwner, match=r"workers belongs to manager\[0\], .*; this is root"):
        await of_manager.stop()
    for mesh in (worker, procs):
        with pytest.raises(RemoteError, match=r"NotOwner.*this is manager\[0\]"):
            await manager.stop_it.call_one(mesh)
    assert await of_manager.add.call_one(1, 2) == 3
    assert await worker.add.call_one(1, 2) == 3
    await manager.stop_own.call_one()
    with pytest.raises(MeshStopped):
        await of_manager.ready(LONG_S)
    with pytest.raises(MeshStopped):
        await of_manager.add.call_one(1, 2)


# --- ownership


async def test_actors_spawn_in_init_and_in_endpoints_and_own_what_they_spawn(tree, procs):
    manager = procs[0:1].spawn("manager", Manager)
    spawned = [await manager.mesh.call_one(), await manager.spawn_more.call_one("extra", 1)]
    for mesh in spawned:
        assert (await mesh.where.call_one())["owner"] == "manager[0]"
    pid = (await spawned[1].where.call_one())["pid"]

    await manager.stop()

    await all_gone([pid])
    for mesh in spawned:
        with pytest.raises((Died, MeshStopped)):
            await asyncio.wait_for(mesh.add.call_one(1, 2), LONG_S)


async def test_the_end_of_an_owners_process_ends_all_that_it_owned(tree, procs):
    manager = procs[0:1].spawn("manager", Manager, "handle", "", 1, 1)
    workers = await manager.mesh.call_one()
    elsewhere = await manager.spawn_more.call_one("elsewhere")
    pids = [
        (await workers.where.call_one())["pid"],
        await workers.start_grandchild.call_one(),
        await elsewhere.start_grandchild.call_one(),
    ]
    assert all(map(is_alive, pids))

    os.kill(await manager.pid.call_one(), signal.SIGKILL)

    await all_gone(pids)
    assert (await tree.faults.one()).mesh is manager
    with pytest.raises(Died):
        await asyncio.wait_for(workers.add.call_one(1, 2), LONG_S)


async def test_the_failure_of_an_owner_whose_process_lives_ends_all_that_it_owned(tree, procs):
    manager = procs[0:1].spawn("manager", Manager, "refuse", "", 2, 1)
    workers = await manager.mesh.call_one(1)
    pids = [
        (await workers.where.call_one())["pid"],
        await workers.start_grandchild.call_one(),
    ]
    beside = procs[0:1].spawn("beside", Worker)
    await manager.break_one.call_one(0)

    failure = await tree.faults.one()

    assert failure.mesh is manager and failure.root.where == "workers[0]"
    await all_gone(pids)
    assert await beside.add.call_one(1, 2) == 3


async def test_a_process_that_the_kernel_ends_for_memory_is_told_as_that(tree, procs, monkeypatch):
    worker = procs[0:1].spawn("worker", Worker)
    pid = (await worker.where.call_one())["pid"]
    monkeypatch.setattr(tree.program.memory_kills()._witness, "look", lambda: True)

    os.kill(pid, signal.SIGKILL)

    failure = await tree.faults.one()
    assert failure.kind == FailureKind.OUT_OF_MEMORY and failure.mesh is worker
    assert failure.exit is not None and failure.exit.signal == signal.SIGKILL


async def test_a_process_that_is_not_up_in_time_is_told_as_that(tree, monkeypatch):
    monkeypatch.setattr(local_procs, "START_LIMIT_S", 0.001)
    procs = this_host().spawn_procs(1, name="slow")
    worker = procs.spawn("worker", Worker)

    with pytest.raises(Died) as caught:
        await asyncio.wait_for(worker.add.call_one(1, 2), LONG_S)

    assert caught.value.failure.kind == FailureKind.INIT_TIMEOUT
    assert "was not up within 0.001 s" in str(await tree.faults.one())


async def test_actors_of_an_owner_that_is_gone_end_in_the_processes_of_others(tree, procs, journal):
    """An actor may spawn in processes that it was given."""
    owner = procs[0:1].spawn("owner", Manager, "handle", journal.path)
    await owner.spawn_in.call_one(procs[1:2])
    guest = await owner.mesh.call_one(1)
    assert (await guest.where.call_one())["owner"] == "owner[0]"
    beside = procs[1:2].spawn("beside", Worker)

    os.kill(await owner.pid.call_one(), signal.SIGKILL)

    assert (await tree.faults.one()).mesh is owner
    await journal.has("cleanup guest: FailureAsError")
    assert await beside.add.call_one(1, 2) == 3


async def test_who_owns_actors_in_a_process_is_told_that_its_owner_ended_it(tree, procs):
    ended = this_host().spawn_procs(1, name="ended")
    manager = procs[0:1].spawn("manager", Manager)
    await manager.spawn_in.call_one(ended)
    guest = await manager.mesh.call_one(1)
    await guest.add.call_one(1, 2)

    assert (await ended.stop()).is_clean

    told = await told_once(manager)
    assert (told["kind"], told["name"], told["asked"]) == ("EXITED", "guest", True)
    assert told["message"] == "ended[0] was ended by its owner, root"
    # Whoever asks late is told the same.
    control: Any = ended._procs
    end = await tree.program.end_in(control.mesh_id, control.instance_id_of(0))
    assert end is not None and end.exit is not None and end.exit.asked
    with pytest.raises(LookupError):
        await tree.program.end_in("no mesh", "no process")


async def test_a_process_without_actors_is_the_owners_of_the_processes(tree):
    procs = this_host().spawn_procs(1, name="empty")
    worker = procs.spawn("worker", Worker)
    pid = (await worker.where.call_one())["pid"]
    await worker.stop()

    os.kill(pid, signal.SIGKILL)

    failure = await tree.faults.one()
    assert failure.mesh is procs and failure.where == "empty[0]"
    await failure.respawn()
    assert await procs.spawn("worker", Worker).add.call_one(1, 2) == 3


# --- the end of programs


async def test_what_nobody_handles_ends_the_program_as_ctrl_c_would(journal):
    with a_script("default_hook", Path(journal.path)) as script:
        exit_code = await script.ended()

    assert exit_code == 1
    ended = [line for line in journal.lines if not line.startswith(("handler", "workers"))]
    assert ended[0] == "up" and ended[-2:] == ["finally", "atexit"]
    assert script.errors.count("UNHANDLED: managers[0] refused") == 1
    assert script.errors.count("ValueError: break 0") == 1
    assert "Traceback" not in script.errors and "KeyboardInterrupt" not in script.errors


async def test_a_root_that_an_exception_leaves_leaves_nothing(journal):
    with a_script("leaving_by_exception", Path(journal.path)) as script:
        exit_code = await script.ended()

    assert exit_code == 1
    assert script.errors.rstrip().endswith("LookupError: the program's own")
    pids = script.pids()
    assert len(pids) == 3
    assert not [pid for pid in pids if is_alive(pid)]
    assert "cleanup manager: None" in journal.lines


async def test_what_goes_wrong_at_the_very_end_reaches_the_hook(journal):
    with a_script("untidy", Path(journal.path)) as script:
        exit_code = await script.ended()

    assert exit_code == 0  # the hook took it
    assert journal.lines == ["hook CLEANUP_RAISED", "atexit"]


async def test_an_init_that_raises_while_nothing_is_awaited_ends_the_program(journal):
    with a_script("broken", Path(journal.path)) as script:
        exit_code = await script.ended()

    assert exit_code == 1
    assert script.errors.count("LookupError: there is no weight file") == 1
    assert "unhandled failure" in script.errors


async def test_an_actor_takes_no_more_messages_than_its_mesh_allows(procs):
    worker = procs[0].options(max_in_flight=2).spawn("worker", Worker)
    naps = [asyncio.create_task(worker.nap.call_one(LONG_S)) for _ in range(2)]
    await until(lambda: _outstanding(worker) == 2, "both are sent")

    with pytest.raises(NoRoom, match="2 messages"):
        await worker.nap.call_one(0.0)

    for nap in naps:
        nap.cancel()
    await asyncio.wait(naps)
    assert await worker.nap.call_one(0.0)


def _outstanding(worker) -> int:
    return sum(link.outstanding for link in worker._view.links)


async def test_a_process_has_one_root(tree):
    with pytest.raises(RuntimeError, match="there is one root"):
        async with root():
            raise AssertionError("there are two")
