"""What a checker sees on an actor beside its own: the names of a mesh, and the handlers.

`procs.spawn("workers", Worker, …)` returns a mesh and has, for a checker, the type `Worker`: there
is no other way to have `workers.step` typed. So the names of a mesh have to be names of an actor
too, for checkers alone. Decided here: which, and how loosely. Invariant: none of them keeps the
author of an actor from using the name for something else, since on an actor itself it is theirs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from stagekeeper.actor.failure import MeshFailure
    from stagekeeper.actor.owning.stop_report import StopReport
    from stagekeeper.actor.selection import Index

    class StopMesh(Protocol):
        def __call__(self, budget_s: float | None = None) -> Coroutine[Any, Any, StopReport]: ...

    class AwaitMesh(Protocol):
        def __call__(self, timeout_s: float | None = None) -> Coroutine[Any, Any, None]: ...

    class MeshNames:
        """For checkers only.

        `X | Any` is read as X and may be anything in a subclass but a read-only property; so the
        two words that authors want most are Any.
        """

        stop: StopMesh | Any
        ready: AwaitMesh | Any
        name: Any  # str
        size: Any  # int
        ranks: tuple[int, ...] | Any
        failures: Mapping[int, MeshFailure] | Any

        def __getitem__(self, index: Index) -> Self: ...

        def __len__(self) -> int: ...

        __supervise_limit_s__: float

        def __supervise__(self, failure: MeshFailure, /) -> bool | Awaitable[bool]: ...

        def __cleanup__(self, exc: BaseException | None, /) -> Awaitable[None] | None: ...
