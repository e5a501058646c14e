"""Which entrypoints and programs an agent may start, and whether it could find them.

The agent never imports a model's code, so it looks for the module's file as Python would, without
running anything. Where it cannot tell (a finder of somebody's own) it lets the stage find out. A
program is looked for in the agent's own PATH: what a name there means is its operator's to say, and
no spec's.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Final

from stagekeeper.core.model import StageSpec
from stagekeeper.wire.entrypoint_patterns import is_allowed, is_entrypoint

COMMAND_PREFIX: Final = "command:"
"""Of the patterns that allow programs: `command:vllm`, `command:/opt/models/*`."""


class Entrypoints:
    """What `--allow` and `--pythonpath` say.

    Args:
        allow: patterns as in `module.*`, matched against `module.qualname`, and as in
            `command:vllm`, matched against the program as the spec names it; "*" allows all.
        pythonpath: folders that come before the agent's own Python environment.
    """

    def __init__(self, allow: Sequence[str], pythonpath: Sequence[Path]) -> None:
        self._allow = tuple(allow)
        self._path = [str(folder) for folder in pythonpath]

    def stage_problems(self, stage: StageSpec) -> Iterator[tuple[str, str]]:
        """Yield what of a stage cannot be started here: the field, and what is wrong with it."""
        if stage.command is None:
            yield from (("entrypoint", problem) for problem in self.problems(stage.entrypoint))
        else:
            problems = self.program_problems(stage.command.program)
            yield from (("command.argv[0]", problem) for problem in problems)

    def program_problems(self, program: str) -> Iterator[str]:
        """Yield what is wrong with the program of a command stage."""
        named = f"{COMMAND_PREFIX}{program}"
        # A pattern that was meant for classes, `*.Server`, must not let a program in by its look.
        patterns = [it for it in self._allow if it == "*" or it.startswith(COMMAND_PREFIX)]
        if not any(fnmatchcase(named, pattern) for pattern in patterns):
            yield (
                f"{program} is not allowed on this agent, which starts "
                f"{', '.join(self._allow) or 'nothing'} (--allow '{named}')"
            )
        elif find_program(program) is None:
            yield (
                f"{program} is no program that this agent can run: "
                + (
                    "there is no such file, or it may not be executed"
                    if program.startswith("/")
                    else f"its PATH has none of that name ({os.environ.get('PATH', os.defpath)})"
                )
            )

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


def find_program(program: str) -> str | None:
    """Return the path of a program: its own, or where this agent's PATH has it."""
    return shutil.which(program, path=os.environ.get("PATH", os.defpath))


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
