"""The log of a stage does not fill the disk, and whoever reads it finds his place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stagekeeper.stage import log_bound

KIB = 1024


def test_the_beginning_of_a_long_log_is_given_back_and_nothing_moves(tmp_path: Path) -> None:
    log = tmp_path / "stage.log"
    lines = b"".join(b"line %07d\n" % it for it in range(100_000))
    log.write_bytes(lines)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    try:
        assert log_bound.trim(descriptor, 2 * len(lines)) is False
        assert log_bound.trim(descriptor, len(lines) - 8 * KIB) is False  # an eighth more may be
        assert log_bound.trim(descriptor, 256 * KIB) is True
        assert log_bound.trim(descriptor, 256 * KIB) is False
        os.write(descriptor, b"and on\n")
    finally:
        os.close(descriptor)

    status, content = log.stat(), log.read_bytes()
    assert status.st_blocks * 512 < 300 * KIB
    assert content[-256 * KIB :] == (lines + b"and on\n")[-256 * KIB :]
    assert len(content) == len(lines) + 7 and not content[:KIB].strip(b"\0")


def test_what_is_no_file_is_left_alone() -> None:
    ours, theirs = os.pipe()
    try:
        assert log_bound.trim(theirs, 0) is False
    finally:
        os.close(ours)
        os.close(theirs)


async def test_where_nothing_can_be_given_back_it_is_said_once_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def cannot(descriptor: int, most_bytes: int) -> bool:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(log_bound, "trim", cannot)
    await log_bound.keep_bounded()
    assert "not kept bounded" in caplog.text
