"""One stage process from its first line to its last: control socket, phases, calls, orderly end.

Decided here: the order of a life, what ends it, and with which exit code. Not decided here: whether
it should be restarted. Invariants: the control socket answers before any of the model's code is
imported; and nothing but EndStage, a signal or a failed start ends the process, no agent's absence.

Exit codes: 0 it was asked to end and did; 1 its start failed; 2 its launch file is unusable. The
program of a command stage that ends unasked takes this process with it, by the same code or signal.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stagekeeper.actor import context
from stagekeeper.actor.hosting.connect import Connections
from stagekeeper.core.command_stage import GRPC
from stagekeeper.host import loop_signals
from stagekeeper.host.process import boot_id
from stagekeeper.host.server import Server
from stagekeeper.runtime.launch import Launch, read_launch
from stagekeeper.runtime.phase_lock import LockTimeout, LockUnusable
from stagekeeper.stage import control_service, stage_service
from stagekeeper.stage.activity import Activity
from stagekeeper.stage.connect_calls import StageCalls
from stagekeeper.stage.control_service import StageControlService
from stagekeeper.stage.dispatch import Dispatcher
from stagekeeper.stage.log_bound import keep_bounded
from stagekeeper.stage.phases import PhaseRunner
from stagekeeper.stage.program import ProgramUnusable, end_like
from stagekeeper.stage.siblings import Siblings
from stagekeeper.stage.stage import Stage, StageContext, StageDevice, make_stage
from stagekeeper.stage.stage_service import StageService
from stagekeeper.stage.vitals import Vitals, failure_from
from stagekeeper.v1.stage_control_service_pb2_grpc import (
    add_StageControlServiceServicer_to_server,
)
from stagekeeper.v1.stage_service_pb2_grpc import add_StageServiceServicer_to_server
from stagekeeper.wire.error_details import is_own_cancellation

if TYPE_CHECKING:
    from stagekeeper.stage.command_stage import CommandStage

FAILURE_SHOWN_S = 10.0
"""How long a stage that did not come up waits for its agent to read why."""

_SEND_S = 2.0
"""What answers that are ready get to be sent, at the end."""

_LEAVE_S = 3.0
"""What the model's own threads and exit handlers get at the very end."""

_SAY_IT_ALL = (ProgramUnusable, LockTimeout, LockUnusable, OSError)
"""What can keep a program from coming up, and is no bug of ours."""

_log = logging.getLogger("stagekeeper.stage")


def run(launch_path: str) -> int:
    """Be a stage process; return its exit code."""
    _start_log()
    try:
        launch = read_launch(Path(launch_path))
    except (OSError, ValueError) as error:
        _log.error("the launch file %s cannot be used: %s", launch_path, error)
        return 2
    return asyncio.run(StageHost(launch).run())


