"""Whether a reign may begin: who is at the stable endpoint, and whether ours can be listened at.

Decided here: who has to be waited for, and who is none of ours. A supervisor of the same cluster
keeps its place, and so does one that may be there; another cluster, or a program that is no
supervisor, is somebody's mistake. Not decided here: what becomes of a start that has to wait
(`standby`); the listening itself decides in the end.

Invariant: nothing is written and nothing stays bound.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from stagekeeper.core.ids import NO_EPOCH, Epoch
from stagekeeper.host.server import AddressTaken
from stagekeeper.supervisor.endpoint_look import (
    Found,
    Served,
    Silent,
    Stranger,
    Vacant,
    listen_problem,
    look,
)
from stagekeeper.supervisor.settings import SupervisorSettings, has_port


@dataclass(frozen=True, slots=True)
class Free:
    """A reign may begin. `is_certain`: nobody else can listen where ours is asked for.

    Otherwise the stable endpoint is not of this process, and refused connections: whoever forwards
    there may only be starting anew.
    """

    is_certain: bool


@dataclass(frozen=True, slots=True)
class Occupied:
    """A supervisor of this cluster is there (`epoch`), or somebody may be (None)."""

    why: str
    epoch: Epoch | None = None


@dataclass(frozen=True, slots=True)
class Foreign:
    """What is there is not of this cluster, and waiting for its end would be a mistake too."""

    why: str


Outlook = Free | Occupied | Foreign


@dataclass(frozen=True, slots=True)
class Turn:
    """A reign may begin now: above `above`. `is_first`: nobody was met who reigned before."""

    above: Epoch = NO_EPOCH
    is_first: bool = True


async def find_predecessor(
    settings: SupervisorSettings,
    *,
    look: Callable[[str, float], Awaitable[Found]] = look,
    listen_problem: Callable[[str], OSError | None] = listen_problem,
) -> Outlook:
    """Say whether a supervisor with these settings could begin its reign now."""
    stable, own = settings.stable, settings.endpoint
    found: Found = Vacant(is_refused=True)
    if has_port(stable):
        found = await look(stable, settings.look_timeout_s)
    if not isinstance(found, Vacant):
        return _met(found, stable, settings)
    problem = listen_problem(own)
    if problem is None:
        return Free(is_certain=stable == own)
    if problem.errno != errno.EADDRINUSE:
        return Foreign(f"cannot listen at {own}: {problem.strerror}")
    if own != stable:
        found = await look(own, settings.look_timeout_s)
        if not isinstance(found, Vacant):
            return _met(found, own, settings)
    if found.is_refused:
        return Occupied(f"cannot listen at {own}: somebody has it who does not listen yet")
    return Foreign(f"cannot listen at {own}: something else does, and it is no supervisor")


async def check_turn(settings: SupervisorSettings) -> Turn:
    """Return when a reign may begin at once.

    Raises:
        AddressTaken: naming the cluster and the reign that live there, if it is a supervisor.
    """
    outlook = await find_predecessor(settings)
    if isinstance(outlook, Free):
        return Turn()
    raise refusal(outlook)


def refusal(outlook: Occupied | Foreign) -> AddressTaken:
    """Say that a start which may not wait cannot go on."""
    hint = "end that one first, or use another --endpoint"
    return AddressTaken(f"{outlook.why}: {hint}" if isinstance(outlook, Occupied) else outlook.why)


def _met(found: Served | Silent | Stranger, address: str, settings: SupervisorSettings) -> Outlook:
    if isinstance(found, Silent):
        return Occupied(
            f"cannot listen at {address}: somebody is there who does not answer ({found.why})"
            if address == settings.endpoint
            else f"whoever lives at {address} does not answer ({found.why})"
        )
    if isinstance(found, Stranger):
        return Foreign(
            f"cannot listen at {address}: something else does ({found.why})"
            if address == settings.endpoint
            else f"what lives at {address} is no supervisor ({found.why}): look at "
            "--stable-endpoint"
        )
    if found.cluster != settings.cluster:
        return Foreign(
            f"a supervisor of another cluster, {found.cluster!r} (epoch {found.epoch}), lives at "
            f"{address}, and this one is of {settings.cluster!r}: look at --cluster, or use "
            "another --endpoint"
        )
    return Occupied(
        f"a supervisor of cluster {found.cluster!r} (epoch {found.epoch}) lives at {address}",
        found.epoch,
    )
