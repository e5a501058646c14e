"""The verbs, one a module: flags and arguments here, the work elsewhere.

A verb's module imports what it works with inside of its function: `stagekeeper agent` then loads no
client, and every `--help` is quick.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

import typer

from stagekeeper.cli.verbs.agent import agent
from stagekeeper.cli.verbs.call import call
from stagekeeper.cli.verbs.delete import delete
from stagekeeper.cli.verbs.deploy import deploy
from stagekeeper.cli.verbs.describe import describe
from stagekeeper.cli.verbs.events import events
from stagekeeper.cli.verbs.init import init
from stagekeeper.cli.verbs.logs import logs
from stagekeeper.cli.verbs.plan import plan
from stagekeeper.cli.verbs.stages import stages
from stagekeeper.cli.verbs.status import status
from stagekeeper.cli.verbs.supervisor import supervisor
from stagekeeper.cli.verbs.up import up
from stagekeeper.cli.verbs.validate import validate

HELP = """Keep multi-stage models serving while the things around them fail.

\b
Exit codes: 0 done, 1 it failed, 2 usage, 69 nobody answers, 70 a bug,
78 bad spec, 130 Ctrl-C.
"""

_VERBS = (
    init,
    validate,
    up,
    supervisor,
    agent,
    plan,
    deploy,
    status,
    describe,
    call,
    logs,
    events,
    delete,
    stages,
)
"""In the order in which somebody new needs them."""

LONG_LIVED: Final[Mapping[str, Callable[..., None]]] = {"supervisor": supervisor, "agent": agent}
"""Verbs whose processes stay, and should carry nothing that only read their command line."""


def command() -> Any:
    """Build the command line."""
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        help=HELP,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_everywhere)
    for verb in _VERBS:
        app.command()(verb)
    return typer.main.get_command(app)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        print(f"stagekeeper {version('stagekeeper')}")
        raise typer.Exit


def _everywhere(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version and exit.",
            callback=_print_version,
            is_eager=True,
            show_default=False,
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show tracebacks; anywhere on the line.", show_default=False),
    ] = False,
) -> None:
    """Take the flags that belong to no verb; both have been dealt with by now."""
