"""What the program of a command stage is started with: its command line and its environment.

Decided here: what each template stands for in this start, and what the program is given of the
agent's environment: a list, and nothing of the Python environment that the agent itself runs in.
Not decided here: the ports (`ports`), and how the program is watched (the stage process).

Invariant: nothing that the spec's `env` says reaches the stage process itself, which is ours.
"""

from __future__ import annotations

from collections.abc import Mapping

from stagekeeper.agent.entrypoints import find_program
from stagekeeper.core.command_stage import CommandPlace, StagePorts, share_of
from stagekeeper.core.ids import Generation
from stagekeeper.core.model import StageStart
from stagekeeper.runtime.launch import LaunchCommand, LaunchDevice


def command_launch(
    start: StageStart,
    place: CommandPlace,
    ports: StagePorts,
    base: Mapping[str, str],
    fixed: Mapping[str, str],
) -> LaunchCommand:
    """Fill in what the stage process executes.

    Args:
        start: has a command.
        place: where it runs, with everything settled.
        ports: what was leased for it.
        base: what every stage gets of the agent's environment; the spec's goes before it.
        fixed: what nobody's spec changes.
    """
    command = start.spec.command
    assert command is not None
    filled = [place.fill(argument) for argument in command.argv[1:]]
    env = {name: place.fill(value) for name, value in start.spec.env}
    return LaunchCommand(
        spec=command,
        argv=[find_program(command.program) or command.program, *filled],
        env={**base, **env, **fixed},
        ports={it.name: it.port for it in ports.ports},
        has_fixed_bytes=start.spec.memory is not None and start.spec.memory.bytes is not None,
    )


def command_place(
    start: StageStart,
    devices: list[LaunchDevice],
    *,
    host: str,
    ports: StagePorts,
    leader: StagePorts,
    generation: Generation,
    instance_id: str,
    run_dir: str,
    cache_dir: str,
) -> CommandPlace:
    """Say where one shard of a command stage runs."""
    need = start.spec.memory
    least = min(devices, key=lambda it: it.budget_bytes, default=None)
    utilization = need.utilization if need is not None else None
    if utilization is None and least is not None:
        utilization = share_of(least.budget_bytes, least.total_bytes)
    return CommandPlace(
        host=host,
        shard_index=start.shard_index,
        shard_count=start.shard_count,
        device_uuids=start.device_ids,
        utilization=utilization,
        memory_bytes=least.budget_bytes if least is not None else None,
        ports={it.name: it.port for it in ports.ports},
        leader_host=leader.host,
        leader_ports={it.name: it.port for it in leader.ports},
        generation=generation_text(generation),
        instance_id=instance_id,
        run_dir=run_dir,
        cache_dir=cache_dir,
    )


def generation_text(generation: Generation) -> str:
    """Write a generation so that it can stand in a file's name; the same on every worker."""
    epoch = generation.epoch
    return f"{epoch.number}.{epoch.supervisor_id[:8]}.{generation.n}"
