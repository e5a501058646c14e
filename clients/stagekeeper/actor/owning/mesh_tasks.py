"""The background tasks of one mesh, and waiting for the first of several things.

Invariant: one that fails is told of where a program looks for what actors say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from stagekeeper.host.tasks import TaskOwner

_log = logging.getLogger("stagekeeper.actor")


def mesh_tasks(name: str) -> TaskOwner:
    """Return who owns the tasks of a mesh.

    Args:
        name: of the tasks, for people.
    """
    return TaskOwner(name, _failed)


async def first_of(waits: Sequence[Coroutine[Any, Any, object]]) -> None:
    """Return when one of these does, and end the others; at once when there are none."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    if not tasks:
        return
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _failed(task: str, error: BaseException) -> None:
    _log.error("%s failed", task, exc_info=error)
