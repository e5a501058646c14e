"""Errors of cards, and cards that are hidden or in parts, through the real nvidia-ml-py."""

from __future__ import annotations

import pytest

from tests.fakes.nvml_library import GIB, GPU_IS_LOST, NOT_SUPPORTED, UNKNOWN, FakeNvml
from tests.fakes.nvml_reader import KERNEL_LOG_ENV, NAMESPACE_ENV, nvml_reader

A, B, C = "GPU-aaaa-1", "GPU-bbbb-2", "GPU-cccc-3"


def machine(nvml: FakeNvml, *uuids: str) -> None:
    for number, uuid in enumerate(uuids):
        nvml.card(uuid)
        nvml.says(f"pci {uuid} 00000000:{number + 1:02x}:00.0")


async def test_error_is_heard_between_looks_and_lasts(nvml):
    machine(nvml, A, B)
    async with nvml_reader(nvml.env) as reader:
        await reader.look()
        nvml.says(f"event {A} 79", f"event {B} 63", f"event {A} 95")
        heard = await reader.look("listen")
        nvml.says("error nvmlDeviceGetCount 999")
        failed = await reader.look()
        nvml.says_no_more("error", "event")
        after = await reader.look()

    for seen in (heard, failed, after):
        reason = seen.cards[A]["sick_reason"]
        assert reason.startswith("XID 79 (it has fallen off the bus): nothing new goes there; ")
        assert seen.cards[B]["sick_reason"] == ""
    assert "nvmlDeviceGetCount" in failed.unknown_reason  # also while the list is not known
    assert heard.faults == []


async def test_error_that_came_before_the_list_could_not_be_read_is_kept(nvml):
    machine(nvml, A)
    async with nvml_reader(nvml.env) as reader:
        await reader.look()
        nvml.says(f"event {A} 119", f"error nvmlDeviceGetHandleByIndex {GPU_IS_LOST} {A}")
        seen = await reader.look()

    assert "GPU is lost" in seen.unknown_reason
    assert "XID 119" in seen.cards[A]["sick_reason"]


async def test_cards_are_listened_to_anew_after_a_failure_and_when_they_come(nvml):
    machine(nvml, A)
    nvml.says(f"error nvmlEventSetWait {UNKNOWN}")
    async with nvml_reader(nvml.env) as reader:
        await reader.look()
        assert "nvmlEventSetWait" in (await reader.look()).unknown_reason
        nvml.says_no_more("error")
        machine(nvml, A, B)
        await reader.look()
        nvml.says(f"event {B} 95")
        seen = await reader.look()

    assert "XID 95" in seen.cards[B]["sick_reason"]
    assert nvml.calls.count("nvmlEventSetFree") == nvml.calls.count("nvmlShutdown") == 1


@pytest.mark.parametrize(
    "call",
    ["nvmlEventSetCreate", "nvmlDeviceGetSupportedEventTypes", "nvmlDeviceRegisterEvents"],
)
async def test_driver_that_tells_no_errors_is_no_failure(nvml, call):
    machine(nvml, A)
    nvml.says(f"error {call} {NOT_SUPPORTED}")
    async with nvml_reader(nvml.env) as reader:
        seen = await reader.look()
        await reader.look("listen")

    assert (seen.uuids, seen.unknown_reason) == ([A], "")
    assert "nvmlEventSetWait" not in nvml.calls


async def test_waiting_for_errors_that_hangs_halts_nobody(nvml):
    machine(nvml, A)
    async with nvml_reader(nvml.env, deadline_s=0.3) as reader:
        await reader.look()
        nvml.says("hang nvmlEventSetWait")
        await reader.look("listen")
        seen = await reader.look()

    assert seen.unknown_reason == "nvmlEventSetWait has not returned within 0.3 s"
    assert seen.thread_count == 2


async def test_error_of_a_program_comes_with_its_process_where_the_kernel_names_it(nvml, tmp_path):
    machine(nvml, A)
    log = tmp_path / "kmsg"
    log.touch()
    with_log = {KERNEL_LOG_ENV: str(log), NAMESPACE_ENV: "/proc/self/ns/pid"}
    async with nvml_reader(nvml.env) as reader, nvml_reader(nvml.env | with_log) as told:
        await reader.look()
        await told.look()
        log.write_text("6,1,1,-;NVRM: Xid (PCI:0000:01:00): 31, pid=4711, name=python\n")
        nvml.says(f"event {A} 31")
        (unnamed,) = (await reader.look("listen")).faults
        seen = await told.look("listen")

    assert unnamed == {
        "device_ids": [A],
        "text": f"XID 31 (an illegal memory access) of card {A}",
        "pid": None,
    }
    assert [it["device_ids"] for it in seen.faults] == [[A]]
    # In a container's pid namespace the kernel's numbers mean nothing.
    assert seen.faults[0]["pid"] in (4711, None)
    assert seen.cards[A]["sick_reason"] == ""


