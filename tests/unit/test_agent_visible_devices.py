"""`CUDA_VISIBLE_DEVICES` of the agent, read as CUDA reads it."""

from __future__ import annotations

import pytest

from stagekeeper.agent.cards.device_choice import GpuChoice
from stagekeeper.agent.cards.nvml import NvmlDevices
from stagekeeper.agent.cards.nvml_calls import Listing, NvmlCard
from stagekeeper.agent.cards.visible_devices import Unclear, VisibleDevices

A, B, C = "GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3"


def card(uuid: str, place: int, model: str = "NVIDIA H200", **more) -> NvmlCard:
    return NvmlCard(uuid, more.pop("gpu", uuid), model, 80, 0, (), place=place, **more)


ALIKE = Listing((card(A, 0), card(B, 1), card(C, 2)))
MIXED = Listing((card(A, 0), card(B, 1, "NVIDIA L4"), card(C, 2)))
MIG = Listing(
    (
        card("MIG-11", 0, "H200 MIG 3g.71gb", gpu=A, gpu_instance=1, compute_instance=0),
        card("MIG-12", 0, "H200 MIG 1g.18gb", gpu=A, gpu_instance=2, compute_instance=0),
        card(B, 1, "H200"),
    )
)


def shown(value: str | None, listing: Listing = ALIKE, *, by_address: bool = False) -> list[str]:
    return [it.uuid for it in VisibleDevices(value, by_address).among(listing).cards]


@pytest.mark.parametrize(
    ("value", "uuids"),
    [
        (None, [A, B, C]),
        ("0,1,2", [A, B, C]),
        ("2,0", [C, A]),  # in this order, as CUDA counts them then
        (" 2 , 0 ", [C, A]),
        ("+1", [B]),
        ("1x", [B]),  # as strtol reads it
        (f"{C},{A}", [C, A]),
        ("GPU-c", [C]),
        ("GPU-aaaa,2", [A, C]),
        # The first entry that is no card ends the list.
        ("0,2,-1,1", [A, C]),
        ("0,7,1", [A]),
        ("0,,1", [A]),
        ("0,GPU-dddd,1", [A]),
        ("0,GPU-aa,2", [A]),  # which fits two
        ("NoDevFiles", []),
        ("-1", []),
        ("", []),
        ("0,0", []),  # one that is there twice makes it empty
        (f"0,{A}", []),
    ],
)
def test_list_is_read_as_cuda_reads_it(value, uuids):
    assert shown(value) == uuids


@pytest.mark.parametrize(
    ("value", "uuids"),
    [
        ("MIG-12", ["MIG-12"]),
        (f"MIG-{A}/1/0", ["MIG-11"]),  # as drivers before R470 name it
        (f"MIG-{A}/9/0", []),
        ("0", ["MIG-11", "MIG-12"]),
        (A, ["MIG-11", "MIG-12"]),
        ("MIG-1", []),
        (f"{B},MIG-11", [B, "MIG-11"]),
        ("0,MIG-12", []),
    ],
)
def test_startup_21_instances_are_named_by_their_ids(value, uuids):
    assert shown(value, MIG) == uuids


def test_numbers_are_places_in_an_order_that_only_cuda_knows_where_cards_differ():
    with pytest.raises(Unclear, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        shown("1", MIXED)

    assert shown("1", MIXED, by_address=True) == [B]
    assert shown(f"{B}", MIXED) == [B]


def test_numbers_count_no_cards_where_one_cannot_be_identified():
    broken = Listing(ALIKE.cards, ("card 1: GPU is lost",))

    with pytest.raises(Unclear, match="card 1: GPU is lost"):
        shown("2", broken)
    assert shown(C, broken) == [C]


def test_what_ends_a_list_is_noted():
    visible = VisibleDevices("0,7,1")

    note = visible.among(ALIKE).note

    assert note.startswith("CUDA_VISIBLE_DEVICES=0,7,1 of this agent ends before '7'")
    assert "twice" in VisibleDevices("1,1").among(ALIKE).note
    assert VisibleDevices("2,1").among(ALIKE).note == ""
    assert VisibleDevices("").among(ALIKE).note == ""


class Given(NvmlDevices):
    """Cards that are read from nowhere."""

    async def _listing(self) -> Listing:
        return ALIKE


async def reading(value: str | None, *names: str, asked: bool = False):
    source = Given(
        GpuChoice(names, is_asked_for=asked or bool(names)),
        "host",
        deadline_s=1.0,
        interval_s=1.0,
        visible=VisibleDevices(value),
    )
    await source.look()
    found = source.reading(())
    return [it.device.device_id for it in found.cards], found.unknown_reason


async def test_startup_17_no_card_is_used_that_the_environment_hides():
    assert await reading("2,1") == ([C, B], "")
    # Whoever names a hidden card is told, and gets no other one.
    ids, why = await reading("2,1", "GPU-aaaa")
    assert ids == []
    assert f"fits no card; NVML lists {C}, {B}" in why
    assert f"CUDA_VISIBLE_DEVICES=2,1 of this agent; it does not show {A}" in why


async def test_hidden_cards_are_none_unless_somebody_asks_for_some():
    assert await reading("") == ([], "")
    ids, why = await reading("", asked=True)
    assert ids == [] and "--devices asks for some" in why and A in why
