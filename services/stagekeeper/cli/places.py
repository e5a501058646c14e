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
    from stagekeeper.cli.exits import CliError, ExitCode
    from stagekeeper.runtime.private_folder import FolderIsOpen, make_state_folder

    path = state_dir_path(chosen)
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


def state_dir_path(chosen: Path | None) -> Path:
    """Return where the state directory is, or will be."""
    from stagekeeper.agent.settings import default_state_dir

    return absolute(chosen or default_state_dir())


def import_folders(chosen: Sequence[Path] | None) -> tuple[Path, ...]:
    """Return the folders of `--pythonpath`.

    Raises:
        CliError: one is no folder; stages would start and find nothing to import.
    """
    from stagekeeper.cli.exits import usage

    folders = tuple(absolute(path) for path in chosen or ())
    for folder in folders:
        if not folder.is_dir():
            what = "is no folder" if folder.exists() else "does not exist"
            raise usage(f"--pythonpath: {folder} {what}: name the folder that stages import from")
    return folders


def absolute(path: Path) -> Path:
    return path.expanduser().absolute()
