"""The code of an actor that no message calls: `__init__`, `__supervise__` and `__cleanup__`.

Decided here: where each of them runs, on the loop or in the actor's thread, and for how long. Not
decided here: when, and what its outcome leads to. Invariant: no two pieces of an actor's plain code
run at once, in whichever method; `__supervise__` goes before messages that wait, and once
`__cleanup__` is called none of either begins.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any, Final

from stagekeeper.actor.actor import Actor
from stagekeeper.actor.entrypoint import load_class
from stagekeeper.actor.failing import failure_from, failure_of
from stagekeeper.actor.failure import FailureKind, MeshFailure
from stagekeeper.actor.hosting.actor_thread import ActorThread
from stagekeeper.actor.hosting.handlers import HandlerLate, answer_of
from stagekeeper.actor.hosting.serial import SerialTurns
from stagekeeper.actor.identity import ActorIdentity
from stagekeeper.actor.owning.scope import NoSupervisor
from stagekeeper.v1 import actor_service_pb2 as pb
from stagekeeper.wire.error_details import is_own_cancellation
from stagekeeper.wire.payload import decode_arguments

_SUPERVISE_LIMIT_S: Final = 30.0
_INIT: Final = "__init__"
_SUPERVISE: Final = "__supervise__"
_CLEANUP: Final = "__cleanup__"


class SpecialMethods:
    """Those of one actor. For the loop's thread only.

    Args:
        thread: where its plain code runs.
        turns: who gives that code its turns.
        context: the variables that its code sees; copied for every call.
        on_handled: called where `__supervise__` runs, the moment it has handled a failure.
        on_exit: the actor's code wants the whole process to end.
    """

    def __init__(
        self,
        identity: ActorIdentity,
        thread: ActorThread,
        turns: SerialTurns,
        context: contextvars.Context,
        *,
        on_handled: Callable[[], None],
        on_exit: Callable[[BaseException], None],
    ) -> None:
        self._identity = identity
        self._thread = thread
        self._turns = turns
        self._context = context
        self._on_handled = on_handled
        self._on_exit = on_exit
        self._actor: Actor | None = None

    async def make(self, request: pb.SpawnActorRequest, module_path: str) -> Actor:
        """Load the class and make the actor; raises what that raises."""

        def make() -> Actor:
            cls = load_class(request.entrypoint, module_path)
            args, kwargs = decode_arguments(request.arguments)
            return cls(*args, **kwargs)

        try:
            self._actor = actor = await self._thread.run(make, self._context.copy(), _INIT)
        except (SystemExit, KeyboardInterrupt) as wish:
            self._on_exit(wish)
            raise
        return actor

    async def supervise(self, failure: MeshFailure) -> object:
        """Ask `__supervise__`; raises what that raises.

        Raises:
            NoSupervisor: the actor has none.
        """
        actor = self._actor
        handler = _method(actor, _SUPERVISE)
        if actor is None or handler is None:
            raise NoSupervisor
        context = self._context.copy()
        limit_s = float(getattr(type(actor), "__supervise_limit_s__", _SUPERVISE_LIMIT_S))

        def judged(answer: object) -> bool:
            is_handled = bool(answer)
            if is_handled:
                self._on_handled()
            return is_handled

        async def run_plain(call: Callable[[], object]) -> object:
            if any(not it.kind.is_async for it in actor.__endpoints__.values()):
                return await self._turns.urgent(call, context, _SUPERVISE)
            return context.run(call)

        try:
            return await answer_of(
                handler,
                failure,
                limit_s,
                run_plain=run_plain,
                context=context,
                on_exit=self._on_exit,
                conclude=judged,
            )
        except HandlerLate as late:
            raise TimeoutError(str(late)) from None

    async def clean_up(self, error: BaseException | None, budget_s: float) -> MeshFailure | None:
        """Run `__cleanup__` within the budget, if there is one; return what went wrong.

        Args:
            error: why the actor ends; None when that was asked for.
        """
        cleanup = _method(self._actor, _CLEANUP)
        if cleanup is None:
            return None
        self._turns.close()
        context = self._context.copy()
        name, kind = self._identity.name, FailureKind.CLEANUP_RAISED
        try:
            await answer_of(
                cleanup,
                error,
                budget_s,
                run_plain=lambda call: self._thread.run(call, context, _CLEANUP),
                context=context,
                on_exit=self._on_exit,
            )
        except (SystemExit, KeyboardInterrupt):
            raise
        except HandlerLate:
            what = f"{name}: {_CLEANUP} {self._why_late(budget_s)}"
            return failure_of(self._identity, kind, what)
        except BaseException as raised:
            if isinstance(raised, asyncio.CancelledError) and is_own_cancellation():
                raise
            return failure_from(self._identity, kind, raised, f"{name}: {_CLEANUP} raised")
        return None

    def forget(self) -> None:
        """Hold the actor no longer."""
        self._actor = None

    def _why_late(self, budget_s: float) -> str:
        before = self._thread.running
        if before in ("", _CLEANUP):
            return f"did not end within {budget_s:.3g} s"
        name = self._identity.name
        return f"could not begin within {budget_s:.3g} s: {name}.{before} still runs"


def _method(actor: Actor | None, name: str) -> Any:
    """Return a method of an actor's class; its `__getattr__` is not asked, as for Python's own."""
    return None if getattr(type(actor), name, None) is None else getattr(actor, name)
