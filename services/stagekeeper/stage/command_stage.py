"""`CommandStage`: a server program as a stage.

Its phases: LOAD is from its start until `ready` succeeds, MEASURE is the `canary`, a call as a user
makes it. From then on `live` is looked at. Progress is what it prints of its own accord: a program
that loads for ten minutes and says so is not stalled, and one that only logs that it was looked at
is. Shards above 0 are followers: users reach shard 0 alone, so it
alone is looked at, and a follower has come up when it lives; the replica has when all have.

Decided here: what is looked at when, and how it is taken out of service. Not decided here: the
looks themselves (`probing`), the processes (`program`), and what its end means (`host`).

Invariant: whatever is waited for here, the program's end is seen at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from stagekeeper.core.command_stage import GRPC, LOG, TCP, DrainSpec, Probe
from stagekeeper.core.names import cut
from stagekeeper.runtime.launch import Launch
from stagekeeper.runtime.port_check import is_unbound
from stagekeeper.stage.http_look import NotHttp
from stagekeeper.stage.probing import Looks, Output, metric_sum
from stagekeeper.stage.program import Program, ProgramUnusable
from stagekeeper.stage.stage import Stage
from stagekeeper.stage.vitals import Vitals

_log = logging.getLogger("stagekeeper.stage")

READY_INTERVAL_S: Final = 0.25
LIVE_INTERVAL_S: Final = 5.0
LOOK_TIMEOUT_S: Final = 2.0
CANARY_TIMEOUT_S: Final = 30.0

_METRIC_INTERVAL_S: Final = 0.25
_READ_S: Final = 1.0
_KILL_SHARE: Final = 0.25
_LONGEST_KILL_S: Final = 1.0
"""What of a stop's budget is kept for SIGKILL to whoever does not end: the stage process has to be
done with it before its agent does the same to all."""


class CanaryFailed(ProgramUnusable):
    """The program says that it is ready, and does not answer as its users need it to."""


class PortTaken(ProgramUnusable):
    """Somebody else has a port that was leased for the program."""


class CommandStage(Stage):
    """One shard of a command stage. Made by the host of its process.

    Args:
        launch: has a command.
        show: takes what is going on, for people, which is no sign of progress.
    """

    def __init__(self, launch: Launch, show: Callable[[str], None]) -> None:
        assert launch.command is not None
        self._launch = launch
        self._show = show
        self._spec = launch.command.spec
        self._ports = launch.command.ports
        self.program = Program(launch.command.argv, launch.command.env, launch.run_dir)
        self._output = Output()
        self._looks = Looks(self._host, self._spec, self._ports, self._output)
        self._was_asked = False

    @property
    def _host(self) -> str:
        return self._launch.host.strip("[]")

    @property
    def is_follower(self) -> bool:
        return self._launch.shard_index > 0

    def addresses(self) -> list[tuple[str, str, str]]:
        """Return where users reach the program: (port's name, protocol, address) of each."""
        if self.is_follower:
            return []
        host = self._launch.host
        found = []
        for name, protocol in self._spec.protocols().items():
            address = f"{host}:{self._ports[name]}"
            found.append((name, protocol, address if protocol == GRPC else f"http://{address}"))
        return found

    # --- coming up

    async def load(self) -> None:
        """Start the program, and wait until it is ready."""
        ready = self._ready_probe()
        if ready.look == LOG:
            self._output.watch_for(ready.target)
        self._output.expect_echo(ready)
        self._check_ports()
        self.program.start()
        _log.info("%s has started as process %d", self.program.name, self.program.pid)
        if self.is_follower:
            return
        news = self._output.news
        while problem := await self._looked(ready, LOOK_TIMEOUT_S):
            said = self._output.last_line
            note = cut(f"{said} ({problem})" if said else problem)
            if self._output.news > news:
                news = self._output.news
                self.progress(0, 0, note)
            else:
                self._show(note)
            await self._pause(ready.interval_s or READY_INTERVAL_S)
        _log.info("%s is ready", self.program.name)

    def _check_ports(self) -> None:
        """Make sure that nobody else listens where the program is to: he would be looked at.

        The ports were free when they were leased, which may be long ago: the wait for the cards
        lies between.

        Raises:
            PortTaken: somebody does.
        """
        for name, port in self._ports.items():
            if not is_unbound(self._host, port):
                raise PortTaken(
                    f"port {port} at {self._host}, leased for {name!r}, is in use by another "
                    f"program, so {self.program.name} was not started: find out whose it is "
                    f"(`ss -ltnp 'sport = :{port}'`), or give the agent other ports (--ports)"
                )

    async def measure(self) -> None:
        """Make the call of the canary, where there is one."""
        canary = self._spec.canary
        if canary is None or self.is_follower:
            return
        problem = ""
        for attempt in range(1, canary.failures + 1):
            problem = await self._looked(canary, CANARY_TIMEOUT_S)
            if not problem:
                return
            self.progress(attempt, canary.failures, cut(problem))
            _log.warning("the canary failed (%d of %d): %s", attempt, canary.failures, problem)
            await self._pause(canary.interval_s or READY_INTERVAL_S)
        raise CanaryFailed(
            f"{self.program.name} is ready, and its canary failed "
            f"{canary.failures} times in a row: {problem}"
        )

    def _ready_probe(self) -> Probe:
        return self._spec.ready or Probe(TCP)

    # --- in service

    async def watch(self, vitals: Vitals) -> None:
        """Look whether it lives, as long as this is not cancelled; its end is seen elsewhere."""
        live = self._spec.live
        if live is None or self.is_follower:
            return
        failures = 0
        while True:
            await asyncio.sleep(live.interval_s or LIVE_INTERVAL_S)
            problem = await self._looks.look(live, live.timeout_s or LOOK_TIMEOUT_S)
            failures = failures + 1 if problem else 0
            if failures == live.failures:
                _log.warning("%s does not answer: %s", self.program.name, problem)
            if failures >= live.failures:
                vitals.stalls(cut(f"{self.program.name} does not answer as it should: {problem}"))
            elif not failures and vitals.stall_reason:
                _log.info("%s answers again", self.program.name)
                vitals.answers_again()

    # --- out of service

    async def drain(self, end_at: Callable[[], float]) -> None:
        """Let it settle and end what it works on, then end all of it.

        Args:
            end_at: when its agent gives it up, on the monotonic clock; it may come nearer.
        """
        drain = self._spec.drain or DrainSpec()
        began = time.monotonic()
        kill_s = min(_LONGEST_KILL_S, _KILL_SHARE * max(0.0, end_at() - began))

        def kill_at() -> float:
            return end_at() - kill_s

        await self._wait_until(lambda: min(began + drain.settle_s, kill_at()))
        await self._work_ends(drain, kill_at)
        if not self.program.has_ended:
            _log.info("SIGTERM to %s (process %d)", self.program.name, self.program.pid)
        if await self.program.end(kill_at):
            _log.warning("what was left of %s got SIGKILL", self.program.name)
        _log.info("%s %s", self.program.name, self.program.how_it_ended())

    async def _work_ends(self, drain: DrainSpec, kill_at: Callable[[], float]) -> None:
        """Wait while something is in flight, no longer than the spec allows."""
        began = time.monotonic()
        budget_s = drain.budget_s
        if budget_s is None:
            budget_s = (kill_at() - began) * 2 / 3 if drain.metric else 0.0

        def give_up_at() -> float:
            return min(began + budget_s, kill_at())

        if not drain.metric or self.is_follower:
            await self._wait_until(give_up_at)
            return
        count: float | str = ""
        while not self.program.has_ended and time.monotonic() < give_up_at():
            count = await self._in_flight(drain)
            if count == 0:
                return
            next_at = time.monotonic() + _METRIC_INTERVAL_S
            await self._wait_until(lambda at=next_at: min(at, give_up_at()))  # type: ignore[misc]
        if self.program.has_ended:
            return
        if isinstance(count, str):
            _log.warning("how much is in flight was not told: %s", count or "no time was left")
        else:
            _log.warning("work is in flight still (%s is %g), and is given up", drain.metric, count)

    async def _in_flight(self, drain: DrainSpec) -> float | str:
        """Return how much the program says that it works on; a text says why it does not."""
        try:
            answer = await self._looks.http(drain.port, drain.path, LOOK_TIMEOUT_S)
        except TimeoutError:
            return f"GET {drain.path} was not answered within {LOOK_TIMEOUT_S:g} s"
        except (OSError, NotHttp) as error:
            return f"GET {drain.path}: {error}"
        count = metric_sum(answer.text, drain.metric)
        if count is None:
            return f"GET {drain.path} answered {answer.status}, and has no {drain.metric}"
        return count

    # --- waiting

    async def _looked(self, probe: Probe, timeout_s: float) -> str:
        """Look once; the program's end ends the look too.

        Raises:
            ProgramEnded: it has ended.
        """
        await self._read_on()
        look = asyncio.ensure_future(self._looks.look(probe, probe.timeout_s or timeout_s))
        end = asyncio.ensure_future(self.program.ended())
        try:
            await asyncio.wait({look, end}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (look, end):
                if not task.done():
                    task.cancel()
            await asyncio.wait({look, end})
        self.program.check_alive()
        return look.result()

    async def _read_on(self) -> None:
        """Read what the program has written; a part of it, where it writes without end."""
        until = time.monotonic() + _READ_S
        while self._output.read():
            if time.monotonic() >= until:
                return
            await asyncio.sleep(0)

    async def _pause(self, wait_s: float) -> None:
        await self.program.ended_within(wait_s)
        self.program.check_alive()

    async def _wait_until(self, at: Callable[[], float]) -> None:
        """Wait until a time that may come nearer, or until the program has ended."""
        while not self.program.has_ended and (left_s := at() - time.monotonic()) > 0:
            await self.program.ended_within(min(left_s, 0.1))
