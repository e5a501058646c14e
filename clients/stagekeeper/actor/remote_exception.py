"""Exceptions across processes: to the message and back, and never by pickling them.

Decided here: which builtin type an exception has on the other side (the nearest one that means the
same there), and how much of a chain of causes travels. An exception that steers its own process
(KeyboardInterrupt, StopIteration, CancelledError, …) steers nothing elsewhere: it arrives as a
plain RemoteError. Invariant: no exception, however broken, and no chain, however long or circular,
makes `exception_to_proto` raise or its message larger than 160 KiB.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Sequence
from typing import Any, Final

from stagekeeper.actor.error_text import (
    author_tracebacks,
    beginning,
    chain_of,
    end,
    message_of,
    sendable,
    type_name,
)
from stagekeeper.actor.errors import RemoteError
from stagekeeper.actor.failure_text import place_name
from stagekeeper.v1.stage_service_pb2 import RemoteException

_DEEPEST: Final = 12
"""Exceptions of one chain; what is below stands in the traceback of the first."""

_MOST_MESSAGE_BYTES: Final = 4_096
_MOST_TYPE_BYTES: Final = 256
_MOST_TRACEBACK_BYTES: Final = 32_768
_MOST_CAUSE_TRACEBACK_BYTES: Final = 4_096
_MOST_MEMBERS_TOLD: Final = 8

# Not Exceptions are left out anyway. These are: the two that end an iteration, since `raise` turns
# them into something else or ends a loop; groups, whose members do not travel.
_NOT_TAKEN_OVER: Final = (StopIteration, StopAsyncIteration, BaseExceptionGroup)

_WITH_TEXT: Final = (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError)

_classes: dict[type[Exception], type[RemoteError]] = {Exception: RemoteError}

_ERRNO: Final = re.compile(r"\[Errno (\d{1,6})\]")


def exception_to_proto(
    error: BaseException, *, mesh_name: str = "", rank: int = 0
) -> RemoteException:
    """Tell another process of an exception and what it came from.

    Args:
        mesh_name: of the rank that raised.
        rank: that raised.
    """
    chain = chain_of(error, _DEEPEST)
    first = into = RemoteException()
    for one, text in zip(chain, author_tracebacks(chain), strict=True):
        if one is not error:
            into = into.cause
            into.SetInParent()
        _fill(into, one, text, mesh_name, rank, is_first=one is error)
        into.is_explicit_cause = one is not chain[-1] and one.__cause__ is not None
    return first


def exception_from_proto(message: RemoteException, *, has_rank: bool = True) -> RemoteError:
    """Make what the caller is given: a RemoteError that is also of the nearest builtin type.

    The first of a chain shows its remote traceback, which tells of the whole chain, below its
    message when it is printed.

    Args:
        has_rank: whether the sender set `rank`; without one 0 means nothing.
    """
    chain: list[RemoteException] = [message]
    while chain[-1].HasField("cause") and len(chain) < _DEEPEST:
        chain.append(chain[-1].cause)
    below: RemoteError | None = None
    for told in reversed(chain):
        is_explicit = told.is_explicit_cause
        below = rebuilt(
            _sentence(told, has_rank),
            told.type,
            tuple(told.builtin_types),
            told.message,
            told.traceback,
            told.mesh_name,
            told.rank if has_rank else None,
            below if is_explicit else None,
            None if is_explicit else below,
            is_explicit and below is not None,
            _notes_of(told, has_rank) if told is message else (),
        )
    assert below is not None
    return below


def rebuilt(
    message: str,
    remote_type: str,
    builtin_types: Sequence[str],
    remote_message: str,
    remote_traceback: str,
    mesh_name: str,
    rank: int | None,
    cause: BaseException | None,
    context: BaseException | None,
    suppress_context: bool,
    notes: Sequence[str] = (),
) -> RemoteError:
    """Make a RemoteError of the right class; also how one is unpickled."""
    error = remote_error_class(nearest_builtin(builtin_types))(
        message,
        remote_type=remote_type,
        builtin_types=builtin_types,
        remote_message=remote_message,
        remote_traceback=remote_traceback,
        mesh_name=mesh_name,
        rank=rank,
    )
    error.__cause__ = cause
    error.__context__ = context
    error.__suppress_context__ = suppress_context
    if isinstance(error, OSError):
        found = _ERRNO.match(remote_message)
        error.errno = int(found[1]) if found else None
    for note in notes:
        error.add_note(note)
    return error


def nearest_builtin(names: Sequence[str]) -> type[Exception]:
    """Return the first of these types, unless it must not be taken over: Exception, then."""
    for name in names:
        cls = getattr(builtins, name, None)
        if not isinstance(cls, type) or not issubclass(cls, BaseException):
            continue  # of a later Python; the next one is less precise and true as well
        if not issubclass(cls, Exception) or issubclass(cls, _NOT_TAKEN_OVER):
            return Exception
        return cls
    return Exception


def remote_error_class(builtin: type[Exception]) -> type[RemoteError]:
    """Return the RemoteError that is also this builtin type; for one type always the same class."""
    found = _classes.get(builtin)
    if found is not None:
        return found
    name = f"RemoteError[{builtin.__name__}]"
    namespace: dict[str, Any] = {
        "__module__": "stagekeeper.actor",  # where its users know it from
        "__qualname__": name,
        "__doc__": RemoteError.__doc__,
    }
    own = _UnicodeInit if builtin in _WITH_TEXT else _Init
    made: type[RemoteError] = type(name, (RemoteError, own, builtin), namespace)
    return _classes.setdefault(builtin, made)  # another thread may have been faster


class _Init(Exception):
    """Stands before the builtin type, whose `__init__` may want other arguments."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)


