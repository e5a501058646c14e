"""`@endpoint`: which methods of a class callers may reach, and how each has to be run.

Decided here: the mark, the four kinds of endpoint, and the table that every server of actors reads.
Not decided here: how a call travels and where it runs. Invariant: what is not in a class's table
cannot be called from outside, whatever its name.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, overload

if TYPE_CHECKING:
    from stagekeeper.actor.endpoint_types import EndpointMark, EndpointMethod

P = ParamSpec("P")
Result = TypeVar("Result")

_MARK = "__stagekeeper_endpoint__"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class EndpointKind(Enum):
    """How an endpoint runs and how often it answers."""

    SYNC = "sync"
    ASYNC = "async"
    SYNC_STREAM = "sync stream"
    ASYNC_STREAM = "async stream"

    @property
    def is_async(self) -> bool:
        return self in (EndpointKind.ASYNC, EndpointKind.ASYNC_STREAM)

    @property
    def is_streaming(self) -> bool:
        return self in (EndpointKind.SYNC_STREAM, EndpointKind.ASYNC_STREAM)


@dataclass(frozen=True, slots=True)
class _Mark:
    """What the decorator leaves on a function until its class is made."""

    idempotent: bool


class _Bare(str):
    """An annotation that was left as text, printed without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One entry of a class's table."""

    name: str
    kind: EndpointKind
    idempotent: bool
    """A repeat does no harm, so a client may retry it after a lost answer."""
    signature: inspect.Signature
    """Of the bound method: without `self`."""
    positional: tuple[str, ...]
    """The parameters that may be given by position, `*args` aside."""
    function: Callable[..., Any]
    """Plain function; its first argument is the actor."""

    def __str__(self) -> str:
        """Show the endpoint as its caller sees it: `encode(texts: list[str])`."""
        parameters = [
            parameter.replace(annotation=_Bare(parameter.annotation))
            if isinstance(parameter.annotation, str)
            else parameter
            for parameter in self.signature.parameters.values()
        ]
        return f"{self.name}{inspect.Signature(parameters)}"


@overload
def endpoint(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, Result]], /
) -> EndpointMethod[P, Result, Coroutine[Any, Any, Result]]: ...


@overload
def endpoint(
    method: Callable[Concatenate[Any, P], AsyncIterator[Result]], /
) -> EndpointMethod[P, Result, AsyncIterator[Result]]: ...


@overload
def endpoint(
    method: Callable[Concatenate[Any, P], Iterator[Result]], /
) -> EndpointMethod[P, Result, Iterator[Result]]: ...


@overload
def endpoint(
    method: Callable[Concatenate[Any, P], Result], /
) -> EndpointMethod[P, Result, Result]: ...


@overload
def endpoint(*, idempotent: bool = False) -> EndpointMark: ...


def endpoint(method: Callable[..., Any] | None = None, /, *, idempotent: bool = False) -> Any:
    """Open a method of an actor to callers. Locally it stays the method that it was.

    On a mesh of its actors, the name is an `EndpointRef`: `await workers.step.call(x)`.

    A plain method runs in a worker thread, an `async` one on the event loop (where code that blocks
    holds up every other call). A generator of either sort answers once per value that it yields.

    Args:
        idempotent: a repeat of a call that was already executed does no harm; clients retry such an
            endpoint when an answer was lost.
    """

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        if not inspect.isfunction(function):
            raise TypeError(
                f"@endpoint takes a plain method, not {type(function).__name__}: "
                "put it innermost, and use neither staticmethod, classmethod nor property with it"
            )
        setattr(function, _MARK, _Mark(idempotent))
        return function

    return mark if method is None else mark(method)


def endpoint_table(cls: type, *, reserved: frozenset[str] = frozenset()) -> Mapping[str, Endpoint]:
    """Return the endpoints of `cls`, its bases' included, by name and in order of definition.

    An override of an endpoint has to be marked again: a body that callers reach should show it. An
    override by None takes the endpoint away.

    Raises:
        TypeError: a name is in `reserved` or begins with an underscore, an override is not marked,
            or a mark is on something other than a plain method.
    """
    table: dict[str, Endpoint] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            inner = getattr(value, "__func__", getattr(value, "fget", value))
            mark = getattr(inner, _MARK, None)
            if isinstance(mark, _Mark):
                if inner is not value:
                    raise TypeError(f"{base.__qualname__}.{name}: @endpoint takes a plain method")
                if name.startswith("_"):
                    raise TypeError(
                        f"{base.__qualname__}.{name} cannot be an endpoint: callers are other "
                        "code, and a name with an underscore is not for them"
                    )
                if name in reserved:
                    raise TypeError(
                        f"{base.__qualname__}.{name} cannot be an endpoint: the name is taken"
                    )
                table[name] = _endpoint_of(name, value, mark)
            elif name in table:
                if value is not None:
                    raise TypeError(
                        f"{base.__qualname__}.{name} replaces an endpoint without being one: "
                        "mark it with @endpoint, or set it to None to take the endpoint away"
                    )
                del table[name]
    return MappingProxyType(table)


def _endpoint_of(name: str, function: Callable[..., Any], mark: _Mark) -> Endpoint:
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if not parameters:
        raise TypeError(f"endpoint {name} takes no self")
    return Endpoint(
        name=name,
        kind=_kind_of(function),
        idempotent=mark.idempotent,
        signature=signature.replace(parameters=parameters[1:]),
        positional=tuple(it.name for it in parameters[1:] if it.kind in _POSITIONAL),
        function=function,
    )


def _kind_of(function: Callable[..., Any]) -> EndpointKind:
    if inspect.isasyncgenfunction(function):
        return EndpointKind.ASYNC_STREAM
    if inspect.iscoroutinefunction(function):
        return EndpointKind.ASYNC
    if inspect.isgeneratorfunction(function):
        return EndpointKind.SYNC_STREAM
    return EndpointKind.SYNC
