"""NVIDIA cards through the real nvidia-ml-py, of a library that says what the test says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.fakes.nvml_library import (
    GIB,
    GPU_IS_LOST,
    LIB_RM_VERSION_MISMATCH,
    LIBRARY,
    NOT_SUPPORTED,
    UNKNOWN,
)
from tests.fakes.nvml_reader import nvml_reader
from tests.harness.waiting import wait_for

A, B, C = "GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3"


async def test_cards_are_read_with_who_is_on_them(nvml):
    nvml.card(A, 80 * GIB, 3 * GIB)
    nvml.card(B, 24 * GIB, name="NVIDIA L4")
    nvml.says(f"process {A} 11 {GIB}", f"process {A} 7 ?")

    async with nvml_reader(nvml.env, "cuda") as reader:
        seen = await reader.look()

    assert seen.unknown_reason == ""
    assert seen.uuids == [A, B]
    first, second = seen.cards.values()
    assert (first["kind"], first["model"], first["index"]) == ("cuda", "NVIDIA H200", 0)
    assert (first["total_bytes"], first["used_bytes"]) == (80 * GIB, 3 * GIB)
    assert first["processes"] == {"7": None, "11": GIB}
    assert first["lock_domain_id"] == f"host/{A}"
    assert (second["model"], second["index"], second["processes"]) == ("NVIDIA L4", 1, {})


async def test_host_without_the_library_has_no_cards_and_loads_nothing_heavy(tmp_path):
    async with nvml_reader({"LD_LIBRARY_PATH": str(tmp_path)}) as reader:
        seen = await reader.look()

    assert (seen.uuids, seen.unknown_reason) == ([], "")
    assert not seen.has_pynvml
    assert seen.look_again_s == 60.0


async def test_driver_that_is_not_loaded_is_no_cards_until_it_is(nvml):
    nvml.unload()
    async with nvml_reader(nvml.env) as reader:
        before = await reader.look()
        nvml.card(A)
        after = await reader.look()

    assert (before.uuids, before.unknown_reason) == ([], "")
    assert (after.uuids, after.look_again_s) == ([A], 5.0)


@pytest.mark.parametrize("devices", ["cuda", A])
async def test_cards_that_were_asked_for_are_unknown_without_a_driver(nvml, devices):
    nvml.unload()
    async with nvml_reader(nvml.env, devices) as reader:
        seen = await reader.look()

    assert seen.unknown_reason == "nvmlInit: Driver Not Loaded"


@pytest.mark.parametrize("devices", ["cuda", A])
async def test_cards_that_were_asked_for_are_unknown_without_the_library(tmp_path, devices):
    async with nvml_reader({"LD_LIBRARY_PATH": str(tmp_path)}, devices) as reader:
        seen = await reader.look()

    assert LIBRARY in seen.unknown_reason
    assert "No such file" in seen.unknown_reason


async def test_library_that_is_damaged_is_not_a_host_without_cards(tmp_path):
    (tmp_path / LIBRARY).write_bytes(b"this is no library")

    async with nvml_reader({"LD_LIBRARY_PATH": str(tmp_path)}) as reader:
        seen = await reader.look()

    assert LIBRARY in seen.unknown_reason


async def test_cards_that_were_asked_for_and_that_the_driver_does_not_list_are_unknown(nvml):
    async with nvml_reader(nvml.env, "cuda") as asked, nvml_reader(nvml.env) as unasked:
        assert "lists no card" in (await asked.look()).unknown_reason
        assert (await unasked.look()).unknown_reason == ""


@pytest.mark.parametrize("devices", [(), ("cuda",)])
async def test_failed_init_is_unknown_whether_or_not_cards_were_asked_for_and_mends(nvml, devices):
    nvml.card(A)
    nvml.says(f"error nvmlInit {LIB_RM_VERSION_MISMATCH}")
    async with nvml_reader(nvml.env, *devices) as reader:
        failed = await reader.look()
        nvml.says_no_more("error")
        after = await reader.look()

    assert failed.unknown_reason == "nvmlInit: RM has detected an NVML/RM version mismatch"
    assert (after.uuids, after.unknown_reason) == ([A], "")


async def test_driver_is_asked_anew_after_a_failure(nvml):
    """One that was loaded again answers nobody who knew the one before."""
    nvml.card(A)
    nvml.says(f"error nvmlDeviceGetMemoryInfo {UNKNOWN} {A}")
    async with nvml_reader(nvml.env) as reader:
        await reader.look()
        nvml.says_no_more("error")
        await reader.look()
        await reader.look()

    assert nvml.calls.count("nvmlInit") == 2
    assert nvml.calls.count("nvmlShutdown") == 1


@pytest.mark.parametrize(
    ("fact", "reason"),
    [
        (f"error nvmlDeviceGetCount {UNKNOWN}", "nvmlDeviceGetCount: Unknown Error"),
        (
            f"error nvmlDeviceGetHandleByIndex {GPU_IS_LOST} {B}",
            "card 1: nvmlDeviceGetHandleByIndex: GPU is lost",
        ),
        (f"error nvmlDeviceGetUUID {GPU_IS_LOST} {A}", "card 0: nvmlDeviceGetUUID: GPU is lost"),
        (f"error nvmlDeviceGetMigMode {UNKNOWN} {A}", "card 0: nvmlDeviceGetMigMode: Unknown"),
    ],
)
async def test_failed_reading_is_unknown_with_the_cards_as_they_were_and_mends_itself(
    nvml, fact, reason
):
    nvml.card(A, used_bytes=GIB)
    nvml.card(B)
    async with nvml_reader(nvml.env) as reader:
        before = await reader.look()
        nvml.says(fact)
        failed = await reader.look()
        again = await reader.look()
        nvml.says_no_more("error")
        after = await reader.look()

    assert reason in failed.unknown_reason
    assert again.unknown_reason == failed.unknown_reason  # one that changed would be told anew
    assert failed.uuids == [A, B]
    assert failed.cards[A]["total_bytes"] == 80 * GIB
    assert (failed.cards[A]["used_bytes"], failed.cards[A]["processes"]) == (None, None)
    assert (after.cards, after.unknown_reason) == (before.cards, "")


async def test_card_whose_memory_cannot_be_read_keeps_its_identity_and_mends(nvml):
    nvml.card(A)
    nvml.card(B)
    nvml.says(f"error nvmlDeviceGetMemoryInfo {UNKNOWN} {B}")
    async with nvml_reader(nvml.env, "cuda") as reader:
        seen = await reader.look()
        nvml.says_no_more("error")
        after = await reader.look()

    assert (seen.uuids, seen.unknown_reason) == ([A, B], "")
    assert seen.cards[A]["total_bytes"] == 80 * GIB
    assert (seen.cards[B]["total_bytes"], seen.cards[B]["used_bytes"]) == (0, None)
    assert seen.cards[B]["problem"] == "nvmlDeviceGetMemoryInfo: Unknown Error"
    assert (after.cards[B]["total_bytes"], after.cards[B]["problem"]) == (80 * GIB, "")


@pytest.mark.parametrize("call", ["Compute", "Graphics"])
async def test_driver_that_does_not_tell_processes_leaves_them_unknown(nvml, call):
    nvml.card(A, used_bytes=GIB)
    nvml.says(f"error nvmlDeviceGet{call}RunningProcesses {NOT_SUPPORTED}")
    async with nvml_reader(nvml.env) as reader:
        seen = await reader.look()

    assert (seen.cards[A]["processes"], seen.cards[A]["used_bytes"]) == (None, GIB)


async def test_card_that_vanished_is_gone_from_a_list_that_is_known(nvml):
    nvml.card(A)
    nvml.card(B)
    async with nvml_reader(nvml.env) as reader:
        await reader.look()
        nvml.says_no_more(f"card {A}")
        seen = await reader.look()

    assert (seen.uuids, seen.unknown_reason) == ([B], "")
    assert seen.cards[B]["index"] == 0


async def test_cards_are_chosen_by_uuid_or_by_its_beginning(nvml):
    for uuid in (A, B, C):
        nvml.card(uuid)
    async with nvml_reader(nvml.env, "GPU-c", A) as reader:
        seen = await reader.look()

    assert seen.uuids == [A, C]


async def test_names_that_fit_no_card_or_several_are_all_told(nvml):
    for uuid in (A, B):
        nvml.card(uuid)
    async with nvml_reader(nvml.env, "GPU-aa", "GPU-dd") as reader:
        seen = await reader.look()

    assert f"--devices GPU-aa fits several cards, say more of it: {A}, {B}" in seen.unknown_reason
    assert f"--devices GPU-dd fits no card; NVML lists {A}, {B}" in seen.unknown_reason


async def test_lost_card_hinders_nobody_who_named_the_others(nvml):
    for uuid in (A, B, C):
        nvml.card(uuid)
    nvml.says(f"error nvmlDeviceGetHandleByIndex {GPU_IS_LOST} {B}")
    async with nvml_reader(nvml.env, A, C) as named, nvml_reader(nvml.env, B) as lost:
        assert (await named.look()).uuids == [A, C]
        reason = (await lost.look()).unknown_reason

    assert "fits no card" in reason
    assert "card 1: nvmlDeviceGetHandleByIndex: GPU is lost" in reason


async def test_instances_stand_for_a_card_in_mig_mode(nvml):
    nvml.card(A)
    nvml.card(B)
    nvml.says(f"mig {A} MIG-11 {20 * GIB} {GIB}", f"mig {A} MIG-12 {40 * GIB} 0")
    async with (
        nvml_reader(nvml.env) as everything,
        nvml_reader(nvml.env, "MIG-12") as one,
        nvml_reader(nvml.env, "GPU-aaaa") as whole,
        nvml_reader(nvml.env, "MIG-1") as vague,
    ):
        seen = await everything.look()
        assert seen.uuids == ["MIG-11", "MIG-12", B]
        assert seen.cards["MIG-11"]["used_bytes"] == GIB
        assert (await one.look()).uuids == ["MIG-12"]
        assert (await whole.look()).uuids == ["MIG-11", "MIG-12"]
        assert "fits several cards" in (await vague.look()).unknown_reason


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetMemoryInfo"])
async def test_call_that_hangs_is_unknown_without_halting_the_loop_and_never_piles_up(nvml, call):
    """A loop that is halted by the call would not even answer here: it returns when it is told."""
    nvml.card(A)
    nvml.says(f"hang {call}")
    async with nvml_reader(nvml.env, deadline_s=0.3) as reader:
        first = await reader.look()
        calls = nvml.calls
        later = [await reader.look() for _ in range(20)]

        assert first.unknown_reason == f"{call} has not returned within 0.3 s"
        assert {it.unknown_reason for it in later} == {first.unknown_reason}
        # At once, and on the same one thread: beside it there is the loop's own.
        assert sum(it.took_s for it in later) < 10 * 0.3
        assert {it.thread_count for it in later} == {2}
        assert nvml.calls == calls

        nvml.says_no_more("hang")

        async def recovers():
            seen = await reader.look()
            return not seen.unknown_reason and seen.uuids == [A]

        await wait_for(recovers, "the call returned, and so did the cards")


async def test_many_slow_calls_are_no_hang(nvml):
    """The deadline is each call's own: a large host takes longer, and is not unknown for that."""
    for number in range(6):
        nvml.card(f"GPU-{number}")
    nvml.says("hang nvmlDeviceGetMemoryInfo 0.15")
    async with nvml_reader(nvml.env, deadline_s=0.6) as reader:
        seen = await reader.look()

    assert len(seen.uuids) == 6
    assert seen.took_s > 0.6


async def test_process_ends_while_a_call_hangs(nvml):
    nvml.says("hang nvmlInit")
    async with nvml_reader(nvml.env, deadline_s=0.1) as reader:
        assert "nvmlInit has not returned" in (await reader.look()).unknown_reason
        assert await reader.end() == 0


@pytest.mark.parametrize(
    ("facts", "may_have"),
    [
        ((f"card {A} 1 0 x",), True),
        ((), False),
        (("hang nvmlInit",), True),
        ((f"error nvmlInit {UNKNOWN}",), True),
        (("error nvmlInit 9",), False),
        ((f"card {A} 1 0 x", "hidden"), False),
    ],
)
def test_up_takes_slices_only_where_there_surely_is_no_card(nvml, facts, may_have):
    env = {"CUDA_VISIBLE_DEVICES": "-1"} if "hidden" in facts else {}
    nvml.says(*facts)
    script = (
        "from stagekeeper.cli.up.default_devices import may_have_gpus; print(may_have_gpus(0.3))"
    )

    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **nvml.env, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert ended.stdout.strip() == str(may_have), ended.stderr
