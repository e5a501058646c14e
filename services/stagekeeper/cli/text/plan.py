"""What `stagekeeper plan` shows: the verdict, the order of starting, the map of cards, the sums.

Decided here: the words, and what is worth a row. Not decided here: how it is drawn (`plan_view`).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from stagekeeper.cli.text.amounts import count, seconds, size
from stagekeeper.cli.text.tables import Table, as_rows
from stagekeeper.v1 import deployment_service_pb2 as pb2
from stagekeeper.v1 import types_pb2 as types

UNKNOWN_TIME: Final = "unknown: no earlier start is known"


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a card's sum: `what` is held, new, free or over."""

    what: str
    memory_bytes: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class CardText:
    """One card: what it is, and its sum."""

    worker_id: str
    device_id: str
    model: str
    total_bytes: int
    held_bytes: int
    new_bytes: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class PlanText:
    """`headline` and `facts` first, then the tables, the cards, and what it is refused for."""

    headline: str
    facts: tuple[str, ...]
    tables: tuple[Table, ...]
    cards: tuple[CardText, ...]
    refusals: Table


def plan_text(name: str, plan: pb2.PlanDeploymentResponse) -> PlanText:
    """Make the text of a plan."""
    tables = [_groups(plan), _replicas(plan), _commands(plan)]
    facts = [f"plan id: {plan.plan_id}"]
    if plan.replicas:
        facts.append(f"estimated time: {_estimate(plan)}")
    return PlanText(
        headline=f"{name}: {_verdict(plan)}",
        facts=tuple(facts),
        tables=tuple(table for table in tables if table.rows),
        cards=tuple(_card(device) for device in plan.devices),
        refusals=_refusals(plan),
    )


def _verdict(plan: pb2.PlanDeploymentResponse) -> str:
    kept = f"{_listed(plan.kept_replicas)} would be left alone" if plan.kept_replicas else ""
    if plan.refusals:
        return f"it would be refused now, for {count(len(plan.refusals), 'reason')}"
    if not plan.replicas:
        return f"nothing to do: {kept}"
    starting = _listed([replica.replica_index for replica in plan.replicas])
    return f"it fits: {starting} would start" + (f", {kept}" if kept else "")


def _listed(indexes: Sequence[int]) -> str:
    """Write `replica 0`, `replicas 0, 1, 4`, `replicas 0 to 7`."""
    if len(indexes) == 1:
        return f"replica {indexes[0]}"
    if len(indexes) > 2 and indexes[-1] - indexes[0] == len(indexes) - 1:
        return f"replicas {indexes[0]} to {indexes[-1]}"
    return f"replicas {', '.join(map(str, indexes))}"


def _estimate(plan: pb2.PlanDeploymentResponse) -> str:
    if plan.HasField("estimated_s"):
        return f"{seconds(plan.estimated_s)}, by earlier starts (the longest group)"
    return UNKNOWN_TIME


def _groups(plan: pb2.PlanDeploymentResponse) -> Table:
    rows = [
        (
            str(number),
            " → ".join(group.stage_names),
            ", ".join(map(str, group.devices)) or "none",
            seconds(group.estimated_s) if group.HasField("estimated_s") else "unknown",
        )
        for number, group in enumerate(plan.groups, start=1)
    ]
    return Table(("GROUP", "STAGES, IN TURN", "CARDS", "ESTIMATED"), as_rows(rows))


def _replicas(plan: pb2.PlanDeploymentResponse) -> Table:
    rows: list[tuple[str, str, str]] = []
    for replica in plan.replicas:
        index = str(replica.replica_index)
        first = pb2.PlannedPart(worker_id=replica.worker_id, cards=replica.cards)
        parts = list(replica.parts) or ([first] if replica.worker_id else [])
        if not parts:
            rows.append((index, "nowhere", "no room"))
        for part in parts:
            cards = ", ".join(f"{card.device} is {card.device_id}" for card in part.cards)
            shard = f"shard {part.shard_index}: " if len(parts) > 1 else ""
            rows.append((index, part.worker_id, f"{shard}{cards or 'none needed'}"))
    rows += [(str(index), "-", "left alone") for index in plan.kept_replicas]
    rows.sort(key=lambda row: int(row[0]))
    return Table(("REPLICA", "WORKER", "ITS CARDS"), as_rows(rows))


def _commands(plan: pb2.PlanDeploymentResponse) -> Table:
    """Write what would be executed, so that it can be pasted into a shell."""
    rows = [
        (
            f"{it.replica_index}/{it.stage_name}" + (f"[{it.shard_index}]" * bool(it.shard_index)),
            it.worker_id,
            shlex.join(it.argv),
        )
        for it in plan.commands
    ]
    return Table(("COMMAND OF", "WORKER", "ARGV"), as_rows(rows))


def _card(device: pb2.PlannedDevice) -> CardText:
    held_bytes = sum(holding.memory_bytes for holding in device.holdings)
    entries = [
        *(Entry("held", it.memory_bytes, it.holder) for it in device.holdings),
        *(_new(term, device.total_bytes) for term in device.stages),
    ]
    if device.need_bytes > device.total_bytes:
        over = device.need_bytes - device.total_bytes
        entries.append(
            Entry("over", over, f"{device.need_bytes} bytes wanted, {device.total_bytes} there")
        )
    else:
        entries.append(
            Entry("free", device.total_bytes - device.need_bytes, f"of {size(device.total_bytes)}")
        )
    return CardText(
        worker_id=device.worker_id,
        device_id=device.device_id,
        model=device.model,
        total_bytes=device.total_bytes,
        held_bytes=held_bytes,
        new_bytes=device.need_bytes - held_bytes,
        entries=tuple(entries),
    )


def _new(term: pb2.PlannedTerm, total_bytes: int) -> Entry:
    shard = f"[{term.shard_index}]" if term.shard_index else ""
    note = f"{term.replica_index}/{term.stage_name}{shard}: {need_text(term.need, total_bytes)}"
    return Entry("new", term.memory_bytes, note)


def need_text(need: types.MemoryNeed, total_bytes: int) -> str:
    """Write `0.6 of 80 GiB + 2 GiB reserve`, or `12 GiB`."""
    if need.WhichOneof("amount") == "utilization":
        text = f"{need.utilization:g} of {size(total_bytes)}"
    else:
        text = size(need.bytes)
    return f"{text} + {size(need.reserve_bytes)} reserve" if need.reserve_bytes else text


def _refusals(plan: pb2.PlanDeploymentResponse) -> Table:
    rows = [
        (refusal.reason, _where(refusal.worker_id, refusal.device_id), refusal.message)
        for refusal in plan.refusals
    ]
    return Table(("REFUSED", "WHERE", "WHY"), as_rows(rows))


def _where(*parts: str) -> str:
    return " ".join(part for part in parts if part) or "-"


def sum_table(cards: Iterable[CardText]) -> Table:
    """Return the sums of all cards as rows that stand for themselves."""
    rows = [
        (card.worker_id, card.device_id, entry.what, size(entry.memory_bytes), entry.note)
        for card in cards
        for entry in card.entries
    ]
    return Table(("WORKER", "CARD", "MEMORY", "SIZE", "WHOSE"), as_rows(rows))
