"""What processes that stay leave out of themselves when they start.

Decided here: structlog comes without rich, which it loads, if it finds it, to draw tracebacks in a
terminal; that is a tenth of an agent's start, and its memory for good. Invariant: whoever imports
rich afterwards gets it.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, Final, cast

_DRAWING: Final = "rich"


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