async def test_error_of_an_instance_leaves_the_others_well(nvml):
    """And startup-21: the instances have totals and use of their own."""
    machine(nvml, A)
    nvml.says(f"mig {A} MIG-11 {20 * GIB} {GIB}", f"mig {A} MIG-12 {40 * GIB} 0")
    nvml.says("ids MIG-11 1 0", "ids MIG-12 2 0", f"process MIG-11 77 {GIB}")
    async with (
        nvml_reader(nvml.env) as everything,
        nvml_reader(nvml.env, "MIG-11") as one,
        nvml_reader({**nvml.env, "CUDA_VISIBLE_DEVICES": f"MIG-{A}/2/0"}) as other,
    ):
        for reader in (everything, one, other):
            await reader.look()
        nvml.says(f"event {A} 95 2")
        seen, alone, hit = [await it.look() for it in (everything, one, other)]

    assert [
        (uuid, card["total_bytes"], card["used_bytes"], card["processes"])
        for uuid, card in seen.cards.items()
    ] == [("MIG-11", 20 * GIB, GIB, {"77": GIB}), ("MIG-12", 40 * GIB, 0, {})]
    assert [bool(card["sick_reason"]) for card in seen.cards.values()] == [False, True]
    assert alone.uuids == ["MIG-11"] and alone.cards["MIG-11"]["sick_reason"] == ""
    assert hit.uuids == ["MIG-12"] and hit.cards["MIG-12"]["sick_reason"]


async def test_startup_18_cards_are_counted_as_cuda_counts_the_visible_ones(nvml):
    machine(nvml, *(f"GPU-{n}" for n in range(6)))
    env = {**nvml.env, "CUDA_VISIBLE_DEVICES": "2,3,4,5"}
    async with nvml_reader(env) as reader, nvml_reader(env, "GPU-0") as hidden:
        seen = await reader.look()
        refused = await hidden.look()

    assert [(it["index"], uuid) for uuid, it in seen.cards.items()] == [
        (0, "GPU-2"),
        (1, "GPU-3"),
        (2, "GPU-4"),
        (3, "GPU-5"),
    ]
    assert "does not show GPU-0, GPU-1" in refused.unknown_reason


async def test_startup_42_numbers_are_taken_only_where_cudas_order_is_known(nvml):
    """CUDA counts the fastest card first, NVML by PCI address: 0 would be another one there."""
    nvml.card(A, 10 * GIB, name="NVIDIA L4")
    nvml.card(B, 80 * GIB)
    numbers = {"CUDA_VISIBLE_DEVICES": "0"}
    by_address = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    async with (
        nvml_reader({**nvml.env, **numbers}) as unclear,
        nvml_reader({**nvml.env, **numbers, **by_address}) as clear,
    ):
        assert "set CUDA_DEVICE_ORDER=PCI_BUS_ID" in (await unclear.look()).unknown_reason
        seen = await clear.look()

    assert {uuid: it["total_bytes"] for uuid, it in seen.cards.items()} == {A: 10 * GIB}


async def test_list_that_ends_early_is_noted(nvml):
    machine(nvml, A, B)
    async with nvml_reader({**nvml.env, "CUDA_VISIBLE_DEVICES": "1,7,0"}) as reader:
        seen = await reader.look()

    assert seen.uuids == [B]
    assert len(seen.notes) == 1 and "ends before '7'" in seen.notes[0]


async def test_startup_43_pid_0_is_several_processes_of_other_namespaces(nvml):
    nvml.card(A, used_bytes=6 * GIB)
    nvml.says(f"process {A} 0 {2 * GIB}", f"process {A} 0 {3 * GIB}", f"process {A} 0 ?")
    async with nvml_reader(nvml.env) as reader:
        seen = await reader.look()

    assert seen.cards[A]["processes"] == {"0": 5 * GIB}
