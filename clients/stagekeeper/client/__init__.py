"""The client SDK: deploy, watch and call, with or without the supervisor.

It logs to `stagekeeper.client`, and to nobody unless the program sets logging up.
"""

import logging

from stagekeeper.client.client import Client
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
from stagekeeper.client.event_reading import Gap
from stagekeeper.client.spec_file import LoadedSpec, SpecError, load_spec, parse_spec

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
