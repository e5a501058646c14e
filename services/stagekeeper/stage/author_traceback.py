"""Tracebacks as the author of a stage wants them: from the first frame of the stage's own code on.

Decided here: which frames are left out, at the top only: what is ours, and the import of the entry
point. Invariant: a traceback in which nothing else is left is shown whole.
"""

from __future__ import annotations

import importlib
import traceback
from pathlib import Path
from types import TracebackType

_NOT_THEIRS = (str(Path(__file__).parent), "<frozen importlib", str(importlib.__file__))


def author_traceback(error: BaseException) -> str:
    """Format an error, without the frames that led to the author's code."""
    trace = error.__traceback__
    return "".join(traceback.format_exception(type(error), error, _theirs(trace) or trace))


def _theirs(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_NOT_THEIRS):
        trace = trace.tb_next
    return trace
