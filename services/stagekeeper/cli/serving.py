"""A supervisor or an agent as this process: run, announced, ended.

Decided here: what the lines on stdout say. Others wait for these lines and read their facts, so a
key is never renamed.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import structlog

from stagekeeper.cli.exits import usage
from stagekeeper.cli.service import run_service, state_line

if TYPE_CHECKING:
    from stagekeeper.agent.settings import AgentSettings
    from stagekeeper.supervisor.settings import SupervisorSettings

_log = structlog.get_logger(__name__)

ALL: Final = ("*",)
MOST_FILES: Final = 2**20


def raise_file_limit() -> None:
    """Let this process open as many files as it may.

    Each worker and each reader holds a connection, and the usual limit of 1024 is one for programs
    that nobody connects to: above it connections are taken by the kernel and never answered. Not
    for agents: what they start would inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def serve_supervisor(settings: SupervisorSettings, *, log_level: str, parent_pid: int) -> None:
    """Run a supervisor until SIGTERM or SIGINT."""
    from stagekeeper.supervisor.app import Supervisor
    from stagekeeper.supervisor.lifetime import SteppedDown, run
    from stagekeeper.supervisor.standby import Waiting

    raise_file_limit()

    async def service(stop: asyncio.Event) -> None:
        def stands_by(waiting: Waiting) -> None:
            facts = {"endpoint": waiting.endpoint, "epoch": waiting.epoch or "unknown"}
            print(state_line("supervisor", "standby", facts), flush=True)

        def stepped_down(over: SteppedDown) -> None:
            facts = {"endpoint": over.endpoint, "epoch": over.epoch}
            print(state_line("supervisor", "stepped-down", facts), flush=True)

        def announce(supervisor: Supervisor) -> None:
            facts = {
                "endpoint": supervisor.endpoint,
                "workers": supervisor.worker_address,
                "epoch": supervisor.epoch,
                "state": settings.state_dir or "none",
            }
            print(state_line("supervisor", "ready", facts), flush=True)

        await run(
            settings,
            stop=stop,
            ready=announce,
            on_standby=stands_by,
            on_stepped_down=stepped_down,
        )

    run_service(service, log_level=log_level, parent_pid=parent_pid)


def allowed_entrypoints(allow: Sequence[str], addresses: Sequence[str]) -> tuple[str, ...]:
    """Return what an agent may start: everything where only this machine can ask for it.

    Args:
        addresses: where it is asked; a bare host is one too.

    Raises:
        CliError: others can ask, and nobody said what for.
    """
    from stagekeeper.host.server import NotLoopback, check_loopback

    if allow:
        return tuple(allow)
    for address in addresses:
        try:
            check_loopback(address, insecure=False)
        except NotLoopback:
            raise usage(
                f"{address} can be reached from other machines, so say which classes and programs "
                "this agent may start: --allow 'my_models.*' --allow command:vllm"
            ) from None
        except ValueError:
            continue  # the settings say better what is wrong with it
    return ALL


def _limits(settings: AgentSettings) -> Iterator[str]:
    """Say what this agent does less well, or more freely, than its operator may think."""
    if settings.allow == ALL:
        yield (
            "every class and every program may be started by whoever reaches this machine's "
            "loopback (--allow)"
        )
    from stagekeeper.agent.host_lock import HOST_LOCK_DIR

    if settings.lock_dir != HOST_LOCK_DIR:
        yield f"locks in {settings.lock_dir} hold only among agents that use the same --lock-dir"


def serve_agent(settings: AgentSettings, *, log_level: str, parent_pid: int) -> None:
    """Run an agent until SIGTERM or SIGINT, or until it gives up looking for a supervisor."""
    from stagekeeper.agent.app import Agent, run

    async def service(stop: asyncio.Event) -> None:
        for limit in _limits(settings):
            _log.info(limit)

        def announce(agent: Agent) -> None:
            facts = {
                "worker": settings.worker_id,
                "address": agent.address,
                "incarnation": agent.identity.incarnation,
                "adopted": agent.adopted_count,
            }
            print(state_line("agent", "ready", facts), flush=True)

        await run(settings, stop=stop, ready=announce)

    run_service(service, log_level=log_level, parent_pid=parent_pid)
