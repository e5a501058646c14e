"""What a supervisor is started with, checked as a whole before anything is opened.

Decided here: defaults, and which settings contradict each other. Not decided here: where they come
from (flags, files), and the rules of silence, whose numbers `core.settings` checks.

Invariant: a `SupervisorSettings` that exists can be run.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from stagekeeper.core.settings import RegistrySettings
from stagekeeper.host.server import check_loopback, split_address
from stagekeeper.wire.stable_endpoint import DEFAULT_ENDPOINT

LONGEST_NAME = 63


class SettingsRefused(ValueError):
    """Settings that cannot be run; `problems` has every one of them, a sentence each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorSettings:
    """One supervisor. Times are seconds.

    Attributes:
        cluster: every part of a cluster names the same one.
        endpoint: where users are served, and agents that look for their supervisor.
        stable_endpoint: that address as everybody dials it (a name, a virtual address, a TCP
            proxy); empty: `endpoint`. Who answers there reigns.
        listen: the worker-facing address; port 0 takes one from the system at each start.
        advertise: the worker-facing address as agents are told it; empty: `listen` with its real
            port. A `:0` in it takes the real port.
        state_dir: holds the store and its lock; None keeps nothing (`--no-store`).
        standby: whether a supervisor waits while another one of its cluster lives; without, it
            refuses to start, or ends.
        insecure: allows addresses beyond loopback, though nothing is encrypted yet.
        registry: the numbers that decisions are made by.
        tick_s: how often time is told to the registry; None: fitted to the heartbeats.
        bookmark_s: how long a watcher hears nothing before it is told that nothing happened.
        slow_reader_s: how long a watcher may take nothing before it is cut.
        probe_timeout_s: how long an agent may take to answer when it is dialled back.
        stop_timeout_s: how long one call to stop a slot is waited for; it goes on, and is asked
            for again.
        look_s: about so long between two looks at the stable endpoint; each is jittered.
        look_timeout_s: how long the endpoint may take to answer one.
        rejoin_s: how long a lost agent is tried before its operation counts as failed; agents roll
            back by themselves what nobody joins for as long.
    """

    cluster: str = "default"
    endpoint: str = DEFAULT_ENDPOINT
    stable_endpoint: str = ""
    listen: str = "127.0.0.1:0"
    advertise: str = ""
    state_dir: Path | None = None
    standby: bool = True
    insecure: bool = False
    registry: RegistrySettings = field(default_factory=RegistrySettings)
    tick_s: float | None = None
    bookmark_s: float = 5.0
    slow_reader_s: float = 30.0
    probe_timeout_s: float = 3.0
    stop_timeout_s: float = 60.0
    rejoin_s: float = 60.0
    look_s: float = 2.0
    look_timeout_s: float = 1.0

    def __post_init__(self) -> None:
        problems = [*self._name_problems(), *self._address_problems(), *self._time_problems()]
        if problems:
            raise SettingsRefused(problems)

    @property
    def stable(self) -> str:
        """Return the address that everybody dials."""
        return self.stable_endpoint or self.endpoint

    @property
    def tick_interval_s(self) -> float:
        """Return the time between two ticks: a silence is noticed a fraction of a beat late."""
        return self.tick_s or min(0.5, self.registry.heartbeat_s / 4)

    def _name_problems(self) -> list[str]:
        if not 1 <= len(self.cluster) <= LONGEST_NAME or not self.cluster.isprintable():
            return [f"cluster {self.cluster!r} is not a name of 1 to {LONGEST_NAME} characters"]
        return []

    def _address_problems(self) -> list[str]:
        problems = []
        for name in ("endpoint", "listen"):
            try:
                check_loopback(getattr(self, name), insecure=self.insecure)
            except ValueError as error:
                problems.append(f"{name}: {error}")
        if self.stable_endpoint:
            problems += self._stable_problems()
        if self.advertise:
            try:
                split_address(self.advertise)
            except ValueError as error:
                problems.append(f"advertise: {error}")
        elif not problems and _is_wildcard(self.listen):
            problems.append(
                f"listen {self.listen} is every address of this machine, so agents cannot be told "
                "one: say --advertise HOST:0"
            )
        return problems

    def _stable_problems(self) -> list[str]:
        try:
            check_loopback(self.stable_endpoint, insecure=self.insecure)
        except ValueError as error:
            return [f"stable_endpoint: {error}"]
        if not has_port(self.stable_endpoint):
            return [f"stable_endpoint: {self.stable_endpoint} has no port that anybody could dial"]
        return []

    def _time_problems(self) -> list[str]:
        names = (
            "bookmark_s",
            "slow_reader_s",
            "probe_timeout_s",
            "stop_timeout_s",
            "rejoin_s",
            "look_s",
            "look_timeout_s",
        )
        problems = [
            f"{name} {getattr(self, name)} is not above 0" for name in names if not self._ok(name)
        ]
        if self.tick_s is not None and not 0 < self.tick_s <= self.registry.heartbeat_s:
            problems.append(
                f"tick_s {self.tick_s} is not above 0 and at most heartbeat_s "
                f"({self.registry.heartbeat_s})"
            )
        return problems

    def _ok(self, name: str) -> bool:
        value: float = getattr(self, name)
        return 0 < value < float("inf")


def has_port(address: str) -> bool:
    """Say whether an address can be dialled; port 0 is known only once it is listened at."""
    return split_address(address)[1] != 0


def _is_wildcard(address: str) -> bool:
    host, _ = split_address(address)
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
