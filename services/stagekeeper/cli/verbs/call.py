"""`stagekeeper call`: one call to a deployment."""

from __future__ import annotations

from typing import Annotated

from stagekeeper.cli import flags
from stagekeeper.wire.stable_endpoint import DEFAULT_ENDPOINT


def call(
    name: Annotated[str, flags.Argument(metavar="NAME", help="The deployment.")],
    endpoint_name: Annotated[str, flags.Argument(metavar="ENDPOINT", help="What to call.")],
    argument: Annotated[
        str | None,
        flags.Argument(
            metavar="[JSON]",
            help="An object holds keyword arguments, anything else is one argument; - reads stdin.",
        ),
    ] = None,
    stage: Annotated[
        str | None,
        flags.Option(
            metavar="STAGE",
            help="A stage's name or id [default: the deployment's entry].",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float, flags.Option(metavar="SECONDS", help="Give up then; the endpoint is told.")
    ] = 60.0,
    endpoint: flags.Endpoint = DEFAULT_ENDPOINT,
    insecure: flags.Insecure = False,
) -> None:
    """Call an endpoint, and print its answer as JSON.

    An endpoint that yields prints one line for each value.
    """
    from stagekeeper.cli.asking import ask, check_seconds, stage_of
    from stagekeeper.cli.calling import call_shown, read_argument

    check_seconds(timeout, "--timeout")
    arguments = read_argument(argument)
    ask(
        endpoint,
        lambda client: call_shown(
            client, name, endpoint_name, arguments, stage=stage_of(stage), timeout=timeout
        ),
        insecure=insecure,
    )