class StageHost:
    """Hosts one stage; also what it gives to that stage (`StageHooks`)."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._vitals = Vitals()
        self._activity = Activity()
        self._siblings = Siblings(launch.stage_id)
        self._context = _context_of(launch)
        self._command = self._make_command()
        self._dispatcher: Dispatcher | None = None
        self._server: Server | None = None
        self._end_at: float | None = None
        """When calls under way are given up, on the monotonic clock; None: no end is wanted."""
        self._ending = asyncio.Event()
        """Set when an end is wanted, and then by each thing that may bring it nearer."""

    # --- what the stage is given

    @property
    def context(self) -> StageContext:
        return self._context

    @property
    def siblings(self) -> Siblings:
        return self._siblings

    def report_progress(self, done: int, total: int, note: str) -> None:
        self._activity.report(context(), done, total, note)

    # --- its life

    async def run(self) -> int:
        launch = self._launch
        self._siblings.serve()
        self._listen_to_signals()
        control = StageControlService(
            launch.instance_id,
            self._vitals,
            self._activity,
            set_peers=self._siblings.set_peers,
            end=self._want_end,
        )
        control_server = Server(
            f"unix:{launch.control_socket}",
            [control_service.SERVICE],
            [lambda server: add_StageControlServiceServicer_to_server(control, server)],
            ends_streams=[control],
            with_reflection=False,
        )
        await control_server.start()
        _log.info("%s: the process %d has begun", _title(launch), os.getpid())
        bounding = asyncio.create_task(keep_bounded(), name="bound the log")
        coming_up = asyncio.create_task(self._come_up(), name="come up")
        wanted = asyncio.create_task(self._ending.wait(), name="end wanted")
        await asyncio.wait({coming_up, wanted}, return_when=asyncio.FIRST_COMPLETED)
        code = 0
        if not coming_up.done():
            _log.info("ended while it was starting, in %s", self._vitals.phase)
            if self._command is not None:
                coming_up.cancel()
                await asyncio.wait({coming_up})
                await self._command.program.end(self._given_up_at)
        elif coming_up.result():
            await self._serve_until(wanted)
        elif self._vitals.failure is not None:
            code = 1
            await asyncio.wait({wanted}, timeout=FAILURE_SHOWN_S)
        if self._command is not None and self._has_lost_program:
            code = await self._end_with_program(self._command)
        bounding.cancel()
        await asyncio.wait({bounding})
        await control_server.stop(0.2)
        _leave(code, is_idle=coming_up.done() and not self._activity.is_busy)
        return code

    async def _come_up(self) -> bool:
        """Run the phases and begin to serve; False when that failed, and `vitals` says why."""
        began = time.monotonic()
        try:
            runner = PhaseRunner(self._launch, self, self._vitals, self._activity, self._command)
            stage = await runner.run()
            address = await self._serve(stage)
        except BaseException as error:  # SystemExit in a phase is a failed start like any other
            if isinstance(error, asyncio.CancelledError) and is_own_cancellation():
                raise
            if self._command is not None:
                if self._program_has_ended:
                    return False  # its own end says more than what was waited for here
                await self._command.program.kill()
            failure = failure_from(error)
            # Frames of ours tell nobody anything, and push what a program said out of the last
            # lines of its log.
            is_all_said = self._command is not None and isinstance(error, _SAY_IT_ALL)
            told = failure.error if is_all_said else failure.traceback
            _log.error("the start failed in %s\n%s", self._vitals.phase, told)
            self._vitals.failed(failure)
            return False
        self._activity.reset_progress()  # the last phase's scale means nothing to what follows
        others = [] if self._command is None else self._command.addresses()
        self._vitals.serves([("stage", GRPC, address), *others])
        _log.info("READY at %s after %.3f s", address, time.monotonic() - began)
        return True

    async def _serve_until(self, wanted: asyncio.Task[bool]) -> None:
        """Serve until an end is wanted, and go out of service; or until the program has ended."""
        command = self._command
        if command is None:
            await wanted
            await self._drain()
            return
        watching = asyncio.create_task(command.watch(self._vitals), name="watch the program")
        ended = asyncio.create_task(command.program.ended(), name="end of the program")
        await asyncio.wait({wanted, ended}, return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        await asyncio.wait({watching})
        if not watching.cancelled() and (bug := watching.exception()):
            _log.error("the program was not looked at any more", exc_info=bug)
        if self._end_at is not None:
            await self._drain()

    def _where_to_call(self) -> str:
        if self._command is None:
            return ""
        addresses = ", ".join(url for _, _, url in self._command.addresses())
        return f"it is a program: call it at {addresses or 'its own ports'}"

    def _make_command(self) -> CommandStage | None:
        if self._launch.command is None:
            return None
        from stagekeeper.stage.command_stage import CommandStage

        given = {"launch": self._launch, "show": self._activity.show}
        stage = make_stage(CommandStage, given, self)
        assert isinstance(stage, CommandStage)
        return stage

    @property
    def _program_has_ended(self) -> bool:
        return self._command is not None and self._command.program.has_ended

    @property
    def _has_lost_program(self) -> bool:
        """Whether its program ended, and neither its agent nor this process had asked for that."""
        is_asked = self._end_at is not None or self._vitals.failure is not None
        return self._program_has_ended and not is_asked

    def _given_up_at(self) -> float:
        assert self._end_at is not None
        return self._end_at

    async def _end_with_program(self, command: CommandStage) -> int:
        """End as the program did, which nobody asked for; what it has left behind goes first."""
        program = command.program
        await program.kill()
        if self._server is not None:
            try:
                await self._server.stop(0.0)  # one that is left open complains into the log
            except TimeoutError:
                _log.warning("the stage's own port could not be closed")
        _log.error("%s (process %d) %s, unasked", program.name, program.pid, program.how_it_ended())
        assert program.status is not None
        return end_like(program.status)

    async def _serve(self, stage: Stage) -> str:
        launch = self._launch
        self._siblings.tensors = stage.tensors
        self._dispatcher = Dispatcher(
            stage,
            instance_id=launch.instance_id,
            rank=launch.shard_index,
            max_in_flight=launch.max_in_flight,
            activity=self._activity,
            instead=self._where_to_call(),
        )
        calls = StageCalls(self._dispatcher, launch.instance_id, boot_id())
        connections = Connections(calls, calls)
        service = StageService(self._dispatcher, connections)
        self._server = Server(
            f"{launch.host}:0",
            [stage_service.SERVICE],
            [lambda server: add_StageServiceServicer_to_server(service, server)],
            ends_streams=[connections],
        )
        return await self._server.start()

    async def _drain(self) -> None:
        """Take no new calls, let those under way end within the budget, close the port."""
        assert self._dispatcher is not None and self._server is not None
        self._dispatcher.close()
        self._vitals.drains()
        await self._server.say_not_serving()
        await self._calls_ended()
        given_up = self._activity.cancel_calls()
        if self._command is not None:
            await self._command.drain(self._given_up_at)
        for name in given_up:
            _log.warning("a call to %s did not end within the budget and is given up", name)
        try:
            # A call is over when its code is; its answer may still be on its way out.
            await self._server.stop(0.0 if given_up else _SEND_S)
        except TimeoutError:
            _log.warning("calls that were given up go on, and end with the process")
        await self._siblings.close()

    async def _calls_ended(self) -> None:
        """Return when no call is under way, or the budget is over; it may shrink meanwhile."""
        loop = asyncio.get_running_loop()

        def on_end() -> None:
            loop.call_soon_threadsafe(self._ending.set)

        assert self._end_at is not None
        self._activity.on_end = on_end
        while (left_s := self._end_at - time.monotonic()) > 0:
            self._ending.clear()
            if not self._activity.call_count:
                break
            try:
                async with asyncio.timeout(left_s):
                    await self._ending.wait()
            except TimeoutError:
                pass
        self._activity.on_end = lambda: None  # the loop ends before the last thread may

    def _want_end(self, budget_s: float, reason: str) -> None:
        """Begin the end. Repeats shorten the budget, never lengthen it."""
        end_at = time.monotonic() + max(0.0, budget_s)
        if self._end_at is None:
            _log.info("asked to end within %.1f s: %s", budget_s, reason)
        if self._end_at is None or end_at < self._end_at:
            self._end_at = end_at
            self._ending.set()

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()

        def on_signal(number: signal.Signals) -> None:
            # The next one is the kernel's to carry out: it also ends a process in which a call
            # into native code holds the interpreter.
            for each in (signal.SIGTERM, signal.SIGINT):
                loop_signals.leave(loop, each)
                signal.signal(each, signal.SIG_DFL)
            self._want_end(self._launch.stop_budget_s, f"it got {number.name}")

        for number in (signal.SIGTERM, signal.SIGINT):
            loop_signals.listen(loop, number, partial(on_signal, number))


def _context_of(launch: Launch) -> StageContext:
    cache_dir, run_dir = Path(launch.cache_dir), Path(launch.run_dir)
    cache_dir.mkdir(parents=True, exist_ok=True)
    run_dir.mkdir(parents=True, exist_ok=True)
    return StageContext(
        deployment=launch.deployment,
        replica_index=launch.replica_index,
        stage_id=launch.stage_id,
        stage_name=launch.stage_name,
        shard_index=launch.shard_index,
        shard_count=launch.shard_count,
        devices=tuple(
            StageDevice(device.device_id, device.kind, device.budget_bytes, device.total_bytes)
            for device in launch.devices
        ),
        budget_bytes=launch.budget_bytes,
        cache_dir=cache_dir,
        run_dir=run_dir,
    )


def _title(launch: Launch) -> str:
    return (
        f"{launch.deployment} replica {launch.replica_index} stage {launch.stage_name} "
        f"shard {launch.shard_index} of {launch.shard_count}, instance {launch.instance_id}"
    )


def _start_log() -> None:
    """Write our lines to stderr, which is the stage's log; the root logger is the model's own."""
    output = logging.StreamHandler(sys.stderr)
    output.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    ours = logging.getLogger("stagekeeper")
    ours.addHandler(output)
    ours.setLevel(logging.INFO)
    ours.propagate = False
    # A crash in native code leaves its stacks in the log, and SIGUSR1 asks for them at any time,
    # also while a call holds the interpreter.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def _leave(code: int, *, is_idle: bool) -> None:
    """End the process: as Python does when nothing runs any more, at once when something does."""
    sys.stdout.flush()
    sys.stderr.flush()
    if not is_idle:
        os._exit(code)  # a thread that does not listen would be waited for

    def give_up() -> None:
        time.sleep(_LEAVE_S)
        os._exit(code)

    threading.Thread(target=give_up, name="leave", daemon=True).start()
