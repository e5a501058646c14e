"""`root()`: the program at the root of a tree, as an async context.

Inside of it the program owns what it spawns; on the way out everything has ended, whichever way
that is. Decided here: what an unhandled failure does to the program, and the order of its end.
Invariant: when the block is left nothing of the tree is left, also when it is left by an
exception; and when the program is killed, its warden sees to it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import threading
import uuid
from collections.abc import Callable, Sequence
from contextvars import Token
from types import TracebackType
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar, cast

from stagekeeper.actor import reference_codec  # noqa: F401  (lets meshes travel)
from stagekeeper.actor.actor import Actor
from stagekeeper.actor.errors import NotStopped, UnhandledFault
from stagekeeper.actor.failure import FailureKind, MeshFailure
from stagekeeper.actor.hook import call_hook, install_excepthook
from stagekeeper.actor.hosts import HostMesh
from stagekeeper.actor.identity import ActorIdentity
from stagekeeper.actor.owning.proc_places import is_unconfirmed
from stagekeeper.actor.owning.scope import (
    DEFAULT_STOP_BUDGET_S,
    Scope,
    checked_budget_s,
    current_scope,
)
from stagekeeper.actor.program import (
    DEFAULT_LEASE_S,
    Program,
    claim_process,
    set_current_program,
)
from stagekeeper.host import loop_signals
from stagekeeper.host.process import host_boot_id
from stagekeeper.host.server import check_loopback
from stagekeeper.host.warden import Warden, start_warden

if TYPE_CHECKING:
    from stagekeeper.client import Client

P = ParamSpec("P")
SomeActor = TypeVar("SomeActor", bound=Actor)

_log = logging.getLogger("stagekeeper.actor")

_WARDEN_LIMIT_S: Final = 5.0
_LAST_S: Final = 2.0
"""For actors of this process that were to have ended before."""


class Root:
    """The root of an actor tree. Made by `root`."""

    def __init__(
        self,
        endpoint: str | None,
        *,
        name: str,
        lease_s: float,
        stop_budget_s: float,
        listen_host: str,
    ) -> None:
        self._endpoint = endpoint
        self._name = name
        self._lease_s = lease_s
        self._listen_host = listen_host
        self._stop_budget_s = stop_budget_s
        self._forget()

    def _forget(self) -> None:
        """Know of no tree: the same root may be entered again when it was left."""
        self._fault: BaseException | None = None
        self._unconfirmed: list[MeshFailure] = []
        self._client: Client | None = None
        self._warden: Warden | None = None
        self._watching_warden: asyncio.Task[None] | None = None
        self._is_ending = False
        self._is_left_on_purpose = False
        self._loop: asyncio.AbstractEventLoop | None = None
        """Where SIGTERM is listened to; None when it is not."""

    async def __aenter__(self) -> Root:
        instance_id = str(uuid.uuid4())
        program = Program(
            instance_id=instance_id,
            tree_path=f"{uuid.uuid4()}/{instance_id}",
            token=secrets.token_urlsafe(32),
            boot_id=host_boot_id(),
            lease_s=self._lease_s,
            listen_host=self._listen_host,
        )
        claim_process(program)  # before anything is awaited, so that nobody else comes between
        self._forget()
        self._program = program
        identity = ActorIdentity(instance_id, "", self._name, 0, 1, 1, ())
        self._scope = Scope(identity, stop_budget_s=self._stop_budget_s)
        self._scope.supervise = self._ask_hook
        self._scope.on_unhandled = self._ask_hook_about_end
        self._program.root_scope = self._scope
        self._program.before_child = self._start_warden
        try:
            await self._program.start()
        except BaseException:
            set_current_program(None)
            raise
        install_excepthook()
        self._token: Token[Scope | None] = current_scope.set(self._scope)
        self._task = asyncio.current_task()
        self._scope.open()
        self._listen_to_sigterm()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_ending = True
        self._leave_sigterm()
        self._is_left_on_purpose = _is_purpose(exc if self._fault is None else self._fault)
        try:
            await self._end_whole()
        finally:
            set_current_program(None)
            try:
                current_scope.reset(self._token)
            except ValueError:
                pass  # left in another context than it was entered in, as some test runners do
        left = NotStopped(self._unconfirmed) if self._unconfirmed else None
        if self._fault is None:
            if left is not None and exc is None:
                raise left
            if left is not None and exc is not None:
                exc.add_note(left.message)
            return
        if left is not None:
            self._fault.add_note(left.message)
        if isinstance(exc, asyncio.CancelledError) and self._task is not None:
            self._task.uncancel()
        raise self._fault

    async def _end_whole(self) -> None:
        """End the tree, in order; at once when whoever waits for that is cancelled."""
        ending = asyncio.create_task(self._end(), name="end of the tree")
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            hurried = asyncio.create_task(self._program.end_meshes(), name="end at once")
            await asyncio.shield(asyncio.gather(ending, hurried))
            raise

    async def _end(self) -> None:
        await self._scope.drained()
        for problem in await self._scope.stop(self._stop_budget_s, None):
            if is_unconfirmed(problem):
                self._unconfirmed.append(problem)
            elif not self._only_logs(problem):
                await self._ask_hook(problem)
        # Actors of this process that were not through within the budget: they end here or never.
        try:
            async with asyncio.timeout(_LAST_S):
                await self._program.house.stop_all(0.0)
        except TimeoutError:
            _log.warning("code of actors in this process still runs when their tree has ended")
        if self._client is not None:
            await self._client.close()
        await self._program.close()
        if self._watching_warden is not None:
            self._watching_warden.cancel()
        if self._warden is not None:
            await self._warden.close(_WARDEN_LIMIT_S)

    async def hosts(
        self, *, workers: Sequence[str] | None = None, count: int | None = None
    ) -> HostMesh:
        """Return hosts of the cluster whose endpoint `root` was given.

        Args:
            workers: their worker ids, in the order that is wanted; None means all that are there.
            count: how many, the first ones; None means all.

        Raises:
            RuntimeError: `root` was given no endpoint.
            NotFound: no such worker is known.
            Unavailable: one that is named is not heard of, or there are too few.
            SupervisorUnreachable: nobody answers at the endpoint.
        """
        endpoint = self._cluster()
        # Only those who use a cluster pay for what it takes to talk to one.
        from stagekeeper.actor.cluster_hosts import hosts_of
        from stagekeeper.actor.owning.remote_procs import RemoteProcSource

        found = await hosts_of(endpoint, workers=workers, count=count)
        program = self._program
        return HostMesh(
            program,
            tuple(host.name for host in found),
            lambda count, name: RemoteProcSource(program, found, count),
        )

    async def stage(
        self, deployment: str, stage: str, cls: Callable[P, SomeActor] | None = None
    ) -> SomeActor:
        """Return a stage of a deployment, to be called like a mesh: one rank per replica.

        It belongs to the cluster: whoever leaves the tree leaves it running. Nothing is repeated
        by itself; `stagekeeper.client` does that.

        Args:
            cls: its class, for checkers and for the names of its endpoints; what tensors in its
                answers become is what the class says.

        Raises:
            RuntimeError: `root` was given no endpoint.
            NotFound: there is no such deployment or stage.
        """
        from stagekeeper.actor.deployed import StageMesh
        from stagekeeper.client import Client

        if self._client is None:
            client = Client(self._cluster())
            self._client = await client.__aenter__()
        mesh = StageMesh(
            self._program,
            self._client,
            deployment,
            stage,
            getattr(cls, "__endpoints__", None),
            getattr(cls, "tensors", "numpy"),
        )
        await mesh.check()
        return cast(SomeActor, mesh)

    def _cluster(self) -> str:
        if self._endpoint is None:
            raise RuntimeError(
                'this tree is local: say root("host:port") with a supervisor\'s endpoint, or use '
                "this_host()"
            )
        return self._endpoint

    # --- failures that nobody handled

    async def _ask_hook(self, failure: MeshFailure) -> bool:
        error = call_hook(failure)
        if error is not None:
            self._leave_with(error)
        return True

    def _leave_with(self, error: BaseException) -> None:
        """Have the block left, and `error` raised when all has ended; only the first counts."""
        if self._fault is None:
            self._fault = error
            if not self._is_ending and self._task is not None:
                self._task.cancel()

    def _listen_to_sigterm(self) -> None:
        """End in order at a SIGTERM, where the program has no mind of its own about it."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._loop = asyncio.get_running_loop()
            loop_signals.listen(self._loop, signal.SIGTERM, self._terminated)

    def _terminated(self) -> None:
        self._leave_sigterm()
        self._leave_with(SystemExit(128 + signal.SIGTERM))

    def _leave_sigterm(self) -> None:
        """From now on a SIGTERM ends the program at once, as it did before."""
        if self._loop is not None:
            loop_signals.leave(self._loop, signal.SIGTERM)
            self._loop = None

    def _ask_hook_about_end(self, failure: MeshFailure, error: BaseException | None) -> None:
        """What came while the tree was being stopped: nobody but the hook is left."""
        if self._only_logs(failure):
            return
        fault = call_hook(failure)
        if fault is not None and self._fault is None:
            self._fault = fault

    def _only_logs(self, problem: MeshFailure) -> bool:
        """Log an error of a cleanup where it would take the place of what ends the program."""
        if not (self._is_left_on_purpose and problem.kind is FailureKind.CLEANUP_RAISED):
            return False
        _log.warning("while the tree ended: %s", problem.summary)
        return True

    # --- what ends the tree when this program is killed

    def _start_warden(self) -> None:
        if self._warden is None and not self._is_ending:
            self._warden = start_warden(self._program.tree_path)
            self._watching_warden = asyncio.create_task(self._watch_warden(), name="warden")

    async def _watch_warden(self) -> None:
        """A warden that was killed gets a successor."""
        while self._warden is not None:
            await self._warden.ended()
            if self._is_ending:
                return
            _log.warning("the warden of this tree ended; another one takes its place")
            self._warden = start_warden(self._program.tree_path)


