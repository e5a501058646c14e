"""What an exception of somebody else's code is called, says, and looks like, as plain text.

Decided here: which frames are left out of a traceback, at its start only: what led to the author's
code and is ours. Texts are cut by bytes, since that is what a message has room for. Invariant: no
exception, however broken, makes these functions raise, and what they return can be sent.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import stagekeeper

_NOT_THEIRS: Final = (
    # Who runs actors, and who runs a deployed stage, which may not be installed.
    *(str(Path(root, runner)) for root in stagekeeper.__path__ for runner in ("actor", "stage")),
    str(Path(concurrent.futures.__file__).parent),
    str(Path(asyncio.__file__).parent),
    str(importlib.__file__),
    "<frozen importlib",
)

_DEEPEST_TOLD: Final = 32
"""Errors of one chain that a traceback tells of, nearest first."""

_SCRIPT_AGAIN: Final = re.compile(r"__stagekeeper_main_\d+__")
"""The name under which a script is imported again (`entrypoint`)."""

CUT: Final = "…"
"""Stands where text was left out."""


def type_name(error: BaseException) -> str:
    """Return the type as Python prints it: `ValueError`, `torch.OutOfMemoryError`.

    One of a script is named as the script would name it, also where it is imported again.
    """
    cls = type(error)
    module: object = cls.__module__  # of a class that code has made it may be anything
    if not isinstance(module, str) or module in ("builtins", "__main__"):
        return cls.__qualname__
    if _SCRIPT_AGAIN.fullmatch(module):
        return cls.__qualname__
    return f"{module}.{cls.__qualname__}"


def message_of(error: BaseException) -> str:
    """Return what the error says of itself, whose `__str__` may raise as well."""
    try:
        return sendable(str(error))
    except BaseException as broken:  # also what would end the process: nobody asked for that
        return f"(its message cannot be read: __str__ raised {type(broken).__qualname__})"


def one_line(error: BaseException, most_bytes: int = 1_000) -> str:
    """Return `Type: message`, of the message its first line."""
    lines = message_of(error).strip().splitlines()
    return beginning(f"{type_name(error)}: {lines[0]}" if lines else type_name(error), most_bytes)


def author_traceback(error: BaseException) -> str:
    """Format an error and what it came from, without the frames that led to the author's code.

    A traceback in which nothing else would be left is shown whole.
    """
    return author_tracebacks([error])[0]


def author_tracebacks(chain: Sequence[BaseException]) -> list[str]:
    """Do the same for an error and those that it came from, one text each (`chain_of`)."""
    try:
        told = traceback.TracebackException.from_exception(chain[0], compact=True)
        cut = f"{CUT}\n" if _leave_out(told) else ""
        texts: list[str] = []
        one: traceback.TracebackException | None = told
        while one is not None and len(texts) < len(chain):
            whole = cut + "".join(one.format())
            texts.append(sendable(re.sub(rf"{_SCRIPT_AGAIN.pattern}\.", "", whole)))
            one = one.__cause__ or one.__context__
    except Exception:  # its notes or its source are broken too: the frames alone, then
        texts = []
    return texts + [_frames_of(error) for error in chain[len(texts) :]]


def _leave_out(told: traceback.TracebackException) -> bool:
    """Take out our frames, and errors too far down a chain; return whether there were such."""
    # Not recursive, since a chain may be deeper than Python goes.
    rest: list[tuple[int, traceback.TracebackException]] = [(0, told)]
    is_cut = False
    while rest:
        depth, one = rest.pop()
        ours = 0
        while ours < len(one.stack) and one.stack[ours].filename.startswith(_NOT_THEIRS):
            ours += 1
        if ours < len(one.stack):
            del one.stack[:ours]
        if depth == _DEEPEST_TOLD - 1 and (one.__cause__ or one.__context__):
            one.__cause__ = one.__context__ = None
            is_cut = True
        below = (one.__cause__, one.__context__, *(one.exceptions or ()))
        rest += [(depth + 1, it) for it in below if it is not None]
    return is_cut


def _frames_of(error: BaseException) -> str:
    frames = "".join(traceback.format_tb(error.__traceback__))
    return sendable(f"{frames}{type_name(error)}: {message_of(error)}\n")


def chain_of(error: BaseException, most: int) -> list[BaseException]:
    """Return an error, what it came from, what that came from, and so on; each once."""
    chain = [error]
    while len(chain) < most:
        below = came_from(chain[-1])
        if below is None or any(below is it for it in chain):
            break
        chain.append(below)
    return chain


def came_from(error: BaseException) -> BaseException | None:
    """Return its cause or, without one, the context that Python would show."""
    if error.__cause__ is not None or error.__suppress_context__:
        return error.__cause__
    return error.__context__


def sendable(text: str) -> str:
    """Replace what is no text in any encoding, such as the undecodable bytes of a file's name."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def beginning(text: str, most_bytes: int) -> str:
    """Cut sendable text to so many bytes of UTF-8, the mark of the cut at its end included."""
    data = text[:most_bytes].encode()
    if len(text) <= most_bytes and len(data) <= most_bytes:
        return text
    room = max(0, most_bytes - len(CUT.encode()))
    return data[:room].decode("utf-8", "ignore") + CUT


def end(text: str, most_bytes: int) -> str:
    """As `beginning`, but what is kept is the end, where a traceback says what matters."""
    data = text[max(0, len(text) - most_bytes) :].encode()
    if len(text) <= most_bytes and len(data) <= most_bytes:
        return text
    room = max(0, most_bytes - len(CUT.encode()))
    return CUT + data[len(data) - room :].decode("utf-8", "ignore")
