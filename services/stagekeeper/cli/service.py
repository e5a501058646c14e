"""Running one long-lived part in this process: signals in, a line for each state, an orderly end.

Decided here: SIGTERM and SIGINT ask for the end, a second one does not hurry it (SIGKILL does); the
lines of `state_line` are the only thing on stdout.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping

import structlog

from stagekeeper.cli.light_start import all_is_loaded
from stagekeeper.cli.log_output import configure_logs
from stagekeeper.host.parent_death import die_with

_log = structlog.get_logger(__name__)

Service = Callable[[asyncio.Event], Awaitable[None]]
"""Runs until the event is set, and returns when everything of it has ended."""


def state_line(part: str, state: str, facts: Mapping[str, object]) -> str:
    """Make the line that says what a part does now: `agent ready: worker=node-1 …`."""
    return f"{part} {state}: " + " ".join(f"{name}={value}" for name, value in facts.items())


def run_service(service: Service, *, log_level: str, parent_pid: int = 0) -> None:
    """Run `service` until it is asked to end.

    Args:
        parent_pid: end when this process, our parent, is gone; 0 asks for nothing of the kind.
    """
    configure_logs(log_level)
    all_is_loaded()
    asyncio.run(_until_signalled(service, parent_pid))


async def _until_signalled(service: Service, parent_pid: int) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ask(received: signal.Signals) -> None:
        _log.info("asked to end", signal=received.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ask, number)
    if parent_pid and not die_with(parent_pid):
        _log.warning("the process that started this one is gone: not starting", pid=parent_pid)
        return
    await service(stop)