def _is_purpose(error: BaseException | None) -> bool:
    """Return whether the block is left by Ctrl-C, a cancellation or an exit, and not a failure."""
    exits = (asyncio.CancelledError, KeyboardInterrupt, SystemExit)
    return isinstance(error, exits) and not isinstance(error, UnhandledFault)


def root(
    endpoint: str | None = None,
    *,
    name: str = "root",
    lease_s: float = DEFAULT_LEASE_S,
    stop_budget_s: float = DEFAULT_STOP_BUDGET_S,
    listen_host: str = "127.0.0.1",
    insecure: bool = False,
) -> Root:
    """Make this program the root of an actor tree: `async with root() as tree:`.

    Args:
        endpoint: of a supervisor, `host:port`, for `tree.hosts()`; None where everything is local.
        name: for people.
        lease_s: a process that gives no sign of life for so long is stalled.
        stop_budget_s: for the messages of all meshes together when the block is left.
        listen_host: the address of this host that the other processes of the tree dial; with hosts
            of a cluster, one that they reach.
        insecure: `listen_host` may be beyond loopback, though nothing is encrypted yet.

    Raises:
        NotLoopback: `listen_host` is beyond loopback, and `insecure` was not given.
        UnhandledFault: on the way out: a failure reached the root, and the hook did not handle it.
        NotStopped: on the way out: all has ended but for processes on hosts that do not answer.
            What left the block, if anything did, goes on instead, with a note of them.
        ValueError: a number of seconds makes no sense.
    """
    if not 0.05 <= lease_s <= 3_600:
        raise ValueError(f"lease_s has to be within 0.05 and 3,600, not {lease_s}")
    check_loopback(f"{listen_host}:0", insecure=insecure)
    return Root(
        endpoint,
        name=name,
        lease_s=lease_s,
        stop_budget_s=checked_budget_s(stop_budget_s),
        listen_host=listen_host,
    )
