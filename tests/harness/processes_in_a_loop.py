"""A host, a network and processes for actor trees, all within one `VirtualLoop`.

The product's own code runs on both ends: programs, connections, houses, meshes. Made up are only
the channel (`network_in_a_loop`), the start of a process, and the actors' threads. Everything takes
a time that is drawn, so that news of one event comes in any order: an end of stream, an answer, the
kernel's word. Invariant: a process that has ended does nothing more, and neither does what it had
started.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock
from uuid import UUID

from stagekeeper.actor.failure import ExitInfo
from stagekeeper.actor.hosting.actor_service import ActorService
from stagekeeper.actor.hosting.actor_thread import ActorThread
from stagekeeper.actor.hosting.connect import Connections, ConnectService
from stagekeeper.actor.owning.local_procs import not_started
from stagekeeper.actor.owning.proc_places import ProcEnd, ProcFailed
from stagekeeper.actor.place import Place
from stagekeeper.actor.program import Program, set_current_program
from stagekeeper.host.proc_launch import ProcNotStarted
from stagekeeper.host.process import ExitStatus
from tests.harness.network_in_a_loop import Channel, End
from tests.harness.virtual_time import VirtualLoop, in_no_process, process_here

_STOP_BUDGET_S = 8.0


class Host:
    """All processes of one tree, and the ways between them.

    Args:
        chance: draws how long everything takes.
    """

    def __init__(self, loop: VirtualLoop, chance: random.Random) -> None:
        self.loop = loop
        self.chance = chance
        self.processes: dict[str, MadeUpProcess] = {}
        self.bad_starts = 0
        """So many of the next processes do not come up."""
        self.plain_code_s = 0.0
        """What each piece of plain code takes, besides what is drawn."""
        self._last_port = 0

    def process(self, name: str, parent: MadeUpProcess | None) -> MadeUpProcess:
        self._last_port += 1
        process = MadeUpProcess(self, name, f"made-up:{self._last_port}", self._last_port, parent)
        self.processes[process.address] = process
        return process

    def at(self, address: str) -> MadeUpProcess | None:
        return self.processes.get(address)

    @property
    def living(self) -> list[MadeUpProcess]:
        return [process for process in self.processes.values() if not process.is_dead]

    def soon(self, callback: Callable[[], object]) -> None:
        """Call it after what something takes on one host."""
        in_no_process(self.loop, self.delay_s(), callback)

    def delay_s(self) -> float:
        return self.chance.choice((0.0, 0.0002, 0.0005, 0.001, 0.003))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the product's code meet this host instead of the real one."""
        with (
            mock.patch("stagekeeper.actor.hosts.current_program", program_here),
            mock.patch("stagekeeper.actor.reference_codec.current_program", program_here),
            mock.patch("stagekeeper.actor.program.current_program", program_here),
            mock.patch("stagekeeper.actor.tree_root.Program", MadeUpProgram),
            mock.patch("stagekeeper.actor.hosts.LocalProcSource", MadeUpSource),
            mock.patch("stagekeeper.actor.hosting.hosted_actor.ActorThread", InlineThread),
            mock.patch("grpc.aio.insecure_channel", self._channel),
            mock.patch("uuid.uuid4", lambda: UUID(int=self.chance.getrandbits(128))),
        ):
            try:
                yield
            finally:
                set_current_program(None)

    def _channel(self, address: str, options: Any = None) -> Channel:
        caller = process_here()
        assert isinstance(caller, MadeUpProcess)
        return Channel(self, caller, address)


def program_here() -> Program:
    """Return the program of the process whose code runs here."""
    process = process_here()
    assert isinstance(process, MadeUpProcess) and process.program is not None
    return process.program


class MadeUpProcess(End):
    """One process.

    Attributes:
        program: once it is up.
        exit: how it ended.
    """

    def __init__(
        self, host: Host, name: str, address: str, pid: int, parent: MadeUpProcess | None
    ) -> None:
        super().__init__(host.loop)
        self.host = host
        self.name = name
        self.address = address
        self.pid = pid
        self.children: list[MadeUpProcess] = []
        self.program: Program | None = None
        self.exit: ExitStatus | None = None
        self.exited: asyncio.Future[None] = host.loop.create_future()
        if parent is not None:
            parent.children.append(self)

    def end(self, status: ExitStatus) -> None:
        """It is over, and with it all that it started."""
        if self.is_dead:
            return
        self.kill()
        self.exit = status
        for child in self.children:
            child.end(ExitStatus(signal=signal.SIGKILL))
        for way in list(self.ways):
            way.lost(self)
        self.host.soon(self._reaped)

    def _reaped(self) -> None:
        if not self.exited.done():
            self.exited.set_result(None)


