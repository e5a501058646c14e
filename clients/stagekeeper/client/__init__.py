"""The client SDK: deploy, watch and call, with or without the supervisor.

It logs to `stagekeeper.client`, and to nobody unless the program sets logging up.
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any, Final

from stagekeeper.client.errors import (
    BadEndpoint,
    BadRequest,
    Bug,
    CallLost,
    DeadlineExceeded,
    DeployFailed,
    EndpointRaised,
    NameTaken,
    NoReplica,
    NoRoom,
    NotAllowed,
    NotFound,
    NotYet,
    OutOfDate,
    PlanStale,
    StagekeeperError,
    SupervisorUnreachable,
    Unavailable,
    UnreadableAnswer,
    WrongState,
)

# Heavier than the errors by far, and not needed by every process of an actor tree: imported when
# asked for.
if TYPE_CHECKING:
    from stagekeeper.client.client import Client
    from stagekeeper.client.event_reading import Gap
    from stagekeeper.client.spec_file import LoadedSpec, SpecError, load_spec, parse_spec

_HOMES: Final = {
    "Client": "client",
    "Gap": "event_reading",
    "LoadedSpec": "spec_file",
    "SpecError": "spec_file",
    "load_spec": "spec_file",
    "parse_spec": "spec_file",
}

__all__ = [
    "BadEndpoint",
    "BadRequest",
    "Bug",
    "CallLost",
    "Client",
    "DeadlineExceeded",
    "DeployFailed",
    "EndpointRaised",
    "Gap",
    "LoadedSpec",
    "NameTaken",
    "NoReplica",
    "NoRoom",
    "NotAllowed",
    "NotFound",
    "NotYet",
    "OutOfDate",
    "PlanStale",
    "SpecError",
    "StagekeeperError",
    "SupervisorUnreachable",
    "Unavailable",
    "UnreadableAnswer",
    "WrongState",
    "load_spec",
    "parse_spec",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
