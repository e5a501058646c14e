"""What an agent can know of its cards, and the one way in which every kind of card is read.

Two kinds are real: NVIDIA cards through NVML (`nvml`) and slices of RAM (`host_memory`). Decided
here: the shape of a reading. Not decided here: what follows from it (`inventory`, `ledger`).

Invariant: a list that could not be read is never an empty list. A reading either is the whole truth
of this moment, or says why there is none, and then carries the cards as they were last read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from stagekeeper.core.ids import DeviceId
from stagekeeper.core.model import Device

if TYPE_CHECKING:
    from stagekeeper.agent.stage_process import StageProcess


@dataclass(frozen=True, slots=True)
class CardProcess:
    """A process on a card; `used_bytes` is None where the driver does not tell.

    The pid is one of the driver's: in a container with a pid namespace of its own it may be
    another's number, or nobody's.
    """

    pid: int
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class CardReading:
    """One card, as it was read.

    Attributes:
        device: its `used_bytes` is what is used by anybody, None where that is unknown; its
            `total_bytes` is 0 where the memory could not be read: nothing new goes there, nor
            where it has a `sick_reason`.
        processes: who is on it, ascending by pid; None where nobody can tell.
        problem: why its memory could not be read; empty when it was.
    """

    device: Device
    processes: tuple[CardProcess, ...] | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class CardFault:
    """An error that one program met on a card, which is well itself.

    Attributes:
        device_ids: the card, or those of its parts of which it may be.
        pid: of the program, where that is known.
        text: what it was, for people.
    """

    device_ids: tuple[DeviceId, ...]
    text: str
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """All cards of one kind, in their driver's order.

    Attributes:
        unknown_reason: why the list could not be read; empty when it was. The cards then are those
            of the last good reading, without what they use.
    """

    cards: tuple[CardReading, ...] = ()
    unknown_reason: str = ""


class DeviceSource(Protocol):
    """One kind of card."""

    async def look(self) -> float | None:
        """Read anew, and return after how many seconds to look again; None: never.

        Returns when the cards are read, or when it is clear that they cannot be. Never raises for
        what a driver does, and never blocks the loop. One look at a time.
        """
        ...

    def reading(self, stages: Iterable[StageProcess]) -> Reading:
        """Return what is known now, without asking anybody.

        Args:
            stages: those of this agent, for a kind whose memory is used by them alone.
        """
        ...
