"""Nobody but their owner can read what a supervisor and an agent keep."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from stagekeeper.agent.directory import AgentDirectory
from stagekeeper.agent.durable_file import write_durably
from stagekeeper.agent.identity import AgentIdentity
from stagekeeper.cli.exits import CliError
from stagekeeper.cli.places import make_state_dir
from stagekeeper.core.ids import Epoch, WorkerId
from stagekeeper.runtime.private_folder import (
    FolderIsOpen,
    make_private_folder,
    make_state_folder,
)
from stagekeeper.supervisor.app import Supervisor
from stagekeeper.supervisor.settings import SupervisorSettings
from stagekeeper.supervisor.store import SqliteStore


@pytest.fixture(autouse=True)
def a_usual_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def modes_below(folder: Path) -> set[int]:
    return {mode(it) for it in folder.rglob("*") if it.is_dir()}


# --- the folder that a user chose


def test_new_folder_is_for_its_owner_alone(tmp_path):
    make_state_folder(tmp_path / "parents" / "state")

    assert mode(tmp_path / "parents" / "state") == 0o700


def test_empty_folder_of_ours_is_closed(tmp_path):
    state = tmp_path / "state"
    state.mkdir(mode=0o777)
    state.chmod(0o777)

    make_state_folder(state)

    assert mode(state) == 0o700


def test_state_of_an_earlier_release_is_closed(tmp_path):
    state = tmp_path / "state"
    for name in ("agents", "cache", "logs"):
        (state / name).mkdir(parents=True)
    for name in ("supervisor.sqlite", "supervisor.sqlite-wal", "supervisor.lock", "up.lock"):
        (state / name).touch()
    assert mode(state) == 0o755

    make_state_folder(state)

    assert mode(state) == 0o700


@pytest.mark.parametrize("found", [0o1777, 0o755, 0o710])
def test_folder_with_other_things_in_it_is_refused_and_left_as_it_was(tmp_path, found):
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "somebody's").touch()
    shared.chmod(found)

    with pytest.raises(FolderIsOpen, match=r"holds other things too: choose an empty one"):
        make_state_folder(shared)

    assert mode(shared) == found


def test_closed_folder_may_hold_anything(tmp_path):
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    (state / "notes.txt").touch()

    make_state_folder(state)


@pytest.mark.parametrize("make", [make_state_folder, make_private_folder])
def test_open_folder_of_another_user_is_refused(tmp_path, monkeypatch, make):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)

    with pytest.raises(FolderIsOpen, match="belongs to another user"):
        make(theirs)


# --- who uses it


def test_agent_closes_its_folders(tmp_path):
    state = tmp_path / "state"
    directory = AgentDirectory(state, WorkerId("w"))
    for folder in (directory.sockets, directory.stages, directory.cache):
        folder.mkdir(parents=True)
    assert modes_below(state) == {0o755}

    directory.create()

    assert mode(state) == 0o700
    assert modes_below(state) == {0o700}


def test_agents_files_are_for_their_owner_alone(tmp_path):
    path = tmp_path / "identity.json"
    AgentIdentity.next_life(path, WorkerId("w"), recorded_incarnation=0)
    assert mode(path) == 0o600

    write_durably(path, b"{}")

    assert mode(path) == 0o600


async def test_supervisor_closes_its_folder_and_its_files(tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    supervisor = Supervisor(SupervisorSettings(endpoint="127.0.0.1:0", state_dir=state))
    await supervisor.start()
    try:
        assert mode(state) == 0o700
        files = {it.name: mode(it) for it in state.iterdir()}
    finally:
        await supervisor.stop()

    assert {"supervisor.sqlite", "supervisor.sqlite-wal", "supervisor.lock"} <= files.keys()
    assert set(files.values()) == {0o600}


def test_store_of_an_earlier_release_is_closed(tmp_path):
    path = tmp_path / "supervisor.sqlite"
    path.touch(mode=0o644)

    store = SqliteStore(tmp_path)
    store.seize(Epoch(1, "a"))

    assert {mode(it) for it in tmp_path.iterdir()} == {0o600}
    store.close()


def test_command_line_closes_the_state_directory(tmp_path):
    (tmp_path / "state").mkdir()

    assert mode(make_state_dir(tmp_path / "state")) == 0o700


def test_command_line_says_what_to_do_about_a_shared_state_directory(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "spec.yaml").touch()

    with pytest.raises(CliError, match=f"chmod 700 {shared}"):
        make_state_dir(shared)
