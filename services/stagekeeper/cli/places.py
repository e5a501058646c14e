"""Where files are when nobody says: the state directory.

Decided here: what the command line falls back to. Paths come back absolute, since they are handed
to processes that run elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def make_state_dir(chosen: Path | None) -> Path:
    """Return the state directory, made and absolute, for its owner's eyes alone.

    Raises:
        CliError: it cannot be made, or others can look into it.
    """
    from stagekeeper.agent.settings import default_state_dir
    from stagekeeper.cli.exits import CliError, ExitCode
    from stagekeeper.runtime.private_folder import FolderIsOpen, make_state_folder

    path = absolute(chosen or default_state_dir())
    try:
        make_state_folder(path)
    except FolderIsOpen as error:
        raise CliError(ExitCode.FAILED, f"--state-dir: {error}") from error
    except OSError as error:
        raise CliError(
            ExitCode.FAILED,
            f"the state directory {path} cannot be made ({error.strerror}): choose another with "
            "--state-dir",
        ) from error
    return path


def absolute(path: Path) -> Path:
    return path.expanduser().absolute()


def absolute_all(paths: Sequence[Path]) -> tuple[Path, ...]:
    return tuple(absolute(path) for path in paths)
