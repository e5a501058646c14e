"""The phase lock between processes: who gets in, in which order, and who is named.

Cases recovery-R50 (the lock's half), R53; startup-10, 34.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from stagekeeper.runtime import phase_lock
from stagekeeper.runtime.phase_lock import LockTimeout, Mode, PhaseLock, Wait, lock_paths
from tests.harness.lock_user import LockUser, lock_user, waits_in_the_kernel
from tests.harness.waiting import wait_for

CARD = "host-1/GPU-a"


class Users:
    """The processes of one test, as many as it asks for."""

    def __init__(self, lock_dir: Path, stack: AsyncExitStack) -> None:
        self._lock_dir = lock_dir
        self._stack = stack

    async def start(self, *stages: str, domains: tuple[str, ...] = (CARD,)) -> list[LockUser]:
        users = [lock_user(self._lock_dir, stage, *domains) for stage in stages]
        return list(
            await asyncio.gather(*(self._stack.enter_async_context(user) for user in users))
        )


@pytest.fixture
async def users(tmp_path):
    async with AsyncExitStack() as stack:
        yield Users(tmp_path, stack)


async def test_loads_overlap_and_measurements_do_not(users):
    first, second, third = await users.start("one", "two", "three")
    await first.holds("shared", "LOAD")
    await second.holds("shared", "LOAD")
    third.say("alone", "MEASURE")
    await third.is_waiting()

    await first.frees()
    second_freed = await second.frees()
    had = float(await third.answer("had"))
    assert had >= second_freed

    first.say("alone", "MEASURE")
    await first.is_waiting()
    third_freed = await third.frees()
    assert float(await first.answer("had")) >= third_freed


async def test_writer_goes_before_readers_that_come_later(users):
    reader, writer, later = await users.start("reader", "writer", "later")
    await reader.holds("shared", "LOAD")
    writer.say("alone", "MEASURE")
    await writer.is_waiting()
    later.say("shared", "LOAD")
    await later.is_waiting()

    await reader.frees()
    await writer.answer("had")
    writer_freed = await writer.frees()
    assert float(await later.answer("had")) >= writer_freed


async def test_recovery_R53_killed_holder_and_the_child_it_forked_keep_nothing(users):
    """recovery-R53: a lock that a fork inherits would live on, under the name of a dead process."""
    holder, next_one = await users.start("holder", "next")
    await holder.holds("alone", "MEASURE")
    holder.say("fork")
    child = int(await holder.answer("forked"))
    try:
        next_one.say("alone", "MEASURE")
        await next_one.is_waiting()
        await holder.kill()

        await next_one.answer("had")
        assert Path(f"/proc/{child}").exists()
    finally:
        os.kill(child, signal.SIGKILL)


async def test_startup_10_recovery_R50_wait_without_progress_of_the_holder_fails_and_names_it(
    users, tmp_path
):
    """recovery-R50, startup-10: after the limit comes a failure, never work without the lock."""
    (holder,) = await users.start("stage talker of demo/0")
    await holder.holds("alone", "MEASURE")
    holder.say("enter", "ALLOCATE")
    await holder.answer("entered")
    waits: list[Wait] = []
    has_run = False

    with pytest.raises(LockTimeout) as caught:
        lock = PhaseLock(tmp_path, [CARD], "w", limit_s=0.3, on_wait=waits.append)
        async with lock.held(Mode.SHARED, "LOAD"):
            has_run = True

    assert not has_run
    assert [it.pid for it in caught.value.holders] == [holder.pid]
    assert f"process {holder.pid} (stage talker of demo/0, ALLOCATE, since 2" in str(caught.value)
    assert f"held by process {holder.pid} (stage talker" in str(waits[0])

    # The thread that was left behind still waits; what it gets it lets go, for others to have.
    with pytest.raises(RuntimeError, match="already, or waits"):
        async with lock.held(Mode.SHARED, "LOAD"):
            pass
    await holder.frees()
    await holder.holds("alone", "MEASURE")
    await holder.frees()

    async def is_free_again() -> bool:
        try:
            async with lock.held(Mode.ALONE, "MEASURE"):
                return True
        except RuntimeError:
            return False

    await wait_for(is_free_again, "the thread that was left behind has ended")


async def test_progress_of_the_holder_lengthens_a_wait(users, tmp_path):
    (holder,) = await users.start("holder")
    await holder.holds("shared", "LOAD")
    looks = 0

    def on_wait(wait: Wait) -> None:
        nonlocal looks
        looks += 1
        if looks <= 12:
            holder.say("progress", looks)
        elif looks == 13:
            holder.say("free")

    # Each look tells the holder to get on, in all for three times the limit.
    async with PhaseLock(tmp_path, [CARD], "w", limit_s=0.4, on_wait=on_wait).held(
        Mode.ALONE, "MEASURE"
    ):
        pass

    assert looks >= 12


async def test_cancelled_wait_takes_nothing_from_others(users, tmp_path):
    first, second = await users.start("first", "second")
    await first.holds("alone", "MEASURE")
    lock = PhaseLock(tmp_path, [CARD], "cancelled")

    async def want() -> None:
        async with lock.held(Mode.ALONE, "MEASURE"):
            raise AssertionError("it was not to be had")

    wanting = asyncio.create_task(want())
    await waits_in_the_kernel(os.getpid())
    second.say("alone", "MEASURE")
    await second.is_waiting()
    wanting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wanting

    await first.frees()
    await second.answer("had")


async def test_cards_are_taken_in_one_order_whatever_order_they_are_named_in(users):
    """recovery-R50: with {a, b} and {b, a} nobody has one and waits for the other for ever."""
    (first,) = await users.start("first", domains=("a",))
    (forth,) = await users.start("forth", domains=("a", "b"))
    (back,) = await users.start("back", domains=("b", "a"))
    await first.holds("alone", "MEASURE")
    for user in (forth, back):
        user.say("alone", "MEASURE")
        await user.is_waiting()

    await first.frees()
    await forth.answer("had")
    freed = await forth.frees()
    assert float(await back.answer("had")) >= freed


async def test_replaced_file_is_noticed_by_those_who_waited_for_the_old_one(users, tmp_path):
    holder, waiter, late = await users.start("holder", "waiter", "late")
    await holder.holds("shared", "LOAD")
    waiter.say("alone", "MEASURE")
    await waiter.is_waiting()
    lock_paths(tmp_path, CARD)[0].unlink()
    holder.say("intact")
    assert "was removed or replaced" in await holder.answer("failed")

    # One that comes now stays behind the turnstile, and so does not lock the new file meanwhile.
    late.say("alone", "MEASURE")
    await late.is_waiting()
    await holder.frees()
    await waiter.answer("had")
    freed = await waiter.frees()
    assert float(await late.answer("had")) >= freed


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's file needs root to be made")
def test_startup_34_file_of_another_user_is_refused_with_what_to_do(tmp_path):
    """startup-34."""
    tmp_path.chmod(0o1777)
    for folder in (tmp_path, *tmp_path.parents):
        if folder != Path("/") and not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    lock_path = lock_paths(tmp_path, CARD)[0]
    lock_path.touch()
    os.chown(lock_path, 4711, 4711)
    lock_path.chmod(0o444)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setuid(4712)
        said = ""
        try:
            asyncio.run(_try(tmp_path))
        except phase_lock.LockUnusable as error:
            said = str(error)
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        said = answer.read()
    os.waitpid(child, 0)

    assert f"{lock_path} cannot be used as a lock (Permission denied)" in said
    assert "belongs to user 4711 and has mode 0444" in said
    assert "chmod 666" in said


async def _try(lock_dir: Path) -> None:
    async with PhaseLock(lock_dir, [CARD], "s").held(Mode.SHARED, "LOAD"):
        pass
