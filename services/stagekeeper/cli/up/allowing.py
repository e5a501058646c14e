"""What a spec's stages need to be allowed: the class of each, or its program."""

from __future__ import annotations

import glob

from stagekeeper.v1.types_pb2 import StageSpec


def allowance(stage: StageSpec) -> str:
    """Return the pattern that allows one stage and nothing else."""
    if not stage.HasField("command"):
        return stage.entrypoint
    program = stage.command.argv[0] if stage.command.argv else ""
    return f"command:{glob.escape(program)}"
