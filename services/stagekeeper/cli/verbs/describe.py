"""`stagekeeper describe`: why a deployment is as it is, since when, and what happens next."""

from __future__ import annotations

from typing import Annotated

from stagekeeper.cli import flags
from stagekeeper.wire.stable_endpoint import DEFAULT_ENDPOINT


def describe(
    name: Annotated[str, flags.Argument(metavar="NAME", help="The deployment.")],
    endpoint: flags.Endpoint = DEFAULT_ENDPOINT,
    output: flags.OutputFormat = flags.Output.TEXT,
    insecure: flags.Insecure = False,
) -> None:
    """Show why a deployment is as it is, since when, and what happens next.

    Its spec, each replica with its stages, what failed last and what that wrote, the workers that
    hold it, and what happened lately.
    """
    from stagekeeper.cli.asking import ask
    from stagekeeper.cli.describing import description_shown

    is_json = output is flags.Output.JSON
    ask(
        endpoint,
        lambda client: description_shown(client, name, as_json=is_json),
        insecure=insecure,
    )
