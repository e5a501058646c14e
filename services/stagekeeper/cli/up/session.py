"""One `stagekeeper up`, from the lock to the last process.

Decided here: the order of things, what is deleted at the end, and what a second signal cuts short.
Not decided here: when a child is started again (`child`), and what is printed (`notices`).

Invariants: what this `up` did not deploy it does not delete, and a start that fails leaves nothing
behind that the same command with a mended file would trip over.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import Any, Final

from stagekeeper.agent.host_lock import FileLock, LockHeld
from stagekeeper.cli.deploying import Creation, delete_shown, deploy_shown
from stagekeeper.cli.exits import CliError, ExitCode
from stagekeeper.cli.log_output import silence_libraries
from stagekeeper.cli.stdout import say
from stagekeeper.cli.text.amounts import count
from stagekeeper.cli.up.child import ChildEvent, Ended, StartFailed
from stagekeeper.cli.up.leftovers import kill_stages
from stagekeeper.cli.up.notices import (
    DeploymentNotices,
    child_notice,
    left_running,
    where_state_is,
)
from stagekeeper.cli.up.plane import Plane, PlaneOptions
from stagekeeper.cli.up.signals import EndRequests
from stagekeeper.client import (
    Client,
    LoadedSpec,
    NameTaken,
    NotFound,
    StagekeeperError,
    Unavailable,
    WrongState,
)
from stagekeeper.runtime.clock import SystemClock
from stagekeeper.v1 import types_pb2 as types

LOOK_AGAIN_S: Final = 0.1
MOST_ATTEMPTS: Final = 3
"""How often a deployment is asked for whose start is cut short by the end of one of ours."""

SUPERVISOR_PATIENCE_S: Final = 30.0
"""How long a question waits for a supervisor that is being started again."""


def run_up(options: PlaneOptions, specs: Sequence[LoadedSpec], *, keep: bool) -> int:
    """Run everything until a signal; return the exit code.

    Raises:
        CliError: something could not be started or deployed; all that this run began is undone.
    """
    silence_libraries()
    try:
        lock = FileLock.take(options.state_dir / "up.lock", f"state directory {options.state_dir}")
    except LockHeld as held:
        raise CliError(
            ExitCode.FAILED,
            f"{held}: another `stagekeeper up` owns it. End that one, or use another --state-dir "
            "and --endpoint",
        ) from held
    try:
        return asyncio.run(_Session(options, specs, keep=keep).run())
    finally:
        lock.release()


class _Session:
    def __init__(self, options: PlaneOptions, specs: Sequence[LoadedSpec], *, keep: bool) -> None:
        self._options = options
        self._specs = specs
        self._keep = keep
        self._clock = SystemClock()
        self._plane = Plane(options, clock=self._clock, on_event=self._tell)
        self._creations: list[Creation] = []
        self._left: set[str] = set()
        """Deployments of which it has been said that they go on."""
        self._deaths = 0

    async def run(self) -> int:
        ends = EndRequests(lambda: say("ending; once more kills everything at once"))
        failure: BaseException | None = None
        try:
            await _until(ends.asked, self._serve())
        except (CliError, StagekeeperError, StartFailed, OSError) as error:
            failure = error
            say("that failed, for the reason below; undoing what this run began")
        try:
            if not await _until(ends.asked_again, self._end(is_failure=failure is not None)):
                await self._kill()
                return ExitCode.INTERRUPTED
        except (CliError, StagekeeperError) as trouble:
            say(f"not everything could be undone: {trouble}")
            failure = failure or trouble
        if failure is not None:
            raise _explained(failure)
        return ends.exit_code

    async def _serve(self) -> None:
        """Bring everything up, and stay."""
        say(where_state_is(self._options.state_dir, self._options.logs))
        await self._plane.start()
        async with self._client() as client:
            failed = asyncio.create_task(self._plane.failed(), name="up/failed")
            try:
                await _or_raise(failed, self._workers_alive(client))
                for loaded in self._specs:
                    await self._deploy(client, loaded)
                say(self._summary())
                await _or_raise(failed, self._tell_changes(client))
            finally:
                failed.cancel()

    async def _workers_alive(self, client: Client) -> None:
        wanted = set(self._options.agents)
        while True:
            workers = (await client.workers()).workers
            if wanted <= {w.worker_id for w in workers if w.state == types.WORKER_STATE_ALIVE}:
                return
            await self._clock.sleep(LOOK_AGAIN_S)

    async def _deploy(self, client: Client, loaded: LoadedSpec) -> None:
        """Deploy one file, whatever happens to the supervisor and the agents meanwhile."""
        name = loaded.spec.name
        creation = Creation(name)
        self._creations.append(creation)
        attempts = 0
        while True:
            attempts, deaths = attempts + 1, self._deaths
            try:
                await deploy_shown(
                    client, loaded, creation, after_failure="mend the cause and run this again"
                )
                return
            except Unavailable as error:
                say(f"{name}: {error.message}; asking again")
                await self._clock.sleep(LOOK_AGAIN_S)
            except CliError:
                # One of ours ended under the creation, and it could not go on: no fault of the
                # stages, unless that repeats.
                if self._deaths == deaths or attempts == MOST_ATTEMPTS:
                    raise
                say(f"{name}: its start was cut short; asking again")
            except (NameTaken, WrongState) as error:
                await self._make_way(client, name, error)

    async def _make_way(self, client: Client, name: str, error: StagekeeperError) -> None:
        """Have what an earlier `up` left gone, where nothing of it runs or it is going anyway.

        Raises:
            StagekeeperError: `error`; something of it runs.
        """
        if isinstance(error, WrongState):
            say(f"{name}: is still being deleted")
        elif await self._is_idle(client, name):
            say(f"{name}: wanted with another spec, and nothing of it runs; replaced")
        else:
            raise error
        with contextlib.suppress(NotFound):
            await delete_shown(client, name)

    async def _is_idle(self, client: Client, name: str) -> bool:
        """Whether nothing of a deployment runs, for certain."""
        listing = await client.list()
        shards = [
            shard.record
            for deployment in listing.deployments
            if deployment.name == name
            for replica in deployment.replicas
            for shard in replica.shards
        ]
        over = (types.SHARD_STATE_FAILED, types.SHARD_STATE_STOPPED)
        return listing.complete and all(record.state in over for record in shards)

    def _summary(self) -> str:
        names = ", ".join(creation.name for creation in self._creations)
        what = "ends the supervisor and agents"
        if names and self._keep:
            what += f", and leaves {names} running"
        elif names:
            what = f"deletes {names} and {what}"
        return f"up: endpoint {self._plane.endpoint}; Ctrl-C {what}"

    async def _tell_changes(self, client: Client) -> None:
        notices = DeploymentNotices()
        async with contextlib.aclosing(client.watch()) as changes:
            async for change in changes:
                for line in notices.of(change):
                    say(line)

    async def _end(self, *, is_failure: bool) -> None:
        """Delete what has to be deleted, then end every child."""
        trouble: BaseException | None = None
        try:
            await self._undo(is_failure=is_failure)
        except (CliError, StagekeeperError) as error:
            trouble = error
        await self._tell_what_goes_on()
        # No `finally`: a second signal cancels this, and must not wait for an orderly end.
        await self._plane.stop()
        if trouble is not None:
            raise trouble

    async def _undo(self, *, is_failure: bool) -> None:
        # What was never accepted is not there, or is somebody else's.
        ours = [creation for creation in self._creations if creation.accepted is not None]
        if not ours:
            return
        if self._keep and not is_failure:
            return  # what goes on is told of all alike
        async with self._client() as client:
            for creation in reversed(ours):
                if is_failure and not await self._is_to_go(client, creation):
                    say(f"{creation.name}: left as it is; the next `up` takes over")
                    self._left.add(creation.name)
                    continue
                with contextlib.suppress(NotFound):
                    await delete_shown(client, creation.name)

    async def _tell_what_goes_on(self) -> None:
        """Say which deployments outlive this run: what it keeps, and what others deployed here."""
        supervisor = self._plane.supervisor
        if not supervisor.facts or supervisor.pid is None:
            return
        async with Client(self._plane.endpoint, patience_s=0, watch_at_once=False) as client:
            with contextlib.suppress(StagekeeperError):
                listing = await client.list()
                for line in left_running(listing.deployments, told=self._left):
                    say(line)

    async def _is_to_go(self, client: Client, creation: Creation) -> bool:
        """Whether a failed run takes a deployment down: one that it began, or that serves nothing.

        One that an earlier `up` left serving is not ours to end because something else went wrong.
        """
        assert creation.accepted is not None
        try:
            deployment = await client.get(creation.name)
        except NotFound:
            return True
        ready = sum(r.state == types.REPLICA_STATE_READY for r in deployment.replicas)
        was_there = len(deployment.replicas) > len(creation.accepted.starting_replicas)
        return not ready or not was_there

    async def _kill(self) -> None:
        await self._plane.kill()
        if self._keep:
            return
        hit = kill_stages(self._options.state_dir, self._options.agents)
        say(f"killed: supervisor, agents, stages ({count(hit, 'live one')})")

    def _client(self) -> Client:
        return Client(self._plane.endpoint, patience_s=SUPERVISOR_PATIENCE_S, watch_at_once=False)

    def _tell(self, event: ChildEvent) -> None:
        self._deaths += isinstance(event, Ended)
        say(child_notice(event))


async def _until(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work` until it ends or the event is set; return whether it ended. Its errors go on."""
    running = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(event.wait())
    both: set[asyncio.Future[Any]] = {running, waiting}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not running.done():
        running.cancel()
        await asyncio.wait({running})
        return False
    running.result()
    return True


async def _or_raise(failed: asyncio.Task[None], work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, unless a child is given up before."""
    running = asyncio.ensure_future(work)
    try:
        await asyncio.wait({failed, running}, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            failed.result()
        await running
    finally:
        running.cancel()


def _explained(failure: BaseException) -> BaseException:
    """Say what of a failure is only true of `up`."""
    if isinstance(failure, StartFailed):
        return CliError(ExitCode.FAILED, str(failure), details=[f"its log: {failure.log}"])
    if isinstance(failure, NameTaken):
        return CliError(
            ExitCode.FAILED,
            f"{failure.message}. It was left by an earlier `up`: run `stagekeeper up` without a "
            "file, and delete it from another terminal",
        )
    return failure
