"""What an agent can be told: settings, devices of host memory, entrypoints that it may start."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagekeeper.agent.cards.host_memory import parse_devices, parse_size
from stagekeeper.agent.directory import AgentDirectory, directories_in, file_name
from stagekeeper.agent.entrypoints import Entrypoints
from stagekeeper.agent.settings import AgentSettings, SettingsError
from stagekeeper.core.ids import WorkerId


def settings(**changes) -> AgentSettings:
    fields = {
        "worker_id": WorkerId("w"),
        "state_dir": Path("/tmp/s"),
        "lock_dir": Path("/tmp/l"),
        **changes,
    }
    return AgentSettings(**fields)


def test_defaults_are_sound():
    settings().check()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"worker_id": ""}, "worker id ''"),
        ({"worker_id": "a/b"}, "worker id 'a/b'"),
        ({"worker_id": "x" * 64}, "1 to 63"),
        ({"worker_id": "a\nb"}, "printable"),
        ({"cluster": ""}, "cluster"),
        ({"endpoint": "nowhere"}, "endpoint"),
        ({"listen": "10.0.0.1:0"}, "not a loopback address"),
        ({"listen": "0.0.0.0:0", "insecure": True}, "advertise"),
        ({"advertise": "10.0.0.1"}, "advertise"),
        ({"devices": ("gpu:0=1GiB",)}, "cpu:0=8GiB"),
        ({"devices": ("cpu:0=1GiB", "cpu:0=2GiB")}, "given twice"),
        ({"operation_lease_s": 0.0}, "operation_lease_s"),
        ({"stop_budget_s": -1.0}, "stop_budget_s"),
        ({"max_loads": 0}, "max_loads"),
        ({"heartbeat_timeout_s": float("nan")}, "heartbeat_timeout_s"),
        ({"busy_after_s": 5.0, "stall_after_s": 4.0}, "stall_after_s"),
        ({"state_dir": Path("/tmp/" + "long/" * 20)}, "choose a shorter --state-dir"),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes, said):
    with pytest.raises(SettingsError) as raised:
        settings(**changes).check()

    assert said in str(raised.value)


def test_every_problem_is_said_at_once():
    with pytest.raises(SettingsError) as raised:
        settings(worker_id="", cluster="", stop_budget_s=-1.0).check()

    assert len(raised.value.problems) == 3


def test_socket_path_of_107_bytes_is_the_longest():
    fits = 107 - len("/agents/w/sock/000000000000")

    settings(state_dir=Path("/" + "d" * (fits - 1))).check()
    with pytest.raises(SettingsError, match="108 bytes"):
        settings(state_dir=Path("/" + "d" * fits)).check()


@pytest.mark.parametrize(
    ("advertise", "bound", "expected", "host"),
    [
        ("", "127.0.0.1:5", "127.0.0.1:5", "127.0.0.1"),
        ("node-1", "0.0.0.0:5", "node-1:5", "node-1"),
        ("node-1:77", "0.0.0.0:5", "node-1:77", "node-1"),
        ("node-1:0", "0.0.0.0:5", "node-1:5", "node-1"),
        ("::1", "[::]:5", "[::1]:5", "[::1]"),
        ("[::1]:7", "[::]:5", "[::1]:7", "[::1]"),
    ],
)
def test_advertised_address_takes_the_real_port_where_it_names_none(
    advertise, bound, expected, host
):
    it = settings(advertise=advertise, listen="127.0.0.1:0", insecure=True)

    assert it.advertised(bound) == expected
    assert it.stage_host == host


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * 2**30),
        ("1.5 GB", 1_500_000_000),
        ("512MiB", 2**29),
        ("4096", 4096),
        ("10kb", 10_000),
        ("1TiB", 2**40),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1 parsec", "0", "1e9", "1,5GiB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="8GiB"):
        parse_size(text)


def test_devices_are_ascending_and_have_their_own_lock_domains():
    devices = parse_devices(("cpu:3=2GiB", "cpu:1=1GiB"), "host/w")

    assert [(it.device_id, it.index, it.total_bytes) for it in devices] == [
        ("cpu:1", 0, 2**30),
        ("cpu:3", 1, 2 * 2**30),
    ]
    assert [it.lock_domain_id for it in devices] == ["host/w/cpu:1", "host/w/cpu:3"]


def test_every_wrong_device_is_named():
    with pytest.raises(ValueError, match=r"'cuda:0'.*'cpu:1=much'"):
        parse_devices(("cuda:0", "cpu:1=much"), "")


def test_names_from_outside_become_different_file_names_in_one_folder(tmp_path):
    names = ["w", "W", "w.1", ".", "..", "a%2Fb", "ünïcode", "llama-2", "x y"]

    files = [file_name(name) for name in names]

    assert len(set(files)) == len(names)
    assert not any("/" in name or name in (".", "..") for name in files)
    assert AgentDirectory(tmp_path, WorkerId("..")).root.parent == tmp_path / "agents"


def test_workers_of_a_state_directory_are_found_by_their_folders(tmp_path):
    names = ["a%2Fb", "llama-2", "w.1", "x y", "ünïcode", "🦙"]
    for name in names:
        AgentDirectory(tmp_path, WorkerId(name)).root.mkdir(parents=True)
    (tmp_path / "agents" / "w.1.bak").mkdir()
    (tmp_path / "agents" / "file").touch()

    found = directories_in(tmp_path)

    assert {it.worker_id for it in found} == set(names)
    assert [it.root for it in found] == sorted(it.root for it in found)
    assert directories_in(tmp_path / "nowhere") == []


@pytest.fixture
def entrypoints(tmp_path):
    package = tmp_path / "models" / "deep"
    package.mkdir(parents=True)
    (tmp_path / "models" / "__init__.py").write_text("raise SystemExit('never imported')")
    (package / "__init__.py").write_text("")
    (package / "omni.py").write_text("")
    (tmp_path / "plain.py").write_text("raise SystemExit('never imported')")
    return lambda *allow: Entrypoints(allow or ("*",), (tmp_path,))


@pytest.mark.parametrize("name", ["plain:X", "models.deep.omni:A.B", "models:X", "json.decoder:X"])
def test_modules_that_are_there_are_found_without_being_imported(entrypoints, name):
    assert list(entrypoints().problems(name)) == []


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("nowhere:X", "no module nowhere"),
        ("models.deep.audio:X", "no module models.deep.audio"),
        ("plain.part:X", "no module plain.part"),
        ("models.shallow.omni:X", "no module models.shallow"),
    ],
)
def test_module_that_is_not_there_is_named_with_the_path(entrypoints, tmp_path, name, missing):
    (problem,) = entrypoints().problems(name)

    assert missing in problem
    assert str(tmp_path) in problem


@pytest.mark.parametrize("name", ["", "plain", "plain:", ":X", "a b:X", "plain:X-Y", "../x:Y"])
def test_what_is_no_entrypoint_is_refused(entrypoints, name):
    (problem,) = entrypoints().problems(name)

    assert "module:Class" in problem


@pytest.mark.parametrize(
    ("allow", "name", "is_allowed"),
    [
        ("plain.*", "plain:X", True),
        ("plain:*", "plain:X", True),
        ("plain.X", "plain:X", True),
        ("plain.X", "plain:Y", False),
        ("models.*", "models.deep.omni:X", True),
        ("model.*", "models.deep.omni:X", False),
    ],
)
def test_only_what_is_allowed_may_be_started(entrypoints, allow, name, is_allowed):
    problems = list(entrypoints(allow).problems(name))

    assert (problems == []) is is_allowed
    assert is_allowed or "--allow" in problems[0]
