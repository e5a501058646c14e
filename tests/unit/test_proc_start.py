"""What a process of an actor tree is told and answers, without any process."""

from __future__ import annotations

import asyncio
import os

import pytest

from stagekeeper.host.proc_line import ProcLaunch, ProcReport
from stagekeeper.host.proc_start import ReportPipe

LAUNCH = ProcLaunch(
    instance_id="4f1c",
    name="workers",
    tree_path="2b7e/4f1c",
    token="very-secret",
    listen_host="127.0.0.1",
    lease_s=0.5,
    boot_id="9d",
    owner="trainer",
    pythonpath=["/a\nb", "/ü"],
    extra={"main_path": "/a/b.py"},
)


def test_launch_is_one_line_and_reads_back():
    line = LAUNCH.to_line()

    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert ProcLaunch.from_line(line) == LAUNCH
    assert "very-secret" not in repr(LAUNCH)


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b"{}", b'{"x": 1}', b'"x"', b"1", b"\xff"])
def test_line_that_is_none_is_refused(line):
    with pytest.raises(ValueError):
        ProcLaunch.from_line(line)
    if line != b"{}":
        with pytest.raises(ValueError):
            ProcReport.from_line(line)


async def test_owner_that_lets_go_is_told_once_and_one_that_writes_is_not():
    read_end, write_end = os.pipe()
    report = ReportPipe(-1, read_end)
    told = asyncio.Event()
    report.on_owner_gone(told.set)

    os.write(write_end, b"anything")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(told.wait(), 0.05)
    os.close(write_end)

    await asyncio.wait_for(told.wait(), 5)
    os.close(read_end)


def test_report_to_an_owner_that_gave_up_is_harmless_and_a_second_one_a_mistake():
    read_end, write_end = os.pipe()
    os.close(read_end)
    pipe = ReportPipe(write_end, -1)

    pipe.report("127.0.0.1:1")

    with pytest.raises(RuntimeError, match="told already"):
        pipe.fail("late")
