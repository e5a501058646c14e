"""Flags that several verbs share, each said once.

Decided here: their names, defaults and help. They are read out of the verbs' signatures, so these
names are used there as types. What describes a flag is a class of ours: typer's own would load
typer into processes that stay for months.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from stagekeeper.wire.stable_endpoint import DEFAULT_ENDPOINT, ENDPOINT_ENV


class Parameter:
    """What typer is told of a parameter, once it is asked.

    Attributes:
        names: of a flag, if they are not the parameter's own.
        settings: the rest, under typer's names.
    """

    def __init__(self, *names: str, **settings: Any) -> None:
        self.names = names
        self.settings = settings


class Option(Parameter):
    """A flag of a verb."""


class Argument(Parameter):
    """A word of a verb that stands without a flag."""


class Output(StrEnum):
    """How an answer is written."""

    TEXT = "text"
    JSON = "json"


Endpoint = Annotated[
    str,
    Option(
        envvar=ENDPOINT_ENV,
        metavar="HOST:PORT",
        help=f"The supervisor's stable address [default: {DEFAULT_ENDPOINT}].",
        show_default=False,
    ),
]

Insecure = Annotated[
    bool,
    Option(
        "--insecure",
        help="Allow addresses beyond this machine, though nothing is encrypted yet.",
        show_default=False,
    ),
]

OutputFormat = Annotated[
    Output, Option("--output", "-o", help="text for people, json for programs.")
]

ClusterFlag = Annotated[
    str, Option("--cluster", help="The cluster's name; every part says the same.")
]

StateDir = Annotated[
    Path | None,
    Option(
        metavar="DIR",
        help="Where state is kept [default: $XDG_STATE_HOME/stagekeeper or "
        "~/.local/state/stagekeeper].",
        show_default=False,
    ),
]

LockDir = Annotated[
    Path | None,
    Option(
        metavar="DIR",
        help="Locks shared by all agents of this host [default: /run/lock/stagekeeper].",
        show_default=False,
    ),
]

PythonPath = Annotated[
    list[Path] | None,
    Option(
        "--pythonpath",
        metavar="DIR",
        help="A folder that stages import from; may be given several times.",
        show_default=False,
    ),
]

Devices = Annotated[
    list[str] | None,
    Option(
        "--devices",
        metavar="DEVICE",
        help="cuda: all NVIDIA cards; GPU-… or MIG-…: the one whose UUID begins so; cpu:0=8GiB: a "
        "slice of RAM that stands for a card; none. May be given several times.",
        show_default=False,
    ),
]

Allow = Annotated[
    list[str] | None,
    Option(
        "--allow",
        metavar="PATTERN",
        help="Classes of stages and actors ('my_models.*') and programs ('command:vllm') that may "
        "be started; may be given several times.",
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
    LogLevel, Option("--log-level", help="The least urgent thing that is logged.")
]

DieWithParent = Annotated[
    int,
    Option(
        "--die-with",
        metavar="PID",
        hidden=True,
        help="End when this process, which started us, is gone.",
    ),
]
