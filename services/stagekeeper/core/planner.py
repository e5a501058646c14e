"""Plan a start: which stages have to wait for each other, and whether the cards can hold them.

Decided here: groups (stages tied together by the cards they share) and admission (bytes against
the total of each card). Not decided here: when a stage starts (`init_run`), and which real card a
replica's card is (placement).

Invariant: nothing is guessed. A plan with a mistake in it is refused whole, with every mistake
named in one `PlanError`; a plan that is well formed and too large is refused card by card.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

from stagekeeper.core.errors import PlanError
from stagekeeper.core.model import MemoryNeed

DeviceKey: TypeAlias = int | str
"""A resolved card: an index, or a UUID; opaque, compared exactly (`1` and `"1"` are two cards)."""

Stage = TypeVar("Stage", bound=int)
Device = TypeVar("Device", bound=DeviceKey)
Key = TypeVar("Key")
Value = TypeVar("Value")
Table: TypeAlias = Mapping[Key, Value] | Iterable[tuple[Key, Value]]

LARGEST_TERMS_SHOWN = 8
UTILIZATION_STEPS = 10_000
"""A suggested utilization is a whole number of these steps: four digits, rounded down."""


def init_groups(stage_devices: Table[Stage, Iterable[DeviceKey]]) -> list[list[Stage]]:
    """Group the stages that share a card, directly or through other stages.

    Union-find with path halving (Tarjan and van Leeuwen, 1984), without recursion: a chain of ten
    thousand stages is one group.

    Args:
        stage_devices: stage id → its cards; none at all makes the stage a group of its own.

    Returns:
        The groups ordered by their least stage, the stages of each ascending.

    Raises:
        PlanError: naming every mistake (ids that are no ids, duplicates) at once.
    """
    problems: list[str] = []
    plan: dict[Stage, tuple[DeviceKey, ...]] = {}
    for stage_id, devices in _rows(stage_devices):
        _add_stage(plan, stage_id, _checked_devices(stage_id, devices, problems), problems)
    if problems:
        raise PlanError(problems)

    parent = {stage_id: stage_id for stage_id in plan}

    def root(stage_id: Stage) -> Stage:
        while parent[stage_id] != stage_id:
            grandparent = parent[parent[stage_id]]
            parent[stage_id] = grandparent
            stage_id = grandparent
        return stage_id

    first_on: dict[DeviceKey, Stage] = {}
    for stage_id, cards in plan.items():
        mine = root(stage_id)
        for device in cards:
            theirs = root(first_on.setdefault(device, stage_id))
            if theirs != mine:
                parent[mine] = theirs
                mine = theirs

    groups: dict[Stage, list[Stage]] = {}
    for stage_id in sorted(plan):
        groups.setdefault(root(stage_id), []).append(stage_id)
    return list(groups.values())


class Holding(NamedTuple):
    """Bytes of a card that are not free for new stages; `holder` is shown ("pid 4711 (python)")."""

    device_id: DeviceKey
    holder: str
    memory_bytes: int


class StageTerm(NamedTuple):
    """What one new stage adds to the sum of one card."""

    stage_id: int
    need: MemoryNeed
    memory_bytes: int

    def arithmetic(self, total_bytes: int) -> str:
        """Say how its bytes come about; only what is a sum is written as one."""
        if self.need.utilization is None:
            share = f"{self.need.bytes}"
        else:
            share = f"{self.need.utilization} × {total_bytes}"
        reserve = f" + {self.need.reserve_bytes}" if self.need.reserve_bytes else ""
        is_sum = self.need.utilization is not None or reserve
        total = f" = {self.memory_bytes}" if is_sum else ""
        return f"stage {self.stage_id}: {share}{reserve}{total}{_short(self.memory_bytes)}"


@dataclass(frozen=True, slots=True)
class DeviceSum:
    """What is wanted of one card: new stages in the order of the plan, then what is held."""

    device_id: DeviceKey
    total_bytes: int
    need_bytes: int
    stages: tuple[StageTerm, ...]
    holdings: tuple[Holding, ...]

    @property
    def is_over(self) -> bool:
        """Whether a new stage is refused here. A card that no new stage wants says nothing."""
        return bool(self.stages) and self.need_bytes > self.total_bytes

    def nearest_utilization(self, term: StageTerm) -> float | None:
        """Return the largest utilization, up to its own, at which `term` fits if all else stays.

        None when there is none, or when the stage states bytes.
        """
        if term.need.utilization is None or not self.is_over:
            return term.need.utilization
        others_bytes = self.need_bytes - term.memory_bytes + term.need.reserve_bytes
        steps = (self.total_bytes - others_bytes) * UTILIZATION_STEPS // self.total_bytes
        return steps / UTILIZATION_STEPS if steps > 0 else None

    def refusal(self) -> str:
        """Say in one line what is too much, how the sum came about, and what would fit."""
        shown = heapq.nlargest(LARGEST_TERMS_SHOWN, self.stages, key=lambda term: term.memory_bytes)
        held = heapq.nlargest(LARGEST_TERMS_SHOWN, self.holdings, key=lambda it: it.memory_bytes)
        terms = [term.arithmetic(self.total_bytes) for term in shown]
        terms += [f"{it.holder}: {it.memory_bytes}{_short(it.memory_bytes)}" for it in held]
        more = len(self.stages) + len(self.holdings) - len(terms)
        if more:
            terms.append(f"and {more} more")
        if self.holdings:
            free_bytes = max(0, self.total_bytes - sum(it.memory_bytes for it in self.holdings))
            terms.append(f"free: {free_bytes}{_short(free_bytes)}")
        fits = [
            f"stage {term.stage_id} at utilization {utilization}"
            for term in shown
            if (utilization := self.nearest_utilization(term)) is not None
        ]
        if fits:
            terms.append(f"it fits with {' or '.join(fits)}")
        elif any(term.need.utilization is not None for term in self.stages):
            terms.append("no cut of one stage's utilization is enough")
        over_bytes = self.need_bytes - self.total_bytes
        return (
            f"device {self.device_id}: {self.need_bytes} bytes needed{_short(self.need_bytes)}, "
            f"{self.total_bytes} there{_short(self.total_bytes)}, "
            f"{over_bytes} too many{_short(over_bytes)}: {'; '.join(terms)}"
        )


@dataclass(frozen=True, slots=True)
class AdmissionReport:
    """The arithmetic of an admission: every card asked about, ascending, empty ones too."""

    devices: tuple[DeviceSum, ...]

    @property
    def refusals(self) -> list[str]:
        """One line for each card that would be over its total; empty means admitted."""
        return [device.refusal() for device in self.devices if device.is_over]

    def nearest_utilization(self, stage_id: int) -> float | None:
        """Return the largest utilization at which this stage fits on all its cards.

        None when there is none, when the stage states bytes, and when it asks for no card.
        """
        fitting = [
            device.nearest_utilization(term)
            for device in self.devices
            for term in device.stages
            if term.stage_id == stage_id
        ]
        found = [utilization for utilization in fitting if utilization is not None]
        return min(found) if found and len(found) == len(fitting) else None


def admission_check(
    stages: Table[Stage, tuple[Iterable[DeviceKey], float]],
    device_total_bytes: Table[Device, int],
    reserve_bytes: int,
) -> list[str]:
    """Check that on each card Σ (int(utilization × total) + reserve) ≤ total; equality is admitted.

    Each product is truncated before it is added: sums of fractions refuse 20 × 0.05.

    Args:
        stages: stage id → (its cards, its share of each of them in (0, 1]).
        device_total_bytes: card → its bytes. A card of 0 bytes (a driver that could not tell) is a
            mistake as soon as a stage asks for it.
        reserve_bytes: counted once for each stage on each card.

    Returns:
        One line for each card that is over, ascending by card, each with ``device <id>`` in it.

    Raises:
        PlanError: naming every mistake in the arguments at once.
    """
    problems: list[str] = []
    if not _is_count(reserve_bytes):
        problems.append(f"reserve_bytes {reserve_bytes!r} is not a whole number of bytes from 0")
        reserve_bytes = 0
    rows = (
        (stage_id, (devices, MemoryNeed(utilization=utilization, reserve_bytes=reserve_bytes)))
        for stage_id, (devices, utilization) in _rows(stages)
    )
    return _report(rows, _rows(device_total_bytes), (), problems).refusals


def admission_report(
    stages: Table[Stage, tuple[Iterable[DeviceKey], MemoryNeed | None]],
    device_total_bytes: Table[Device, int],
    holdings: Iterable[Holding] = (),
) -> AdmissionReport:
    """Do the sums of `admission_check`, with bytes, own reserves, and what already holds memory.

    Args:
        stages: stage id → (its cards, what it needs of each); None only where there are no cards.
        device_total_bytes: card → its bytes.
        holdings: whatever runs, starts or stops on these cards, and strangers; those on other
            cards are left out.

    Raises:
        PlanError: naming every mistake in the arguments at once.
    """
    return _report(_rows(stages), _rows(device_total_bytes), holdings, [])


def _report(
    rows: Iterable[tuple[Stage, tuple[Iterable[DeviceKey], MemoryNeed | None]]],
    total_rows: Iterable[tuple[Device, int]],
    holdings: Iterable[Holding],
    problems: list[str],
) -> AdmissionReport:
    totals = _checked_totals(total_rows, problems)
    plan: dict[Stage, tuple[tuple[DeviceKey, ...], MemoryNeed | None]] = {}
    for stage_id, (devices, need) in rows:
        cards = _checked_devices(stage_id, devices, problems)
        for device in cards:
            if device not in totals:
                problems.append(f"stage {stage_id!r}: unknown device {device}")
            elif totals[device] == 0:
                problems.append(f"stage {stage_id!r}: device {device} reports 0 bytes in total")
        problems.extend(_need_problems(f"stage {stage_id!r}", need, has_devices=bool(cards)))
        _add_stage(plan, stage_id, (cards, need), problems)

    held: dict[DeviceKey, list[Holding]] = {device: [] for device in totals}
    for holding in holdings:
        if not _is_count(holding.memory_bytes):
            problems.append(f"{holding.holder}: cannot hold {holding.memory_bytes!r} bytes")
        elif holding.device_id in held:
            held[holding.device_id].append(holding)
    if problems:
        raise PlanError(problems)

    terms: dict[DeviceKey, list[StageTerm]] = {device: [] for device in totals}
    for stage_id in sorted(plan):
        cards, need = plan[stage_id]
        if need is not None:
            for device in cards:
                terms[device].append(StageTerm(stage_id, need, need.on_card(totals[device])))
    return AdmissionReport(
        tuple(
            DeviceSum(
                device_id=device,
                total_bytes=totals[device],
                need_bytes=sum(term.memory_bytes for term in terms[device])
                + sum(holding.memory_bytes for holding in held[device]),
                stages=tuple(terms[device]),
                holdings=tuple(held[device]),
            )
            for device in sorted(totals, key=lambda device: (isinstance(device, str), device))
        )
    )


def _rows(table: Table[Key, Value]) -> Iterable[tuple[Key, Value]]:
    return table.items() if isinstance(table, Mapping) else table


def _add_stage(
    plan: dict[Stage, Value], stage_id: Stage, value: Value, problems: list[str]
) -> None:
    if not _is_count(stage_id):
        # bool is an int, and True == 1: it would silently be stage 1.
        problems.append(f"stage id {stage_id!r} is not a whole number from 0")
    elif stage_id in plan:
        problems.append(f"stage {stage_id}: duplicate stage id")
    else:
        plan[stage_id] = value


def _checked_devices(
    stage_id: object, devices: object, problems: list[str]
) -> tuple[DeviceKey, ...]:
    """Return the sound cards in their order, each once; append what is wrong with the others."""
    where = f"stage {stage_id!r}"
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        problems.append(f"{where}: devices are a list of device ids, not {devices!r}")
        return ()
    checked: dict[DeviceKey, None] = {}
    for device in devices:
        # A plain number is seen without a call: there may be ten thousands of them.
        if not (type(device) is int and device >= 0) and not _is_device(device):
            problems.append(f"{where}: device id {device!r} is neither a number from 0 nor a name")
        elif device in checked:
            problems.append(f"{where}: duplicate device {device}")
        else:
            checked[device] = None
    return tuple(checked)


def _checked_totals(
    rows: Iterable[tuple[DeviceKey, int]], problems: list[str]
) -> dict[DeviceKey, int]:
    checked: dict[DeviceKey, int] = {}
    for device, total_bytes in rows:
        if not _is_device(device):
            problems.append(f"device id {device!r} is neither a number from 0 nor a name")
        elif device in checked:
            problems.append(f"device {device}: duplicate total")
        else:
            if not _is_count(total_bytes):
                problems.append(f"device {device}: {total_bytes!r} is not a whole number of bytes")
            checked[device] = total_bytes
    return checked


def _need_problems(where: str, need: MemoryNeed | None, *, has_devices: bool) -> Iterable[str]:
    if need is None:
        if has_devices:
            yield f"{where}: has devices, and does not say how much memory it needs"
        return
    if (need.utilization is None) == (need.bytes is None):
        yield f"{where}: memory is either a utilization or bytes"
    elif need.bytes is not None and not (_is_count(need.bytes) and need.bytes > 0):
        yield f"{where}: {need.bytes!r} is not a whole number of bytes above 0"
    elif need.utilization is not None and not _is_share(need.utilization):
        yield f"{where}: utilization {need.utilization!r} is not in (0, 1]; 0.9 is 90 %"
    if not _is_count(need.reserve_bytes):
        yield f"{where}: reserve {need.reserve_bytes!r} is not a whole number of bytes from 0"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_share(value: object) -> bool:
    # nan compares false with everything, and so it is refused here.
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


def _is_device(value: object) -> bool:
    return _is_count(value) or (isinstance(value, str) and value != "")


def _short(count_bytes: int) -> str:
    """Write bytes as people read them, to stand behind the exact number; nothing for few."""
    for unit, unit_bytes in (("GiB", 2**30), ("MiB", 2**20)):
        if count_bytes >= unit_bytes:
            amount = f"{count_bytes / unit_bytes:.2f}".rstrip("0").rstrip(".")
            return f" ({amount} {unit})"
    return ""
