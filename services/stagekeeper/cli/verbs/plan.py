"""`stagekeeper plan`: what a deploy would do, looked at before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from stagekeeper.cli import flags
from stagekeeper.wire.stable_endpoint import DEFAULT_ENDPOINT


def plan(
    file: Annotated[Path, flags.Argument(metavar="FILE", help="The spec.")],
    endpoint: flags.Endpoint = DEFAULT_ENDPOINT,
    output: flags.OutputFormat = flags.Output.TEXT,
    insecure: flags.Insecure = False,
) -> None:
    """Show what a deploy would do now, and start nothing.

    In which order stages start and how long that may take, which real card each card of a replica
    would be, what is held and wanted of each, and every reason why it would be refused: the exit
    code is then 1. `deploy --plan-id` starts what was shown, or nothing.
    """
    from stagekeeper.cli.asking import ask
    from stagekeeper.cli.exits import CliError
    from stagekeeper.cli.explain import explain
    from stagekeeper.cli.planning import plan_shown
    from stagekeeper.cli.spec_files import read_specs
    from stagekeeper.client import SupervisorUnreachable

    loaded = read_specs([file])[0]
    as_json = output is flags.Output.JSON
    try:
        ask(
            endpoint,
            lambda client: plan_shown(client, loaded, file, as_json=as_json),
            insecure=insecure,
        )
    except SupervisorUnreachable as error:
        known = explain(error)
        offline = f"`stagekeeper validate {file}` checks the spec without a supervisor"
        raise CliError(known.code, known.message, details=[offline]) from error
