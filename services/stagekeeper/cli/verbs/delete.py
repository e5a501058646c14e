"""`stagekeeper delete`: a deployment wanted no longer, and followed until it is gone."""

from __future__ import annotations

from typing import Annotated

from stagekeeper.cli import flags
from stagekeeper.wire.stable_endpoint import DEFAULT_ENDPOINT


def delete(
    name: Annotated[str, flags.Argument(metavar="NAME", help="The deployment.")],
    endpoint: flags.Endpoint = DEFAULT_ENDPOINT,
    no_wait: Annotated[
        bool,
        flags.Option(
            "--no-wait", help="Return once it is written down; it goes on.", show_default=False
        ),
    ] = False,
    timeout: Annotated[
        float | None,
        flags.Option(
            metavar="SECONDS",
            help="Stop waiting then; the deletion goes on [default: the stages' stop budgets and "
            "a minute].",
            show_default=False,
        ),
    ] = None,
    insecure: flags.Insecure = False,
) -> None:
    """Delete a deployment.

    Its stages are asked to end, and killed when their stop budget is over. A creation under way is
    cancelled. Once written down it goes on by itself, whatever happens to this command.
    """
    from stagekeeper.cli.asking import ask, check_seconds
    from stagekeeper.cli.deploying import delete_shown
    from stagekeeper.cli.exits import CliError, ExitCode
    from stagekeeper.client import Client

    check_seconds(timeout, "--timeout")

    async def work(client: Client) -> None:
        if not no_wait:
            await delete_shown(client, name, timeout=timeout)
            return
        await client.delete(name, wait=False)
        print(f"{name}: is being deleted")

    try:
        ask(endpoint, work, insecure=insecure)
    except KeyboardInterrupt:
        raise CliError(
            ExitCode.INTERRUPTED,
            f"what was written down goes on: `stagekeeper status` shows what is left of {name!r}",
        ) from None