class _UnicodeInit(Exception):
    """As `_Init`. The bytes did not travel: without empty ones the attributes could not be read."""

    def __init__(self, message: str) -> None:
        if isinstance(self, UnicodeDecodeError):
            UnicodeDecodeError.__init__(self, "", b"", 0, 0, message)
        elif isinstance(self, UnicodeEncodeError):
            UnicodeEncodeError.__init__(self, "", "", 0, 0, message)
        elif isinstance(self, UnicodeTranslateError):
            UnicodeTranslateError.__init__(self, "", 0, 0, message)
        self.args = (message,)


def _fill(
    into: RemoteException,
    error: BaseException,
    trace: str,
    mesh_name: str,
    rank: int,
    *,
    is_first: bool,
) -> None:
    limit = _MOST_TRACEBACK_BYTES if is_first else _MOST_CAUSE_TRACEBACK_BYTES
    into.traceback = end(trace, limit)
    into.mesh_name, into.rank = beginning(sendable(mesh_name), _MOST_TYPE_BYTES), rank
    if isinstance(error, RemoteError):  # passing through: it goes on as what it was at first
        kind, message = error.remote_type, error.remote_message
        into.builtin_types.extend(error.builtin_types)
        if not is_first:
            into.mesh_name, into.rank = error.mesh_name, error.rank or 0
    else:
        kind, message = type_name(error), _told(error)
        into.builtin_types.extend(
            [
                cls.__name__
                for cls in type(error).__mro__
                if cls.__module__ == "builtins" and cls is not object
            ]
        )
    into.type = beginning(sendable(kind), _MOST_TYPE_BYTES)
    into.message = beginning(message, _MOST_MESSAGE_BYTES)


def _told(error: BaseException) -> str:
    message = message_of(error)
    if not isinstance(error, BaseExceptionGroup):
        return message
    members = [f"{type_name(it)}: {message_of(it)}" for it in error.exceptions[:_MOST_MEMBERS_TOLD]]
    return f"{message}: {'; '.join(members)}"


def _sentence(told: RemoteException, has_rank: bool) -> str:
    what = f"{told.type}: {told.message}" if told.message else told.type
    return f"{_where(told, has_rank)} raised {what}" if told.mesh_name else what


def _notes_of(told: RemoteException, has_rank: bool) -> list[str]:
    if not told.traceback:
        return []
    return [f"\nTraceback of {_where(told, has_rank)}:\n{told.traceback.rstrip()}"]


def _where(told: RemoteException, has_rank: bool) -> str:
    return place_name(told.mesh_name, (told.rank,) if has_rank else ())
