"""What `@endpoint` is to a type checker; at run time it returns the method, and nothing of this is.

Decided here: how the checker sees one name in three ways: on an actor as the method, on a mesh as
an `EndpointRef`, on the class as the plain function. A mesh has the type of its actors, so that the
first two are one type: an `EndpointRef` that can also be called, with what the method returns.
Invariant: parameters and results pass through unchanged, so that a wrong argument is an error in
every way of calling.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

from stagekeeper.actor.calling import EndpointRef

P = ParamSpec("P")
Result = TypeVar("Result")
ResultSeen = TypeVar("ResultSeen", covariant=True)
LocalSeen = TypeVar("LocalSeen", covariant=True)


class EndpointMethod(Generic[P, ResultSeen, LocalSeen]):
    """A marked method in the body of its class.

    `ResultSeen` is one answer (of a generator: one value); `LocalSeen` what the method returns.
    """

    @overload
    def __get__(
        self, instance: None, owner: type | None = None
    ) -> Callable[Concatenate[Any, P], LocalSeen]: ...

    @overload
    def __get__(
        self, instance: object, owner: type | None = None
    ) -> EndpointRef[P, ResultSeen, LocalSeen]: ...

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        raise NotImplementedError("for checkers only")


class EndpointMark(Protocol):
    """What `@endpoint(…)` with options returns."""

    @overload
    def __call__(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, Result]], /
    ) -> EndpointMethod[P, Result, Coroutine[Any, Any, Result]]: ...

    @overload
    def __call__(
        self, method: Callable[Concatenate[Any, P], AsyncIterator[Result]], /
    ) -> EndpointMethod[P, Result, AsyncIterator[Result]]: ...

    @overload
    def __call__(
        self, method: Callable[Concatenate[Any, P], Iterator[Result]], /
    ) -> EndpointMethod[P, Result, Iterator[Result]]: ...

    @overload
    def __call__(
        self, method: Callable[Concatenate[Any, P], Result], /
    ) -> EndpointMethod[P, Result, Result]: ...
