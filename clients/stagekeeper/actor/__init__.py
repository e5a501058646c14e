"""Actors: objects in processes of their own, who owns them, and what happens when one fails.

`root()` makes a program the root of a tree; `this_host().spawn_procs(n)` starts processes;
`procs.spawn(name, Class, …)` puts an actor into each. See docs/actors.md.
"""

from collections.abc import Callable

from stagekeeper.actor.actor import Actor
from stagekeeper.actor.call_context import CallContext, context
from stagekeeper.actor.calling import EndpointRef, Ranked
from stagekeeper.actor.endpoint import Endpoint, EndpointKind, endpoint
from stagekeeper.actor.entrypoint import EntrypointError
from stagekeeper.actor.errors import (
    Died,
    MeshError,
    MeshStopped,
    NotOwner,
    NotSendable,
    RemoteError,
    UnhandledFault,
)
from stagekeeper.actor.failure import ExitInfo, FailureKind, Hop, MeshFailure
from stagekeeper.actor.hook import end_program
from stagekeeper.actor.hosts import HostMesh, ProcMesh, this_host, this_proc
from stagekeeper.actor.mesh import ActorMesh
from stagekeeper.actor.owning.actor_mesh import StopReport, Unrun
from stagekeeper.actor.root import Root, root
from stagekeeper.actor.value_mesh import ValueMesh

from stagekeeper.actor import reference_codec  # isort: skip  # noqa: F401  (registers meshes)

unhandled_fault_hook: Callable[[MeshFailure], object] = end_program
"""Called with each failure that nobody handled; assign another function to handle them.

Returning means handled, raising means not. It is looked up when it is needed and called once per
failure. The default prints the failure and ends the program as Ctrl-C would, with exit status 1.
"""

__all__ = [
    "Actor",
    "ActorMesh",
    "CallContext",
    "Died",
    "Endpoint",
    "EndpointKind",
    "EndpointRef",
    "EntrypointError",
    "ExitInfo",
    "FailureKind",
    "Hop",
    "HostMesh",
    "MeshError",
    "MeshFailure",
    "MeshStopped",
    "NotOwner",
    "NotSendable",
    "ProcMesh",
    "Ranked",
    "RemoteError",
    "Root",
    "StopReport",
    "UnhandledFault",
    "Unrun",
    "ValueMesh",
    "context",
    "end_program",
    "endpoint",
    "root",
    "this_host",
    "this_proc",
    "unhandled_fault_hook",
]
