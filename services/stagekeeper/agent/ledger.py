"""Who holds how much of each card, as admission counts it.

A claim is booked when an operation reserves it and is freed when the last process of its stage is
proven gone, or when the operation ends without one; starting and stopping stages count like running
ones. The sums are the core's. Invariant: between a check and its booking nothing is awaited, so no
two operations are admitted to the same bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
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

    def __init__(self, devices: Iterable[Device]) -> None:
        self._totals = {device.device_id: device.total_bytes for device in devices}
        self._booked: dict[Booking, tuple[str, tuple[DeviceClaim, ...]]] = {}

    def admit(self, stages: Sequence[StageStart], *, without: Collection[OperationId] = ()) -> None:
        """Check that new stages fit beside all that is booked; books nothing.

        Args:
            without: operations whose claims are about to be freed.

        Raises:
            Refused: UNKNOWN_DEVICE, BAD_FIELD, or ADMISSION_REFUSED with the sum for each card.
        """
        unknown = sorted(
            {device for stage in stages for device in stage.device_ids} - self._totals.keys()
        )
        if unknown:
            raise Refused(
                Reason.UNKNOWN_DEVICE,
                f"this agent has no device {', '.join(unknown)}; it has "
                f"{', '.join(sorted(self._totals)) or 'none'}",
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

    def claims_of(self, stage: StageStart) -> tuple[DeviceClaim, ...]:
        """Return what admission counts for a stage, one entry per device."""
        if stage.spec.memory is None:
            return ()
        return tuple(
            DeviceClaim(device_id, stage.spec.memory.on_card(self._totals[device_id]))
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
        return self._totals[device_id]

    def _holdings(self, without: Collection[OperationId] = ()) -> list[Holding]:
        return [
            Holding(claim.device_id, holder, claim.reserved_bytes)
            for booking, (holder, claims) in self._booked.items()
            if booking.operation_id not in without
            for claim in claims
        ]
