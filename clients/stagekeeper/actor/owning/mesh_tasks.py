"""The background tasks of one mesh.

Invariant: one that fails is told of where a program looks for what actors say.
"""

from __future__ import annotations

import logging

from stagekeeper.host.tasks import TaskOwner

_log = logging.getLogger("stagekeeper.actor")


def mesh_tasks(name: str) -> TaskOwner:
    """Return who owns the tasks of a mesh.

    Args:
        name: of the tasks, for people.
    """
    return TaskOwner(name, _failed)


def _failed(task: str, error: BaseException) -> None:
    _log.error("%s failed", task, exc_info=error)
