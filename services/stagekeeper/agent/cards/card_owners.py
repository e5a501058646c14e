"""Whose a process on a card is: of a claim of this host, or a stranger's.

Decided here: what proves it, which is the session that the stage's process leads, or the instance
id in the environment. Invariant: a process is never taken for a stage's by its pid alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stagekeeper.agent.cards.card_use import SeenProcess
from stagekeeper.host.process import environment_value, identity_of, read_stat
from stagekeeper.runtime.launch import INSTANCE_ENV

if TYPE_CHECKING:
    from stagekeeper.agent.cards.devices import CardProcess
    from stagekeeper.agent.cards.host_claims import StageClaim
    from stagekeeper.agent.stage_process import StageProcess

_LONGEST_NAME = 32


def seen_on_card(
    processes: Iterable[CardProcess], claims: Sequence[StageClaim]
) -> list[SeenProcess]:
    """Look at each process that the driver lists; one that does not exist here gets no name."""
    sessions = {it.pid: place for place, it in enumerate(claims) if it.pid and leads(it)}
    instances = {it.instance_id: place for place, it in enumerate(claims) if it.instance_id}
    seen = []
    for process in processes:
        stat = read_stat(process.pid) if process.pid > 0 else None
        if stat is None or stat.is_dead:
            seen.append(SeenProcess(process.pid, process.used_bytes))
            continue
        owner = sessions.get(stat.session)
        if owner is None and instances:
            owner = instances.get(environment_value(process.pid, INSTANCE_ENV) or "")
        name = program_name(process.pid)
        seen.append(SeenProcess(process.pid, process.used_bytes, owner, name))
    return seen


def is_of_stage(pid: int, stage: StageProcess) -> bool:
    """Return whether a process is one of a stage's that this agent holds."""
    stat = read_stat(pid)
    if stat is None:
        return False
    handle = stage.handle
    # A session's number is surely its own only while its leader lives.
    if handle is not None and not handle.has_exited and stat.session == handle.pid:
        return True
    return stage.holds_processes and environment_value(pid, INSTANCE_ENV) == stage.instance_id


def leads(claim: StageClaim) -> bool:
    """Return whether a session with the number of a claim's process can only be its own.

    A number stays taken as long as a session has it. So it is its own while its process leads it,
    and, of a process that has ended, unless another one has the number by now.
    """
    holder = identity_of(claim.pid)
    return holder is None or holder == claim.process


def program_name(pid: int) -> str:
    """Return what the kernel calls a program, fit to be shown; `?` where it does not say."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text(errors="replace").rstrip("\n")
    except OSError:
        return "?"
    return "".join(it if it.isprintable() else "?" for it in name)[:_LONGEST_NAME] or "?"
