"""Which classes a program may run, by patterns: `my_models.*`, `shop.search:Index`, `*`.

An agent judges the entrypoints of stages by them before anything is started; a process for actors
judges each class that it is asked for. Invariant: both say the same of the same class.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase


def is_entrypoint(text: str) -> bool:
    """Return whether a text is of the form `module:Class`."""
    module, separator, qualname = text.partition(":")
    return bool(separator) and _is_dotted(module) and _is_dotted(qualname)


def is_allowed(entrypoint: str, patterns: Iterable[str]) -> bool:
    """Return whether one of the patterns has this `module:Class`.

    Args:
        patterns: matched against `module.Class`; a ":" in one is read as a ".". None allow nothing.
    """
    dotted = entrypoint.replace(":", ".")
    return any(fnmatchcase(dotted, pattern.replace(":", ".")) for pattern in patterns)


def _is_dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))
