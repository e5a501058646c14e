"""Where an agent runs: whether stages outlive it, and whether the kernel killed for memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagekeeper.agent.surroundings import look_around
from stagekeeper.host.oom import OomWitness

UNIT = "0::/system.slice/stagekeeper-agent.service\n"


def around(tmp_path, *, pid=4711, cgroup="0::/user.slice/x.scope\n", kill_mode="", environ=None):
    cgroup_file = tmp_path / "cgroup"
    cgroup_file.write_text(cgroup)
    return look_around(
        pid=pid,
        environ={"INVOCATION_ID": "x"} if environ is None else environ,
        cgroup_file=cgroup_file,
        kill_mode_of=lambda unit: kill_mode,
    )


def test_stages_outlive_an_agent_that_nobody_manages(tmp_path):
    assert around(tmp_path).stages_outlive_agent
    # A shell below a service's terminal has the path and not the invocation.
    assert around(tmp_path, cgroup=UNIT, environ={}).stages_outlive_agent


def test_pid_1_takes_its_container_with_it(tmp_path):
    found = around(tmp_path, pid=1)

    assert not found.stages_outlive_agent
    assert "PID 1" in found.reason


@pytest.mark.parametrize(
    ("kill_mode", "outlive"),
    [("process", True), ("control-group", False), ("mixed", False), ("", False)],
)
def test_systemd_unit_is_judged_by_its_kill_mode(tmp_path, kill_mode, outlive):
    found = around(tmp_path, cgroup=UNIT, kill_mode=kill_mode)

    assert found.stages_outlive_agent is outlive
    assert outlive or "KillMode=process" in found.reason
    assert outlive or "stagekeeper-agent.service" in found.reason


def witness(tmp_path: Path, membership: str) -> tuple[OomWitness, dict[str, Path]]:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(membership)
    files = {
        "vmstat": proc / "vmstat",
        "v2": cgroups / "mine" / "memory.events",
        "v1": cgroups / "memory" / "mine" / "memory.oom_control",
    }
    (proc / "vmstat").write_text("nr_free 1\noom_kill 5\n")
    files["v2"].parent.mkdir(parents=True)
    files["v2"].write_text("low 0\noom 1\noom_kill 2\noom_group_kill 0\n")
    files["v1"].parent.mkdir(parents=True)
    files["v1"].write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 7\n")
    return OomWitness(proc, cgroups), files


@pytest.mark.parametrize(
    ("membership", "own", "other"),
    [
        ("0::/mine\n", "v2", "vmstat"),
        ("4:memory:/mine\n0::/\n", "v1", "v2"),
        ("0::/elsewhere\n", "vmstat", "v2"),
    ],
)
def test_kill_for_memory_is_seen_once_and_only_in_ones_own_group(tmp_path, membership, own, other):
    oom, files = witness(tmp_path, membership)
    assert not oom.look()

    files[other].write_text("oom_kill 99\n")
    assert not oom.look()
    files[own].write_text("oom_kill 99\n")

    assert oom.look()
    assert not oom.look()


def test_host_without_a_counter_has_seen_nothing(tmp_path):
    assert not OomWitness(tmp_path, tmp_path).look()
