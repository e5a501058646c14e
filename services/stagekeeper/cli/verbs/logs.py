"""`stagekeeper logs`: what stages wrote."""

from __future__ import annotations

from typing import Annotated

from stagekeeper.cli import flags
from stagekeeper.wire.stable_endpoint import DEFAULT_ENDPOINT


def logs(
    name: Annotated[str, flags.Argument(metavar="NAME", help="The deployment.")],
    stage: Annotated[
        str | None,
        flags.Option(
            metavar="STAGE", help="A stage's name or id [default: all].", show_default=False
        ),
    ] = None,
    replica: Annotated[
        int | None,
        flags.Option(metavar="N", min=0, help="Which copy [default: all].", show_default=False),
    ] = None,
    follow: Annotated[
        bool,
        flags.Option("--follow", "-f", help="Go on with what is written.", show_default=False),
    ] = False,
    previous: Annotated[
        bool,
        flags.Option("--previous", help="Of the start before the latest one.", show_default=False),
    ] = False,
    lines: Annotated[
        int, flags.Option("--lines", "-n", metavar="N", min=1, help="How many to begin with.")
    ] = 100,
    endpoint: flags.Endpoint = DEFAULT_ENDPOINT,
    insecure: flags.Insecure = False,
) -> None:
    """Print the logs of a deployment's stages.

    They are read from the agents, and are there after a stage has failed, too. Of several stages,
    each line says whose it is: replica/stage.
    """
    from stagekeeper.cli.asking import ask, stage_of
    from stagekeeper.cli.log_reading import LogChoice, logs_shown

    choice = LogChoice(
        name,
        stage=stage_of(stage),
        replica=replica,
        previous=previous,
        last_lines=lines,
        follow=follow,
    )
    ask(
        endpoint,
        lambda client: logs_shown(client, choice),
        insecure=insecure,
        ends_with_reader=follow,
    )
