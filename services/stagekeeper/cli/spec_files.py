"""Spec files as every verb reads them: read, checked by the core's own rules, refused with lines.

Decided here: that a file is checked here, before anybody is asked, and how its problems are shown.
Not decided here: what is wrong (the client reads, the core checks).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stagekeeper.cli.exits import CliError, ExitCode

if TYPE_CHECKING:
    from stagekeeper.client.spec_file import LoadedSpec, SpecError


def read_specs(paths: Sequence[Path]) -> list[LoadedSpec]:
    """Read and check all files.

    Raises:
        CliError: exit code 78, with every problem of every file, or with a name used twice.
    """
    from stagekeeper.client.spec_file import SpecError

    loaded: list[LoadedSpec] = []
    refused: list[SpecError] = []
    for path in paths:
        try:
            loaded.append(read_spec(path))
        except SpecError as error:
            refused.append(error)
    if refused:
        raise bad_specs(refused)
    _check_names(loaded)
    return loaded


def read_spec(path: Path) -> LoadedSpec:
    """Read one file.

    Raises:
        SpecError: every problem, with its line.
    """
    from stagekeeper.client.spec_file import SpecError, load_spec

    try:
        loaded = load_spec(path)
    except SpecError as error:
        raise _with_further_problems(error) from None
    problems = _core_problems(loaded)
    if problems:
        raise loaded.error(problems)
    return loaded


def _core_problems(loaded: LoadedSpec) -> list[tuple[str, str]]:
    """Return what the core finds wrong: (field path, what is wrong with it)."""
    from stagekeeper.core.errors import Refused
    from stagekeeper.core.spec_check import check_spec
    from stagekeeper.runtime.convert import spec_from_proto

    try:
        check_spec(spec_from_proto(loaded.spec))
    except Refused as refused:
        found = [(problem.path, problem.problem) for problem in refused.problems]
        return found or [("", refused.message)]
    return []


def _with_further_problems(error: SpecError) -> SpecError:
    """Add what the core says of the part that could be read: all problems come at once.

    Only of fields that nothing was said of yet: what is wrong there may follow from that.
    """
    from stagekeeper.client.spec_file import SpecError, SpecProblem

    loaded = error.as_read
    if loaded is None:
        return error
    known = [problem.path for problem in error.problems]
    further = [
        SpecProblem(path, problem, loaded.locate(path))
        for path, problem in _core_problems(loaded)
        if not any(_is_within(path, other) or _is_within(other, path) for other in known)
    ]
    return SpecError([*error.problems, *further], error.source)


def _is_within(path: str, outer: str) -> bool:
    """Whether a field is another one, or lies in it."""
    return not outer or path == outer or path.startswith((f"{outer}.", f"{outer}["))


def bad_specs(errors: Sequence[SpecError]) -> CliError:
    """Build the error of files that are wrong; one problem goes on the line itself."""
    lines = [line for error in errors for line in problem_lines(error)]
    if len(lines) == 1:
        return CliError(ExitCode.BAD_SPEC, lines[0])
    what = f"{len(lines)} problems in {' and '.join(error.source for error in errors)}:"
    return CliError(ExitCode.BAD_SPEC, what, details=lines)


def problem_lines(error: SpecError) -> list[str]:
    """Write each problem as `spec.yaml:12: stages[1].memory: what is wrong`."""
    lines = []
    for problem in error.problems:
        where = f"{error.source}:{problem.line}" if problem.line else error.source
        path = f"{problem.path}: " if problem.path else ""
        lines.append(f"{where}: {path}{problem.problem}")
    return lines


def _check_names(loaded: Sequence[LoadedSpec]) -> None:
    first: dict[str, str] = {}
    for item in loaded:
        name = item.spec.name
        if name in first:
            raise CliError(
                ExitCode.BAD_SPEC,
                f"{first[name]} and {item.source} both describe {name!r}: give one another name",
            )
        first[name] = item.source
