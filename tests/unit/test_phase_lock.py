"""The phase lock in one process: its files, its holders, and what it refuses."""

from __future__ import annotations

import asyncio
import os
import stat

import pytest

from stagekeeper.runtime.lock_holders import Holder, HolderText, shortened
from stagekeeper.runtime.phase_lock import LockUnusable, Mode, PhaseLock, lock_paths, named

ALICE = "host-1/GPU-a"


async def test_stage_without_cards_needs_no_lock_and_no_folder(tmp_path):
    async with PhaseLock(tmp_path / "none", [], "s").held(Mode.ALONE, "MEASURE") as hold:
        hold.entered("ALLOCATE")
        hold.check_intact()

    assert list(tmp_path.iterdir()) == []


async def test_files_are_open_to_all_users_and_stay(tmp_path):
    before = os.umask(0o077)
    try:
        async with PhaseLock(tmp_path, [ALICE], "s").held(Mode.SHARED, "LOAD"):
            pass
    finally:
        os.umask(before)

    assert sorted(tmp_path.iterdir()) == sorted(lock_paths(tmp_path, ALICE))
    assert {stat.S_IMODE(it.lstat().st_mode) for it in tmp_path.iterdir()} == {0o666}


def test_domains_of_any_spelling_have_files_of_their_own(tmp_path):
    domains = ["a/b", "a_b", "a/../b", "é", "x" * 4000 + "1", "x" * 4000 + "2", "MIG-1/2/3", " "]
    paths = [path for domain in domains for path in lock_paths(tmp_path, domain)]

    assert len(set(paths)) == 2 * len(domains)
    assert all(it.parent == tmp_path and len(it.name.encode()) < 120 for it in paths)


async def test_each_file_is_opened_once_however_often_it_is_locked(tmp_path):
    lock = PhaseLock(tmp_path, [ALICE], "s")
    async with lock.held(Mode.SHARED, "LOAD"):
        opened = _descriptors_in(tmp_path)
    for mode in (Mode.ALONE, Mode.SHARED, Mode.ALONE):
        async with lock.held(mode, "MEASURE"):
            pass

    assert len(opened) == 2
    assert _descriptors_in(tmp_path) == opened


async def test_lock_is_not_taken_twice_by_one_process(tmp_path):
    lock = PhaseLock(tmp_path, [ALICE], "s")
    async with lock.held(Mode.SHARED, "LOAD"):
        with pytest.raises(RuntimeError, match="holds the phase lock of host-1/GPU-a already"):
            async with PhaseLock(tmp_path, ["z", ALICE], "t").held(Mode.ALONE, "MEASURE"):
                pass
    async with lock.held(Mode.ALONE, "MEASURE"):
        pass


async def test_removed_file_is_made_again_before_anything_runs(tmp_path):
    lock = PhaseLock(tmp_path, [ALICE], "s")
    async with lock.held(Mode.SHARED, "LOAD"):
        pass
    for path in lock_paths(tmp_path, ALICE):
        path.unlink()

    async with lock.held(Mode.ALONE, "MEASURE") as hold:
        assert sorted(tmp_path.iterdir()) == sorted(lock_paths(tmp_path, ALICE))
        hold.check_intact()


async def test_hold_whose_file_was_replaced_says_so(tmp_path):
    async with PhaseLock(tmp_path, [ALICE], "s").held(Mode.ALONE, "MEASURE") as hold:
        lock_paths(tmp_path, ALICE)[0].unlink()
        with pytest.raises(LockUnusable, match=r"GPU-a .* was removed or replaced while it was"):
            hold.check_intact()


async def test_link_in_the_place_of_a_lock_is_not_followed(tmp_path):
    (tmp_path / "theirs").write_text("precious")
    lock_paths(tmp_path, ALICE)[0].symlink_to(tmp_path / "theirs")

    with pytest.raises(LockUnusable, match="cannot be used as a lock"):
        async with PhaseLock(tmp_path, [ALICE], "s").held(Mode.ALONE, "MEASURE"):
            pass

    assert (tmp_path / "theirs").read_text() == "precious"


async def test_pipe_or_folder_in_the_place_of_a_lock_is_refused_and_opens_nothing(tmp_path):
    os.mkfifo(lock_paths(tmp_path, "a")[1])
    lock_paths(tmp_path, "b")[0].mkdir()
    for domain in ("a", "b"):
        with pytest.raises(LockUnusable, match="belongs to user"):
            async with asyncio.timeout(5.0):
                async with PhaseLock(tmp_path, [domain], "s").held(Mode.ALONE, "MEASURE"):
                    pass


async def test_refusal_leaves_the_lock_to_be_had_once_its_file_is_mended(tmp_path):
    turnstile = lock_paths(tmp_path, ALICE)[1]
    turnstile.mkdir()
    lock = PhaseLock(tmp_path, [ALICE], "s")
    for _ in range(2):
        with pytest.raises(LockUnusable):
            async with lock.held(Mode.SHARED, "LOAD"):
                pass
    turnstile.rmdir()
    async with lock.held(Mode.SHARED, "LOAD"):
        pass


def test_holders_are_named_with_all_that_is_known():
    text = HolderText(7, "stage a of d/0", "MEASURE", "2026-01-01T00:00:00Z", 3)

    assert named([Holder(7, text)]) == (
        "process 7 (stage a of d/0, MEASURE, since 2026-01-01T00:00:00Z)"
    )
    assert named([Holder(7), Holder(0)]) == (
        "process 7 and a process that cannot be seen from here"
    )
    assert named([]) == "a process that cannot be seen from here"


def test_names_are_made_to_fit_and_to_be_shown():
    assert shortened("a\nb\x1b") == "a?b?"
    assert len(shortened("é" * 500)) == 120


def _descriptors_in(folder) -> list[tuple[str, str]]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(f"{folder}/"):
            found.append((name, target))
    return sorted(found)
