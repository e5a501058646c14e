"""The ledger of an agent's cards: what is admitted, booked and freed."""

from __future__ import annotations

import pytest

from stagekeeper.agent.cards.host_memory import parse_devices
from stagekeeper.agent.cards.ledger import Booking, Ledger
from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.ids import DeviceId, OperationId, StageId
from stagekeeper.core.model import MemoryNeed, StageSpec, StageStart

TOTAL = 1_000
CARD = DeviceId("cpu:0")


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(parse_devices((f"cpu:0={TOTAL}", f"cpu:1={TOTAL}"), ""))


def start(need: MemoryNeed | None, *cards: str, stage_id: int = 0) -> StageStart:
    spec = StageSpec("s", "a:B", devices=tuple(range(len(cards))), memory=need)
    return StageStart(StageId(stage_id), spec, tuple(DeviceId(card) for card in cards))


def book(ledger: Ledger, stage: StageStart, operation: str = "op") -> Booking:
    booking = Booking(OperationId(operation), stage.stage_id)
    ledger.book(booking, f"holder of {operation}", ledger.claims_of(stage))
    return booking


def test_equality_is_admitted_and_one_byte_more_is_not(ledger):
    book(ledger, start(MemoryNeed(bytes=600), CARD))

    ledger.admit([start(MemoryNeed(bytes=400), CARD)])
    with pytest.raises(Refused) as refused:
        ledger.admit([start(MemoryNeed(bytes=401), CARD)])

    assert refused.value.reason is Reason.ADMISSION_REFUSED
    assert "device cpu:0" in refused.value.message
    assert "holder of op: 600" in refused.value.message


def test_each_product_is_truncated_and_reserves_count_per_card(ledger):
    stage = start(MemoryNeed(utilization=0.3335, reserve_bytes=5), CARD, "cpu:1")

    assert [claim.reserved_bytes for claim in ledger.claims_of(stage)] == [338, 338]


def test_freed_bytes_can_be_had_again_and_nothing_is_freed_twice(ledger):
    """recovery-U12"""
    for attempt in range(20):
        booking = book(ledger, start(MemoryNeed(utilization=1.0), CARD), f"op-{attempt}")
        ledger.free(booking)
        ledger.free(booking)

    assert ledger.reserved_bytes(CARD) == 0
    ledger.admit([start(MemoryNeed(utilization=1.0), CARD)])


def test_booking_twice_counts_once(ledger):
    book(ledger, start(MemoryNeed(bytes=300), CARD))
    book(ledger, start(MemoryNeed(bytes=300), CARD))

    assert ledger.reserved_bytes(CARD) == 300


def test_all_stages_of_a_plan_count_together(ledger):
    stages = [start(MemoryNeed(bytes=400), CARD, stage_id=it) for it in range(3)]

    with pytest.raises(Refused, match="200 too many"):
        ledger.admit(stages)
    assert ledger.reserved_bytes(CARD) == 0


def test_unknown_devices_are_named_with_those_there_are(ledger):
    with pytest.raises(Refused, match=r"no device cpu:7; it has cpu:0, cpu:1") as refused:
        ledger.admit([start(MemoryNeed(bytes=1), "cpu:7")])

    assert refused.value.reason is Reason.UNKNOWN_DEVICE


def test_devices_without_memory_are_a_mistake_of_the_spec(ledger):
    with pytest.raises(Refused) as refused:
        ledger.admit([start(None, CARD)])

    assert refused.value.reason is Reason.BAD_FIELD
    ledger.admit([start(None)])
