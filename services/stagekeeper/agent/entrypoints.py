"""Which entrypoints an agent may start, and whether it could find them.

The agent never imports a model's code, so it looks for the module's file as Python would, without
running anything. Where it cannot tell (a finder of somebody's own) it lets the stage find out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from stagekeeper.wire.entrypoint_patterns import is_allowed, is_entrypoint


class Entrypoints:
    """What `--allow` and `--pythonpath` say.

    Args:
        allow: patterns as in `module.*`, matched against `module.qualname`; "*" allows all.
        pythonpath: folders that come before the agent's own Python environment.
    """

    def __init__(self, allow: Sequence[str], pythonpath: Sequence[Path]) -> None:
        self._allow = tuple(allow)
        self._path = [str(folder) for folder in pythonpath]

    def problems(self, entrypoint: str) -> Iterator[str]:
        """Yield what is wrong with an entrypoint, each a sentence for whoever wrote the spec."""
        if not is_entrypoint(entrypoint):
            yield f"{entrypoint!r} is not of the form module:Class"
            return
        if not is_allowed(entrypoint, self._allow):
            yield (
                f"{entrypoint} is not allowed on this agent, which starts "
                f"{', '.join(self._allow) or 'nothing'} (--allow)"
            )
            return
        missing = self._missing_module(entrypoint.partition(":")[0])
        if missing:
            yield (
                f"{entrypoint}: no module {missing} in this agent's Python environment or in its "
                f"--pythonpath ({', '.join(self._path) or 'none given'})"
            )

    def _missing_module(self, module: str) -> str:
        """Return the first part of a dotted name that is surely not there, else nothing."""
        path: Sequence[str] | None = [*self._path, *sys.path]
        names = module.split(".")
        for count in range(1, len(names) + 1):
            name = ".".join(names[:count])
            spec = PathFinder.find_spec(name, path)
            if spec is None:
                return "" if _is_found_otherwise(name) else name
            path = _parts_of(spec)
            if path is None and count < len(names):
                return ".".join(names[: count + 1])
        return ""


def _is_found_otherwise(name: str) -> bool:
    """Return whether something other than a folder on the path may know the module."""
    if "." in name:
        return False
    return any(
        finder is not PathFinder and finder.find_spec(name, None, None) is not None
        for finder in sys.meta_path
        if hasattr(finder, "find_spec")
    )


def _parts_of(spec: ModuleSpec) -> list[str] | None:
    locations = spec.submodule_search_locations
    return None if locations is None else list(locations)
