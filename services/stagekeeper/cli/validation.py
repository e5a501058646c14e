"""What `validate` says of a file: what it would start, or what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagekeeper.cli.exits import CliError, ExitCode
from stagekeeper.cli.text.amounts import count

if TYPE_CHECKING:
    from stagekeeper.v1.types_pb2 import DeploymentSpec


def summary(spec: DeploymentSpec) -> str:
    """Write `hello, 2 replicas of 3 stages; start order: encoder | index → ranker`."""
    from stagekeeper.core.planner import init_groups

    groups = init_groups({n: tuple(stage.devices) for n, stage in enumerate(spec.stages)})
    order = " | ".join(" → ".join(spec.stages[n].name for n in group) for group in groups)
    replicas = count(spec.replicas or 1, "replica")
    return f"{spec.name}, {replicas} of {count(len(spec.stages), 'stage')}; start order: {order}"


def validation_json(files: Sequence[Path]) -> None:
    """Print the verdict on all files as one document.

    Raises:
        CliError: exit code 78; the document is printed then too.
    """
    from stagekeeper.cli.spec_files import read_spec
    from stagekeeper.client.spec_file import SpecError

    verdicts: list[dict[str, Any]] = []
    for path in files:
        try:
            loaded = read_spec(path)
            verdicts.append({"file": str(path), "name": loaded.spec.name, "problems": []})
        except SpecError as error:
            problems = [
                {"line": item.line or None, "path": item.path, "problem": item.problem}
                for item in error.problems
            ]
            verdicts.append({"file": str(path), "name": None, "problems": problems})
    print(json.dumps({"files": verdicts}, indent=2, ensure_ascii=False))
    wrong = [verdict["file"] for verdict in verdicts if verdict["problems"]]
    if wrong:
        raise CliError(ExitCode.BAD_SPEC, f"problems in {' and '.join(wrong)}")
