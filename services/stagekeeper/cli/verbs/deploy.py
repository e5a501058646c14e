"""`stagekeeper deploy`: a spec file wanted, and followed until it serves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from stagekeeper.cli import flags
from stagekeeper.wire.stable_endpoint import DEFAULT_ENDPOINT


def deploy(
    file: Annotated[Path, flags.Argument(metavar="FILE", help="The spec.")],
    endpoint: flags.Endpoint = DEFAULT_ENDPOINT,
    plan_id: Annotated[
        str,
        flags.Option(
            metavar="ID",
            help="Start what that plan showed, or nothing.",
            show_default=False,
        ),
    ] = "",
    timeout: Annotated[
        float | None,
        flags.Option(
            metavar="SECONDS",
            help="Stop waiting then; the creation goes on [default: wait as long as it takes].",
            show_default=False,
        ),
    ] = None,
    insecure: flags.Insecure = False,
) -> None:
    """Deploy a spec, and show its start.

    The same spec again starts what does not run, and touches nothing that does. Another spec under
    the same name is refused: delete it first. Ctrl-C leaves the creation running.
    """
    from stagekeeper.cli.asking import ask, check_seconds
    from stagekeeper.cli.deploying import Creation, deploy_shown
    from stagekeeper.cli.exits import CliError, ExitCode
    from stagekeeper.cli.spec_files import read_specs
    from stagekeeper.client import NameTaken, PlanStale

    check_seconds(timeout, "--timeout")
    loaded = read_specs([file])[0]
    creation = Creation(loaded.spec.name)
    try:
        ask(
            endpoint,
            lambda client: deploy_shown(client, loaded, creation, plan_id=plan_id, timeout=timeout),
            insecure=insecure,
        )
    except NameTaken as error:
        raise CliError(
            ExitCode.FAILED,
            f"{error.message} (`stagekeeper delete {creation.name}`, then this again)",
        ) from error
    except PlanStale as error:
        raise CliError(ExitCode.FAILED, f"{error.message} (`stagekeeper plan {file}`)") from error
    except KeyboardInterrupt:
        if creation.accepted is None:
            raise
        raise CliError(
            ExitCode.INTERRUPTED,
            f"the creation of {creation.name!r} goes on: `stagekeeper status` shows it, "
            f"`stagekeeper delete {creation.name}` cancels it",
        ) from None
