"""`stagekeeper validate`: a spec file checked offline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from stagekeeper.cli import flags


def validate(
    files: Annotated[list[Path], flags.Argument(metavar="FILE…", help="Spec files.")],
    output: flags.OutputFormat = flags.Output.TEXT,
) -> None:
    """Check a spec file, offline.

    Every problem is listed with its line, and the exit code is then 78. Whether there is room for
    what it asks, `plan` says, which asks the supervisor.
    """
    from stagekeeper.cli.spec_files import read_specs
    from stagekeeper.cli.validation import summary, validation_json

    if output is flags.Output.JSON:
        validation_json(files)
        return
    for loaded in read_specs(files):
        print(f"{loaded.source}: ok: {summary(loaded.spec)}")
