"""What the class of an actor may not be: found when the class is made, not when something failed.

Decided here: the rules for `__init__`, `__supervise__` and `__cleanup__`, and the names that no
endpoint may have because a mesh has them. Not decided here: the endpoints themselves (endpoint).
Invariant: a class that is made has handlers that can be called as they will be, in the place where
they will be.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

from stagekeeper.actor.endpoint import Endpoint

MESH_NAMES: Final = frozenset(
    {"failures", "name", "places", "ranks", "ready", "respawn", "size", "stop"}
)
"""What a mesh has beside the endpoints of its actors."""

_HANDLERS: Final = {"__supervise__": "failure", "__cleanup__": "exc"}
"""What an actor may define, and what it is given."""

_LIMIT: Final = "__supervise_limit_s__"


def check_handlers(cls: type, endpoints: Mapping[str, Endpoint]) -> None:
    """Check what `cls` has beside its endpoints, own or inherited, against them.

    None in the place of one is as if it were absent.

    Raises:
        TypeError: `__init__` is async or yields; a handler cannot be called with what it is given;
            or `__supervise__` is async and every endpoint is plain.
    """
    init = inspect.getattr_static(cls, "__init__", None)
    if (
        inspect.iscoroutinefunction(init)
        or inspect.isgeneratorfunction(init)
        or inspect.isasyncgenfunction(init)
    ):
        raise TypeError(
            f"{cls.__qualname__}.__init__ is async or yields, and Python calls it as a plain "
            "method: await in an endpoint, which the owner calls first"
        )
    for name, parameter in _HANDLERS.items():
        handler = inspect.getattr_static(cls, name, None)
        if handler is not None:
            _check_handler(f"{cls.__qualname__}.{name}", handler, parameter)
    limit_s = getattr(cls, _LIMIT, 1.0)
    if isinstance(limit_s, bool) or not isinstance(limit_s, (int, float)) or not limit_s > 0:
        raise TypeError(f"{cls.__qualname__}.{_LIMIT} is a number of seconds, not {limit_s!r:.80}")
    supervise = inspect.getattr_static(cls, "__supervise__", None)
    if (
        inspect.iscoroutinefunction(supervise)
        and endpoints
        and not any(endpoint.kind.is_async for endpoint in endpoints.values())
    ):
        raise TypeError(
            f"{cls.__qualname__}.__supervise__ is async, and all endpoints of {cls.__qualname__} "
            f"({', '.join(endpoints)}) are plain methods, which run one after the other in a "
            "thread where nothing is awaited: write `def __supervise__`, which then runs between "
            "them, or make an endpoint async"
        )


def _check_handler(where: str, handler: Any, parameter: str) -> None:
    if not inspect.isfunction(handler):
        raise TypeError(
            f"{where} is a plain or async method, not {type(handler).__name__}: write "
            f"`def {where.rpartition('.')[2]}(self, {parameter})`"
        )
    if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        raise TypeError(f"{where} yields; it has to return")
    try:
        inspect.signature(handler).bind(None, None)
    except TypeError as error:
        raise TypeError(
            f"{where}{inspect.signature(handler)} cannot be called with one argument ({error}): "
            f"write `def {where.rpartition('.')[2]}(self, {parameter})`"
        ) from None
