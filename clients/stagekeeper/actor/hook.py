"""The end of a failure's way: what happens when it reaches the root of a tree, and nobody took it.

`stagekeeper.actor.unhandled_fault_hook` is looked up when it is needed, so that assigning to it is
all that a program does. Decided here: what the hook's outcome means, and how an UnhandledFault that
ends a program is printed. Not decided here: how often the hook is called (once a failure), how its
error gets into the main thread, and how the tree is stopped. Invariant: a failure that nobody
handled is printed once, as its tree, and never lost in a traceback.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import traceback
from types import TracebackType
from typing import NoReturn

from stagekeeper.actor.errors import UnhandledFault
from stagekeeper.actor.failure import MeshFailure

_installing = threading.Lock()


def end_program(failure: MeshFailure) -> NoReturn:
    """Print the failure and end the program as Ctrl-C would: what the hook is unless replaced.

    Raises:
        UnhandledFault: always.
    """
    fault = UnhandledFault(failure)
    _tell(fault)
    raise fault


unhandled_fault_hook = end_program
"""What `stagekeeper.actor.unhandled_fault_hook` is until somebody assigns another."""


def call_hook(failure: MeshFailure) -> BaseException | None:
    """Call the hook that is set now, once.

    Returns:
        None when it returned: the failure is handled. Otherwise what the program goes on with, in
        its main thread: a KeyboardInterrupt (UnhandledFault is one) or SystemExit of the hook's as
        it is; of whatever else it raised, an UnhandledFault with that as its cause.
    """
    import stagekeeper.actor as public

    hook = getattr(public, "unhandled_fault_hook", end_program)
    try:
        returned = hook(failure)
        if inspect.iscoroutine(returned):
            returned.close()
            raise TypeError("unhandled_fault_hook must be a plain function, not an async one")
    except (KeyboardInterrupt, SystemExit) as error:
        return error
    except BaseException as error:
        fault = UnhandledFault(failure)
        fault.__cause__ = error
        return fault
    return None


def install_excepthook() -> None:
    """Have an UnhandledFault that ends the program printed as its tree; a repeat does nothing.

    Everything else goes to the hook that was there before.
    """
    with _installing:
        before = sys.excepthook
        if getattr(before, "_prints_faults", False):
            return

        def excepthook(
            cls: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            if isinstance(error, UnhandledFault):
                _tell(error)
                left_by = error.__context__
                if left_by is not None and not isinstance(left_by, asyncio.CancelledError):
                    # It ended the program already, and the tree's end brought the fault.
                    before(type(left_by), left_by, left_by.__traceback__)
            else:
                before(cls, error, trace)

        vars(excepthook)["_prints_faults"] = True
        sys.excepthook = excepthook


def _tell(fault: UnhandledFault) -> None:
    """Print the tree unless it was; and what the hook itself raised, if that is how it ended."""
    if fault.is_told:
        return
    fault.is_told = True
    text = f"unhandled failure\n{fault.failure}\n"
    if fault.__cause__ is not None:
        text += "unhandled_fault_hook raised:\n"
        text += "".join(traceback.format_exception(fault.__cause__))
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        pass  # no stderr, or nobody reads it: the exit status is what is left to say it
