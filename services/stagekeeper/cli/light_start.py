"""What processes that stay leave out when they start.

Decided here: nothing is collected while modules are loaded, since what they make stays; looking for
garbage in it would be a sixteenth of an agent's start. And structlog comes without rich, which it
loads, if it finds it, to draw tracebacks in a terminal; that is a tenth of an agent's start, and
its memory for good. Invariant: whoever imports rich afterwards gets it.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

_DRAWING: Final = "rich"


@contextmanager
def collecting_nothing() -> Iterator[None]:
    """Collect no garbage within, until `all_is_loaded` if that is called."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def all_is_loaded() -> None:
    """Collect garbage as Python does by itself, but never look through what there is by now."""
    gc.freeze()
    gc.enable()


def load_structlog() -> None:
    """Import structlog as if rich were not installed."""
    if _DRAWING in sys.modules or "structlog" in sys.modules:
        return
    # None is how the import system is told that a module cannot be had.
    modules = cast(dict[str, Any], sys.modules)
    modules[_DRAWING] = None
    try:
        importlib.import_module("structlog")
    finally:
        del modules[_DRAWING]
