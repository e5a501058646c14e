"""The ports that this agent leases to command stages: from a range that it alone has on the host.

Decided here: which range, and which port of it comes next. Ports go round: one that was given back
is the last to be given out again, so that a new generation has other ones than the one before it,
whose late packets reach nobody. A range is a lock on a file in the host's lock folder, taken with
the first lease. Not decided here: when a lease ends (`stages` and `operations`: with the booking of
its memory).

Invariants: a port is leased to one booking at a time; what an earlier life of the agent leased
stays leased for as long as its stage has processes, in whatever range it lies; a port that somebody
has bound is not leased.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import structlog

from stagekeeper.agent.cards.ledger import Booking
from stagekeeper.agent.host_lock import FileLock, LockHeld
from stagekeeper.core.command_stage import PortLease, StagePorts
from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.ids import OperationId
from stagekeeper.core.model import OperationPlan, StageStart
from stagekeeper.runtime.port_check import is_unbound

_log = structlog.get_logger(__name__)

FIRST_PORT: Final = 20_000
LAST_PORT: Final = 29_999
"""Below the ports that Linux gives to whoever asks for any (32768 and above)."""

SLICE_SIZE: Final = 200
"""Of an agent that was not told its range."""


class PortRange:
    """Ports from `first` to `last`.

    Raises:
        ValueError: there is none, or no such port.
    """

    def __init__(self, first: int, last: int) -> None:
        if not 1 <= first <= last <= 65_535:
            raise ValueError(f"{first}-{last} is no range of ports (from 1 to 65535)")
        self.first = first
        self.last = last

    @classmethod
    def parse(cls, text: str) -> PortRange:
        """Read `20000-20199`."""
        first, dash, last = text.partition("-")
        if not (dash and first.isdecimal() and last.isdecimal()):
            raise ValueError(f"{text!r} is no range of ports, such as 20000-20199")
        return cls(int(first), int(last))

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


class Ports:
    """The leases of one agent.

    Args:
        host: the address at which its stages serve, without brackets.
        lock_dir: the host's folder for locks.
        chosen: its range; None takes a slice of its own that no other agent of the host has.
        prefer: any number; equal ones try the same slice first, so that an agent tends to get the
            one that it had.
    """

    def __init__(
        self, host: str, lock_dir: Path, chosen: PortRange | None = None, *, prefer: int = 0
    ) -> None:
        self._host = host
        self._lock_dir = lock_dir
        self._chosen = chosen
        self._prefer = prefer
        self._range: PortRange | None = None
        self._lock: FileLock | None = None
        self._next = 0
        self._leases: dict[Booking, StagePorts] = {}

    def of(self, booking: Booking) -> StagePorts | None:
        """Return what is leased for one stage of an operation."""
        return self._leases.get(booking)

    def lease(self, plan: OperationPlan) -> tuple[StagePorts, ...]:
        """Lease what the command stages of a plan want, all or nothing.

        Raises:
            Refused: ADMISSION_REFUSED: the range has too few free ports, or there is no range.
        """
        wanting = [start for start in plan.stages if start.spec.command is not None]
        try:
            return tuple([self._lease_one(plan.operation_id, start) for start in wanting])
        except Refused:
            for start in wanting:
                self.free(Booking(plan.operation_id, start.stage_id))
            raise

    def hold(self, booking: Booking, ports: StagePorts) -> None:
        """Go on with a lease of an earlier life of this agent."""
        if ports.ports:
            self._leases[booking] = ports

    def hold_again(self, booking: Booking, leases: tuple[PortLease, ...]) -> None:
        """Go on with the leases of a recorded stage."""
        self.hold(booking, StagePorts(booking.stage_id, self._host, leases))

    def free(self, booking: Booking) -> None:
        """End the lease of one stage. A second time changes nothing."""
        self._leases.pop(booking, None)

    def close(self) -> None:
        """Let go of the range; leases stay with those who have them."""
        if self._lock is not None:
            self._lock.release()
            self._lock = self._range = None

    def _lease_one(self, operation_id: OperationId, start: StageStart) -> StagePorts:
        assert start.spec.command is not None
        names = start.spec.command.ports
        ports = StagePorts(start.stage_id, self._host)
        if names:
            free = self._free_ports()
            leased = []
            for name in names:
                port = next(free, None)
                if port is None:
                    raise Refused(
                        Reason.ADMISSION_REFUSED,
                        f"no port is free for {name!r} of stage {start.spec.name}: this agent has "
                        f"the ports {self._range}, and {self._leased_count()} of them are leased; "
                        "give it more (--ports)",
                    )
                leased.append(PortLease(name, port))
            ports = StagePorts(start.stage_id, self._host, tuple(leased))
            self._leases[Booking(operation_id, start.stage_id)] = ports
        return ports

    def _free_ports(self) -> Iterator[int]:
        """Yield ports that nobody has, going on behind the last one that was given out."""
        owned = self._own_range()
        count = owned.last - owned.first + 1
        taken = {lease.port for ports in self._leases.values() for lease in ports.ports}
        for _ in range(count):
            port = owned.first + self._next % count
            self._next += 1
            if port not in taken and is_unbound(self._host, port):
                yield port

    def _leased_count(self) -> int:
        return sum(len(ports.ports) for ports in self._leases.values())

    def _own_range(self) -> PortRange:
        if self._range is None:
            self._range = self._take_range()
            _log.info("this agent leases ports", ports=str(self._range))
        return self._range

    def _take_range(self) -> PortRange:
        refusals = []
        for candidate in self._candidates():
            path = self._lock_dir / f"ports-{candidate}.lock"
            try:
                self._lock = FileLock.take(path, f"the range of ports {candidate}")
            except (LockHeld, OSError) as error:
                refusals.append(str(error))
                continue
            return candidate
        raise Refused(
            Reason.ADMISSION_REFUSED,
            f"this agent has no ports to lease: {refusals[0]}; give it some of its own (--ports)",
        )

    def _candidates(self) -> Iterable[PortRange]:
        if self._chosen is not None:
            yield self._chosen
            return
        slices = (LAST_PORT + 1 - FIRST_PORT) // SLICE_SIZE
        for number in range(slices):
            first = FIRST_PORT + (self._prefer + number) % slices * SLICE_SIZE
            yield PortRange(first, first + SLICE_SIZE - 1)
