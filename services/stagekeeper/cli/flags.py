"""Flags that several verbs share, each said once.

Decided here: their names, defaults and help. typer reads them out of the verbs' signatures, so
these names are used there as types.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from stagekeeper.wire.stable_endpoint import DEFAULT_ENDPOINT, ENDPOINT_ENV


class Output(StrEnum):
    """How an answer is written."""

    TEXT = "text"
    JSON = "json"


Endpoint = Annotated[
    str,
    typer.Option(
        envvar=ENDPOINT_ENV,
        metavar="HOST:PORT",
        help=f"The supervisor's stable address [default: {DEFAULT_ENDPOINT}].",
        show_default=False,
    ),
]

Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Allow addresses beyond this machine, though nothing is encrypted yet.",
        show_default=False,
    ),
]

OutputFormat = Annotated[
    Output, typer.Option("--output", "-o", help="text for people, json for programs.")
]

ClusterFlag = Annotated[
    str, typer.Option("--cluster", help="The cluster's name; every part says the same.")
]

StateDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Where state is kept [default: $XDG_STATE_HOME/stagekeeper or "
        "~/.local/state/stagekeeper].",
        show_default=False,
    ),
]

LockDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Locks shared by all agents of this host [default: /run/lock/stagekeeper].",
        show_default=False,
    ),
]

PythonPath = Annotated[
    list[Path] | None,
    typer.Option(
        "--pythonpath",
        metavar="DIR",
        help="A folder that stages import from; may be given several times.",
        show_default=False,
    ),
]

Devices = Annotated[
    list[str] | None,
    typer.Option(
        "--devices",
        metavar="DEVICE",
        help="cuda: all NVIDIA cards; GPU-… or MIG-…: the one whose UUID begins so; cpu:0=8GiB: a "
        "slice of RAM that stands for a card; none. May be given several times.",
        show_default=False,
    ),
]

Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="PATTERN",
        help="Entrypoints of stages and classes of actors that may be started, as 'my_models.*'; "
        "may be given several times.",
        show_default=False,
    ),
]


class LogLevel(StrEnum):
    """The least urgent thing that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


LogLevelFlag = Annotated[
    LogLevel, typer.Option("--log-level", help="The least urgent thing that is logged.")
]

DieWithParent = Annotated[
    int,
    typer.Option(
        "--die-with",
        metavar="PID",
        hidden=True,
        help="End when this process, which started us, is gone.",
    ),
]
