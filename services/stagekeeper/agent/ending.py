"""The end of a stage's processes: asked for, waited for, forced, proven.

To be asked is for the main process alone: over its socket, or by SIGTERM where that cannot be said.
SIGKILL goes to every process in its session, with its instance id in the environment, or descending
from its main process while that lives. Decided here: in which order, and when it is over. Not
decided here: why a stage ends. Invariant: `gone` is set only after a look at all processes of the
host that found none of this instance.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Final

import structlog

from stagekeeper.agent.control_link import LinkError
from stagekeeper.agent.stage_process import StageProcess
from stagekeeper.core.ids import InstanceId
from stagekeeper.host.process import (
    ProcessHandle,
    ProcessIdentity,
    descendants,
    find_members,
    is_alive,
)
from stagekeeper.runtime import crash_points
from stagekeeper.runtime.launch import INSTANCE_ENV

_log = structlog.get_logger(__name__)

_ASK_TIMEOUT_S: Final = 2.0
_KILL_ROUND_S: Final = 5.0
_STREAM_END_S: Final = 0.2


async def end_processes(stage: StageProcess, *, budget_s: float, reason: str) -> bool:
    """End all that belongs to a stage; return whether SIGKILL was needed.

    It is marked as asked first, so its end is no failure. May be cancelled: what was sent stays
    sent, and a repeat goes on.

    Args:
        budget_s: from now until SIGKILL; 0 kills at once.
    """
    stage.is_asked = True
    deadline = asyncio.get_running_loop().time() + budget_s
    handle = stage.handle
    if handle is not None and budget_s > 0 and not handle.has_exited:
        await _ask(stage, handle, budget_s, reason)
        crash_points.reached("stop-asked")
        try:
            async with asyncio.timeout_at(deadline):
                await handle.wait()
        except TimeoutError:
            _log.warning("a stage did not end within its budget", stage=str(stage), pid=handle.pid)
    return await kill_processes(stage)


async def kill_processes(stage: StageProcess) -> bool:
    """SIGKILL all that belongs to a stage, until it is proven gone; return whether any lived."""
    stage.was_killed = True
    async with stage.killing:
        return not stage.gone.is_set() and await _kill_until_gone(stage)


async def _kill_until_gone(stage: StageProcess) -> bool:
    handle = stage.handle
    # Our hold began while the leader lived, so the session's number is still its own.
    session = handle.pid if handle is not None else None
    leader = handle.identity if handle is not None else None
    killed = False
    pids = set(stage.card_pids) if session is None else {session, *stage.card_pids}
    while members := await _members(stage.instance_id, leader):
        killed = True
        pids.update(member.pid for member in members)
        left = await _kill(members)
        if left:
            _log.error(
                "processes of a stage outlive SIGKILL; they hold its memory",
                stage=str(stage),
                pids=[member.pid for member in left],
            )
    if handle is not None:
        await handle.wait()
        handle.reap()
        handle.close()
    if stage.link is not None:
        await stage.link.close()
        stage.link = None
    # What it claims is free only then: the driver takes its memory back a while after its end.
    stage.memory_note = await stage.memory_returns(pids)
    stage.all_gone()
    crash_points.reached("stop-gone")
    return killed


async def stream_end(stage: StageProcess) -> None:
    """Let the last words of a process that has ended come in, if there are any."""
    try:
        async with asyncio.timeout(_STREAM_END_S):
            await stage.stream_ended.wait()
    except TimeoutError:
        pass


async def _ask(stage: StageProcess, handle: ProcessHandle, budget_s: float, reason: str) -> None:
    """Say it once. SIGTERM is not sent on top: it names no budget, and a second one kills.

    An agent that takes over a stop asks again, so calls within their budget would be cut.
    """
    if stage.link is not None:
        try:
            await stage.link.end(budget_s, reason, min(_ASK_TIMEOUT_S, budget_s))
            return
        except LinkError as error:
            _log.info("a stage was not asked over its socket", stage=str(stage), error=str(error))
    handle.send(signal.SIGTERM)


async def _members(
    instance_id: InstanceId, leader: ProcessIdentity | None
) -> list[ProcessIdentity]:
    # In a thread: on a host with thousands of processes the look takes a while.
    return await asyncio.to_thread(_look_for_members, instance_id, leader)


def _look_for_members(
    instance_id: InstanceId, leader: ProcessIdentity | None
) -> list[ProcessIdentity]:
    """Find all of an instance, also what descends from its main process and shows no sign of it."""
    if leader is None:
        return find_members(INSTANCE_ENV, instance_id)
    found = find_members(INSTANCE_ENV, instance_id, session=leader.pid)
    below = [it for it in descendants(leader.pid) if it not in set(found)]
    # Asked afterwards: then the number was its own while its descendants were looked for.
    return found + below if is_alive(leader) else found


async def _kill(members: list[ProcessIdentity]) -> list[ProcessIdentity]:
    """SIGKILL each and wait for its end; return those that did not end in time."""
    handles = [handle for member in members if (handle := ProcessHandle.open(member))]
    try:
        for handle in handles:
            try:
                handle.send(signal.SIGKILL)
            except PermissionError as error:
                _log.error("a process of a stage is another user's", pid=handle.pid, error=error)
        waits = [asyncio.ensure_future(handle.wait()) for handle in handles]
        if waits:
            _, pending = await asyncio.wait(waits, timeout=_KILL_ROUND_S)
            for wait in pending:
                wait.cancel()
            if pending:
                await asyncio.wait(pending)
        return [handle.identity for handle in handles if not handle.has_exited]
    finally:
        for handle in handles:
            handle.close()
