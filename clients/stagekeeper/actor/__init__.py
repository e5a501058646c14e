"""Actors: objects in processes of their own, who owns them, and what happens when one fails.

`root()` makes a program the root of a tree; `this_host().spawn_procs(n)` starts processes;
`procs.spawn(name, Class, …)` puts an actor into each. See docs/actors.md.
"""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from stagekeeper.actor.actor import Actor
from stagekeeper.actor.call_context import CallContext, context
from stagekeeper.actor.endpoint import Endpoint, EndpointKind, endpoint

# A stage is an actor without a tree, and starts sooner without what a tree is made of.
if TYPE_CHECKING:
    from stagekeeper.actor.calling import EndpointRef, Ranked
    from stagekeeper.actor.entrypoint import EntrypointError
    from stagekeeper.actor.errors import (
        Died,
        MeshError,
        MeshStopped,
        NotOwner,
        NotSendable,
        NotStopped,
        RemoteError,
        UnhandledFault,
    )
    from stagekeeper.actor.failure import ExitInfo, FailureKind, Hop, MeshFailure
    from stagekeeper.actor.hook import end_program
    from stagekeeper.actor.hosts import HostMesh, ProcMesh, this_host, this_proc
    from stagekeeper.actor.mesh import ActorMesh
    from stagekeeper.actor.owning.stop_report import StopReport, Unrun
    from stagekeeper.actor.tree_root import Root, root
    from stagekeeper.actor.value_mesh import ValueMesh

    unhandled_fault_hook: Callable[[MeshFailure], object]
    """Called with each failure that nobody handled; assign another function to handle them.

    Returning means handled, raising means not. It is looked up when it is needed and called once
    per failure. The default prints the failure and ends the program as Ctrl-C would, with exit
    status 1.
    """

_HOMES: Final = {
    "calling": ("EndpointRef", "Ranked"),
    "entrypoint": ("EntrypointError",),
    "errors": (
        "Died",
        "MeshError",
        "MeshStopped",
        "NotOwner",
        "NotSendable",
        "NotStopped",
        "RemoteError",
        "UnhandledFault",
    ),
    "failure": ("ExitInfo", "FailureKind", "Hop", "MeshFailure"),
    "hook": ("end_program", "unhandled_fault_hook"),
    "hosts": ("HostMesh", "ProcMesh", "this_host", "this_proc"),
    "mesh": ("ActorMesh",),
    "owning.stop_report": ("StopReport", "Unrun"),
    "tree_root": ("Root", "root"),
    "value_mesh": ("ValueMesh",),
}

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
    "NotStopped",
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


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            found = getattr(importlib.import_module(f"{__name__}.{home}"), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
