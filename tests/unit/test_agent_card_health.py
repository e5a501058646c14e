"""What errors of cards cost: the table, how far each reaches, and which process it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stagekeeper.agent.cards.card_health import CardHealth
from stagekeeper.agent.cards.kernel_log import KernelLog
from stagekeeper.agent.cards.nvml_calls import NvmlCard
from stagekeeper.agent.cards.nvml_events import XidEvent
from stagekeeper.agent.cards.xid_table import XIDS, Reach, xid_kind
from stagekeeper.core.limits import LONGEST_TEXT

A, B = "GPU-aaaa", "GPU-bbbb"
CARDS = tuple(NvmlCard(uuid, uuid, "H200", 80, 0, ()) for uuid in (A, B))
PARTS = tuple(NvmlCard(f"MIG-{n}", A, "MIG", 9, 0, (), gpu_instance=n) for n in (1, 2))


# --- the table


@pytest.mark.parametrize(
    ("reach", "xids"),
    [
        (Reach.IGNORE, (14, 45, 63, 92, 106, 154, 171)),
        (Reach.STAGE, (8, 13, 31, 32, 43, 68, 69, 94)),
        (Reach.DEVICE, (46, 48, 62, 64, 74, 79, 95, 109, 119, 120, 140, 158)),
        (Reach.HOST, (151,)),
    ],
)
def test_errors_reach_as_far_as_their_source_says(reach, xids):
    assert {xid_kind(xid).reach for xid in xids} == {reach}


def test_each_line_has_its_number_once_a_meaning_and_a_source():
    for xid, kind in XIDS.items():
        assert kind.xid == xid
        assert kind.what and kind.says
    assert {it.reach for it in XIDS.values()} == set(Reach)


def test_what_is_not_in_the_table_ends_nothing():
    assert xid_kind(9_999).reach is Reach.IGNORE
    assert CardHealth().take_in(XidEvent(A, 9_999), CARDS) is None


# --- how far


def test_error_of_a_card_makes_it_sick_for_good_and_its_first_one_is_told():
    health = CardHealth()

    for xid in (95, 79, 63):
        assert health.take_in(XidEvent(A, xid), CARDS) is None

    assert health.reason(A).startswith("XID 95 (an uncorrectable memory error, not contained)")
    assert "start this agent anew" in health.reason(A)
    assert health.reason(B) == ""


def test_error_of_the_machine_makes_every_card_sick():
    health = CardHealth()

    health.take_in(XidEvent("GPU-of-somebody", 151), CARDS)

    assert health.reason(A) == health.reason(B) != ""
    assert "GPU-of-somebody" in health.reason(A)


def test_error_of_a_card_that_is_not_used_here_is_nobodys():
    health = CardHealth()

    assert health.take_in(XidEvent("GPU-of-somebody", 79), CARDS) is None
    assert health.take_in(XidEvent("GPU-of-somebody", 31), CARDS) is None
    assert health.reason(A) == ""


@pytest.mark.parametrize(
    ("instance", "sick"), [(2, ["MIG-2"]), (None, ["MIG-1", "MIG-2"]), (7, [])]
)
def test_error_in_mig_mode_is_that_of_the_instance_that_it_names(instance, sick):
    health = CardHealth()

    health.take_in(XidEvent(A, 95, gpu_instance=instance), PARTS)

    assert [it.uuid for it in PARTS if health.reason(it.uuid)] == sick


def test_error_of_a_program_is_passed_on_and_the_card_is_well():
    health = CardHealth()

    fault = health.take_in(XidEvent(A, 31), CARDS, 4711)

    assert fault is not None
    assert (fault.device_ids, fault.pid) == ((A,), 4711)
    assert fault.text == f"XID 31 (an illegal memory access) of card {A}"
    assert health.reason(A) == ""


def test_reasons_fit_into_what_a_supervisor_takes():
    uuid = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
    cards = (NvmlCard(uuid, uuid, "", 1, 0, ()),)
    for xid in XIDS:
        health = CardHealth()
        health.take_in(XidEvent(uuid, xid), cards)
        assert len(health.reason(uuid)) <= LONGEST_TEXT


# --- which process


@pytest.fixture
def log_file(tmp_path) -> Path:
    path = tmp_path / "kmsg"
    path.write_text("6,1,2,-;NVRM: Xid (PCI:0000:01:00): 31, pid=1, name=before\n")
    return path


@pytest.fixture
def first_namespace(tmp_path, monkeypatch) -> Path:
    """A file that looks like the first pid namespace."""
    path = tmp_path / "pid"
    path.touch()
    first_inode = "stagekeeper.agent.cards.kernel_log._FIRST_NAMESPACE_INODE"
    monkeypatch.setattr(first_inode, path.stat().st_ino)
    return path


def write(path: Path, *lines: str) -> None:
    with path.open("a") as file:
        file.writelines(f"6,9,9,-;NVRM: {line}\n" for line in lines)


def test_process_is_the_one_that_the_driver_wrote_of_that_card_and_error(log_file, first_namespace):
    log = KernelLog(log_file, first_namespace)
    write(
        log_file,
        "Xid (PCI:0000:01:00): 31, pid='<unknown>', name=<unknown>, Ch 0",
        "Xid (PCI:0000:02:00): 31, pid=22, name=python, Ch 1",
        "Xid (PCI:0000:01:00): 13, pid=13, name=python, Graphics Exception",
        "Xid (PCI:0000:01:00): 31, pid=31, name=python, Ch 2",
        "Xid (PCI:0000:01:00): 31, pid=32, name=python, Ch 3",
    )

    assert log.pid_of("00000000:01:00.0", 31) == 31
    assert log.pid_of("00000000:01:00.0", 31) == 32
    assert log.pid_of("00000000:01:00.0", 31) is None
    assert log.pid_of("00000000:02:00.0", 31) == 22
    assert log.pid_of("", 13) is None
    log.close()


def test_pids_of_the_kernel_mean_nothing_in_another_namespace(log_file, tmp_path):
    (tmp_path / "pid").touch()
    log = KernelLog(log_file, tmp_path / "pid")
    write(log_file, "Xid (PCI:0000:01:00): 31, pid=31, name=python, Ch 2")

    assert not log.can_name
    assert log.pid_of("00000000:01:00.0", 31) is None


def test_log_that_may_not_be_read_names_nobody(tmp_path, first_namespace):
    log = KernelLog(tmp_path / "none", first_namespace)

    assert not log.can_name
    assert log.pid_of("00000000:01:00.0", 31) is None


def test_log_is_let_go(log_file, first_namespace):
    before = set(os.listdir("/proc/self/fd"))
    log = KernelLog(log_file, first_namespace)
    log.close()

    assert set(os.listdir("/proc/self/fd")) == before