class _Left(BaseException):
    """Ends what runs in a process that has ended: no line after it is reached."""


class MadeUpProgram(Program):
    """A program that listens on a made-up network."""

    async def start(self) -> str:
        process = process_here()
        assert isinstance(process, MadeUpProcess)
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._connections = Connections(self, self.house)
        process.services = (
            ConnectService(self._connections),
            ActorService(self, self.house, self),
        )
        process.program = self
        self.address = process.address

        def leave(error: BaseException) -> None:
            code = error.code if isinstance(error, SystemExit) else 1
            process.end(ExitStatus(code=code or 0))  # type: ignore[arg-type]
            raise _Left

        self.house.on_exit = leave
        self.links.start()
        return self.address

    async def close(self) -> None:
        await self.links.close()
        self._connections.end_streams()
        await asyncio.sleep(0.01)


class MadeUpSource:
    """Starts made-up processes as children of one."""

    def __init__(self, program: Program) -> None:
        self._program = program

    async def start(self, index: int, instance_id: str, name: str) -> MadeUpProc:
        parent = process_here()
        assert isinstance(parent, MadeUpProcess)
        host = parent.host
        process = host.process(name, parent)
        is_bad = host.bad_starts > 0
        host.bad_starts -= is_bad
        try:
            await asyncio.sleep(host.delay_s())
            if is_bad:
                process.end(ExitStatus(code=3))
            else:
                program = self._child(process, instance_id)
                await asyncio.wait({process.start(program.start())})
            await asyncio.sleep(host.delay_s())
        except BaseException:
            process.end(ExitStatus(signal=signal.SIGKILL))
            raise
        if process.is_dead:
            error = ProcNotStarted(f"{name} ended before it was up", process.exit)
            raise ProcFailed(not_started(instance_id, name, error))
        return MadeUpProc(process, instance_id, self._program.boot_id)

    def _child(self, process: MadeUpProcess, instance_id: str) -> MadeUpProgram:
        of = self._program
        return MadeUpProgram(
            instance_id=instance_id,
            tree_path=f"{of.tree_path}/{instance_id}",
            token=of.token,
            boot_id=of.boot_id,
            lease_s=of.lease_s,
        )

    async def close(self) -> None: ...


class MadeUpProc:
    """A made-up process, for who started it."""

    def __init__(self, process: MadeUpProcess, instance_id: str, boot_id: str) -> None:
        self._process = process
        self.place = Place(process.address, instance_id, process.pid, boot_id)

    async def ended(self) -> ProcEnd:
        await asyncio.shield(self._process.exited)
        return ProcEnd(ExitInfo.of(self._process.exit), detected_by="pidfd")

    async def end(self, budget_s: float) -> bool:
        process = self._process
        if not process.is_dead:
            _ = process.start(self._ask_to_end())
        try:
            await asyncio.wait_for(asyncio.shield(process.exited), budget_s)
        except TimeoutError:
            await self.kill()
            return False
        return True

    async def _ask_to_end(self) -> None:
        program = self._process.program
        assert program is not None
        await program.house.stop_all(_STOP_BUDGET_S)
        await program.close()
        self._process.end(ExitStatus(code=0))

    async def kill(self) -> None:
        self._process.end(ExitStatus(signal=signal.SIGKILL))
        await asyncio.shield(self._process.exited)


class InlineThread(ActorThread):
    """In place of an actor's thread: its pieces run on the loop, and take as long as is drawn."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._waiting: deque[tuple[Any, ...]] = deque()

    def run(
        self, piece: Callable[[], Any], context: contextvars.Context, what: str
    ) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._unsettled += 1
        self._idle.clear()
        self._waiting.append((piece, future, context, what))
        self._next()
        return future

    def _next(self) -> None:
        if self._waiting and not self.running:
            piece, future, context, self.running = self._waiting.popleft()
            asyncio.get_running_loop().call_soon(self._begin, piece, future, context)

    def _begin(
        self, piece: Callable[[], Any], future: asyncio.Future[Any], context: contextvars.Context
    ) -> None:
        result, error = None, None
        try:
            result = context.run(piece)
        except BaseException as raised:
            error = raised
        process = process_here()
        assert isinstance(process, MadeUpProcess)
        takes_s = process.host.delay_s() + process.host.plain_code_s
        asyncio.get_running_loop().call_later(takes_s, self._end, future, result, error)

    def _end(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        self.running = ""
        self._settle(future, result, error)
        self._next()

    def close(self) -> None:
        """There is no thread to end."""
