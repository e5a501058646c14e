"""`stagekeeper events`: what happened, and what happens."""

from __future__ import annotations

from typing import Annotated

from stagekeeper.cli import flags
from stagekeeper.wire.stable_endpoint import DEFAULT_ENDPOINT


def events(
    name: Annotated[
        str,
        flags.Argument(
            metavar="[NAME]", help="Only of this deployment [default: all].", show_default=False
        ),
    ] = "",
    follow: Annotated[
        bool, flags.Option("--follow", "-f", help="Go on with what happens.", show_default=False)
    ] = False,
    last: Annotated[
        int,
        flags.Option(
            "--last", "-n", metavar="N", min=0, max=10_000, help="How many to begin with."
        ),
    ] = 100,
    endpoint: flags.Endpoint = DEFAULT_ENDPOINT,
    output: flags.OutputFormat = flags.Output.TEXT,
    insecure: flags.Insecure = False,
) -> None:
    """Print what happened: to a deployment, or to everything.

    The supervisor keeps events in memory: a new one begins with its own. With --follow the verb
    outlives it, and says on stderr when it is away and when another one reigns.
    """
    from stagekeeper.cli.asking import ask
    from stagekeeper.cli.event_showing import events_shown

    is_json = output is flags.Output.JSON
    ask(
        endpoint,
        lambda client: events_shown(client, name, last=last, follow=follow, as_json=is_json),
        insecure=insecure,
        ends_with_reader=follow,
    )
