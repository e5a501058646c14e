"""`stagekeeper init`: a starter spec and its stages."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from stagekeeper.cli import flags
from stagekeeper.cli.starter import SPEC_FILE, write_starter


def init(
    folder: Annotated[
        Path, flags.Argument(metavar="[DIR]", help="Where to; made if it is missing.")
    ] = Path(),
) -> None:
    """Write a starter spec and its stages.

    Both are ready to be run, and to be changed.
    """
    for path in write_starter(folder):
        print(f"wrote {path}")
    print("next:")
    if folder != Path():
        print(f"  cd {shlex.quote(str(folder))}")
    print(f"  stagekeeper up {SPEC_FILE} --pythonpath .")
    print("and, in another terminal:")
    print("""  stagekeeper call hello greet '{"name": "Ada"}'""")
