"""A supervisor or an agent as this process: run, announced, ended.

Decided here: what the ready lines say. Others wait for these lines and read their facts, so a key
is never renamed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from stagekeeper.cli.service import ready_line, run_service

if TYPE_CHECKING:
    from stagekeeper.agent.settings import AgentSettings
    from stagekeeper.supervisor.settings import SupervisorSettings


def serve_supervisor(settings: SupervisorSettings, *, log_level: str, parent_pid: int) -> None:
    """Run a supervisor until SIGTERM or SIGINT."""
    from stagekeeper.supervisor.app import run

    async def service(stop: asyncio.Event) -> None:
        def announce(endpoint: str, workers: str) -> None:
            facts = {
                "endpoint": endpoint,
                "workers": workers,
                "state": settings.state_dir or "none",
            }
            print(ready_line("supervisor", facts), flush=True)

        await run(settings, stop=stop, ready=announce)

    run_service(service, log_level=log_level, parent_pid=parent_pid)


def serve_agent(settings: AgentSettings, *, log_level: str, parent_pid: int) -> None:
    """Run an agent until SIGTERM or SIGINT, or until it gives up looking for a supervisor."""
    from stagekeeper.agent.app import run

    async def service(stop: asyncio.Event) -> None:
        def announce(address: str) -> None:
            facts = {"worker": settings.worker_id, "address": address}
            print(ready_line("agent", facts), flush=True)

        await run(settings, stop=stop, ready=announce)

    run_service(service, log_level=log_level, parent_pid=parent_pid)
