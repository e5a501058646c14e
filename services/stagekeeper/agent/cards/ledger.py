"""Who holds how much of each card, as admission counts it.

A claim is booked when an operation reserves it and is freed when the last process of its stage is
proven gone and its memory is back, or when the operation ends without one; starting and stopping
stages count like running ones. Beside the claims of this agent count those of the other agents of
the host (`host_ledger`), and whatever else the driver says is used (`card_use`). The sums are the
core's. The cards change while the agent lives: new claims are checked against what is known of them
now, and what was admitted stays booked whatever becomes of its card.

Invariants: what is new is checked and booked in one turn, in which nothing is awaited and no other
agent of the host books; nothing new goes on a card that is not known now.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from stagekeeper.agent.cards.card_claimants import (
    OWN,
    Claimant,
    claimants_of,
    foreign_holders,
    holdings,
)
from stagekeeper.agent.cards.devices import CardReading
from stagekeeper.agent.cards.host_claims import ClaimedCard, OtherClaims, StageClaim
from stagekeeper.agent.cards.host_ledger import HostLedger, LedgerBusy
from stagekeeper.core.errors import FieldProblem, PlanError, Reason, Refused, bad_fields
from stagekeeper.core.ids import DeviceId, InstanceId, OperationId, StageId
from stagekeeper.core.model import Device, DeviceClaim, ForeignHolder, StageStart
from stagekeeper.core.planner import Holding, admission_report
from stagekeeper.host.process import ProcessIdentity


@dataclass(frozen=True, slots=True)
class Booking:
    """Whose claims they are. A stage of an operation books once, however often it is started."""

    operation_id: OperationId
    stage_id: StageId


@dataclass(frozen=True, slots=True)
class _Booked:
    holder: str
    claims: tuple[DeviceClaim, ...]
    instance_id: InstanceId = InstanceId("")
    process: ProcessIdentity | None = None


class Ledger:
    """The claims on the cards of one agent.

    Args:
        host: the ledger that all agents of the host share; None counts this agent's claims alone.

    Attributes:
        on_free: called with each booking that ends, and perhaps more than once.
    """

    def __init__(self, devices: Iterable[Device] = (), host: HostLedger | None = None) -> None:
        self.on_free: Callable[[Booking], None] = lambda booking: None
        self._host = host
        self._is_open = False
        self._is_taken_over = False
        self._totals: dict[DeviceId, int] = {}
        self._last_totals: dict[DeviceId, int] = {}
        self._domains: dict[DeviceId, str] = {}
        self._readings: Mapping[DeviceId, CardReading] = {}
        self._unknown_reason = ""
        self._problems: Mapping[DeviceId, str] = {}
        self._sick: dict[DeviceId, str] = {}
        self._booked: dict[Booking, _Booked] = {}
        self._inherited: dict[Booking, StageClaim] = {}
        self.cards_are(devices)

    # --- what is known of the cards

    def cards_are(
        self,
        devices: Iterable[Device],
        *,
        unknown_reason: str = "",
        problems: Mapping[DeviceId, str] | None = None,
        readings: Iterable[CardReading] = (),
    ) -> None:
        """Count with these cards from now on.

        Args:
            unknown_reason: why the list could not be read; not empty admits nothing to any card.
            problems: why the memory of a card could not be read.
            readings: who uses what of them. Without one a card's claims alone count.
        """
        devices = tuple(devices)
        self._totals = {device.device_id: device.total_bytes for device in devices}
        self._last_totals |= {it: total for it, total in self._totals.items() if total}
        domains = {it.device_id: it.lock_domain_id or it.device_id for it in devices}
        has_other_names = not domains.items() <= self._domains.items()
        self._domains |= domains
        self._readings = {it.device.device_id: it for it in readings}
        self._unknown_reason = unknown_reason
        self._problems = problems or {}
        self._sick = {it.device_id: it.sick_reason for it in devices if it.sick_reason}
        if self._is_taken_over:
            self.forget_inherited()
        if has_other_names:
            self._tell()

    def total_bytes(self, device_id: DeviceId) -> int:
        """Return what a card has, or had when its memory could last be read; 0 when it never could.

        Claims are counted with it, so that a claim does not shrink with what is known of its card.
        """
        return self._last_totals.get(device_id, 0)

    # --- admission

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Check and book as one, while no other agent of this host does; await nothing in it.

        What was booked in it is told to them before it is over, or is booked no longer.

        Raises:
            LedgerBusy: another one has the turn, or the claims cannot be told. Nothing was changed.
        """
        if self._host is None:
            yield
            return
        before = dict(self._booked)
        with self._host.turn():
            self._open_in_turn(self._host)
            try:
                yield
                if self._booked != before:
                    self._host.write(self._own_claims())
            except BaseException:
                self._booked = before
                raise

    def admit(self, stages: Sequence[StageStart], *, without: Collection[OperationId] = ()) -> None:
        """Check that new stages fit beside all that is held; books nothing.

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
        self._check_well(wanted)
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
            report = admission_report(needs, self._totals, self._held(sorted(wanted), without))
        except PlanError as error:
            raise bad_fields(
                [FieldProblem("stages", problem) for problem in error.problems]
            ) from error
        if report.refusals:
            raise Refused(Reason.ADMISSION_REFUSED, "; ".join(report.refusals))

    def check_still_there(self, stage: StageStart) -> None:
        """Refuse to start on a card that is gone or sick since it was reserved, or whose bytes are.

        Taken they can be only while this agent was dead: what it had reserved and not started yet
        counted for nobody then. A list that cannot be read right now says nothing, and what was
        admitted goes on.

        Raises:
            Refused: UNKNOWN_DEVICE, ADMISSION_REFUSED.
        """
        if not self._unknown_reason:
            self._check_there(stage.device_ids)
        self._check_well(stage.device_ids)
        if stage.device_ids and self._host is not None and not self._is_open:
            raise LedgerBusy("this agent has not had its turn since it was started")
        all_others = self._others()
        for device_id in stage.device_ids:
            claimants = self._claimants(device_id, all_others)
            others = [it for it in claimants if it.worker_id and it.reserved_bytes]
            total_bytes = self.total_bytes(device_id)
            if others and total_bytes and sum(it.reserved_bytes for it in claimants) > total_bytes:
                listed = "; ".join(
                    f"{it.holder}: {it.reserved_bytes}" for it in claimants if it.reserved_bytes
                )
                raise Refused(
                    Reason.ADMISSION_REFUSED,
                    f"device {device_id} has {total_bytes} bytes and was given to others while "
                    f"this agent was away: {listed}",
                )

    def claims_of(self, stage: StageStart) -> tuple[DeviceClaim, ...]:
        """Return what admission counts for a stage, one entry per device."""
        if stage.spec.memory is None:
            return ()
        return tuple(
            DeviceClaim(device_id, stage.spec.memory.on_card(self.total_bytes(device_id)))
            for device_id in stage.device_ids
        )

    # --- the books

    def book(self, booking: Booking, holder: str, claims: tuple[DeviceClaim, ...]) -> None:
        """Count claims from now on; `holder` is shown in refusals. A repeat changes nothing.

        New ones are booked in the turn that admitted them; outside of it only what was admitted
        before.
        """
        self._booked.setdefault(booking, _Booked(holder, claims))
        self._inherited.pop(booking, None)

    def runs(self, booking: Booking, instance_id: InstanceId, process: ProcessIdentity) -> None:
        """Tell by which process a claim lives on, should this agent die. Repeats change nothing."""
        booked = self._booked.get(booking)
        if booked is not None and (booked.instance_id, booked.process) != (instance_id, process):
            self._booked[booking] = replace(booked, instance_id=instance_id, process=process)
            self._tell()

    def free(self, booking: Booking) -> None:
        """Count claims no longer; harmless when they are free already."""
        self.on_free(booking)
        had = self._booked.pop(booking, None), self._inherited.pop(booking, None)
        if had != (None, None):
            self._tell()

    def open(self) -> None:
        """Take over what an earlier life told the other agents of this host, in one turn.

        From then on all of it counts as this agent's, also what no process stands behind. Called
        before anything is taken over; a repeat changes nothing.

        Raises:
            LedgerBusy: another agent has its turn: repeat. The word of the earlier life counts.
        """
        if self._host is not None:
            with self._host.turn():
                self._open_in_turn(self._host)

    def _open_in_turn(self, host: HostLedger) -> None:
        if self._is_open:
            return
        for claim in host.left_behind():
            booking = Booking(OperationId(claim.operation_id), StageId(claim.stage_id))
            if booking not in self._booked:
                self._inherited[booking] = claim
            # Before its cards are read what is taken over has to be told by the names they had.
            for card in claim.cards:
                self._domains.setdefault(DeviceId(card.device_id), card.lock_domain_id)
        if self._is_taken_over:
            self.forget_inherited()
        host.write(self._own_claims())
        self._is_open = True

    def forget_inherited(self) -> None:
        """Free what an earlier life claimed and nobody has taken over, unless it still runs.

        Called when all that can be taken over was: what runs then is what no record tells of.
        """
        is_first, self._is_taken_over = not self._is_taken_over, True
        if self._host is None:
            return
        running = {it: c for it, c in self._inherited.items() if self._host.still_runs(c)}
        if is_first or running != self._inherited:
            self._inherited = running
            self._tell()

    def reserved_bytes(self, device_id: DeviceId) -> int:
        return sum(_reserved(it, device_id) for it in self._booked.values())

    def foreign(self) -> dict[DeviceId, tuple[ForeignHolder, ...]]:
        """Return what counts on each card beside what this agent has reserved, the largest first.

        Where the claims of the others cannot be read, what they use still counts as strangers'.
        """
        try:
            others = self._others()
        except LedgerBusy:
            others = []
        return {
            device_id: foreign_holders(
                self._claimants(device_id, others),
                self._readings.get(device_id),
                self.total_bytes(device_id),
                self._host.worker_id if self._host is not None else OWN,
            )
            for device_id in self._totals
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """What its operator should know of the ledger that the host shares."""
        return self._host.notes if self._host is not None else ()

    # --- how

    def _check_there(self, device_ids: Iterable[DeviceId]) -> None:
        unknown = sorted(set(device_ids) - self._totals.keys())
        if unknown:
            raise Refused(
                Reason.UNKNOWN_DEVICE,
                f"this agent has no device {', '.join(unknown)}; it has "
                f"{', '.join(sorted(self._totals)) or 'none'}",
            )

    def _check_well(self, device_ids: Iterable[DeviceId]) -> None:
        sick = sorted(self._sick.keys() & set(device_ids))
        if sick:
            whys = "; ".join(f"device {it} is sick: {self._sick[it]}" for it in sick)
            raise Refused(Reason.ADMISSION_REFUSED, whys)

    def _held(
        self, device_ids: Iterable[DeviceId], without: Collection[OperationId]
    ) -> Iterator[Holding]:
        others = self._others()
        for device_id in device_ids:
            claimants = self._claimants(device_id, others, without)
            yield from holdings(device_id, claimants, self._readings.get(device_id))

    def _others(self) -> list[OtherClaims]:
        return self._host.others() if self._host is not None else []

    def _claimants(
        self,
        device_id: DeviceId,
        others: Iterable[OtherClaims],
        without: Collection[OperationId] = (),
    ) -> list[Claimant]:
        """Return all claims of the host, this agent's own first, with what each has of a card."""
        domain = self._domain(device_id)
        found = [
            Claimant(self._claim(booking, booked), _reserved(booked, device_id))
            for booking, booked in self._booked.items()
            if booking.operation_id not in without
        ]
        found += [Claimant(it, it.on_card(domain)) for it in self._inherited.values()]
        if self._host is not None:
            found += claimants_of(others, domain, self._host.cluster)
        return found

    def _domain(self, device_id: DeviceId) -> str:
        """Return the name of a card among all agents of the host."""
        return self._domains.get(device_id, device_id)

    def _own_claims(self) -> list[StageClaim]:
        own = [self._claim(*it) for it in self._booked.items() if it[1].claims]
        return own + list(self._inherited.values())

    def _claim(self, booking: Booking, booked: _Booked) -> StageClaim:
        process = booked.process
        return StageClaim(
            operation_id=booking.operation_id,
            stage_id=booking.stage_id,
            holder=booked.holder,
            instance_id=booked.instance_id,
            pid=process.pid if process is not None else 0,
            start_ticks=process.start_ticks if process is not None else 0,
            cards=tuple(
                ClaimedCard(self._domain(it.device_id), it.reserved_bytes, it.device_id)
                for it in booked.claims
            ),
        )

    def _tell(self) -> None:
        """Tell the others outside a turn what is free now, or by which process a claim lives."""
        if self._host is None or not self._is_open:
            return
        try:
            self._host.write(self._own_claims())
        except LedgerBusy:
            pass  # they count what they last read, which is more; it is told with the next change


def _reserved(booked: _Booked, device_id: DeviceId) -> int:
    return sum(it.reserved_bytes for it in booked.claims if it.device_id == device_id)
