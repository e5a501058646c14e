"""Processes on hosts of a cluster: started by the agents there, held by an open stream each.

The stream is the lease: while it is open the process lives, and its end is told over it. A stream
that broke is opened anew within the lease; the agent joins what it has, and starts nothing twice.
Decided here: when a process is given up on. Not decided here: what its end means to its owner.

Invariant: a process that was asked for is ended by its owner's word, or by its agent when the lease
is over; an agent's new life is never asked for what an earlier one had started.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import grpc

from stagekeeper.actor.cluster_hosts import AgentHost
from stagekeeper.actor.failure import ExitInfo, FailureKind, MeshFailure, failure_id
from stagekeeper.actor.owning.proc_places import UNCONFIRMED, ProcEnd, ProcFailed
from stagekeeper.actor.place import Place
from stagekeeper.client.errors import CONNECTION_LOST, UNREACHABLE, StagekeeperError, from_rpc
from stagekeeper.client.pool import ChannelPool
from stagekeeper.client.retry import for_a_while
from stagekeeper.host.tasks import TaskOwner
from stagekeeper.v1 import agent_service_pb2 as pb
from stagekeeper.v1.agent_service_pb2_grpc import AgentServiceStub
from stagekeeper.wire.error_details import is_own_cancellation, released

if TYPE_CHECKING:
    from stagekeeper.actor.program import Program

START_LIMIT_S: Final = 90.0
"""Beyond what the agent gives a start, so that it is the agent that says why."""

_DIAL_PATIENCE_S: Final = 5.0
"""How long an agent is tried that was never reached: it may just be coming back."""

_GONE_LIMIT_S: Final = 5.0
"""Beyond the budget: what the kernel may take, and the way back. An agent that has not answered by
then is out of reach, or the kernel holds on to something for long: it goes on without us."""

_TOLD_LIMIT_S: Final = 5.0
"""How long the word of an end may take over a stream that is open."""

_BROKEN: Final = (UNREACHABLE, CONNECTION_LOST)


class RemoteProc:
    """One process on a host of the cluster. It is up once `up` has returned.

    Args:
        host: where it is to run.
        asks: the request for it, without what is known only later.
    """

    place: Place

    def __init__(
        self, host: AgentHost, asks: pb.SpawnProcsRequest, pool: ChannelPool, tasks: TaskOwner
    ) -> None:
        self._host = host
        self._asks = asks
        self._pool = pool
        self._is_up = asyncio.Event()
        self._is_asked = False
        self._end: asyncio.Future[ProcEnd] = asyncio.get_running_loop().create_future()
        self._holding = tasks.start(f"process {asks.name}", self._hold())

    @property
    def has_come_up(self) -> bool:
        return self._is_up.is_set()

    async def up(self) -> None:
        """Return when it is up, or has ended without."""
        coming: asyncio.Future[Any] = asyncio.ensure_future(self._is_up.wait())
        ways: set[asyncio.Future[Any]] = {coming, self._end}
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            coming.cancel()

    async def ended(self) -> ProcEnd:
        """Return how it ended, when it has."""
        return await asyncio.shield(self._end)

    async def end(self, budget_s: float) -> bool:
        """Have it end by itself within the budget, or killed; False: it had to be, or who knows."""
        if not self._end.done():
            await self._ask_to_end(budget_s)
        end = await self.ended()
        return end.exit is not None and end.exit.signal is None

    async def kill(self) -> None:
        """Kill it with all that it started; return when it is gone, or its agent out of reach."""
        await self.end(0.0)

    async def _ask_to_end(self, budget_s: float) -> None:
        self._is_asked = True
        request = pb.SpawnProcsRequest()
        request.CopyFrom(self._asks)
        del request.instance_ids[:]  # the set, so that it can never be made again
        request.ends, request.end_budget_s = True, max(0.0, budget_s)

        async def ask() -> None:
            async with aclosing(self._events(request, budget_s + _GONE_LIMIT_S)) as events:
                async for _ in events:
                    pass

        try:
            async with asyncio.timeout(budget_s + _GONE_LIMIT_S):
                await for_a_while(self._asks.lease_s, _is_broken)(ask)
            async with asyncio.timeout(_TOLD_LIMIT_S):
                await self.ended()  # the agent says how, on the stream that holds it
        except (StagekeeperError, TimeoutError):
            self._holding.cancel()  # without a holder its agent ends it when the lease is over

    # --- the stream that holds it

    async def _hold(self) -> None:
        end = ProcEnd(
            None,
            UNCONFIRMED,
            f"agent {self._host.name} does not say that it has ended: it may still run, and "
            "nobody holds it",
        )
        try:
            found: ProcEnd | None = None
            while found is None:
                patience_s = self._asks.lease_s if self.has_come_up else _DIAL_PATIENCE_S
                found = await for_a_while(patience_s, _is_broken)(self._hold_once)
            end = found
        except StagekeeperError as error:
            seen_by = "lease" if error.reason in _BROKEN else "agent"
            if self._is_asked and error.reason == "PROCS_UNKNOWN":
                # It came back to a set that has ended meanwhile, as it was asked to.
                end = ProcEnd(ExitInfo(asked=True), seen_by, f"agent {self._host.name} ended it")
            else:
                end = ProcEnd(None, seen_by, f"agent {self._host.name}: {error.message}")
        finally:
            self._end.set_result(end)

    async def _hold_once(self) -> ProcEnd | None:
        """Hold it over one stream; return how it ended, None when a stream that was good broke."""
        is_good = False
        try:
            async with aclosing(self._events(self._asks, None)) as events:
                async for event in events:
                    is_good = True
                    if event.HasField("ended"):
                        return _end_of(event.ended)
                    self._came_up(event.started)
        except StagekeeperError as error:
            if is_good and _is_broken(error):
                return None
            raise
        return ProcEnd(None, "agent", f"agent {self._host.name} has ended it")

    async def _events(
        self, request: pb.SpawnProcsRequest, timeout_s: float | None
    ) -> AsyncGenerator[pb.SpawnProcsResponse, None]:
        """Yield what one stream tells.

        Raises:
            StagekeeperError: it was refused, or it broke.
        """
        where = f"the agent at {self._host.address}"
        with self._pool.link(self._host.address) as link:
            call = link.stub(AgentServiceStub).SpawnProcs(request, timeout=timeout_s)
            try:
                async for event in call:
                    yield event
            except grpc.RpcError as error:
                failure = from_rpc(error, where=where)
                if _is_broken(failure):
                    self._pool.drop(link)
                raise failure from released(error)
            except asyncio.CancelledError:
                if is_own_cancellation():
                    raise
                self._pool.drop(link)
                raise StagekeeperError(f"{where} was let go", reason=CONNECTION_LOST) from None
            finally:
                call.cancel()  # does nothing to one that has ended
                del call  # see `released`

    def _came_up(self, started: pb.ProcStarted) -> None:
        self._asks.incarnation = started.incarnation
        self.place = Place(started.address, started.instance_id, started.pid, started.boot_id)
        self._is_up.set()


class RemoteProcSource:
    """Starts processes on hosts of a cluster, as many on each, those of one host together.

    Args:
        hosts: in the order of the processes.
        count: of processes on each host.
        environment: for the processes, beside what their agents give them.
    """

    def __init__(
        self,
        program: Program,
        hosts: Sequence[AgentHost],
        count: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._program = program
        self._hosts = tuple(hosts)
        self._count = count
        self._environment = dict(environment or {})
        self._owner = f"process {os.getpid()} on {socket.gethostname()}"
        self._pool = ChannelPool()
        self._tasks = TaskOwner("remote processes")

    async def start(self, index: int, instance_id: str, name: str) -> RemoteProc:
        """Start one and return when it is up.

        Raises:
            ProcFailed: it did not come up; nothing is left of it.
        """
        host = self._hosts[index // self._count]
        asks = pb.SpawnProcsRequest(
            cluster=host.cluster,
            procs_id=instance_id,
            token=self._program.token,
            instance_ids=[instance_id],
            lease_s=self._program.lease_s,
            environment=self._environment,
            name=name,
            owner=self._owner,
        )
        proc = RemoteProc(host, asks, self._pool, self._tasks)
        try:
            async with asyncio.timeout(START_LIMIT_S):
                await proc.up()
        except TimeoutError:
            await proc.kill()
            if not proc.has_come_up:
                late = f"it was not up within {START_LIMIT_S:g} s"
                end = replace(await proc.ended(), message=late, is_late=True)
                raise ProcFailed(_not_started(instance_id, name, host, end)) from None
        except BaseException:
            if not self._tasks.is_stopping:
                _ = self._tasks.start(f"end of {name}", proc.kill())  # nobody waits for that
            raise
        if proc.has_come_up:
            return proc
        raise ProcFailed(_not_started(instance_id, name, host, await proc.ended()))

    async def close(self) -> None:
        """Let go of the agents; what still runs there ends with its lease."""
        await self._tasks.stop()
        await self._pool.close()


def _is_broken(error: BaseException) -> bool:
    return isinstance(error, StagekeeperError) and error.reason in _BROKEN


def _end_of(ended: pb.ProcEnded) -> ProcEnd:
    exit_info = None
    if ended.HasField("exit"):
        told: Any = ended.exit
        exit_info = ExitInfo(
            told.code if told.HasField("code") else None,
            told.signal if told.HasField("signal") else None,
            told.out_of_memory,
            told.asked,
        )
    lines = tuple(ended.last_log_lines)
    return ProcEnd(exit_info, "agent", ended.reason, lines, ended.is_late)


def _not_started(instance_id: str, name: str, host: AgentHost, end: ProcEnd) -> MeshFailure:
    return MeshFailure(
        id=failure_id(instance_id, "end"),
        kind=FailureKind.INIT_TIMEOUT if end.is_late else FailureKind.INIT_RAISED,
        mesh_name=name,
        instance_id=instance_id,
        message=f"on {host.name}: {end.message}",
        exit=end.exit,
        detected_by="start",
        last_log_lines=end.last_log_lines,
    )
