"""The folder and the files of host-wide locks, on a host where others write too."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from stagekeeper.agent import host_lock
from stagekeeper.agent.host_lock import FileLock, default_lock_dir, holder_of, make_lock_dir
from stagekeeper.agent.settings import AgentSettings
from tests.harness.processes import lock_held


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def bare_host(tmp_path, monkeypatch) -> Path:
    """A host on which nobody has made a folder for locks yet."""
    (tmp_path / "lock").mkdir()
    monkeypatch.setattr(host_lock, "HOST_LOCK_DIR", tmp_path / "lock" / "stagekeeper")
    return tmp_path


def test_new_folder_and_file_are_open_to_all_users_whatever_the_umask_says(tmp_path):
    before = os.umask(0o077)
    try:
        make_lock_dir(tmp_path / "l")
        FileLock.take(tmp_path / "l" / "file", "it").release()
    finally:
        os.umask(before)

    assert mode(tmp_path / "l") == 0o1777
    assert mode(tmp_path / "l" / "file") == 0o666


def test_modes_of_what_was_there_before_are_left_alone(tmp_path):
    (tmp_path / "l").mkdir(mode=0o700)
    (tmp_path / "l" / "file").touch(mode=0o600)

    make_lock_dir(tmp_path / "l")
    FileLock.take(tmp_path / "l" / "file", "it").release()

    assert (mode(tmp_path / "l"), mode(tmp_path / "l" / "file")) == (0o700, 0o600)


def test_link_in_the_place_of_the_folder_is_not_followed(tmp_path):
    (tmp_path / "theirs").mkdir(mode=0o700)
    (tmp_path / "l").symlink_to(tmp_path / "theirs")

    with pytest.raises(PermissionError, match="is a symbolic link"):
        make_lock_dir(tmp_path / "l")

    assert mode(tmp_path / "theirs") == 0o700


def test_link_in_the_place_of_a_lock_is_not_followed(tmp_path):
    (tmp_path / "secret").touch(mode=0o600)
    (tmp_path / "there").symlink_to(tmp_path / "secret")
    (tmp_path / "nowhere").symlink_to(tmp_path / "made")

    for name in ("there", "nowhere"):
        with pytest.raises(OSError, match="symbolic links"):
            FileLock.take(tmp_path / name, "it")

    assert mode(tmp_path / "secret") == 0o600
    assert not (tmp_path / "made").exists()


def test_folder_that_others_can_write_needs_the_sticky_bit(tmp_path):
    (tmp_path / "l").mkdir()
    (tmp_path / "l").chmod(0o777)

    with pytest.raises(PermissionError, match="not sticky"):
        make_lock_dir(tmp_path / "l")
    (tmp_path / "l").chmod(0o1777)
    make_lock_dir(tmp_path / "l")


def test_folder_of_another_user_is_refused_and_roots_is_taken(tmp_path, monkeypatch):
    make_lock_dir(tmp_path / "l")
    owner = (tmp_path / "l").stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)

    if owner == 0:
        make_lock_dir(tmp_path / "l")
        os.chown(tmp_path / "l", owner + 2, -1)
    with pytest.raises(PermissionError, match=r"belongs to user .*--lock-dir"):
        make_lock_dir(tmp_path / "l")


def test_choosing_a_folder_makes_nothing(bare_host):
    assert AgentSettings().lock_dir == default_lock_dir() == bare_host / "lock" / "stagekeeper"

    assert list((bare_host / "lock").iterdir()) == []


@pytest.mark.parametrize("runtime_dir", ["/run/user/7", None])
def test_users_own_folder_is_chosen_where_the_hosts_cannot_be_trusted(
    bare_host, monkeypatch, runtime_dir
):
    (bare_host / "lock" / "stagekeeper").symlink_to(bare_host)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    if runtime_dir:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime_dir)

    expected = f"{runtime_dir}/stagekeeper" if runtime_dir else f"/tmp/stagekeeper-{os.getuid()}"
    assert default_lock_dir() == Path(expected)


def test_holder_of_a_lock_is_seen_without_taking_it(tmp_path):
    path = tmp_path / "lock"
    assert holder_of(path) is None
    FileLock.take(path, "it").release()
    assert holder_of(path) is None
    with lock_held(path) as pid:
        assert holder_of(path) == pid
        assert holder_of(path) == pid, "the first look did not take it away"

    assert holder_of(path) is None
