"""Who holds how much of each card, as admission counts it.

A claim is booked when an operation reserves it and is freed when the last process of its stage is
proven gone, or when the operation ends without one; starting and stopping stages count like running
ones. The sums are the core's. The cards change while the agent lives: new claims are checked
against what is known of them now, and what was admitted stays booked whatever becomes of its card.

Invariants: between a check and its booking nothing is awaited, so no two operations are admitted to
the same bytes; nothing new goes on a card that is not known now.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from stagekeeper.core.errors import FieldProblem, PlanError, Reason, Refused, bad_fields
from stagekeeper.core.ids import DeviceId, OperationId, StageId
from stagekeeper.core.model import Device, DeviceClaim, StageStart
from stagekeeper.core.planner import Holding, admission_report


@dataclass(frozen=True, slots=True)
class Booking:
    """Whose claims they are. A stage of an operation books once, however often it is started."""

    operation_id: OperationId
    stage_id: StageId


class Ledger:
    """The claims on the cards of one agent."""

    def __init__(self, devices: Iterable[Device] = ()) -> None:
        self._totals: dict[DeviceId, int] = {}
        self._last_totals: dict[DeviceId, int] = {}
        self._unknown_reason = ""
        self._problems: Mapping[DeviceId, str] = {}
        self.cards_are(devices)
        self._booked: dict[Booking, tuple[str, tuple[DeviceClaim, ...]]] = {}

    def cards_are(
        self,
        devices: Iterable[Device],
        *,
        unknown_reason: str = "",
        problems: Mapping[DeviceId, str] | None = None,
    ) -> None:
        """Count with these cards from now on.

        Args:
            unknown_reason: why the list could not be read; not empty admits nothing to any card.
            problems: why the memory of a card could not be read.
        """
        self._totals = {device.device_id: device.total_bytes for device in devices}
        self._last_totals |= {it: total for it, total in self._totals.items() if total}
        self._unknown_reason = unknown_reason
        self._problems = problems or {}

    def admit(self, stages: Sequence[StageStart], *, without: Collection[OperationId] = ()) -> None:
        """Check that new stages fit beside all that is booked; books nothing.

        Args:
            without: operations whose claims are about to be freed.

        Raises:
            Refused: UNKNOWN_DEVICE, BAD_FIELD, or ADMISSION_REFUSED with the sum for each card, or
                with why a card is not known.
        """
        wanted = {device for stage in stages for device in stage.device_ids}
        if wanted and self._unknown_reason:
            raise Refused(
                Reason.ADMISSION_REFUSED,
                f"this agent cannot read its devices, so nothing new goes on them: "
                f"{self._unknown_reason}. Mend the driver (nvidia-smi on its host tells more), or "
                "start the agent with other --devices; it looks again by itself",
            )
        self._check_there(wanted)
        unread = sorted(it for it in wanted if not self._totals[it])
        if unread:
            whys = [f"device {it}: {self._problems.get(it) or 'it has 0 bytes'}" for it in unread]
            raise Refused(
                Reason.ADMISSION_REFUSED,
                f"memory that cannot be read is not given away: {'; '.join(whys)}. Choose another "
                "card, or mend this one; this agent looks again by itself",
            )
        needs = {it.stage_id: (it.device_ids, it.spec.memory) for it in stages}
        try:
            report = admission_report(needs, self._totals, self._holdings(without))
        except PlanError as error:
            raise bad_fields(
                [FieldProblem("stages", problem) for problem in error.problems]
            ) from error
        if report.refusals:
            raise Refused(Reason.ADMISSION_REFUSED, "; ".join(report.refusals))

    def check_still_there(self, stage: StageStart) -> None:
        """Refuse to start on a card that is gone since it was reserved.

        A list that cannot be read right now says nothing, and what was admitted goes on.

        Raises:
            Refused: UNKNOWN_DEVICE.
        """
        if not self._unknown_reason:
            self._check_there(stage.device_ids)

    def claims_of(self, stage: StageStart) -> tuple[DeviceClaim, ...]:
        """Return what admission counts for a stage, one entry per device."""
        if stage.spec.memory is None:
            return ()
        return tuple(
            DeviceClaim(device_id, stage.spec.memory.on_card(self.total_bytes(device_id)))
            for device_id in stage.device_ids
        )

    def book(self, booking: Booking, holder: str, claims: tuple[DeviceClaim, ...]) -> None:
        """Count claims from now on; `holder` is shown in refusals. A repeat changes nothing."""
        self._booked.setdefault(booking, (holder, claims))

    def free(self, booking: Booking) -> None:
        """Count claims no longer; harmless when they are free already."""
        self._booked.pop(booking, None)

    def reserved_bytes(self, device_id: DeviceId) -> int:
        return sum(it.memory_bytes for it in self._holdings() if it.device_id == device_id)

    def total_bytes(self, device_id: DeviceId) -> int:
        """Return what a card has, or had when its memory could last be read; 0 when it never could.

        Claims are counted with it, so that a claim does not shrink with what is known of its card.
        """
        return self._last_totals.get(device_id, 0)

    def _check_there(self, device_ids: Iterable[DeviceId]) -> None:
        unknown = sorted(set(device_ids) - self._totals.keys())
        if unknown:
            raise Refused(
                Reason.UNKNOWN_DEVICE,
                f"this agent has no device {', '.join(unknown)}; it has "
                f"{', '.join(sorted(self._totals)) or 'none'}",
            )

    def _holdings(self, without: Collection[OperationId] = ()) -> list[Holding]:
        return [
            Holding(claim.device_id, holder, claim.reserved_bytes)
            for booking, (holder, claims) in self._booked.items()
            if booking.operation_id not in without
            for claim in claims
        ]
