"""Whether the stages would outlive this agent, judged by where it runs.

A process manager may kill all that its program started: systemd does unless the unit says
`KillMode=process`, and the end of PID 1 ends its container. What cannot be found out is reported as
"they may not", with what to do.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SYSTEMCTL_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """`reason` says why the stages end with the agent; empty when they do not."""

    stages_outlive_agent: bool
    reason: str = ""


def look_around(
    *,
    pid: int | None = None,
    environ: Mapping[str, str] = os.environ,
    cgroup_file: Path = Path("/proc/self/cgroup"),
    kill_mode_of: Callable[[str], str] | None = None,
) -> Surroundings:
    """Judge the surroundings of this process. May ask systemd, for a few seconds at most."""
    if (os.getpid() if pid is None else pid) == 1:
        return Surroundings(
            False,
            "the agent is PID 1 of its container, which ends with it: run it below an init "
            "(docker --init, or the stages die with every restart of the agent)",
        )
    unit = _systemd_unit(environ, cgroup_file)
    if not unit:
        return Surroundings(True)
    kill_mode = (kill_mode_of or _kill_mode)(unit)
    if kill_mode in ("process", "none"):
        return Surroundings(True)
    found = f"has KillMode={kill_mode}" if kill_mode else "could not be asked for its KillMode"
    return Surroundings(
        False, f"systemd unit {unit} {found}: set KillMode=process, or the stages die with it"
    )


def _systemd_unit(environ: Mapping[str, str], cgroup_file: Path) -> str:
    """Return the service that systemd runs this process as; empty outside of one."""
    if "INVOCATION_ID" not in environ:
        return ""
    try:
        lines = cgroup_file.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        *_, path = line.split(":", 2)
        name = path.rstrip("/").rpartition("/")[2]
        if name.endswith(".service"):
            return name
    return ""


def _kill_mode(unit: str) -> str:
    for scope in ((), ("--user",)):
        try:
            answer = subprocess.run(
                ["systemctl", *scope, "show", "--property=KillMode", "--value", unit],
                capture_output=True,
                text=True,
                timeout=_SYSTEMCTL_TIMEOUT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            continue
        if answer.stdout.strip():
            return answer.stdout.strip()
    return ""
