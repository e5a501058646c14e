"""Flags of `up` that no child could run with, found before anything starts.

Decided here: that they are judged by the children's own settings, and named as `up` calls them. Not
decided here: what is wrong with them.
"""

from __future__ import annotations

from collections.abc import Iterator

from stagekeeper.agent.settings import AgentSettings, SettingsError
from stagekeeper.cli.exits import CliError, ExitCode, usage
from stagekeeper.cli.up.plane import PlaneOptions
from stagekeeper.core.ids import ClusterName, WorkerId
from stagekeeper.core.settings import RegistrySettings
from stagekeeper.supervisor.settings import SettingsRefused, SupervisorSettings


def check_flags(options: PlaneOptions, *, cluster: str, insecure: bool) -> None:
    """Refuse what a supervisor or an agent would refuse.

    Raises:
        CliError: exit code 2, with every problem.
    """
    problems = list(dict.fromkeys(_agent_problems(options, cluster)))
    problems += _supervisor_problems(options, insecure=insecure)
    if len(problems) == 1:
        raise usage(problems[0])
    if problems:
        raise CliError(ExitCode.USAGE, "these flags cannot work:", details=problems)


def _agent_problems(options: PlaneOptions, cluster: str) -> Iterator[str]:
    # Of agents that differ in their number alone the last one has the longest name.
    settings = AgentSettings(
        cluster=ClusterName(cluster),
        worker_id=WorkerId(options.agents[-1]),
        endpoint=options.endpoint,
        state_dir=options.state_dir,
        lock_dir=options.lock_dir,
        devices=options.devices,
        pythonpath=options.pythonpath,
    )
    try:
        settings.check()
    except SettingsError as error:
        for problem in error.problems:
            yield problem.replace("worker id", "--worker-prefix makes worker ids, and", 1)


def _supervisor_problems(options: PlaneOptions, *, insecure: bool) -> Iterator[str]:
    """Judge what agents do not: the cluster's name is theirs too, and is judged there."""
    try:
        RegistrySettings(heartbeat_s=options.heartbeat_s)
    except ValueError as error:
        yield f"--heartbeat-s: {error}"
    try:
        SupervisorSettings(endpoint=options.endpoint, insecure=insecure)
    except SettingsRefused as error:
        yield from error.problems
